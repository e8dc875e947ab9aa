//! Task arithmetic: W = W₀ + λ Σ_t w_t (W_t − W₀); with `normalize`, the sum is divided by Σ_t w_t.
//!
//! Source: G. Ilharco et al., "Editing models with task arithmetic" (2023, arXiv:2212.04089), section 2; mergekit 0.1.5.

use super::differences::{DifferenceMethod, WEIGHT, shared};
use super::trim_plan::Trimming;

/// `task_arithmetic`.
pub(super) const TASK_ARITHMETIC: DifferenceMethod = DifferenceMethod {
    name: "task_arithmetic",
    summary: "adds weighted differences from the base",
    trimming: Trimming::None,
    elects: false,
    // mergekit accepts a density here and ignores it.
    per_model: &[WEIGHT, super::differences::DENSITY],
    shared: &shared(false, false),
};
