//! Least squares on the weights that are kept: the smallest error of a linear's output for a given mask.
//!
//! G = XᵀX `[in_features, in_features]` (`input_gram.rs`), damped by λ = 1 % of the mean of its diagonal; W `[out_features, in_features]`
//! the dense weights, M their mask. For every row i on its own:
//!
//! ```text
//! minimise (w_i − ŵ_i) (G + λI) (w_i − ŵ_i)ᵀ  over ŵ_i that are zero outside M_i
//! ```
//!
//! Columns are scaled to unit length first: s_j = √(G_jj + λ) + 10⁻⁸, Gs = (G + λI) / (s sᵀ), ws = w·s. This is a preconditioner, and makes
//! |ws| Wanda's score. The normal equations, restricted to the kept weights, are solved by conjugate gradients, all rows at once with one
//! product with Gs per step. Ten steps, as in ALPS, arXiv:2406.07831 §3.3, reference `cg_batch` in mazumder-lab/ALPS.
//! Sums over a row run in f64; all else is f32.

use anyhow::Result;
use rayon::prelude::*;

use crate::bytes::ByteSize;
use crate::linalg::gram::{GramMatrix, f32_kernel};
use crate::linalg::product::{Factor, Packed, ProductJob, Values, products};
use crate::pruning::statistics::input_gram::InputGram;

/// Steps of conjugate gradients, as in the reference.
pub(crate) const STEPS: usize = 10;
/// λ as a fraction of the mean of the diagonal, as in the reference.
const DAMPING: f64 = 0.01;
/// Rows that are refitted at the same time. The number bounds the memory; rows are independent.
const ROWS: usize = 1024;

/// Gs and s of an input.
pub(crate) struct ScaledGram {
    /// Gs, `[in_features, in_features]`.
    pub(crate) gram: Vec<f32>,
    /// s, `[in_features]`.
    pub(crate) scale: Vec<f32>,
}

impl ScaledGram {
    /// Scales G of an input.
    pub(crate) fn of(statistics: &InputGram) -> Result<Self> {
        let n = statistics.gram().width();
        let diagonal = statistics.gram().diagonal();
        let mean = diagonal.iter().map(|value| f64::from(*value)).sum::<f64>() / n.max(1) as f64;
        let damp = (DAMPING * mean) as f32;
        let scale: Vec<f32> = diagonal.iter().map(|value| (value + damp).sqrt() + 1e-8).collect();
        let mut gram = statistics.gram().square();
        gram.par_chunks_mut(n.max(1)).enumerate().for_each(|(row, values)| {
            values[row] += damp;
            for (value, scale_of) in values.iter_mut().zip(&scale) {
                *value = *value / scale_of / scale[row];
            }
        });
        Ok(Self { gram, scale })
    }

    /// Gs and s of some columns.
    pub(crate) fn of_columns(&self, columns: &[usize]) -> Self {
        let rows = columns.iter().map(|row| &self.gram[row * self.width()..]);
        let values = rows.flat_map(|row| columns.iter().map(|column| row[*column]));
        Self {
            gram: values.collect(),
            scale: columns.iter().map(|column| self.scale[*column]).collect(),
        }
    }

    /// Columns.
    pub(crate) fn width(&self) -> usize {
        self.scale.len()
    }

    /// Bytes for an input with this many columns.
    pub(crate) fn bytes(in_features: usize) -> ByteSize {
        GramMatrix::square_bytes(in_features)
    }

    /// Multiplies every row by s.
    pub(crate) fn scaled(&self, mut weights: Vec<f32>) -> Vec<f32> {
        weights.par_chunks_mut(self.width().max(1)).for_each(|row| {
            row.iter_mut().zip(&self.scale).for_each(|(value, scale)| *value *= scale);
        });
        weights
    }

    /// Divides every row by s.
    pub(crate) fn unscaled(&self, mut weights: Vec<f32>) -> Vec<f32> {
        weights.par_chunks_mut(self.width().max(1)).for_each(|row| {
            row.iter_mut().zip(&self.scale).for_each(|(value, scale)| *value /= scale);
        });
        weights
    }

    /// Writes rows·Gs to `out`.
    pub(crate) fn product(&self, rows: &[f32], out: &mut [f32], packed: &mut Packed) {
        multiply(rows, &self.gram, self.width(), out, packed);
    }
}

/// Floating-point operations of this many products `[rows, n]` with S `[n, n]`, and of this many inverses.
pub(crate) fn operations(rows: usize, n: usize, products: usize, inverses: usize) -> f64 {
    let (rows, n) = (rows as f64, n as f64);
    n * n * (2.0 * rows * products as f64 + n * inverses as f64)
}

/// Writes rows·S to `out`, S symmetric `[n, n]`.
pub(crate) fn multiply(rows: &[f32], s: &[f32], n: usize, out: &mut [f32], packed: &mut Packed) {
    let job = ProductJob {
        weight: Factor::Stored(Values::F32(s)),
        columns: n,
        out,
        stride: n,
        adds: false,
    };
    products(f32_kernel(), rows, n, &mut [job], packed);
}

/// Solves for the kept weights by conjugate gradients.
///
/// # Arguments
/// * `target`: ws·Gs of the dense weights, `[rows, n]`
/// * `x`: the scaled weights to begin with, which become the solution; weights outside the mask become 0
/// * `is_kept`: `[rows, n]`
pub(crate) fn refit(
    gram: &ScaledGram,
    target: &[f32],
    x: &mut [f32],
    is_kept: &[bool],
    steps: usize,
) {
    let n = gram.width().max(1);
    let mut buffers = Buffers::default();
    for ((target, x), is_kept) in
        target.chunks(ROWS * n).zip(x.chunks_mut(ROWS * n)).zip(is_kept.chunks(ROWS * n))
    {
        gram.refit_rows(target, x, is_kept, steps, &mut buffers);
    }
}

/// Bytes of [`refit`] for rows of this length, beyond its arguments.
pub(crate) fn refit_bytes(out_features: usize, in_features: usize) -> ByteSize {
    ByteSize::of(3 * out_features.min(ROWS) * in_features, size_of::<f32>())
}

#[derive(Default)]
struct Buffers {
    residual: Vec<f32>,
    direction: Vec<f32>,
    product: Vec<f32>,
    packed: Packed,
}

impl ScaledGram {
    fn refit_rows(
        &self,
        target: &[f32],
        x: &mut [f32],
        is_kept: &[bool],
        steps: usize,
        buffers: &mut Buffers,
    ) {
        let n = self.width().max(1);
        let Buffers { residual, direction, product, packed } = buffers;
        for buffer in [&mut *residual, &mut *direction, &mut *product] {
            buffer.resize(x.len(), 0.0);
        }
        x.par_chunks_mut(n).zip(is_kept.par_chunks(n)).for_each(|(x, is_kept)| {
            for (x, is_kept) in x.iter_mut().zip(is_kept) {
                *x = if *is_kept { *x } else { 0.0 };
            }
        });
        self.product(x, product, packed);
        // r = (target − x·Gs) on the mask, p = r, and r·r of every row.
        let mut norms: Vec<f64> = residual
            .par_chunks_mut(n)
            .zip(direction.par_chunks_mut(n))
            .zip(product.par_chunks(n))
            .zip(target.par_chunks(n).zip(is_kept.par_chunks(n)))
            .map(|(((residual, direction), product), (target, is_kept))| {
                let mut norm = 0.0;
                for at in 0..residual.len() {
                    let value = if is_kept[at] { target[at] - product[at] } else { 0.0 };
                    residual[at] = value;
                    direction[at] = value;
                    norm += f64::from(value) * f64::from(value);
                }
                norm
            })
            .collect();
        for _ in 0..steps {
            self.product(direction, product, packed);
            x.par_chunks_mut(n)
                .zip(residual.par_chunks_mut(n))
                .zip(direction.par_chunks_mut(n).zip(product.par_chunks(n)))
                .zip(is_kept.par_chunks(n).zip(norms.par_iter_mut()))
                .for_each(|(((x, residual), (direction, product)), (is_kept, norm))| {
                    let pairs = direction.iter().zip(product);
                    let curvature: f64 = pairs.map(|(p, q)| f64::from(*p) * f64::from(*q)).sum();
                    // A row that is solved, or has no weights, stays.
                    if *norm <= 0.0 || curvature <= 0.0 {
                        return;
                    }
                    let alpha = (*norm / curvature) as f32;
                    let mut next = 0.0;
                    for at in 0..x.len() {
                        x[at] += alpha * direction[at];
                        let change = if is_kept[at] { alpha * product[at] } else { 0.0 };
                        residual[at] -= change;
                        next += f64::from(residual[at]) * f64::from(residual[at]);
                    }
                    let beta = (next / *norm) as f32;
                    for (direction, residual) in direction.iter_mut().zip(&*residual) {
                        *direction = residual + beta * *direction;
                    }
                    *norm = next;
                });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pruning::statistics::InPlaceStatistics;

    /// Statistics of an input with correlated columns.
    pub(crate) fn statistics(n: usize, tokens: usize) -> InputGram {
        let mut statistics = InputGram::new(n, crate::linalg::Products::F32);
        let rows: Vec<f32> = (0..tokens * n)
            .map(|at| {
                let (token, column) = (at / n, at % n);
                let shared = ((token * 31 % 17) as f32 - 8.0) / 8.0;
                shared + ((at * 7919 % 1013) as f32 - 500.0) / (300.0 + 40.0 * column as f32)
            })
            .collect();
        statistics.add_rows(&rows);
        statistics.end_sample();
        statistics.finish();
        statistics
    }

    #[test]
    fn the_solution_has_no_gradient_on_the_kept_weights() {
        let (rows, n) = (5, 12);
        let gram = ScaledGram::of(&statistics(n, 200)).unwrap();
        let weights: Vec<f32> =
            (0..rows * n).map(|at| ((at * 37 % 61) as f32 - 30.0) / 10.0).collect();
        let is_kept: Vec<bool> = (0..rows * n).map(|at| at * 13 % 7 < 4).collect();
        let scaled = gram.scaled(weights);
        let mut target = vec![0.0; rows * n];
        gram.product(&scaled, &mut target, &mut Packed::default());
        let mut x = scaled.clone();
        refit(&gram, &target, &mut x, &is_kept, 4 * n);
        let mut product = vec![0.0; rows * n];
        gram.product(&x, &mut product, &mut Packed::default());
        for at in 0..rows * n {
            match is_kept[at] {
                true => assert!((target[at] - product[at]).abs() < 1e-4, "{at}"),
                false => assert_eq!(x[at], 0.0),
            }
        }
        assert!(is_kept.contains(&true));
    }

    #[test]
    fn a_full_mask_returns_the_dense_weights() {
        let n = 9;
        let gram = ScaledGram::of(&statistics(n, 50)).unwrap();
        let scaled = gram.scaled((0..n).map(|at| at as f32 - 4.0).collect());
        let mut target = vec![0.0; n];
        gram.product(&scaled, &mut target, &mut Packed::default());
        let mut x = scaled.clone();
        refit(&gram, &target, &mut x, &[true; 9], 3);
        let off = x.iter().zip(&scaled).map(|(a, b)| (a - b).abs());
        assert!(off.fold(0.0, f32::max) < 1e-4);
    }
}
