//! TIES: trim each difference to its largest entries, elect a sign per entry, average what agrees with it.
//!
//! ```text
//! T_t = D_t where |D_t| is among the largest density·n, else 0       D_t = W_t − W₀
//! s   = sign(Σ_t w_t T_t)
//! W   = W₀ + λ Σ_t w_t T_t [sign = s] / Σ_t w_t [sign = s]
//! ```
//!
//! | | mergekit | paper |
//! | --- | --- | --- |
//! | trimmed together | a tensor | the whole model |
//! | kept | exactly max(1, int(density·n)); on ties, earlier entries | all not smaller than the (int(density·n) + 1)-th largest |
//! | entries whose sum is 0 | plus | the sign of most sums |
//! | divisor | weights that agree | number of models that agree |
//!
//! With statistics of a linear's input (`--saliency`), each row keeps its int(density·columns) largest |D_ij| a_j, which cost the most
//! output error to remove. With statistics of the experts, a_tj² also weighs votes and averages. The shared steps are in
//! `differences.rs`.
//!
//! Source: P. Yadav, D. Tam, L. Choshen, C. Raffel, M. Bansal, "TIES-Merging: Resolving interference when merging models" (2023,
//! arXiv:2306.01708), algorithm 1, and the authors' code; mergekit 0.1.5.

use super::differences::{DENSITY, DifferenceMethod, WEIGHT, shared};
use super::trim_plan::Trimming;

/// `ties`.
pub(super) const TIES: DifferenceMethod = DifferenceMethod {
    name: "ties",
    summary: "trims differences, elects signs and averages what agrees",
    trimming: Trimming::Magnitude,
    elects: true,
    per_model: &[WEIGHT, DENSITY],
    shared: &shared(true, false),
};
