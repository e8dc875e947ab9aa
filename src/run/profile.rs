//! Where the time of a run went on the CPU, and how much of what the CPU can do came of it.

use serde::{Deserialize, Serialize};

/// Times of the parts of a run; those of a GPU's work are in the phases alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileReport {
    /// What the CPU can do, measured in this run; absent without `--profile`.
    pub peak: Option<PeakReport>,
    /// The parts, in the order work passes them; together they are the run.
    pub parts: Vec<PartReport>,
}

/// GFLOP/s of multiply-adds on registers alone, all threads together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PeakReport {
    /// In f32.
    pub f32: f64,
    /// Of products of bf16 by the kernel in use; absent where there are none. An f32 product that is a sum of them takes three to six.
    pub bf16: Option<f64>,
}

/// One part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartReport {
    /// `read`, `pack`, `qkv`, `attention`, `o`, `mlp`, `statistics`, `score`, `select`, `output error`, `write`, `head`, `other`.
    pub part: String,
    /// Wall time.
    pub seconds: f64,
    /// Operations of its products per second, in units of 10⁹; absent for parts that are not products.
    pub gflops: Option<f64>,
    /// That over the peak of its arithmetic, of which an f32 product by parts takes several products of bf16; absent without a peak.
    pub share_of_peak: Option<f64>,
}
