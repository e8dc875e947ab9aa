//! Text in, token ids out: the tokenizer, the corpora, the calibration samples and the evaluation windows.
//!
//! The room's promise is sameness: the same text, tokenizer and seed give the ids that the Python reference (locuslab/wanda
//! over Hugging Face `datasets`) gives, and a [`TextProtocol`] records enough to prove it. Texts are read from local files only,
//! which `cli` has downloaded before where need be, or told by [`stories`]. [`check`] is called before any work starts,
//! [`calibration()`] and [`evaluation()`] when the ids are needed.

mod cache;
mod calibration;
mod chat;
mod cut;
mod dataset;
mod digest;
mod documents;
mod encoder;
mod evaluation;
pub mod footprint;
mod joined;
mod line_index;
mod outlook;
mod parquet_shape;
mod parquet_text;
mod python_random;
pub mod stories;
mod tokenizer;
mod unpacked;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

pub use cache::TextCache;
pub use calibration::{Calibration, calibration};
pub use chat::ChatTemplate;
pub use dataset::{DatasetSpec, HubFile};
pub use evaluation::{Evaluation, evaluation};
pub use outlook::{TextOutlook, outlook};
pub use python_random::PythonRandom;
pub use tokenizer::Tokenizer;

use crate::failure::Failure;
use dataset::Source;
use documents::Format;

/// What a text is for; decides the split, the way rows are joined, and the flag that messages name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Text that statistics are computed from: the train split, `--dataset`.
    Calibration,
    /// Text that perplexity is measured on: the test split, `--eval-dataset`.
    Evaluation,
}

impl Role {
    /// The flag that names the text.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Calibration => "--dataset",
            Self::Evaluation => "--eval-dataset",
        }
    }

    /// The end of a hint: evaluation can be left out.
    fn or_not_at_all(self) -> &'static str {
        match self {
            Self::Calibration => "",
            Self::Evaluation => ", or prune with --eval none",
        }
    }
}

/// Which ids were used and how they came about; goes into the run record, so that two runs can be compared.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TextProtocol {
    /// "wikitext2", "c4", "ptb", "demo", "text" (a plain file) or "documents".
    pub dataset: String,
    /// The file read; several are separated by commas; "built in" for the demo text.
    pub path: String,
    /// How the text was put together and cut, in words.
    pub convention: String,
    /// SHA-256 in hex of the joined text; of all documents as JSON lines where samples are drawn from documents.
    pub text_sha256: String,
    /// [`Tokenizer::sha256`].
    pub tokenizer_sha256: String,
    /// Tokens of the whole text; where samples are drawn from documents, of the different documents that were tokenized.
    pub total_tokens: u64,
    /// Tokens in the samples or windows: `windows` · `seqlen`.
    pub tokens_used: u64,
    /// Samples (calibration) or windows (evaluation).
    pub windows: u64,
    /// Tokens per sample or window.
    pub seqlen: u64,
    /// SHA-256 in hex of the used ids as int32, little endian, row-major.
    pub tokens_sha256: String,
    /// The seed of the draw; none for evaluation, which draws nothing.
    pub seed: Option<u64>,
}

/// Is the text there, and of a kind we read? Looks at names and beginnings only.
///
/// # Errors
///
/// Fails when the dataset was named without a path, no file of the split is found or several are, the beginning of a file is
/// not what it should be (UTF-8 text, a JSON line with `text`, parquet with a column `text`), or a file is empty.
pub fn check(spec: &DatasetSpec, role: Role) -> Result<()> {
    match dataset::locate(spec, role)? {
        Source::Documents(path, format) => documents::check(&path, format),
        Source::Plain(path) | Source::Sentences(path) => check_text(&path),
        Source::Stories(_) => Ok(()),
        Source::Rows(parts) => parts.iter().try_for_each(|part| match Format::of(part)? {
            Format::Parquet => documents::check(part, Format::Parquet),
            _ => check_text(part),
        }),
    }
}

/// The first bytes of a file must be UTF-8.
fn check_text(path: &Path) -> Result<()> {
    let mut start = Vec::new();
    let file = File::open(path)
        .map_err(|error| Failure::new(format!("cannot open `{}`: {error}", path.display())))?;
    file.take(1 << 16)
        .read_to_end(&mut start)
        .with_context(|| format!("cannot read `{}`", path.display()))?;
    if start.is_empty() {
        return Err(Failure::new(format!("`{}` is empty", path.display()))
            .hint("name another text with --dataset or --eval-dataset")
            .into());
    }
    match std::str::from_utf8(&start) {
        // A character may be cut by the end of what we looked at.
        Err(error) if error.error_len().is_some() => {
            Err(joined::not_utf8(path, error.valid_up_to() as u64).into())
        }
        _ => Ok(()),
    }
}
