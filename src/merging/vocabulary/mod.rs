//! Vocabularies of merges: models with different tokens, the rows of their embeddings in the output, and the output's tokenizer.
//!
//! The output has the tokens of one model or of all. For each row of its embedding and head, and each source, a [`RowRule`] names the
//! row that the source brings into the merge: its own row for that token, if the source has the token. Else, as in mergekit 0.1.5
//! (`tokenizer/embed.py`):
//!
//! ```text
//! the row that the recipe names for the token
//! the row of the only source with the token, the base model's row, or the mean of the rows of all that have it
//! zeros for a token of no source; the mean of all rows of the source for rows beyond the last token
//! ```
//!
//! | file | content |
//! | --- | --- |
//! | `tokens` | [`ModelTokens`], the tokens of a model |
//! | `rows` | [`Vocabulary`], the output's tokens, and [`RowMap`], the rules of the rows of a tensor |
//! | `tokenizer_files` | [`TokenizerEdit`], changes of the tokenizer's files |
//! | `chat_template` | [`chat_template`](fn@chat_template), the template that a recipe names |

mod chat_template;
mod rows;
mod tokenizer_files;
mod tokens;

pub use chat_template::chat_template;
pub use rows::{RowMap, RowRule, TokenModels, Vocabulary};
pub use tokenizer_files::{EditedFiles, TOKENIZER_FILES, TokenizerEdit, limit_token_ids};
pub use tokens::{ModelTokens, TOKENIZER_FILE};
