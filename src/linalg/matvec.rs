//! The product of one token: y = W·x on the stored weight, widened piece by piece on the stack.
//!
//! y_i = Σ_j W_ij x_j, W `[rows, columns]` as stored, x and y in f32, accumulated in f32. Each weight is used once, so reading W limits the
//! speed. Products of many tokens widen a panel of rows first, which here would write and read four more bytes per weight.
//!
//! A row's sum does not depend on the number of threads or on the rows around it. Its order of summation differs from the panel path
//! and depends on the width of the CPU's vectors.

use half::slice::HalfFloatSliceExt;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::stored::{StoredMatrix, StoredValues};

/// Vectors of partial sums; with fewer, an addition waits for the addition before it.
const VECTORS: usize = 4;

/// Half-precision weights widened at once, on the stack. A multiple of every CPU's vectors, so that only the end of a row is shorter.
const PIECE: usize = 256;

/// Weight bytes per task: some ten microseconds, long compared with the cost of scheduling.
const TASK_BYTES: usize = 1 << 17;

/// Writes W·x to `out`.
///
/// # Panics
/// Panics when the length of `x` is not the number of W's columns, or the length of `out` not the number of its rows.
pub(super) fn product(weight: &StoredMatrix, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), weight.columns(), "x must be [columns]");
    assert_eq!(out.len(), weight.rows(), "out must be [rows]");
    let row_bytes = (weight.columns() * weight.dtype().bytes()).max(1);
    let rows_at_once = (TASK_BYTES / row_bytes).max(1);
    let arch = Arch::new();
    let task = |(number, out): (usize, &mut [f32])| {
        let first_row = number * rows_at_once;
        arch.dispatch(RowTask { weight, first_row, x, out });
    };
    if out.len() <= rows_at_once {
        task((0, out));
    } else {
        out.par_chunks_mut(rows_at_once).enumerate().for_each(task);
    }
}

/// A task: a row per element of `out`.
struct RowTask<'a> {
    weight: &'a StoredMatrix,
    first_row: usize,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for RowTask<'_> {
    type Output = ();

    /// Compiled for every width of vectors; all called functions are inlined, so they use these vectors.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { weight, first_row, x, out } = self;
        let columns = x.len();
        for (y, row) in out.iter_mut().zip(first_row..) {
            let own = row * columns..(row + 1) * columns;
            *y = match &*weight.values {
                StoredValues::F32(values) => RowSum::new(simd).add(&values[own], x).total(),
                StoredValues::F16(values) => {
                    dot(simd, &values[own], x, |row, wide| row.convert_to_f32_slice(wide))
                }
                StoredValues::Bf16(values) => dot(simd, &values[own], x, |row, wide| {
                    for (wide, value) in wide.iter_mut().zip(row) {
                        // A bfloat16 is the upper half of an f32.
                        *wide = f32::from_bits(u32::from(value.to_bits()) << 16);
                    }
                }),
            };
        }
    }
}

/// w·x, with w widened in pieces that stay in the first-level cache.
#[inline(always)]
fn dot<S: Simd, W>(simd: S, row: &[W], x: &[f32], widen: impl Fn(&[W], &mut [f32])) -> f32 {
    let mut wide = [0.0f32; PIECE];
    let mut sum = RowSum::new(simd);
    for (row, x) in row.chunks(PIECE).zip(x.chunks(PIECE)) {
        let wide = &mut wide[..row.len()];
        widen(row, wide);
        sum = sum.add(wide, x);
    }
    sum.total()
}

/// The sum of a row so far: vectors, and the rest after the last whole vector.
struct RowSum<S: Simd> {
    simd: S,
    vectors: [S::f32s; VECTORS],
    rest: f32,
}

impl<S: Simd> RowSum<S> {
    #[inline(always)]
    fn new(simd: S) -> Self {
        Self { simd, vectors: [simd.splat_f32s(0.0); VECTORS], rest: 0.0 }
    }

    /// sum + w·x
    #[inline(always)]
    fn add(mut self, w: &[f32], x: &[f32]) -> Self {
        let simd = self.simd;
        let ((w, w_rest), (x, x_rest)) = (S::as_simd_f32s(w), S::as_simd_f32s(x));
        let ((groups, w), (x_groups, x)) = (w.as_chunks::<VECTORS>(), x.as_chunks::<VECTORS>());
        for (w, x) in groups.iter().zip(x_groups) {
            for ((sum, &w), &x) in self.vectors.iter_mut().zip(w).zip(x) {
                *sum = simd.mul_add_e_f32s(w, x, *sum);
            }
        }
        for ((sum, &w), &x) in self.vectors.iter_mut().zip(w).zip(x) {
            *sum = simd.mul_add_e_f32s(w, x, *sum);
        }
        for (w, x) in w_rest.iter().zip(x_rest) {
            self.rest += w * x;
        }
        self
    }

    #[inline(always)]
    fn total(self) -> f32 {
        let [a, b, c, d] = self.vectors;
        let sum = |a, b| self.simd.add_f32s(a, b);
        self.simd.reduce_sum_f32s(sum(sum(a, b), sum(c, d))) + self.rest
    }
}

#[cfg(test)]
mod tests {
    use super::super::stored::StoredDtype;
    use super::*;

    fn noise(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            })
            .collect()
    }

    #[test]
    fn the_product_equals_the_formula_for_every_dtype_and_odd_shapes() {
        for (rows, columns) in [(1, 1), (3, 31), (5, 33), (300, 64), (7, 777), (2, 70_001)] {
            // Random numbers: periodic numbers would add up in some lanes and cancel, with large rounding errors.
            let (values, x) = (noise(rows * columns, 1), noise(columns, 2));
            for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
                let weight = StoredMatrix::from_f32(dtype, rows, columns, &values);
                let mut out = vec![f32::NAN; rows];
                product(&weight, &x, &mut out);
                let mut wide = vec![0.0; columns];
                for (row, &got) in out.iter().enumerate() {
                    weight.widen_rows(row, &mut wide);
                    let exact: f64 =
                        wide.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
                    // Products below 1/4, whose sums stay near 0.1 · √columns, rounded to 2^-24 at every step.
                    let tolerance = 1e-6 * (1.0 + (columns as f64).sqrt());
                    assert!(
                        (f64::from(got) - exact).abs() < tolerance,
                        "{dtype:?} {rows} x {columns}, row {row}: {got} {exact}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_nan_stays_in_its_row() {
        let mut values = vec![1.0; 80];
        values[40] = f32::NAN;
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let weight = StoredMatrix::from_f32(dtype, 2, 40, &values);
            let mut out = [0.0; 2];
            product(&weight, &[1.0; 40], &mut out);
            assert_eq!(out[0], 40.0);
            assert!(out[1].is_nan(), "{dtype:?}");
        }
    }
}
