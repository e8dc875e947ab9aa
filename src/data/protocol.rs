//! The purpose of a text, and the record of the ids that were made from it.

use serde::{Deserialize, Serialize};

/// The purpose of a text. It decides the split, the way rows are joined, and the flag that messages name.
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
    pub(super) fn or_not_at_all(self) -> &'static str {
        match self {
            Self::Calibration => "",
            Self::Evaluation => ", or prune with --eval none",
        }
    }
}

/// The record of a text and of the ids used from it. Two runs with equal records computed with equal ids.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TextProtocol {
    /// "wikitext2", "c4", "ptb", "demo", "text" (a plain file) or "documents".
    pub dataset: String,
    /// The file; several files are separated by commas; "built in" for the demo text.
    pub path: String,
    /// The way the text was joined and cut, in words.
    pub convention: String,
    /// SHA-256 in hex of the joined text; of all documents as JSON lines if samples are drawn from documents.
    pub text_sha256: String,
    /// The hash of the tokenizer: [`Tokenizer::sha256`](super::Tokenizer::sha256).
    pub tokenizer_sha256: String,
    /// Tokens of the whole text; if samples are drawn from documents, tokens of the different documents that were tokenized.
    pub total_tokens: u64,
    /// Tokens in the samples or windows: `windows` · `seqlen`.
    pub tokens_used: u64,
    /// Samples (calibration) or windows (evaluation).
    pub windows: u64,
    /// Tokens per sample or window.
    pub seqlen: u64,
    /// SHA-256 in hex of the used ids as int32, little endian, row-major.
    pub tokens_sha256: String,
    /// The seed of the draw; none for evaluation, which does not draw.
    pub seed: Option<u64>,
}
