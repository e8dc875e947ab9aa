//! Parts of several records: a text, a perplexity, a phase, a process.

use serde::{Deserialize, Deserializer, Serialize};

use super::phase::Phase;
use crate::bytes::ByteSize;

/// The record of a text and of the ids used from it. Two runs with equal records computed with equal ids.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TextProtocol {
    /// "wikitext2", "c4", "ptb", "demo", "text" (a plain file) or "documents".
    pub dataset: String,
    /// The file; several files are separated by commas; "built in" for the demo text.
    pub path: String,
    /// The way the text was joined and cut, in words.
    pub convention: String,
    /// SHA-256 in hex of the joined text; of all documents as JSON lines if samples are drawn from documents.
    pub text_sha256: String,
    /// The hash of the tokenizer, and its special tokens where tokenizer_config.json decides differently.
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
    /// The first token of each sample within its text or document; none for evaluation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub starts: Vec<u64>,
    /// The document of each sample, counted from 0; absent if the samples are cut from a joined text, and for evaluation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<Vec<u64>>,
}

/// A perplexity, and its windows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PerplexityReport {
    /// exp of the mean over windows of the mean next-token loss; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub perplexity: f64,
    /// Mean loss over windows, in nat; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub mean_loss: f64,
    /// Standard error of the mean over windows, in nat; 0 for a single window; `null` in JSON unless it is finite.
    #[serde(deserialize_with = "null_is_nan")]
    pub standard_error: f64,
    /// Windows.
    pub windows: usize,
    /// Tokens per window.
    pub seqlen: usize,
}

/// Time and memory of a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PhaseReport {
    /// The phase.
    pub phase: Phase,
    /// Wall time, added over the layers.
    pub seconds: f64,
    /// Peak anonymous memory of the process during the phase; absent on systems that do not report it.
    pub peak_anonymous: Option<ByteSize>,
}

/// A process that worked on a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionReport {
    /// The beginning of the process, in seconds since 1970 (UTC).
    pub started_unix_seconds: u64,
    /// The duration of its work. For a killed process it ends with the last finished layer.
    pub seconds: f64,
    /// Layers that were finished at its beginning.
    pub first_layer: usize,
}

/// Reads `null` as NaN: JSON has no NaN, and serde_json writes `null`.
pub(super) fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
