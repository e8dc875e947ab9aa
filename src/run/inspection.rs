//! The findings of `prune inspect`, as plain records. docs/dev/records.md documents them.

use serde::{Deserialize, Serialize};

use super::PruningRecord;
use super::zeros_gain::ZerosGain;
use crate::bytes::ByteSize;

/// The version of the schema. It rises when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// The findings for a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inspection {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The folder, as given.
    pub model: String,
    /// Decoder layers, by config.json.
    pub num_hidden_layers: usize,
    /// Width of the residual stream, by config.json.
    pub hidden_size: usize,
    /// Elements of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: ByteSize,
    /// The dtypes of the tensors, by their bytes, largest first.
    pub dtypes: Vec<DtypeShare>,
    /// The weight files.
    pub shards: Vec<ShardFile>,
    /// Zeros in all decoder linears.
    pub sparsity: Zeros,
    /// Decoder linears by the pattern that accounts for their zeros, most matrices first.
    pub patterns: Vec<PatternCount>,
    /// Infinities and NaNs in all tensors.
    pub non_finite: u64,
    /// The decoder layers, in order.
    pub layers: Vec<InspectedLayer>,
    /// Tensors that are no decoder linears, by kind.
    pub other: Vec<OtherTensors>,
    /// Decoder linears that contradict config.json.
    pub problems: Vec<Problem>,
    /// The comparison with the dense checkpoint; absent without a dense checkpoint.
    pub against: Option<DenseComparison>,
    /// The storage of a packed checkpoint; absent for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<PackedStorage>,
    /// The gain of the zeros; absent where they gain nothing, and for a 4-bit checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zeros_gain: Option<ZerosGain>,
    /// `pruning.json` of the folder; absent where there is none, or none of this model.
    #[serde(default)]
    pub pruning: Option<PruningRecord>,
}

/// Matrices that are stored as a mask and the kept values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedStorage {
    /// The layout: `sparse-bitmask`, `sparse-24-bitmask` or `prune-bitmask`.
    pub format: String,
    /// The kept values: `exact`, or `int8` for rounded values.
    pub values: String,
    /// Packed matrices.
    pub matrices: usize,
    /// Bytes of all tensors of the dense model.
    pub dense_bytes: ByteSize,
}

/// The tensors of a dtype.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DtypeShare {
    /// The dtype by its name in safetensors: `BF16`.
    pub dtype: String,
    /// Tensors of this dtype.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: ByteSize,
}

/// A weight file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFile {
    /// Its name in the folder.
    pub file: String,
    /// Its length.
    pub bytes: ByteSize,
}

/// Zeros among weights.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Zeros {
    /// Weights equal to 0, of either sign.
    pub zeros: u64,
    /// All weights.
    pub weights: u64,
    /// `zeros / weights`; 0 without weights.
    pub ratio: f64,
}

/// A pattern, and the number of decoder linears that have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatternCount {
    /// `2:4`; absent for zeros without a pattern, and for matrices without zeros.
    pub pattern: Option<String>,
    /// Matrices.
    pub matrices: usize,
}

/// A decoder layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InspectedLayer {
    /// Its index, from 0.
    pub layer: usize,
    /// Zeros in its linears.
    pub sparsity: Zeros,
    /// Its linears, in the order of the reference; missing linears are left out.
    pub matrices: Vec<InspectedMatrix>,
}

/// A decoder linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InspectedMatrix {
    /// The module's name: `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// [out_features, in_features], as stored.
    pub shape: Vec<usize>,
    /// The dtype by its name in safetensors.
    pub dtype: String,
    /// Its zeros.
    pub sparsity: Zeros,
    /// For groups of 2, 4, 8, 16 and 32 weights: the least number of zeros in a group. Sizes with a group without zeros are left out.
    pub groups: Vec<GroupZeros>,
    /// The smallest pattern that accounts for nearly all zeros, as `n:m`; absent without such a pattern.
    pub pattern: Option<String>,
    /// Infinities and NaNs.
    pub non_finite: u64,
    /// Weights that are neither +0 nor the dense model's; absent without a dense model.
    pub changed: Option<u64>,
}

/// At least `n` zeros in every aligned group of `m` weights along the input features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupZeros {
    /// Zeros.
    pub n: u32,
    /// Weights.
    pub m: usize,
}

/// Tensors of a kind that are no decoder linears.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherTensors {
    /// `embedding`, `head`, `norms`, `biases` or `others`.
    pub kind: String,
    /// The number of tensors.
    pub tensors: usize,
    /// Their elements.
    pub parameters: u64,
    /// Their bytes.
    pub bytes: ByteSize,
    /// Elements equal to 0, counted in f32, f16 and bf16.
    pub zeros: u64,
    /// Infinities and NaNs, counted in the same dtypes.
    pub non_finite: u64,
}

/// A decoder linear that contradicts config.json.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The tensor.
    pub tensor: String,
    /// The contradiction: `missing`, or the found and the expected value.
    pub problem: String,
}

/// The comparison of a checkpoint with a dense checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DenseComparison {
    /// The dense folder, as given.
    pub dense: String,
    /// Weights in all tensors of the dense model.
    #[serde(default)]
    pub dense_parameters: u64,
    /// Bytes in all tensors of the dense model.
    #[serde(default)]
    pub dense_bytes: ByteSize,
    /// Layers of the dense model that were dropped, from the record beside the weights. The kept layers were compared.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers_dropped: Vec<usize>,
    /// The width that was dropped, in words, from the record beside the weights. The matrices that lost it are not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width_dropped: Option<String>,
    /// Both models have the same tensors. Every kept weight equals the dense model's bit for bit; every tensor that is no decoder linear
    /// equals it byte for byte.
    pub is_pruned_copy: bool,
    /// The method that changed the kept weights, from the record of the run; absent where the record names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_by: Option<String>,
    /// The channels of its MLPs are not in the dense model's order, by the record of the run. So weights of gate_proj, up_proj and
    /// down_proj have moved, but they were compared place by place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub permuted: bool,
    /// The merge that made this model, from the record beside its weights; absent if no merge made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged_by: Option<String>,
    /// Every weight of a decoder linear is +0 or the dense model's.
    pub kept_identical: bool,
    /// Compared weights of decoder linears that are not zero in this model.
    pub kept: u64,
    /// Weights of decoder linears that are neither +0 nor the dense model's.
    pub changed: u64,
    /// The first changed weight, in the order of the files.
    pub first_changed: Option<ChangedWeight>,
    /// Zeros of decoder linears that were zero in the dense model already.
    pub zeros_before: u64,
    /// Compared tensors that are no decoder linears.
    pub untouched: usize,
    /// Names of compared tensors that are no decoder linears and differ from the dense model's.
    pub untouched_differing: Vec<String>,
    /// Tensors that only the dense model has.
    pub missing: Vec<String>,
    /// Tensors that only this model has.
    pub added: Vec<String>,
    /// Tensors whose shape or dtype differs from the dense model's; they were not compared.
    pub unlike: Vec<UnlikeTensor>,
}

impl DenseComparison {
    /// True if the model was made from the dense model: it is a pruned copy, or only its kept weights differ and its method changes
    /// them, or its matrices lost width, or a merge made it. A merge may change every tensor.
    pub fn is_made_from_dense(&self) -> bool {
        self.is_pruned_copy
            || self.merged_by.is_some()
            || (self.changed_by.is_some() || self.width_dropped.is_some() && self.kept_identical)
                && self
                    .untouched_differing
                    .iter()
                    .all(|name| self.permuted && is_permuted_bias(name))
                && self.missing.is_empty()
                && self.added.is_empty()
                && (self.unlike.is_empty() || self.width_dropped.is_some())
    }
}

/// Returns whether a tensor is a bias that takes the order of an MLP's channels.
fn is_permuted_bias(name: &str) -> bool {
    name.ends_with(".mlp.gate_proj.bias") || name.ends_with(".mlp.up_proj.bias")
}

/// A weight that is neither pruned nor equal to the dense model's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChangedWeight {
    /// The tensor.
    pub tensor: String,
    /// Its output feature, from 0.
    pub row: usize,
    /// Its input feature, from 0.
    pub column: usize,
    /// The value in the dense model; `null` in JSON unless it is finite.
    pub dense: Option<f32>,
    /// The value in this model; `null` in JSON unless it is finite.
    pub found: Option<f32>,
}

/// A tensor that cannot be compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnlikeTensor {
    /// Its name.
    pub tensor: String,
    /// Dtype and shape in the dense model.
    pub dense: StoredAs,
    /// Dtype and shape in this model.
    pub found: StoredAs,
}

/// Dtype and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredAs {
    /// The dtype by its name in safetensors.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
}

impl Zeros {
    /// `zeros` of `weights`.
    pub fn of(zeros: u64, weights: u64) -> Self {
        Self {
            zeros,
            weights,
            ratio: if weights == 0 { 0.0 } else { zeros as f64 / weights as f64 },
        }
    }

    /// The sum of several counts.
    pub fn sum<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let (zeros, weights) = parts
            .into_iter()
            .fold((0, 0), |(zeros, weights), part| (zeros + part.zeros, weights + part.weights));
        Self::of(zeros, weights)
    }
}
