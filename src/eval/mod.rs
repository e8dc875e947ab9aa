//! Measuring what pruning did: perplexity, riding in the sweep, and the sparsity of what is on the disk.

mod comparison;
pub mod inspect;
pub mod perplexity;

pub use inspect::inspect;
pub use perplexity::Perplexity;
