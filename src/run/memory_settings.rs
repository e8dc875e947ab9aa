//! Settings that trade memory for time. A plan chooses them so that a run fits. No setting changes a mask, except by rounding on GPUs.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// Settings of the executing code that trade memory for time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemorySettings {
    /// The next layer is read while the current layer is in use, so two layers are in memory.
    pub prefetch: bool,
    /// The part of a layer's weights that is in memory while the layer is in use.
    pub weights: WeightsHeld,
    /// Tokens that the MLP computes at once.
    pub mlp_tokens: usize,
    /// Key/value heads, with their queries, that attention computes at once; `None` is all of them.
    pub attention_heads: Option<usize>,
    /// Logits that exist at once, in bytes of f32.
    pub logits_bytes: ByteSize,
    /// Weights packed for bf16 products stay until the layer is finished: the layer is in memory twice. Products in f32 do not keep
    /// packed weights.
    pub keep_packed: bool,
    /// Rows of the head's weight in memory at once; `None` is all of them.
    pub head_rows: Option<usize>,
    /// The inputs of a layer whose large statistics exist at the same time.
    pub statistics: StatisticsHeld,
    /// The place of Gram matrices while samples pass a layer on a GPU.
    pub grams: GramsHeld,
}

/// The place of Gram matrices while samples pass a layer on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GramsHeld {
    /// The GPU, which sums up the products of its samples.
    Device,
    /// The host, which gets the rows of every sample.
    Host,
}

/// The inputs of a layer whose statistics exist at the same time, for methods with statistics that are collected in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StatisticsHeld {
    /// The statistics of all four inputs: the samples pass the dense layer once.
    Layer,
    /// The statistics of a single input: the samples pass the dense layer four times.
    Input,
}

/// The part of a decoder layer's weights that is in memory while the layer is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsHeld {
    /// All weights.
    Layer,
    /// Some rows of a matrix, read at every product. A whole matrix is in memory only while it is scored.
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
            statistics: StatisticsHeld::Layer,
            grams: GramsHeld::Device,
        }
    }
}

impl MemorySettings {
    /// Returns whether packed weights may stay. A matrix that is in memory for a moment is not worth a packed copy.
    pub fn keeps_packed(&self) -> bool {
        self.keep_packed && self.weights == WeightsHeld::Layer
    }

    /// Returns the source of a layer's weights, for the text of a plan.
    pub fn weights_come_from(&self) -> &'static str {
        match (self.weights, self.prefetch) {
            (WeightsHeld::Layer, true) => "disk, read ahead",
            (WeightsHeld::Layer, false) => "disk",
            (WeightsHeld::Matrix, _) => "disk, by matrix at every use",
        }
    }
}
