//! Letting a model write: what perplexity means, as a sentence one can read.

pub mod greedy;

pub use greedy::SmallModel;
