//! The result of `prune quantize`, as a plain record: the object of `--json`.

use serde::{Deserialize, Serialize};

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
    /// Quantised matrices.
    pub matrices: usize,
    /// Their weights.
    pub weights: u64,
    /// Their weights that were 0.
    pub zeros_before: u64,
    /// Their weights that are 0 now. The codes of small weights are those of 0.
    pub zeros_after: u64,
    /// The bytes of all tensors before.
    pub bytes_before: ByteSize,
    /// The bytes of all weight files now.
    pub bytes_after: ByteSize,
}
