//! A weight with a low-rank change that keeps its zeros, for training: W' = M ∘ (W + s·B·A).
//!
//! W `[out, in]` is a pruned weight, M `[out, in]` its mask (1 = kept), A `[rank, in]`, B `[out, rank]`, s = alpha / rank. From the
//! gradient G = ∂loss/∂W' (`gradient`):
//!
//! ```text
//! dB = s·(G ∘ M)·Aᵀ    [out, rank]
//! dA = s·Bᵀ·(G ∘ M)    [rank, in]
//! ```
//!
//! LoRA: Hu et al. 2021, arXiv:2106.09685, eq. 3. The mask inside the training is from LoRS, Hu et al. 2025, arXiv:2501.08582.
//!
//! G is never stored: it is computed in rectangles that fit a second-level cache. Each is masked there, and becomes its part of dA and
//! dB by two thin products in f32. The rectangles and the order of their sums do not depend on the number of threads.
//!
//! Memory of a matrix: W' in the dtype of the products and out·in / 8 bytes of M. A, B and their gradients take 8·rank·(out + in). The
//! parts of dA and dB take 4·rank·(out + in) for each row or column of rectangles ([`factor_parts_elements`]).

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use super::Linear;
use super::buffer_pool::{BufferPool, grow};
use super::convert;
use super::matmul::{Threads, View, matmul};
use super::product::{Kernel, Strided, StridedFactors, Values, parts_of_product, product_in_parts};
use super::stored::{StoredDtype, StoredMatrix, zero_bits_from};
use super::weight::ProductContext;
use crate::bytes::ByteSize;

/// Elements of W' that a task computes at once.
const CHUNK: usize = 1 << 16;

/// Bytes that a thread packs for its piece of B·A: the rank is small.
const PACKED_PER_THREAD: usize = 256 << 10;

/// A low-rank change of a matrix: s·B·A.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRank {
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub columns: usize,
    /// Rows of A.
    pub rank: usize,
    /// s.
    pub scale: f32,
    /// A `[rank, columns]`.
    pub a: Vec<f32>,
    /// B `[rows, rank]`.
    pub b: Vec<f32>,
}

impl LowRank {
    /// The change of a matrix of this shape.
    ///
    /// # Panics
    /// Panics when the factors do not have the sizes of their shapes.
    pub fn new((rows, columns): (usize, usize), [a, b]: [Vec<f32>; 2], scale: f32) -> Self {
        let rank = a.len() / columns.max(1);
        assert!(
            rank > 0 && a.len() == rank * columns && b.len() == rows * rank,
            "A must be [rank, in], and B [out, rank]"
        );
        Self { rows, columns, rank, scale, a, b }
    }
}

/// A low-rank change of a weight, and the mask of the weight.
#[derive(Debug, Clone)]
pub struct MaskedLowRank {
    /// The change before it is masked.
    pub factors: LowRank,
    /// A bit per element, 1 = pruned, row-major without padding, least significant bit first.
    pruned: Arc<[u8]>,
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
        Self::with_mask(LowRank::new(shape, [a, b], scale), weight.zeros_mask().into())
    }

    /// M, a byte per weight: 1 = kept.
    pub fn kept(&self) -> Vec<u8> {
        let mut kept = vec![0; 8 * self.pruned.len()];
        let bytes = kept.par_chunks_exact_mut(8).with_min_len(1 << 12);
        bytes.zip(&*self.pruned).for_each(|(kept, &pruned)| {
            for (bit, kept) in kept.iter_mut().enumerate() {
                *kept = 1 - (pruned >> bit & 1);
            }
        });
        kept.truncate(self.factors.rows * self.factors.columns);
        kept
    }

    /// Returns M ∘ (W + s·B·A) in `changed`, rounded to its dtype; its old content is lost. Sums are f32.
    ///
    /// # Panics
    /// Panics when `weight` or `changed` does not have the shape of the weight of [`MaskedLowRank::new`].
    pub fn applied_to(&self, weight: &StoredMatrix, mut changed: StoredMatrix) -> StoredMatrix {
        let LowRank { rows, columns, rank, scale, a, b } = &self.factors;
        let (rows, columns, rank, dtype) = (*rows, *columns, *rank, changed.dtype());
        for matrix in [weight, &changed] {
            assert!(
                matrix.rows() == rows && matrix.columns() == columns,
                "the weight must be [out_features, in_features]"
            );
        }
        let rows_at_once = (CHUNK / columns).max(1);
        let row_bytes = columns * dtype.bytes();
        let scratch = BufferPool::<(Vec<f32>, Vec<f32>, Vec<u8>)>::new();
        changed.as_bytes_mut().par_chunks_mut(rows_at_once * row_bytes).enumerate().for_each(
            |(task, bytes)| {
                let (first, rows) = (task * rows_at_once, bytes.len() / row_bytes);
                scratch.lend(Default::default, |(change, wide, narrow)| {
                    let (change, wide) = (grow(change, rows * columns), grow(wide, rows * columns));
                    let b = View::strided(&b[first * rank..], rows, rank, rank);
                    let a = View::strided(a, rank, columns, columns);
                    matmul(change, columns, *scale, b, a, Threads::One);
                    weight.widen_rows(first, wide);
                    wide.iter_mut().zip(change).for_each(|(wide, change)| *wide += *change);
                    convert::narrow(dtype, wide, narrow);
                    bytes.copy_from_slice(narrow);
                });
            },
        );
        changed.zero_bits(&self.pruned);
        changed
    }

    /// A change with a given mask, for a weight whose own zeros are not the mask, such as a quantised weight.
    ///
    /// # Panics
    /// Panics when the mask does not have the size of the weight.
    pub fn with_mask(factors: LowRank, pruned: Arc<[u8]>) -> Self {
        assert_eq!(
            pruned.len(),
            (factors.rows * factors.columns).div_ceil(8),
            "a mask has a bit for every weight"
        );
        Self { factors, pruned }
    }

    /// Masks a rectangle of G in place, and returns its part of the gradients of the factors.
    ///
    /// # Arguments
    /// * `gradient`: G of these `rows` and `columns`; pruned elements become +0
    ///
    /// # Panics
    /// Panics when `gradient` does not have the size of its shape.
    fn part_of_gradients(
        &self,
        [rows, columns]: [Range<usize>; 2],
        gradient: &mut [f32],
    ) -> FactorPart {
        let change = &self.factors;
        let (high, wide, rank) = (rows.len(), columns.len(), change.rank);
        for (row, gradient) in rows.clone().zip(gradient.chunks_exact_mut(wide)) {
            zero_bits_from(gradient, &self.pruned, row * change.columns + columns.start);
        }
        let g = View::strided(gradient, high, wide, wide);
        let a = View::strided(&change.a[columns.start..], rank, wide, change.columns);
        let b = View::strided(&change.b[rows.start * rank..], high, rank, rank);
        let mut part =
            FactorPart { a: vec![0.0; rank * wide], b: vec![0.0; high * rank], rows, columns };
        let (s, one) = (change.scale, Threads::One);
        matmul(&mut part.b, rank, s, g, a.transposed(), one);
        matmul(&mut part.a, wide, s, b.transposed(), g, one);
        part
    }
}

/// Memory of [`MaskedLowRank::applied_to`]: per thread a piece of the change and of the sum in f32, the piece in its dtype, and packed
/// factors.
pub fn applying_bytes(threads: usize, dtype: StoredDtype) -> ByteSize {
    let piece = CHUNK * (2 * size_of::<f32>() + dtype.bytes());
    ByteSize::of(threads, piece + PACKED_PER_THREAD)
}

/// Elements of the parts of a matrix's factor gradients that exist at the same time.
pub fn factor_parts_elements(kernel: Kernel, [rows, columns]: [usize; 2], rank: usize) -> usize {
    let [row_parts, column_parts] = parts_of_product(kernel, rows, columns);
    rank * (column_parts * rows + row_parts * columns)
}

/// The gradients of factors from a rectangle of G.
struct FactorPart {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Of A, `[rank, columns]`.
    a: Vec<f32>,
    /// Of B, `[rows, rank]`.
    b: Vec<f32>,
}

impl Linear {
    /// Adds the gradients of the factors of a change that the weight contains. G = dyᵀ·x exists one rectangle per thread at a time.
    ///
    /// # Arguments
    /// * `dy`: `[tokens, out_features]`
    /// * `x`: `[tokens, in_features]`, the input of the forward pass
    /// * `da`: `[rank, in_features]`
    /// * `db`: `[out_features, rank]`
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn add_factor_gradients(
        &self,
        dy: &[f32],
        x: &[f32],
        change: &MaskedLowRank,
        [da, db]: [&mut [f32]; 2],
        context: &mut ProductContext,
    ) {
        let LowRank { rows, columns, rank, .. } = change.factors;
        let tokens = dy.len() / rows.max(1);
        assert!(
            dy.len() == tokens * rows && x.len() == tokens * columns,
            "dy must be [tokens, out_features], and x [tokens, in_features]"
        );
        assert!(
            da.len() == change.factors.a.len() && db.len() == change.factors.b.len(),
            "gradients have the shapes of their factors"
        );
        if tokens == 0 {
            return;
        }
        let kernel = context.products.of_gradients(self.weight().dtype());
        context.watch.count(2 * tokens * rows * columns);
        // dyᵀ·x, whose sums go over the tokens.
        let factors = StridedFactors {
            x: Strided::transposed(Values::F32(dy), rows),
            weight: Strided::transposed(Values::F32(x), columns),
            tokens: rows,
            columns,
            inner: tokens,
        };
        let parts = product_in_parts(kernel, factors, &mut context.packed, |area, gradient| {
            change.part_of_gradients(area, gradient)
        });
        // In the order of the parts, whichever was first.
        for part in parts {
            let plus = |sums: &mut [f32], more: &[f32]| {
                sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
            };
            plus(&mut db[part.rows.start * rank..part.rows.end * rank], &part.b);
            let lines = part.a.chunks_exact(part.columns.len());
            for (da, more) in da.chunks_exact_mut(columns).zip(lines) {
                plus(&mut da[part.columns.clone()], more);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::stored::StoredDtype;
    use super::*;

    fn wave(count: usize, pace: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * pace).sin()).collect()
    }

    #[test]
    fn the_change_keeps_zeros() {
        let (rows, columns, rank, scale) = (45, 70, 3, 2.0);
        let mut w = wave(rows * columns, 0.53);
        w.iter_mut().step_by(3).for_each(|w| *w = -0.0);
        let (a, b) = (wave(rank * columns, 0.37), wave(rows * rank, 0.71));
        let is_kept = |at: usize| !at.is_multiple_of(3) && w[at] != 0.0;
        for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
            let weight = StoredMatrix::from_f32(dtype, rows, columns, &w);
            let low_rank = MaskedLowRank::new(&weight, a.clone(), b.clone(), scale);
            let kept: Vec<u8> = (0..w.len()).map(|at| u8::from(is_kept(at))).collect();
            assert_eq!(low_rank.kept(), kept);
            let changed = low_rank.applied_to(&weight, weight.clone());
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
                let rounding = if dtype == StoredDtype::F32 { 1e-6 } else { 4e-3 };
                assert!((after - exact).abs() <= rounding * (1.0 + exact.abs()), "{after} {exact}");
            }
        }
    }

    #[test]
    fn gradients_of_factors_are_those_of_the_formula() {
        // A single rectangle; some side by side, with masks between bytes; two stacked rectangles.
        for (rows, columns) in [(45, 70), (300, 701), (2100, 40)] {
            let (tokens, rank, scale) = (9, 3, 2.0);
            let mut w = wave(rows * columns, 0.53);
            w.iter_mut().step_by(3).for_each(|w| *w = -0.0);
            let (a, b) = (wave(rank * columns, 0.37), wave(rows * rank, 0.71));
            let weight = StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &w);
            let change = MaskedLowRank::new(&weight, a.clone(), b.clone(), scale);
            let linear = Linear::new(weight, None);
            let (dy, x) = (wave(tokens * rows, 0.19), wave(tokens * columns, 0.23));
            let run = |threads: usize| {
                let (mut da, mut db) = (vec![1.0; a.len()], vec![2.0; b.len()]);
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
                pool.build().unwrap().install(|| {
                    let mut context = ProductContext::new();
                    let gradients = [&mut da[..], &mut db[..]];
                    linear.add_factor_gradients(&dy, &x, &change, gradients, &mut context);
                });
                (da, db)
            };
            let (da, db) = run(3);
            assert_eq!((&da, &db), (&run(1).0, &run(1).1));
            let g = |row: usize, column: usize| -> f32 {
                if w[row * columns + column] == 0.0 {
                    return 0.0;
                }
                let terms =
                    (0..tokens).map(|token| dy[token * rows + row] * x[token * columns + column]);
                terms.sum()
            };
            let is_close = |got: f32, terms: Vec<f32>| {
                let size: f32 = 1.0 + terms.iter().map(|term| term.abs()).sum::<f32>();
                let exact: f32 = terms.iter().sum();
                assert!((got - exact).abs() < 1e-5 * size, "{got} {exact}");
            };
            for (at, da) in da.iter().enumerate() {
                let terms = (0..rows)
                    .map(|row| scale * b[row * rank + at / columns] * g(row, at % columns));
                is_close(da - 1.0, terms.collect());
            }
            for (at, db) in db.iter().enumerate() {
                let terms = (0..columns)
                    .map(|column| scale * g(at / rank, column) * a[at % rank * columns + column]);
                is_close(db - 2.0, terms.collect());
            }
        }
    }
}
