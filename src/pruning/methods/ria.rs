//! RIA, relative importance and activations: score_ij = (|W_ij| / c_j + |W_ij| / r_i) · (√s_j)^½.
//!
//! W `[out_features, in_features]`; c_j = Σ_i |W_ij| its column sums `[in_features]`, r_i = Σ_j |W_ij| its row sums
//! `[out_features]`; s_j as in Wanda (`column_squares.rs`). A weight is important if it is large among the weights of its input or
//! of its output. Zhang, Bai, Lin, Zhao, Hou, Cannistraci 2024, "Plug-and-Play: An Efficient Post-training Pruning Method for Large
//! Language Models", ICLR 2024, with the exponent a = 0.5; reference: `prune_ria` in
//! biomedical-cybernetics/Relative-importance-and-activation-pruning.
//!
//! `ria` compares scores over the whole matrix with the reference's threshold (up to and including the score at position
//! `int(elements · ratio)`), `ria-per-row` within each output row, as the reference's `--per_outneuron` does. N:M: the N lowest of
//! each aligned group of M, ties to the lower column. Sums run in f64 and are rounded to f32; the reference sums in the dtype of
//! the weights, f16. A column or row without weights has a sum of 0 and scores 0. The reference's channel permutation
//! is in `permutation.rs`, for the channels where it is exact; its weight update is not implemented.

use anyhow::Result;
use rayon::prelude::*;

use crate::bytes::ByteSize;
use crate::linalg::StoredMatrix;
use crate::pruning::mask::Mask;
use crate::pruning::method::{PruningMethod, Request, Score, SparsityRule};
use crate::pruning::options::MethodOptions;
use crate::pruning::select::{lowest_of_matrix, lowest_of_rows};
use crate::pruning::statistics::StatisticsKind;
use crate::pruning::statistics::column_squares::ColumnSquaresKind;

/// Parts of a matrix whose column sums are made at the same time. The number is fixed, so sums do not depend on threads.
const PARTS: usize = 8;

/// Weights relative to their row and column, times input norms.
#[derive(Debug, Clone, Copy)]
pub enum Ria {
    /// Compared over the whole matrix.
    Matrix,
    /// Compared per output row.
    Rows,
}

impl PruningMethod for Ria {
    fn name(&self) -> &'static str {
        match self {
            Self::Matrix => "ria",
            Self::Rows => "ria-per-row",
        }
    }

    fn summary(&self) -> &'static str {
        match self {
            Self::Matrix => {
                "weights relative to their row and column, times input norms, over the whole matrix"
            }
            Self::Rows => "the scores of ria, compared per output row",
        }
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        match self {
            Self::Matrix => SparsityRule::FromMatrix,
            Self::Rows => SparsityRule::FromRows,
        }
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&ColumnSquaresKind)
    }

    fn working_bytes(&self, _out_features: usize, in_features: usize) -> ByteSize {
        // The sums of every part and a row of each, then two numbers per column.
        let part = size_of::<f64>() + size_of::<f32>();
        ByteSize::of(in_features, PARTS * part + 2 * size_of::<f32>())
    }

    fn importance(
        &self,
        dense: &StoredMatrix,
        request: &Request<'_>,
    ) -> Result<Box<Score<'static>>> {
        let squares = request.mean_squares()?;
        let columns = column_sums(dense); // c_j: [in_features]
        let activations: Vec<f32> = squares.iter().map(|s| s.sqrt().sqrt()).collect(); // (√s_j)^½
        Ok(Box::new(move |row| score(row, &columns, &activations)))
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        let score = self.importance(weight, request)?;
        match self {
            Self::Matrix => lowest_of_matrix(weight, request, &*score),
            Self::Rows => lowest_of_rows(weight, request, &*score),
        }
    }
}

/// (|W_ij| / c_j + |W_ij| / r_i) · (√s_j)^½, in place of |W_ij|.
fn score(magnitudes: &mut [f32], columns: &[f32], activations: &[f32]) {
    let row = magnitudes.iter().map(|&weight| f64::from(weight)).sum::<f64>() as f32; // r_i
    let shared = columns.iter().zip(activations);
    for (weight, (&column, activation)) in magnitudes.iter_mut().zip(shared) {
        // A weight of 0 is worth nothing, whatever it is divided by.
        if *weight != 0.0 {
            *weight = (*weight / column + *weight / row) * activation;
        }
    }
}

/// c_j = Σ_i |W_ij|, `[in_features]`. Weights that are not finite are left out: scoring refuses them with their place.
fn column_sums(weight: &StoredMatrix) -> Vec<f32> {
    let (rows, columns) = (weight.rows(), weight.columns());
    let part = rows.div_ceil(PARTS).max(1);
    let parts: Vec<Vec<f64>> = (0..rows)
        .into_par_iter()
        .step_by(part)
        .map(|first| {
            let (mut sums, mut row) = (vec![0.0f64; columns], vec![0.0f32; columns]);
            for at in first..rows.min(first + part) {
                weight.widen_rows(at, &mut row);
                for (sum, weight) in sums.iter_mut().zip(&row) {
                    let is_finite = weight.is_finite();
                    *sum += f64::from(if is_finite { weight.abs() } else { 0.0 });
                }
            }
            sums
        })
        .collect();
    (0..columns).map(|column| parts.iter().map(|sums| sums[column]).sum::<f64>() as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::StoredDtype;
    use crate::pruning::{ColumnSquares, Pattern, Statistics, Target, prune};

    fn pruned(method: Ria, weights: &[f32], squares: [f32; 3], pattern: Pattern) -> Vec<usize> {
        let mut weight = StoredMatrix::from_f32(StoredDtype::F32, 2, 3, weights);
        let statistics = ColumnSquares::from_mean(squares.to_vec());
        let target = Target { ratio: 1.0 / 3.0, pattern };
        let statistics = Statistics::Merged(Box::new(statistics));
        let request = Request::new("w", Some(&statistics), target);
        let mask = prune(&method, &mut weight, &request).unwrap();
        (0..6).filter(|at| mask.is_pruned(at / 3, at % 3)).collect()
    }

    /// Row sums 4 and 10, column sums 4, 4 and 6.
    const WEIGHTS: [f32; 6] = [1.0, 2.0, -1.0, 3.0, -2.0, 5.0];

    #[test]
    fn scores_are_relative_to_row_and_column() {
        // Row 0: 1/4 + 1/4, 2/4 + 2/4, 1/6 + 1/4 = 0.5, 1, 0.417; row 1: 3/4 + 3/10, 2/4 + 2/10, 5/6 + 5/10 = 1.05, 0.7, 1.333.
        let unstructured = Pattern::Unstructured;
        assert_eq!(pruned(Ria::Rows, &WEIGHTS, [1.0; 3], unstructured), [2, 4]);
        // Position int(6 / 3) = 2 of the ascending order holds 0.7, which is removed too.
        let of_matrix = pruned(Ria::Matrix, &WEIGHTS, [1.0; 3], unstructured);
        assert_eq!(of_matrix, [0, 2, 4]);
        // s = 16 doubles a column: row 0 becomes 0.5, 1, 0.833, row 1 1.05, 0.7, 2.667.
        let stronger = pruned(Ria::Rows, &WEIGHTS, [1.0, 1.0, 16.0], unstructured);
        assert_eq!(stronger, [0, 4]);
    }

    #[test]
    fn groups_lose_their_lowest_scores() {
        let group = Pattern::NOfM { n: 1, m: 3 };
        for method in [Ria::Matrix, Ria::Rows] {
            assert_eq!(pruned(method, &WEIGHTS, [1.0; 3], group), [2, 4]);
        }
    }

    #[test]
    fn rows_and_columns_of_zeros_score_zero() {
        let weights = [0.0, 0.0, 0.0, 0.0, 2.0, 5.0];
        let pruned = pruned(Ria::Matrix, &weights, [1.0; 3], Pattern::Unstructured);
        assert_eq!(pruned, [0, 1, 2, 3], "the threshold is a zero");
    }
}
