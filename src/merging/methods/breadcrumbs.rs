//! Model breadcrumbs: removes the smallest and the very largest entries of a difference.
//!
//! ```text
//! kept: the ranks n − kept − outliers … n − outliers of the ascending magnitudes
//! kept = int(density·n)        outliers = int(gamma·n)
//! ```
//!
//! If density + gamma > 1, fewer of the largest entries are removed. Equal magnitudes have ranks in the order of their elements. The
//! shared steps are in `differences.rs`.
//!
//! Source: M. Davari, E. Belilovsky, "Model breadcrumbs" (2023, arXiv:2312.06795), section 3; mergekit 0.1.5.

use super::differences::{DENSITY, DifferenceMethod, WEIGHT, shared};
use super::trim_plan::Trimming;
use crate::merging::recipe::{Parameter, WhenMissing};

/// `breadcrumbs`.
pub(super) const BREADCRUMBS: DifferenceMethod = DifferenceMethod {
    name: "breadcrumbs",
    summary: "removes the smallest and the largest differences, and adds the rest",
    trimming: Trimming::Band,
    elects: false,
    per_model: &[WEIGHT, DENSITY, (Parameter::Gamma, WhenMissing::Is(0.01))],
    shared: &shared(false, false),
};

/// `breadcrumbs_ties`.
pub(super) const BREADCRUMBS_TIES: DifferenceMethod = DifferenceMethod {
    name: "breadcrumbs_ties",
    summary: "removes the smallest and the largest differences, and elects signs",
    elects: true,
    ..BREADCRUMBS
};
