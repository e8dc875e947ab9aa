//! The record of dropped layers: scores, choice, and sizes before and after. docs/dev/records.md documents it.

use serde::{Deserialize, Serialize};

use super::measured::PerplexityReport;
use crate::bytes::ByteSize;

/// Layers that a run left out, with the scores that decided it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerDropReport {
    /// `--drop-layers`.
    pub asked: String,
    /// `--drop-rule`; `name` where `--layers-dropped` named the layers.
    pub rule: String,
    /// The layers left out, by their numbers in the source.
    pub dropped: Vec<usize>,
    /// The source's number of each layer of the result.
    pub kept: Vec<usize>,
    /// Block influence of every layer of the source.
    pub block_influence: Vec<f64>,
    /// Angular distances of the last token: for spans of 1, 2, ... layers, the distance from each first layer.
    pub angular_distance: Vec<Vec<f64>>,
    /// The bound below which `auto` drops; absent where the number was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// The perplexity of the source, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense: Option<PerplexityReport>,
    /// Weights in all tensors of the source, and of the result.
    pub parameters: [u64; 2],
    /// Bytes in all tensors of the source, and of the result.
    pub bytes: [ByteSize; 2],
}

impl LayerDropReport {
    /// The layers left out, as a list.
    pub fn dropped_list(&self) -> String {
        let layers = self.dropped.iter().map(ToString::to_string);
        match self.dropped.len() {
            0 => "none".to_string(),
            _ => layers.collect::<Vec<_>>().join(", "),
        }
    }

    /// The choice in words: `2 of 32 layers (24, 25) by influence`.
    pub fn in_words(&self) -> String {
        let before = self.dropped.len() + self.kept.len();
        let list = match self.dropped.is_empty() {
            true => String::new(),
            false => format!(" ({})", self.dropped_list()),
        };
        format!("{} of {before} layers{list} by {}", self.dropped.len(), self.rule)
    }

    /// The name of [`LayerDropReport::deciding_scores`].
    pub fn name_of_scores(&self) -> &'static str {
        match self.rule.as_str() {
            "angle" => "angle",
            _ => "influence",
        }
    }

    /// The score that decided, of every layer: its influence, or the distance of the span that begins there.
    pub fn deciding_scores(&self) -> &[f64] {
        let spans = self.dropped.len().max(1) - 1;
        match (self.rule.as_str(), self.angular_distance.get(spans)) {
            ("angle", Some(distances)) => distances,
            _ => &self.block_influence,
        }
    }
}
