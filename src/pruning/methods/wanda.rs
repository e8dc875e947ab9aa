//! Wanda: score_ij = |W_ij| · √s_j; the lowest scores of every output row are removed.
//!
//! W `[out_features, in_features]` in its stored dtype, widened exactly; s_j = mean over samples of Σ_tokens x_tj²
//! (`column_squares.rs`); product and root in f32 as in the reference. Sun, Liu, Bair, Kolter 2023, "A Simple and Effective
//! Pruning Approach for Large Language Models", arXiv:2306.11695, eq. 1; reference: `prune_wanda` in locuslab/wanda.
//!
//! Unstructured: exactly `int(in_features · ratio)` weights of each row, ties to the lower column (the reference sorts
//! stably). N:M: the N lowest of each aligned group of M; ties to the lower column, where the reference leaves the order
//! to `topk`. A column that was never active has s_j = 0 and is removed first. `--use-variant` is in `variant.rs`.

use anyhow::Result;

use crate::linalg::StoredMatrix;
use crate::pruning::mask::Mask;
use crate::pruning::method::{PruningMethod, Request, SparsityRule};
use crate::pruning::options::MethodOptions;
use crate::pruning::select::lowest_of_rows;
use crate::pruning::statistics::StatisticsKind;
use crate::pruning::statistics::column_squares::ColumnSquaresKind;

/// Weights times input norms, compared per output row.
#[derive(Debug, Clone, Copy)]
pub struct Wanda;

impl PruningMethod for Wanda {
    fn name(&self) -> &'static str {
        "wanda"
    }

    fn summary(&self) -> &'static str {
        "weights times input norms, compared per output row"
    }

    fn can_share_rows(&self) -> bool {
        true
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::FromRows
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&ColumnSquaresKind)
    }

    fn column_factors(&self, request: &Request<'_>) -> Result<Option<Vec<f32>>> {
        input_norms(request).map(Some)
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        let norms = input_norms(request)?;
        lowest_of_rows(weight, request, &|row| score(row, &norms))
    }
}

/// √s_j `[in_features]`.
///
/// # Errors
/// Fails on a value that is not finite, and without statistics.
pub fn input_norms(request: &Request<'_>) -> Result<Vec<f32>> {
    let squares = request.mean_squares()?;
    Ok(squares.iter().map(|square| square.sqrt()).collect())
}

/// |W_ij| · √s_j, in place of |W_ij|.
pub fn score(magnitudes: &mut [f32], norms: &[f32]) {
    for (weight, norm) in magnitudes.iter_mut().zip(norms) {
        *weight *= norm;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::StoredDtype;
    use crate::pruning::{ColumnSquares, Pattern, Statistics, Target, prune};

    fn mask_of(
        weights: &[f32],
        columns: usize,
        statistics: &[f32],
        ratio: f64,
        pattern: Pattern,
    ) -> Result<Vec<bool>> {
        let mut weight =
            StoredMatrix::from_f32(StoredDtype::F32, weights.len() / columns, columns, weights);
        let target = Target { ratio, pattern };
        let statistics = ColumnSquares::from_mean(statistics.to_vec());
        let statistics = Statistics::Merged(Box::new(statistics));
        let request = Request::new("model.layers.0.mlp.up_proj", Some(&statistics), target);
        let mask = prune(&Wanda, &mut weight, &request)?;
        Ok((0..weights.len()).map(|i| mask.is_pruned(i / columns, i % columns)).collect())
    }

    #[test]
    fn wanda_weighs_magnitudes_by_input_norms_and_prunes_each_row_alike() {
        // Scores of row 0: 4·1, 1·2, 1·3, 1·0; of row 1: 1·1, 9·2, 8·3, 7·0.
        let weights = [4.0, -1.0, 1.0, 1.0, 1.0, 9.0, -8.0, 7.0];
        let mask = mask_of(&weights, 4, &[1.0, 4.0, 9.0, 0.0], 0.5, Pattern::Unstructured).unwrap();
        assert_eq!(mask, [false, true, false, true, true, false, false, true]);
    }

    #[test]
    fn wanda_removes_exactly_k_per_row_with_ties_to_the_lower_column() {
        let mask = mask_of(&[1.0; 14], 7, &[1.0; 7], 0.5, Pattern::Unstructured).unwrap();
        assert_eq!(mask[..7], [true, true, true, false, false, false, false], "int(7 * 0.5) = 3");
        assert_eq!(mask[..7], mask[7..]);
    }

    #[test]
    fn n_of_m_prunes_n_of_each_group() {
        let mask = mask_of(
            &[1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0],
            8,
            &[1.0; 8],
            0.5,
            Pattern::NOfM { n: 2, m: 4 },
        )
        .unwrap();
        assert_eq!(mask, [true, true, false, false, false, false, true, true]);
    }

    #[test]
    fn a_value_that_is_not_finite_is_an_error_that_names_matrix_and_place() {
        let nan = mask_of(&[1.0, f32::NAN], 2, &[1.0; 2], 0.5, Pattern::Unstructured)
            .unwrap_err()
            .to_string();
        assert!(nan.contains("`model.layers.0.mlp.up_proj` has a weight that is NaN or infinite at row 0, column 1"), "{nan}");
        let inf = mask_of(&[1.0, 1.0], 2, &[1.0, f32::INFINITY], 0.5, Pattern::Unstructured)
            .unwrap_err()
            .to_string();
        assert!(inf.contains("column 1 has a mean square of inf"), "{inf}");
    }

    #[test]
    fn a_pattern_that_does_not_divide_is_refused_with_the_matrix_and_the_fix() {
        let error = mask_of(&[1.0; 6], 6, &[1.0; 6], 0.5, Pattern::NOfM { n: 2, m: 4 })
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("has 6 input features, which 4 does not divide")
                && error.contains("--exclude '*up_proj'"),
            "{error}"
        );
    }
}
