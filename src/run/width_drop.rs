//! The record of dropped width: sizes before and after, and what was lost. docs/dev/records.md documents it.

use serde::{Deserialize, Serialize};

use super::measured::PerplexityReport;
use crate::bytes::ByteSize;

/// Width that a run left out. Pairs are the source's and the result's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WidthDropReport {
    /// `--drop-width`.
    pub asked: f64,
    /// `--width-of`.
    pub of: String,
    /// The weights of o_proj and down_proj, which read the narrower width, were refitted.
    pub is_refitted: bool,
    /// MLP channels per layer.
    pub intermediate_size: [usize; 2],
    /// The number that the channels of the result are a multiple of.
    pub multiple: usize,
    /// Query heads per layer.
    pub num_attention_heads: [usize; 2],
    /// Key/value heads per layer.
    pub num_key_value_heads: [usize; 2],
    /// The key/value heads that stay, by layer and their numbers in the source; empty where all stay.
    pub kept_heads: Vec<Vec<usize>>,
    /// The dropped channels' part of the scores of all channels, by layer: of o's input, and of down's input.
    pub lost_scores: Vec<[f64; 2]>,
    /// The perplexity of the source, where it was measured in the pass that dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<PerplexityReport>,
    /// Weights in all tensors.
    pub parameters: [u64; 2],
    /// Bytes in all tensors.
    pub bytes: [ByteSize; 2],
    /// A hash of pieces of the narrower matrices, for a process that continues.
    pub fingerprint: String,
}

impl WidthDropReport {
    /// The change in words: `172 → 136 MLP channels, 8 → 6 heads`.
    pub fn in_words(&self) -> String {
        let changed = |[before, after]: [usize; 2], what: &str| {
            (before != after).then(|| format!("{before} → {after} {what}"))
        };
        let parts = [
            changed(self.intermediate_size, "MLP channels"),
            changed(self.num_attention_heads, "heads"),
            changed(self.num_key_value_heads, "key/value heads"),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        format!("{} per layer", parts.join(", "))
    }
}
