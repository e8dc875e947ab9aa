//! Vocabularies of merges: models with different tokens, and the rows of their embeddings in the output.
//!
//! The output has the tokens of one model or of all. For each of its rows, and each model, a [`RowRule`] names the row that the model brings
//! into the merge: its own for that token where it has one. Else, as in mergekit 0.1.5 (`tokenizer/embed.py`):
//!
//! ```text
//! the row that the recipe names for the token
//! the base model's row, the row of the only model with the token, or the mean of the rows of all that have it
//! zeros for a token of no model; the mean of all rows of the model for rows beyond the last token
//! ```
//!
//! | file | content |
//! | --- | --- |
//! | `tokens` | [`ModelTokens`], the tokens of one model |
//! | `rows` | [`Vocabulary`], the rules of all rows |

mod rows;
mod tokens;

pub use rows::{Models, RowRule, Vocabulary};
pub use tokens::{ModelTokens, TOKENIZER_FILE};
