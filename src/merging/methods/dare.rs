//! DARE: removes entries of a difference at random and scales up the kept entries, so that the mean stays.
//!
//! ```text
//! T_t = m ∘ D_t · c         m_ij = 1 with probability density, else 0
//! c   = Σ|D_t| / Σ|m ∘ D_t| (mergekit, with `rescale`), 1 / density (paper)
//! ```
//!
//! `dare_linear` adds w_t T_t; `dare_ties` elects signs first, without trimming by magnitude. With statistics of a linear's input, the
//! probability rises with the rank of |D_ij| a_j in its row as in `della.rs`, and kept entries are divided by it. The shared steps are
//! in `differences.rs`, the random numbers in `random.rs`.
//!
//! Source: L. Yu, B. Yu, H. Yu, F. Huang, Y. Li, "Language models are super Mario" (2024, arXiv:2311.03099), equation 1; mergekit 0.1.5.

use super::differences::{DENSITY, DifferenceMethod, WEIGHT, shared};
use super::trim_plan::Trimming;

/// `dare_linear`.
pub(super) const DARE_LINEAR: DifferenceMethod = DifferenceMethod {
    name: "dare_linear",
    summary: "removes entries of differences at random, and adds the rest",
    trimming: Trimming::Random,
    elects: false,
    per_model: &[WEIGHT, DENSITY],
    shared: &shared(false, true),
};

/// `dare_ties`.
pub(super) const DARE_TIES: DifferenceMethod = DifferenceMethod {
    name: "dare_ties",
    summary: "removes entries of differences at random, and elects signs",
    elects: true,
    ..DARE_LINEAR
};
