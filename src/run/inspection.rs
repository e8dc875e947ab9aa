//! What `prune inspect` found in a checkpoint, as plain records. Documented in docs/inspect.md.

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// The version of the schema; raised when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// One checkpoint, looked at.
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
    /// What the tensors are stored as, most bytes first.
    pub dtypes: Vec<DtypeShare>,
    /// The weight files.
    pub shards: Vec<ShardFile>,
    /// Over all decoder linears.
    pub sparsity: Zeros,
    /// Decoder linears by the pattern that accounts for their zeros, most matrices first.
    pub patterns: Vec<PatternCount>,
    /// Infinities and NaNs in all tensors.
    pub non_finite: u64,
    /// The decoder layers, in order.
    pub layers: Vec<InspectedLayer>,
    /// Every other tensor, by kind.
    pub other: Vec<OtherTensors>,
    /// Decoder linears that are not as config.json has them.
    pub problems: Vec<Problem>,
    /// Beside the dense checkpoint, where one was given.
    pub against: Option<Comparison>,
}

/// The tensors of one dtype.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DtypeShare {
    /// As safetensors names it: `BF16`.
    pub dtype: String,
    /// Tensors stored so.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: ByteSize,
}

/// One weight file.
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
    /// `zeros / weights`; 0 where there are none.
    pub ratio: f64,
}

/// How many decoder linears share a pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatternCount {
    /// `2:4`; absent for zeros without a pattern, and for matrices without zeros.
    pub pattern: Option<String>,
    /// Matrices.
    pub matrices: usize,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InspectedLayer {
    /// Its index, from 0.
    pub layer: usize,
    /// Over its linears.
    pub sparsity: Zeros,
    /// Its linears, in the order of the reference; those that are missing are left out.
    pub matrices: Vec<InspectedMatrix>,
}

/// One decoder linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InspectedMatrix {
    /// The module's name: `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// [out_features, in_features], as stored.
    pub shape: Vec<usize>,
    /// As safetensors names it.
    pub dtype: String,
    /// Its zeros.
    pub sparsity: Zeros,
    /// For groups of 2, 4, 8, 16 and 32: how many zeros every group has at least. Groups without any are left out.
    pub groups: Vec<Group>,
    /// The smallest group that accounts for nearly all zeros, as `n:m`; absent where none does.
    pub pattern: Option<String>,
    /// Infinities and NaNs.
    pub non_finite: u64,
    /// Weights that are neither +0 nor the dense model's; absent where there was nothing to compare with.
    pub changed: Option<u64>,
}

/// At least `n` zeros in every aligned group of `m` weights along the input features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Zeros.
    pub n: u32,
    /// Weights.
    pub m: usize,
}

/// Tensors that are no decoder linears.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherTensors {
    /// `embedding`, `head`, `norms`, `biases` or `others`.
    pub kind: String,
    /// How many.
    pub tensors: usize,
    /// Their elements.
    pub parameters: u64,
    /// Their bytes.
    pub bytes: ByteSize,
    /// Elements equal to 0, counted in f32, f16 and bf16.
    pub zeros: u64,
    /// Infinities and NaNs, counted in the same.
    pub non_finite: u64,
}

/// A decoder linear that is not as config.json has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The tensor.
    pub tensor: String,
    /// What is wrong: `missing`, or what was found and what was expected.
    pub problem: String,
}

/// A checkpoint beside the dense one it may have been made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// The dense folder, as given.
    pub dense: String,
    /// Same tensors, every kept weight the dense model's bit for bit, every other tensor byte for byte.
    pub is_pruned_copy: bool,
    /// No decoder linear has a weight that is neither +0 nor the dense model's.
    pub kept_identical: bool,
    /// Weights of decoder linears that were compared and are not zero here.
    pub kept: u64,
    /// Weights of decoder linears that are neither +0 nor the dense model's.
    pub changed: u64,
    /// The first of them, in the order of the files.
    pub first_changed: Option<ChangedWeight>,
    /// Zeros of decoder linears that were zero in the dense model already.
    pub zeros_before: u64,
    /// Tensors that are no decoder linears and were compared.
    pub untouched: usize,
    /// Those of them that are not the dense model's, byte for byte.
    pub untouched_differing: Vec<String>,
    /// Tensors that only the dense model has.
    pub missing: Vec<String>,
    /// Tensors that only this model has.
    pub added: Vec<String>,
    /// Tensors of another shape or dtype than the dense model's; they were not compared.
    pub unlike: Vec<UnlikeTensor>,
}

/// A weight that is neither pruned nor what it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChangedWeight {
    /// The tensor.
    pub tensor: String,
    /// Its output feature, from 0.
    pub row: usize,
    /// Its input feature, from 0.
    pub column: usize,
    /// In the dense model; `null` in JSON where it is not finite.
    pub dense: Option<f32>,
    /// In this one; `null` in JSON where it is not finite.
    pub found: Option<f32>,
}

/// A tensor that cannot be compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnlikeTensor {
    /// Its name.
    pub tensor: String,
    /// Dtype and shape in the dense model.
    pub dense: StoredAs,
    /// Dtype and shape in this one.
    pub found: StoredAs,
}

/// How a tensor is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredAs {
    /// As safetensors names it.
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
            ratio: if weights == 0 {
                0.0
            } else {
                zeros as f64 / weights as f64
            },
        }
    }

    /// Over several.
    pub fn sum<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let (zeros, weights) = parts.into_iter().fold((0, 0), |(zeros, weights), part| {
            (zeros + part.zeros, weights + part.weights)
        });
        Self::of(zeros, weights)
    }
}
