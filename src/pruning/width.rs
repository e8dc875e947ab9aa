//! Whole input channels of a linear: their scores, the choice of the channels that stay, and the refit of their weights.
//!
//! ```text
//! score_j = Var(x_j) · Σ_i W_ij²                                WIFV; x [tokens, n] the input, W [out, n], Var over all tokens
//! W' = W · (G + λI)[:, S] · ((G + λI)[S, S])⁻¹                   S the channels that stay, G = Σ x xᵀ, λ = 1 % of mean(diag G)
//! ```
//!
//! An et al. 2024, "Fluctuation-based Adaptive Structured Pruning for Large Language Models" (FLAP), arXiv:2312.11983; reference:
//! CASIA-IVA-Lab/FLAP. The score of a group of channels is the sum over them. Every layer keeps the same number, so scores of
//! different layers are not compared, and the reference's standardisation is left out.
//!
//! The reference adds a bias for the mean of what was removed. Here W' minimises ‖WX − W'X_S‖² + λ‖W' − W_S‖² + λ‖W_R‖², R the removed
//! channels; without removal W' = W. G is not centred, so the mean is made up for, too, and the model needs no bias. Columns are
//! scaled by √(G_jj + λ) as in `least_squares.rs`. The inverse is f64; products are f32, with one step of iterative refinement. Where W has
//! zeros they stay: the least squares of `least_squares.rs` on the non-zero weights begins at W'.

use anyhow::Result;
use rayon::prelude::*;

use super::solvers::dense::zeros_of;
use super::solvers::least_squares::{self, STEPS, ScaledGram, multiply, refit};
use super::statistics::input_gram::InputGram;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;
use crate::linalg::factor::{inverse, working_bytes};
use crate::linalg::gram::GramMatrix;
use crate::linalg::product::Packed;

/// Rows of W that are refitted at the same time. The number bounds the memory; rows are independent.
const ROWS: usize = 256;

/// WIFV of every input channel of a linear.
///
/// # Arguments
/// * `variance`: of the channels, `[in_features]`
///
/// # Errors
/// Fails for a score that is not finite. `name` is the linear's.
pub fn channel_scores(weight: &StoredMatrix, variance: &[f64], name: &str) -> Result<Vec<f64>> {
    let columns = weight.columns();
    let mut squares = vec![0.0; columns];
    let mut row = vec![0.0; columns];
    for at in 0..weight.rows() {
        weight.widen_rows(at, &mut row);
        for (sum, value) in squares.iter_mut().zip(&row) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
    let scores: Vec<f64> = squares.iter().zip(variance).map(|(w, v)| w * v).collect();
    match scores.iter().position(|score| !score.is_finite()) {
        None => Ok(scores),
        Some(channel) => Err(Failure::new(format!(
            "the score of input channel {channel} of `{name}` is {}",
            scores[channel]
        ))
        .detail("its weights or its inputs are not finite")
        .hint("look for weights that are not finite with `prune inspect DIR`")
        .lasting()
        .into()),
    }
}

/// The sums over groups of neighbouring channels.
pub fn sums_of_groups(scores: &[f64], channels: usize) -> Vec<f64> {
    let groups = scores.chunks(channels.max(1));
    groups.map(|group| group.iter().sum()).collect()
}

/// The indices of the `count` highest scores, ascending. Of equal scores the lower index stays.
pub fn highest(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// The channels in these groups of `channels` neighbours.
pub fn channels_of(groups: &[usize], channels: usize) -> Vec<usize> {
    let of = |&group: &usize| group * channels..(group + 1) * channels;
    groups.iter().flat_map(of).collect()
}

/// Some rows of a matrix, byte for byte.
///
/// # Errors
/// Fails when there is too little memory.
pub fn gather_rows(matrix: &StoredMatrix, rows: &[usize]) -> Result<StoredMatrix> {
    let width = matrix.columns() * matrix.dtype().bytes();
    let mut some = StoredMatrix::zeros(matrix.dtype(), rows.len(), matrix.columns())?;
    let out = some.as_bytes_mut().chunks_exact_mut(width.max(1));
    for (out, row) in out.zip(rows) {
        out.copy_from_slice(&matrix.as_bytes()[row * width..][..width]);
    }
    Ok(some)
}

/// Some columns of a matrix, byte for byte.
///
/// # Errors
/// Fails when there is too little memory.
pub fn gather_columns(matrix: &StoredMatrix, columns: &[usize]) -> Result<StoredMatrix> {
    let each = matrix.dtype().bytes();
    let mut some = StoredMatrix::zeros(matrix.dtype(), matrix.rows(), columns.len())?;
    let rows = matrix.as_bytes().chunks_exact((matrix.columns() * each).max(1));
    let out = some.as_bytes_mut().chunks_exact_mut((columns.len() * each).max(1));
    for (out, row) in out.zip(rows) {
        for (out, column) in out.chunks_exact_mut(each).zip(columns) {
            out.copy_from_slice(&row[column * each..][..each]);
        }
    }
    Ok(some)
}

/// Bytes of [`refit_columns`] beyond statistics, W and W'.
pub fn refit_bytes(in_features: usize, kept: usize) -> ByteSize {
    // Gs; the inverse in f64, then in f32, where later Gs of the kept channels is, too; four rows of each width; the refit around zeros.
    let square = |n: usize, each: usize| ByteSize::of(n.saturating_mul(n), each);
    GramMatrix::square_bytes(in_features)
        + square(kept, size_of::<f64>() + size_of::<f32>())
        + working_bytes::<f64>(kept)
        + ByteSize::of(ROWS * 4 * (in_features + kept), size_of::<f32>())
        + least_squares::refit_bytes(ROWS, kept)
}

/// W' of the `kept` input channels, in W's dtype: `[out, kept]`.
///
/// # Errors
/// Fails for statistics without an inverse, and when there is too little memory. `name` is the linear's.
pub fn refit_columns(
    weight: &StoredMatrix,
    statistics: &InputGram,
    kept: &[usize],
    name: &str,
) -> Result<StoredMatrix> {
    let scaled = ScaledGram::of(statistics)?;
    let (n, k) = (scaled.width(), kept.len());
    let mut exact: Vec<f64> = vec![0.0; k * k];
    exact.par_chunks_mut(k.max(1)).zip(kept.par_iter()).for_each(|(out, row)| {
        let row = &scaled.gram[row * n..][..n];
        pick(row, kept, out, f64::from);
    });
    if inverse(&mut exact, k).is_err() {
        return Err(Failure::new(format!("the inputs of `{name}` have no inverse"))
            .detail("they are not finite, or zero in all samples")
            .hint("check the checkpoint with `prune eval --model DIR`, or use more calibration samples")
            .into());
    }
    let inverted: Vec<f32> = exact.iter().map(|&value| value as f32).collect();
    drop(exact);
    let mut of_kept = None;
    let mut refitted = StoredMatrix::zeros(weight.dtype(), weight.rows(), k)?;
    let width = k * weight.dtype().bytes();
    let mut packed = Packed::default();
    for first in (0..weight.rows()).step_by(ROWS) {
        let rows = ROWS.min(weight.rows() - first);
        let mut values = vec![0.0; rows * n];
        weight.widen_rows(first, &mut values);
        let target = product_of_kept(&scaled, &scaled.scaled(values), kept, &mut packed);
        let mut solution = vec![0.0; rows * k];
        multiply(&target, &inverted, k, &mut solution, &mut packed);
        // A step of refinement: what the f32 products left of the target is solved for again.
        let mut spread = vec![0.0; rows * n];
        for (row, values) in spread.chunks_exact_mut(n).zip(solution.chunks_exact(k)) {
            for (column, value) in kept.iter().zip(values) {
                row[*column] = *value;
            }
        }
        let mut rest = product_of_kept(&scaled, &spread, kept, &mut packed);
        for (rest, target) in rest.iter_mut().zip(&target) {
            *rest = target - *rest;
        }
        let mut correction = vec![0.0; rows * k];
        multiply(&rest, &inverted, k, &mut correction, &mut packed);
        for (value, correction) in solution.iter_mut().zip(&correction) {
            *value += correction;
        }
        let is_zero = zeros_of(&gathered(weight, first, rows, kept));
        if !is_zero.is_empty() {
            let gram = of_kept.get_or_insert_with(|| scaled.of_columns(kept));
            let is_kept: Vec<bool> = is_zero.iter().map(|is_zero| !is_zero).collect();
            refit(gram, &target, &mut solution, &is_kept, STEPS);
        }
        for row in solution.chunks_exact_mut(k) {
            for (value, column) in row.iter_mut().zip(kept) {
                *value /= scaled.scale[*column];
            }
        }
        let stored = StoredMatrix::from_f32(weight.dtype(), rows, k, &solution);
        refitted.as_bytes_mut()[first * width..][..rows * width].copy_from_slice(stored.as_bytes());
    }
    Ok(refitted)
}

/// The kept columns of some rows of W, `[rows, kept]`.
fn gathered(weight: &StoredMatrix, first: usize, rows: usize, kept: &[usize]) -> Vec<f32> {
    let n = weight.columns();
    let mut whole = vec![0.0; rows * n];
    weight.widen_rows(first, &mut whole);
    kept_columns(&whole, n, kept)
}

/// The kept columns of rows·Gs.
fn product_of_kept(
    gram: &ScaledGram,
    rows: &[f32],
    kept: &[usize],
    packed: &mut Packed,
) -> Vec<f32> {
    let n = gram.width();
    let mut whole = vec![0.0; rows.len()];
    gram.product(rows, &mut whole, packed);
    kept_columns(&whole, n, kept)
}

/// The kept columns of rows of length `n`.
fn kept_columns(rows: &[f32], n: usize, kept: &[usize]) -> Vec<f32> {
    let mut some = vec![0.0; rows.len() / n.max(1) * kept.len()];
    let pairs = some.chunks_exact_mut(kept.len().max(1)).zip(rows.chunks_exact(n.max(1)));
    for (out, row) in pairs {
        pick(row, kept, out, |value| value);
    }
    some
}

fn pick<T>(row: &[f32], kept: &[usize], out: &mut [T], of: impl Fn(f32) -> T) {
    for (out, column) in out.iter_mut().zip(kept) {
        *out = of(row[*column]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::StoredDtype;
    use crate::pruning::InPlaceStatistics;

    /// Inputs of which column 3 is the sum of columns 0 and 1.
    fn inputs(tokens: usize) -> Vec<f32> {
        let value = |at: usize| ((at * 7919 % 1013) as f32 - 500.0) / 300.0;
        let rows = (0..tokens).map(|token| {
            let [a, b, c] = [3 * token, 3 * token + 1, 3 * token + 2].map(value);
            [a, b, c, a + b]
        });
        rows.flatten().collect()
    }

    fn statistics(rows: &[f32]) -> InputGram {
        let mut statistics = InputGram::new(4, crate::linalg::Products::F32);
        statistics.add_rows(rows);
        statistics.end_sample();
        statistics.finish();
        statistics
    }

    #[test]
    fn a_channel_that_others_make_up_for_is_missed_little() {
        let rows = inputs(400);
        let weight = StoredMatrix::from_f32(StoredDtype::F32, 1, 4, &[1.0, 2.0, -1.0, 0.5]);
        let kept = [0, 1, 2];
        let refitted = refit_columns(&weight, &statistics(&rows), &kept, "w").unwrap();
        let mut values = [0.0; 3];
        refitted.widen_rows(0, &mut values);
        // Column 3 is 0 + 1, so its weight goes to both; λ holds a little back.
        for (value, expected) in values.iter().zip([1.5, 2.5, -1.0]) {
            assert!((value - expected).abs() < 0.02, "{values:?}");
        }
    }

    #[test]
    fn the_refit_has_no_gradient() {
        let rows = inputs(200);
        let statistics = statistics(&rows);
        let weights = [0.3, -1.2, 0.8, 2.0, 1.0, 0.1, -0.4, -0.9];
        let weight = StoredMatrix::from_f32(StoredDtype::F32, 2, 4, &weights);
        let kept = [1, 3];
        let refitted = refit_columns(&weight, &statistics, &kept, "w").unwrap();
        let diagonal = statistics.gram().diagonal();
        let lambda = 0.01 * diagonal.iter().sum::<f32>() / 4.0;
        let mut gram = statistics.gram().square();
        for at in 0..4 {
            gram[at * 5] += lambda;
        }
        for row in 0..2 {
            let mut values = [0.0; 2];
            refitted.widen_rows(row, &mut values);
            for column in kept {
                let dense: f32 = (0..4).map(|j| weights[row * 4 + j] * gram[j * 4 + column]).sum();
                let fitted: f32 = (0..2).map(|j| values[j] * gram[kept[j] * 4 + column]).sum();
                assert!((dense - fitted).abs() < 1e-3 * gram[column * 5], "{dense} {fitted}");
            }
        }
    }

    #[test]
    fn zeros_of_the_source_stay_and_the_other_weights_have_no_gradient() {
        let rows = inputs(400);
        let statistics = statistics(&rows);
        let weights = [1.0, 0.0, -1.0, 0.5, 0.3, 2.0, 0.0, -0.7];
        let weight = StoredMatrix::from_f32(StoredDtype::F32, 2, 4, &weights);
        let kept = [0, 1, 2];
        let refitted = refit_columns(&weight, &statistics, &kept, "w").unwrap();
        let gram = ScaledGram::of(&statistics).unwrap();
        for row in 0..2 {
            let mut values = [0.0; 3];
            refitted.widen_rows(row, &mut values);
            for column in kept {
                let source = weights[row * 4 + column];
                if source == 0.0 {
                    assert_eq!(values[column], 0.0, "{values:?}");
                    continue;
                }
                let of =
                    |value: f32, at: usize| value * gram.scale[at] * gram.gram[at * 4 + column];
                let dense: f32 = (0..4).map(|at| of(weights[row * 4 + at], at)).sum();
                let fitted: f32 = (0..3).map(|at| of(values[at], at)).sum();
                assert!((dense - fitted).abs() < 1e-3, "{dense} {fitted}");
            }
        }
    }

    #[test]
    fn all_channels_return_the_dense_weights() {
        let weight = StoredMatrix::from_f32(StoredDtype::F32, 1, 4, &[1.0, 2.0, -1.0, 0.5]);
        let all = [0, 1, 2, 3];
        let refitted = refit_columns(&weight, &statistics(&inputs(50)), &all, "w").unwrap();
        let mut values = [0.0; 4];
        refitted.widen_rows(0, &mut values);
        for (value, dense) in values.iter().zip([1.0, 2.0, -1.0, 0.5]) {
            assert!((value - dense).abs() < 1e-5, "{values:?}");
        }
    }

    #[test]
    fn scores_and_choices_by_hand() {
        let weight =
            StoredMatrix::from_f32(StoredDtype::F32, 2, 4, &[1., 0., 2., 1., 1., 3., 0., 1.]);
        let scores = channel_scores(&weight, &[1.0, 0.5, 2.0, 0.0], "w").unwrap();
        assert_eq!(scores, [2.0, 4.5, 8.0, 0.0]);
        assert_eq!(sums_of_groups(&scores, 2), [6.5, 8.0]);
        assert_eq!(highest(&scores, 2), [1, 2]);
        assert_eq!(highest(&[1.0; 4], 2), [0, 1]);
        assert_eq!(channels_of(&[0, 2], 2), [0, 1, 4, 5]);
        assert!(channel_scores(&weight, &[f64::NAN; 4], "w").is_err());
        let columns = gather_columns(&weight, &[1, 3]).unwrap();
        assert_eq!(columns, StoredMatrix::from_f32(StoredDtype::F32, 2, 2, &[0., 1., 3., 1.]));
        let rows = gather_rows(&weight, &[1]).unwrap();
        assert_eq!(rows, StoredMatrix::from_f32(StoredDtype::F32, 1, 4, &[1., 3., 0., 1.]));
    }
}
