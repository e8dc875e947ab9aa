//! How the work is cut up: what a plan may turn so that a run fits. No knob changes a mask.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// Settings of the executing code that trade memory for time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemorySettings {
    /// Whether the next layer is read while this one is in use: two layers in memory instead of one.
    pub prefetch: bool,
    /// What of a layer's weights is in memory while it is in use.
    pub weights: WeightsHeld,
    /// Tokens the MLP handles at once.
    pub mlp_tokens: usize,
    /// Key/value heads, with their queries, that attention handles at once; `None` is all of them.
    pub attention_heads: Option<usize>,
    /// Logits that exist at once, in bytes of f32.
    pub logits_bytes: ByteSize,
    /// Whether weights packed for bf16 products stay until the layer is done: two layers in memory instead of one. Nothing is packed for
    /// products in f32.
    pub keep_packed: bool,
    /// Rows of the head's weight in memory at once; `None` is all of them.
    pub head_rows: Option<usize>,
}

/// What of a decoder layer's weights is in memory while it is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsHeld {
    /// All of it.
    Layer,
    /// Some rows of one matrix, read at every product; a whole matrix only while it is scored.
    Matrix,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            prefetch: true,
            weights: WeightsHeld::Layer,
            mlp_tokens: 1024,
            attention_heads: None,
            logits_bytes: ByteSize(128 << 20),
            keep_packed: true,
            head_rows: None,
        }
    }
}

impl MemorySettings {
    /// Where a layer's weights come from, as a plan says it.
    pub fn weights_come_from(&self) -> &'static str {
        match (self.weights, self.prefetch) {
            (WeightsHeld::Layer, true) => "disk, read ahead",
            (WeightsHeld::Layer, false) => "disk",
            (WeightsHeld::Matrix, _) => "disk, by matrix at every use",
        }
    }
}
