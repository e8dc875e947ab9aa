//! Measurement of a model: perplexity within the sweep, and the sparsity of a checkpoint on the disk.
//!
//! | file | content |
//! | --- | --- |
//! | `answers` | log-likelihoods of the choices of tasks, within the sweep |
//! | `comparison` | comparison of a checkpoint with the dense checkpoint it may have been made from: kept, changed and missing weights |
//! | `divergence` | KL divergence of a model from the dense model, at the end of their sweeps |
//! | `inspect` | the sparsity check: the content of a checkpoint on the disk, and its comparison with a dense checkpoint |
//! | `named` | the name of a model that is measured, as its run has it |
//! | `next_token` | the prediction of the next token, from logits that come in parts of the vocabulary |
//! | `perplexity` | perplexity over non-overlapping windows, layer by layer, within the sweep |

pub mod answers;
mod comparison;
pub mod divergence;
pub mod inspect;
mod named;
mod next_token;
pub mod perplexity;

pub use answers::TaskAnswers;
pub use divergence::{DenseHead, Meeting, MeetingRole};
pub use inspect::{Inspected, inspect};
pub use named::NamedModel;
pub use perplexity::Perplexity;
