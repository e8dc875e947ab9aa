//! Measurement of a model: perplexity within the sweep, and the sparsity of a checkpoint on the disk.
//!
//! | file | content |
//! | --- | --- |
//! | `comparison` | comparison of a checkpoint with the dense checkpoint it may have been made from: kept, changed and missing weights |
//! | `inspect` | the sparsity check: the content of a checkpoint on the disk, and its comparison with a dense checkpoint |
//! | `perplexity` | perplexity over non-overlapping windows, layer by layer, within the sweep |

mod comparison;
pub mod inspect;
pub mod perplexity;

pub use inspect::{Inspected, inspect};
pub use perplexity::Perplexity;
