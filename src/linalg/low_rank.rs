//! A weight with a low-rank change that keeps its zeros, for training: W' = M ∘ (W + s·B·A).
//!
//! W `[out, in]` is a pruned weight, M `[out, in]` its mask (1 = kept), A `[rank, in]`, B `[out, rank]`, s = alpha / rank. From the gradient
//! G = ∂loss/∂W' (`gradient`):
//!
//! ```text
//! dB = s·(G ∘ M)·Aᵀ    [out, rank]
//! dA = s·Bᵀ·(G ∘ M)    [rank, in]
//! ```
//!
//! LoRA: Hu et al. 2021, arXiv:2106.09685, eq. 3. The mask inside the training is that of LoRS, Hu et al. 2025, arXiv:2501.08582. LoRS
//! avoids G. Here G is the gradient of a whole weight for one sample, so that masked LoRA is the full gradient and two thin products.
//!
//! Memory of a matrix: W' in the dtype of the products and out·in / 8 bytes of M. A, B and their gradients take 8·rank·(out + in). G takes
//! 4·out·in, for one matrix at a time.

use anyhow::Result;
use rayon::prelude::*;

use super::convert;
use super::matmul::{Threads, View, matmul};
use super::stored::{StoredDtype, StoredMatrix, zero_bits_of};

/// Elements of W' that a task computes at once.
const CHUNK: usize = 1 << 16;

/// The factors of a low-rank change, and the mask of the weight.
#[derive(Debug, Clone)]
pub struct MaskedLowRank {
    out_features: usize,
    in_features: usize,
    scale: f32,
    /// One bit per element, 1 = pruned, row-major without padding, least significant bit first.
    pruned: Vec<u8>,
    /// A `[rank, in_features]`.
    pub a: Vec<f32>,
    /// B `[out_features, rank]`.
    pub b: Vec<f32>,
}

impl MaskedLowRank {
    /// A change of a weight whose zeros are its mask.
    ///
    /// # Arguments
    /// * `weight`: W `[out, in]`
    /// * `a`: `[rank, in]`
    /// * `b`: `[out, rank]`
    /// * `scale`: s
    ///
    /// # Panics
    /// Panics when the factors do not have the sizes of their shapes.
    pub fn new(weight: &StoredMatrix, a: Vec<f32>, b: Vec<f32>, scale: f32) -> Self {
        let shape = (weight.rows(), weight.columns());
        Self::with_mask(shape, weight.zeros_mask(), [a, b], scale)
    }

    /// The rank of the change.
    pub fn rank(&self) -> usize {
        self.a.len() / self.in_features.max(1)
    }

    /// The mask of the weight: one bit per element, 1 = pruned, row-major without padding, least significant bit first.
    pub fn pruned(&self) -> &[u8] {
        &self.pruned
    }

    /// Returns M ∘ (W + s·B·A), rounded to `dtype`. Sums are f32.
    ///
    /// # Errors
    /// Fails when there is too little memory.
    ///
    /// # Panics
    /// Panics when `weight` has another shape than the weight of [`MaskedLowRank::new`].
    pub fn applied_to(&self, weight: &StoredMatrix, dtype: StoredDtype) -> Result<StoredMatrix> {
        let (columns, rank) = (self.in_features, self.rank());
        assert!(
            weight.rows() == self.out_features && weight.columns() == columns,
            "the weight must be [out_features, in_features]"
        );
        let mut changed = StoredMatrix::zeros(dtype, self.out_features, columns)?;
        let rows_at_once = (CHUNK / columns).max(1);
        let row_bytes = columns * dtype.bytes();
        changed
            .as_bytes_mut()
            .par_chunks_mut(rows_at_once * row_bytes)
            .enumerate()
            .for_each(|(task, bytes)| {
                let (first, rows) = (task * rows_at_once, bytes.len() / row_bytes);
                let (mut change, mut wide) = (vec![0.0; rows * columns], vec![0.0; rows * columns]);
                let b = View::strided(&self.b[first * rank..], rows, rank, rank);
                let a = View::strided(&self.a, rank, columns, columns);
                matmul(&mut change, columns, self.scale, b, a, Threads::One);
                weight.widen_rows(first, &mut wide);
                wide.iter_mut()
                    .zip(&change)
                    .for_each(|(wide, change)| *wide += change);
                let mut narrow = Vec::new();
                convert::narrow(dtype, &wide, &mut narrow);
                bytes.copy_from_slice(&narrow);
            });
        changed.zero_bits(&self.pruned);
        Ok(changed)
    }

    /// The same change with the mask given: where the weight's own zeros are not it, as behind a quantisation.
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn with_mask(
        (out_features, in_features): (usize, usize),
        pruned: Vec<u8>,
        [a, b]: [Vec<f32>; 2],
        scale: f32,
    ) -> Self {
        let rank = a.len() / in_features.max(1);
        assert!(
            rank > 0 && a.len() == rank * in_features && b.len() == out_features * rank,
            "A must be [rank, in], and B [out, rank]"
        );
        assert_eq!(
            pruned.len(),
            (out_features * in_features).div_ceil(8),
            "a mask has a bit for every weight"
        );
        Self {
            out_features,
            in_features,
            scale,
            pruned,
            a,
            b,
        }
    }

    /// Masks `gradient` G in place, and adds what it is for the factors to their gradients.
    ///
    /// # Arguments
    /// * `gradient`: G `[out, in]` of some tokens; pruned elements become +0
    /// * `da`: `[rank, in]`
    /// * `db`: `[out, rank]`
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn project(&self, gradient: &mut [f32], da: &mut [f32], db: &mut [f32]) {
        let (rows, columns, rank) = (self.out_features, self.in_features, self.rank());
        assert!(
            gradient.len() == rows * columns
                && da.len() == self.a.len()
                && db.len() == self.b.len(),
            "gradients have the shapes of their weights"
        );
        zero_bits_of(gradient, &self.pruned);
        let g = View::strided(gradient, rows, columns, columns);
        let a = View::strided(&self.a, rank, columns, columns);
        let b = View::strided(&self.b, rows, rank, rank);
        let (mut of_a, mut of_b) = (vec![0.0; da.len()], vec![0.0; db.len()]);
        matmul(&mut of_b, rank, self.scale, g, a.transposed(), Threads::All);
        matmul(
            &mut of_a,
            columns,
            self.scale,
            b.transposed(),
            g,
            Threads::All,
        );
        for (sums, more) in [(da, of_a), (db, of_b)] {
            sums.iter_mut()
                .zip(more)
                .for_each(|(sum, more)| *sum += more);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(count: usize, pace: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * pace).sin()).collect()
    }

    #[test]
    fn the_change_keeps_zeros_and_gradients_are_those_of_the_formula() {
        let (rows, columns, rank, scale) = (45, 70, 3, 2.0);
        let mut w = wave(rows * columns, 0.53);
        w.iter_mut().step_by(3).for_each(|w| *w = -0.0);
        let (a, b) = (wave(rank * columns, 0.37), wave(rows * rank, 0.71));
        let is_kept = |at: usize| !at.is_multiple_of(3) && w[at] != 0.0;
        for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
            let weight = StoredMatrix::from_f32(dtype, rows, columns, &w);
            let low_rank = MaskedLowRank::new(&weight, a.clone(), b.clone(), scale);
            let changed = low_rank.applied_to(&weight, dtype).unwrap();
            let (mut before, mut after) = (vec![0.0; w.len()], vec![0.0; w.len()]);
            weight.widen_rows(0, &mut before);
            changed.widen_rows(0, &mut after);
            let change = |at: usize| -> f32 {
                let (row, column) = (at / columns, at % columns);
                let terms = (0..rank).map(|r| b[row * rank + r] * a[r * columns + column]);
                scale * terms.sum::<f32>()
            };
            for (at, after) in after.iter().enumerate() {
                if !is_kept(at) {
                    assert_eq!(after.to_bits(), 0, "pruned weights are +0");
                    continue;
                }
                let exact = before[at] + change(at);
                let rounding = if dtype == StoredDtype::F32 {
                    1e-6
                } else {
                    4e-3
                };
                assert!(
                    (after - exact).abs() <= rounding * (1.0 + exact.abs()),
                    "{after} {exact}"
                );
            }
            let gradient = wave(w.len(), 0.19);
            let (mut g, mut da, mut db) =
                (gradient.clone(), vec![0.0; a.len()], vec![0.0; b.len()]);
            low_rank.project(&mut g, &mut da, &mut db);
            for (at, g) in g.iter().enumerate() {
                // A gradient times 0 would be −0 where it is negative.
                let expected = if is_kept(at) { gradient[at] } else { 0.0 };
                assert_eq!(g.to_bits(), expected.to_bits());
            }
            for (at, da) in da.iter().enumerate() {
                let terms = (0..rows)
                    .map(|row| b[row * rank + at / columns] * g[row * columns + at % columns]);
                assert!((da - scale * terms.sum::<f32>()).abs() < 1e-4);
            }
            for (at, db) in db.iter().enumerate() {
                let terms = (0..columns).map(|column| {
                    g[at / rank * columns + column] * a[at % rank * columns + column]
                });
                assert!((db - scale * terms.sum::<f32>()).abs() < 1e-4);
            }
        }
    }
}
