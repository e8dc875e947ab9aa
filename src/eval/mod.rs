//! Measuring what pruning cost: perplexity, riding in the sweep.

pub mod perplexity;

pub use perplexity::{Perplexity, Side};
