//! Measurement of a model: perplexity within the sweep, and the sparsity of a checkpoint on the disk.

mod comparison;
pub mod inspect;
pub mod perplexity;

pub use inspect::{Inspected, inspect};
pub use perplexity::Perplexity;
