//! The record of an allocation: what was measured of the layers, and the ratios it led to.

use serde::{Deserialize, Serialize};

/// An allocation of the sparsity to the layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AllocationReport {
    /// `owl` or `error`.
    pub rule: String,
    /// The ratios at which curves were measured; empty for `owl`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<f64>,
    /// Of every layer: the percentage of outliers, or the error at every point.
    pub measured: Vec<Vec<f64>>,
    /// The allocations that were tried; the allocation with the least loss was taken. Empty for `owl`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<TriedRatios>,
    /// The ratio of every layer.
    pub ratios: Vec<f64>,
}

/// The trial of an allocation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TriedRatios {
    /// `error`, `owl` or `uniform`.
    pub rule: String,
    /// The loss of a few tokens, in nat per token; `null` where it is not finite.
    pub loss: Option<f64>,
}
