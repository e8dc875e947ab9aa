//! Merging: one model from several, tensor by tensor. The command itself is in `job/merge`.
//!
//! | folder | content |
//! | --- | --- |
//! | [`recipe`] | models, method and numbers of a merge, from YAML or flags |
//! | [`methods`] | the mathematics on rows of f32 |
//! | [`vocabulary`] | rows of embeddings and tokenizers where tokens differ |
//! | [`pass`] | the loop that reads, merges and writes |

pub mod methods;
pub mod pass;
pub mod recipe;
pub mod vocabulary;
