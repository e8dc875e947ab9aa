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
//! | kept | exactly max(1, int(density·n)), of equal ones the first | all that are not smaller than the value below them |
//! | entries whose sum is 0 | plus | the sign of most sums |
//! | divisor | weights that agree | number of models that agree |
//!
//! With statistics of a linear's input (`--saliency`), each row keeps its int(density·columns) largest |D_ij| a_j, which cost the most
//! output error to remove; with those of the experts, votes and averages are weighted by a_tj². The shared steps are in
//! `differences.rs`.
//!
//! Source: P. Yadav, D. Tam, L. Choshen, C. Raffel, M. Bansal, "TIES-Merging: Resolving interference when merging models" (2023,
//! arXiv:2306.01708), algorithm 1, and the authors' code; mergekit 0.1.5.

use super::differences::{DENSITY, DifferenceMethod, Trimming, WEIGHT, shared};

/// `ties`.
pub(super) const TIES: DifferenceMethod = DifferenceMethod {
    name: "ties",
    summary: "trims differences, elects signs and averages what agrees",
    trimming: Trimming::Magnitude,
    elects: true,
    per_model: &[WEIGHT, DENSITY],
    shared: &shared(true, false),
};
