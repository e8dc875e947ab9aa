//! Magnitude: score_ij = |W_ij|, compared over the whole matrix.
//!
//! The original's rule (`prune_magnitude` in locuslab/wanda): the threshold is the value at position `int(numel · ratio)` of
//! the ascending order of |W|, and everything up to *and including* it is removed: at least one weight more than the ratio
//! says, and all ties of the threshold (frequent in half precision). N:M: the N smallest of each aligned group
//! of M, ties to the lower column. No calibration, no forward pass. Han et al. 2015, arXiv:1506.02626.

use anyhow::Result;

use crate::linalg::StoredMatrix;
use crate::pruning::mask::Mask;
use crate::pruning::method::{PruningMethod, Request, SparsityRule};
use crate::pruning::options::MethodOptions;
use crate::pruning::select::lowest_of_matrix;

/// The smallest weights of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct Magnitude;

impl PruningMethod for Magnitude {
    fn name(&self) -> &'static str {
        "magnitude"
    }

    fn summary(&self) -> &'static str {
        "the smallest weights of each matrix; needs no calibration"
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::FromMatrix
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        // The score is |W_ij| itself.
        lowest_of_matrix(weight, request, &|_magnitudes| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::StoredDtype;
    use crate::pruning::{Pattern, Target, prune};

    fn pruned(weights: &[f32], columns: usize, ratio: f64, pattern: Pattern) -> Vec<usize> {
        let mut weight =
            StoredMatrix::from_f32(StoredDtype::F16, weights.len() / columns, columns, weights);
        let request = Request::new("w", None, Target { ratio, pattern });
        let mask = prune(&Magnitude, &mut weight, &request).unwrap();
        (0..weights.len()).filter(|i| mask.is_pruned(i / columns, i % columns)).collect()
    }

    #[test]
    fn the_threshold_is_global_and_is_removed_too() {
        // Ascending |W|: 0, 1, 1, 2, 3, 4; position int(6 · 0.5) = 3 holds 2, so the weights 0, -1, 1 and -2 are removed.
        let weights = [0.0, -1.0, 1.0, 4.0, -2.0, 3.0];
        assert_eq!(pruned(&weights, 3, 0.5, Pattern::Unstructured), [0, 1, 2, 4]);
    }

    #[test]
    fn all_ties_of_the_threshold_are_removed() {
        assert_eq!(pruned(&[1.0, 1.0, 1.0, 5.0], 2, 0.25, Pattern::Unstructured), [0, 1, 2]);
    }

    #[test]
    fn ratio_zero_prunes_nothing() {
        assert!(pruned(&[0.0, 1.0], 2, 0.0, Pattern::Unstructured).is_empty());
    }

    #[test]
    fn groups_take_their_smallest_with_ties_to_the_lower_column() {
        assert_eq!(pruned(&[2.0, 1.0, -1.0, 1.0], 4, 0.5, Pattern::NOfM { n: 2, m: 4 }), [1, 2]);
    }
}
