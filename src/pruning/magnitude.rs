//! Magnitude: score_ij = |W_ij|, compared over the whole matrix.
//!
//! The original's rule (`prune_magnitude` in locuslab/wanda): the threshold is the value at position `int(numel · ratio)` of
//! the ascending order of |W|, and everything up to *and including* it goes, so at least one weight more than the ratio
//! says, and all ties of the threshold with it (frequent in half precision). N:M: the N smallest of each aligned group
//! of M, ties to the lower column. No calibration, no forward pass. Han et al. 2015, arXiv:1506.02626.

use anyhow::Result;

use super::mask::Mask;
use super::method::{Needs, PruningMethod, Request};
use super::select::{Compares, ScoreMethod, mask_by_score};
use crate::linalg::StoredMatrix;

/// The smallest weights of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Magnitude;

impl ScoreMethod for Magnitude {
    fn score_row(&self, _magnitudes: &mut [f32], _columns: &[f32]) {
        // The score is |W_ij| itself.
    }

    fn compares(&self) -> Compares {
        Compares::WholeMatrix
    }
}

impl PruningMethod for Magnitude {
    fn name(&self) -> &'static str {
        "magnitude"
    }

    fn summary(&self) -> &'static str {
        "the smallest weights of each matrix; needs no calibration"
    }

    fn source(&self) -> &'static str {
        "Han et al. 2015, arXiv:1506.02626"
    }

    fn needs(&self) -> Needs {
        Needs::Nothing
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        mask_by_score(self, weight, request)
    }
}

#[cfg(test)]
mod tests {
    use super::super::target::{Pattern, Target};
    use super::*;
    use crate::linalg::StoredDtype;

    fn pruned(weights: &[f32], columns: usize, ratio: f64, pattern: Pattern) -> Vec<usize> {
        let mut weight =
            StoredMatrix::from_f32(StoredDtype::F16, weights.len() / columns, columns, weights);
        let request = Request {
            name: "w",
            statistics: &[],
            target: Target { ratio, pattern },
            use_variant: false,
            score_time: None,
        };
        let mask = Magnitude.prune(&mut weight, &request).unwrap();
        (0..weights.len())
            .filter(|i| mask.is_pruned(i / columns, i % columns))
            .collect()
    }

    #[test]
    fn the_threshold_is_global_and_goes_too() {
        // Ascending |W|: 0, 1, 1, 2, 3, 4; position int(6 · 0.5) = 3 holds 2, so four weights go, all from where they are.
        let weights = [0.0, -1.0, 1.0, 4.0, -2.0, 3.0];
        assert_eq!(
            pruned(&weights, 3, 0.5, Pattern::Unstructured),
            [0, 1, 2, 4]
        );
    }

    #[test]
    fn all_ties_of_the_threshold_go() {
        assert_eq!(
            pruned(&[1.0, 1.0, 1.0, 5.0], 2, 0.25, Pattern::Unstructured),
            [0, 1, 2]
        );
    }

    #[test]
    fn ratio_zero_prunes_nothing() {
        assert!(pruned(&[0.0, 1.0], 2, 0.0, Pattern::Unstructured).is_empty());
    }

    #[test]
    fn groups_take_their_smallest_with_ties_to_the_lower_column() {
        assert_eq!(
            pruned(&[2.0, 1.0, -1.0, 1.0], 4, 0.5, Pattern::NOfM { n: 2, m: 4 }),
            [1, 2]
        );
    }
}
