//! The results of `prune pack` and `prune unpack`, as plain records: the objects of `--json`. And what is known of the files of an
//! unfinished run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::measured::PhaseReport;
use super::plan::Plan;
use crate::bytes::ByteSize;

/// A checkpoint that was packed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PackingReport {
    /// The version of this program.
    pub prune_version: String,
    /// The folder the model was read from.
    pub model: String,
    /// The folder it was written to.
    pub output: String,
    /// The layout: `sparse-bitmask`, `sparse-24-bitmask` or `prune-bitmask`.
    pub format: String,
    /// The kept values: `exact`, or `int8` for rounded values.
    pub values: String,
    /// The packed matrices.
    #[serde(flatten)]
    pub totals: PackedTotals,
    /// Decoder linears that stay dense.
    pub dense: Vec<DenseMatrix>,
    /// The bytes of all weight files before.
    pub bytes_before: ByteSize,
    /// The bytes of all weight files now.
    pub bytes_after: ByteSize,
    /// Files of the source that are not in the packed folder.
    pub left_out: Vec<String>,
    /// The plan of the run.
    pub plan: Plan,
    /// The phases of the run, with their time and peak memory.
    pub phases: Vec<PhaseReport>,
    /// The peak of anonymous memory, where the system tells it.
    pub peak_anonymous: Option<ByteSize>,
}

/// All packed matrices together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PackedTotals {
    /// Their number.
    pub matrices: usize,
    /// Their weights.
    pub weights: u64,
    /// Their weights that are not kept: all bits are 0.
    pub zeros: u64,
    /// Their bytes before.
    pub matrix_bytes_before: ByteSize,
    /// The bytes of all their parts.
    pub matrix_bytes_after: ByteSize,
}

/// A decoder linear that stays dense.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DenseMatrix {
    /// Its tensor.
    pub tensor: String,
    /// The reason.
    pub why: String,
}

/// A checkpoint that was restored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnpackingReport {
    /// The version of this program.
    pub prune_version: String,
    /// The packed folder.
    pub model: String,
    /// The folder it was written to.
    pub output: String,
    /// The kept values: `exact`, or `int8` for rounded values.
    pub values: String,
    /// Files whose SHA-256 equals the original file's.
    pub files_equal: usize,
    /// Weight files whose values are rounded, so that they differ from the original files.
    pub files_rounded: usize,
    /// The bytes of all weight files of the packed folder.
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

/// A weight file that was read once from its beginning to its end.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ScannedFile {
    /// SHA-256 of the whole file, in hex.
    pub sha256: String,
    /// Its decoder linears, by tensor name.
    pub matrices: BTreeMap<String, ScannedMatrix>,
}

/// The counts of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ScannedMatrix {
    /// Elements with a set bit.
    pub kept: u64,
    /// The most kept elements of four consecutive columns; 4 where the columns are no multiple of 4.
    pub most_of_four: usize,
    /// The largest magnitude, where the values are rounded; else 0.
    pub largest: f32,
}
