//! DELLA: removes entries of a difference at random, small entries of a row more often than large entries.
//!
//! ```text
//! p_ij = density − ε + 2ε r_ij / (n − 1)     r_ij: rank of |D_ij| in its row of n entries, 0 for the smallest
//! T_ij = m_ij D_ij · c                        m_ij = 1 with probability p_ij
//! c    = Σ|D| / Σ|m ∘ D| (mergekit), 1 / p_ij (paper)
//! ```
//!
//! Equal magnitudes have ranks in the order of their columns. The shared steps are in `differences.rs`.
//!
//! Source: P. Deep, R. Bhardwaj, S. Poria, "DELLA-Merging" (2024, arXiv:2406.11617), section 3; mergekit 0.1.5.

use super::differences::{DENSITY, DifferenceMethod, WEIGHT, shared};
use super::trim_plan::{EPSILON, Trimming};
use crate::merging::recipe::{Parameter, WhenMissing};

/// `della`.
pub(super) const DELLA: DifferenceMethod = DifferenceMethod {
    name: "della",
    summary: "removes small differences more often than large ones, and elects signs",
    trimming: Trimming::Ramp,
    elects: true,
    per_model: &[WEIGHT, DENSITY, (Parameter::Epsilon, WhenMissing::Is(EPSILON))],
    shared: &shared(true, true),
};

/// `della_linear`.
pub(super) const DELLA_LINEAR: DifferenceMethod = DifferenceMethod {
    name: "della_linear",
    summary: "removes small differences more often than large ones, and adds the rest",
    elects: false,
    shared: &shared(false, true),
    ..DELLA
};
