//! The profile of a run on the CPU: time per part of the work, and speed relative to the CPU's peak.

use serde::{Deserialize, Serialize};

/// Times of the parts of a run. A GPU's time is part of the phases only.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileReport {
    /// The CPU's peak, measured in this run; absent without `--profile`.
    pub peak: Option<PeakReport>,
    /// The parts, in the order of the work. Their times add up to the run's.
    pub parts: Vec<PartReport>,
}

/// GFLOP/s of multiply-adds on registers alone, all threads together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PeakReport {
    /// Multiply-adds in f32.
    pub f32: f64,
    /// Products of bf16 by the kernel in use; absent without such a kernel. An f32 product by parts takes three to six of them.
    pub bf16: Option<f64>,
}

/// A part of the work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartReport {
    /// `read`, `pack`, `qkv`, `attention`, `o`, `mlp`, `statistics`, `score`, `select`, `output error`, `write`, `head`, `other`.
    pub part: String,
    /// Wall time.
    pub seconds: f64,
    /// 10⁹ operations of its products per second; absent for parts without products.
    pub gflops: Option<f64>,
    /// `gflops` over the peak of its arithmetic; absent without a peak. For f32 products by parts, the peak is the bf16 peak over the
    /// number of the parts' products.
    pub share_of_peak: Option<f64>,
}
