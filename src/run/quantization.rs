//! The result of `prune quantize`, as a plain record: the object of `--json`. And what is known of a matrix of an unfinished run.

use serde::{Deserialize, Serialize};

use super::measured::PhaseReport;
use super::plan::Plan;
use crate::bytes::ByteSize;

/// A checkpoint that was quantised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuantizationReport {
    /// The version of this program.
    pub prune_version: String,
    /// The folder the model was read from.
    pub model: String,
    /// The folder it was written to.
    pub output: String,
    /// The format: `nf4` or `nf4-double`.
    pub format: String,
    /// The quantised matrices.
    #[serde(flatten)]
    pub totals: QuantizedTotals,
    /// The bytes of all tensors before.
    pub bytes_before: ByteSize,
    /// The bytes of all weight files now.
    pub bytes_after: ByteSize,
    /// The plan of the run.
    pub plan: Plan,
    /// The phases of the run, with their time and peak memory.
    pub phases: Vec<PhaseReport>,
    /// The peak of anonymous memory, where the system tells it.
    pub peak_anonymous: Option<ByteSize>,
}

/// All quantised matrices together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QuantizedTotals {
    /// Their number.
    pub matrices: usize,
    /// Their weights.
    pub weights: u64,
    /// Their weights that were 0.
    pub zeros_before: u64,
    /// Their weights that are 0 now. Small weights have the code of 0.
    pub zeros_after: u64,
}

/// A quantised matrix, as the state of an unfinished run keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct QuantizedMatrix {
    /// The mean of its scales with double quantisation, else 0.
    pub offset: f32,
    /// Weights that were 0.
    pub zeros_before: u64,
    /// Weights that are 0 now.
    pub zeros_after: u64,
}
