//! Dense products with strides, by the `gemm` crate.
//!
//! C = alpha · A·B in f32 ([`matmul`]), or C += A·B in f64 ([`add_matmul`]), with A `[rows, inner]` and B `[inner, columns]`. Sums along
//! `inner` have an order that depends on `inner` alone. So neither the thread count nor, beyond small products (`parts`), the number
//! of rows or columns changes a result.

use gemm::Parallelism;

use super::rectangles::{assert_holds, extent};

/// A read-only matrix in a slice: element (i, j) is `values[i * row_stride + j * column_stride]`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T = f32> {
    /// The slice of all elements.
    pub values: &'a [T],
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub columns: usize,
    /// Distance between elements of neighbouring rows, in elements.
    pub row_stride: usize,
    /// Distance between neighbouring elements of a row, in elements.
    pub column_stride: usize,
}

impl<'a, T> View<'a, T> {
    /// A row-major matrix whose rows begin `row_stride` elements apart.
    pub fn strided(values: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self { values, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transposed matrix over the same elements.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn is_inside(&self) -> bool {
        let strides = (self.row_stride, self.column_stride);
        extent(self.rows, self.columns, strides.0, strides.1)
            .is_some_and(|extent| extent <= self.values.len())
            // Offsets of pointers are `isize`.
            && strides.0.max(strides.1) <= isize::MAX as usize
    }
}

/// The threads of a product. A parallel caller gives every product a single thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread alone.
    One,
    /// The global pool.
    All,
}

/// Writes `alpha * lhs * rhs` to `out`, whose rows begin `out_stride` elements apart and are contiguous within.
///
/// # Panics
/// Panics when shapes do not match or a matrix exceeds its slice, which is a bug of the caller.
pub fn matmul(
    out: &mut [f32],
    out_stride: usize,
    alpha: f32,
    lhs: View<'_>,
    rhs: View<'_>,
    threads: Threads,
) {
    product(out, out_stride, None, alpha, lhs, rhs, threads);
}

/// Adds `lhs * rhs` to `out`, as [`matmul`] on the calling thread.
///
/// # Panics
/// Panics as [`matmul`].
pub fn add_matmul(out: &mut [f64], out_stride: usize, lhs: View<'_, f64>, rhs: View<'_, f64>) {
    product(out, out_stride, Some(1.0), 1.0, lhs, rhs, Threads::One);
}

/// Writes `keeps * out + alpha * lhs * rhs` to `out`; without `keeps` the old content of `out` is not read.
fn product<T: Copy + Default + 'static>(
    out: &mut [T],
    out_stride: usize,
    keeps: Option<T>,
    alpha: T,
    lhs: View<'_, T>,
    rhs: View<'_, T>,
    threads: Threads,
) {
    let (rows, columns, inner) = (lhs.rows, rhs.columns, lhs.columns);
    assert_eq!(inner, rhs.rows, "inner sizes of a product must match");
    assert!(lhs.is_inside() && rhs.is_inside(), "a factor reaches beyond its slice");
    if rows == 0 || columns == 0 {
        return;
    }
    assert!(columns <= out_stride || rows == 1, "rows of the result would overlap");
    assert!(isize::try_from(out_stride).is_ok(), "a stride must be an offset of a pointer");
    assert_holds(out.len(), rows, columns, out_stride);
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(rayon::current_num_threads()),
    };
    #[expect(unsafe_code, reason = "the gemm crate takes raw pointers")]
    // SAFETY: the assertions above keep every element of the three matrices inside its slice; `out` is borrowed mutably and so overlaps
    // neither factor, and its rows do not overlap; every element of the slices is initialised.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            keeps.is_some(),
            lhs.values.as_ptr(),
            lhs.column_stride as isize,
            lhs.row_stride as isize,
            rhs.values.as_ptr(),
            rhs.column_stride as isize,
            rhs.row_stride as isize,
            keeps.unwrap_or_default(),
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pseudo_random(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 24) as f32 - 0.5
            })
            .collect()
    }

    #[test]
    fn product_equals_the_triple_loop_over_odd_shapes_and_strides() {
        for (rows, inner, columns) in
            [(1, 1, 1), (3, 5, 7), (13, 33, 65), (64, 172, 17), (2, 600, 40), (1, 64, 64)]
        {
            let a = pseudo_random(rows * (inner + 2), 1);
            let b = pseudo_random(columns * inner, 2);
            let mut out = vec![7.0; rows * (columns + 3)];
            let lhs = View::strided(&a, rows, inner, inner + 2);
            let rhs = View::strided(&b, columns, inner, inner).transposed();
            matmul(&mut out, columns + 3, 0.5, lhs, rhs, Threads::All);
            for i in 0..rows {
                for j in 0..columns {
                    let exact: f64 = (0..inner)
                        .map(|k| f64::from(a[i * (inner + 2) + k]) * f64::from(b[j * inner + k]))
                        .sum::<f64>()
                        * 0.5;
                    let got = f64::from(out[i * (columns + 3) + j]);
                    // f32 products of numbers below 1/2: rounding stays below inner * 2^-24 * 1/4.
                    assert!((exact - got).abs() < 1e-7 * inner as f64, "({i}, {j}): {exact} {got}");
                }
                assert_eq!(
                    out[i * (columns + 3) + columns],
                    7.0,
                    "the gap between rows is not touched"
                );
            }
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let (rows, inner, columns) = (150, 700, 300);
        let (a, b) = (pseudo_random(rows * inner, 3), pseudo_random(columns * inner, 4));
        let lhs = View::strided(&a, rows, inner, inner);
        let rhs = View::strided(&b, columns, inner, inner).transposed();
        let mut one = vec![0.0; rows * columns];
        let mut all = vec![0.0; rows * columns];
        matmul(&mut one, columns, 1.0, lhs, rhs, Threads::One);
        matmul(&mut all, columns, 1.0, lhs, rhs, Threads::All);
        assert_eq!(one, all);
    }

    #[test]
    #[should_panic(expected = "beyond its slice")]
    fn a_factor_beyond_its_slice_is_caught() {
        let a = [0.0; 5];
        matmul(
            &mut [0.0; 4],
            2,
            1.0,
            View::strided(&a, 2, 3, 3),
            View::strided(&a, 3, 1, 1),
            Threads::One,
        );
    }

    // Offsets that wrap around to an element inside: 2 · 2⁶³ = 0, and (2⁶⁴ − 1) + 1 = 0.
    #[test]
    fn strides_that_overflow_are_caught() {
        let view = |rows, columns, row_stride, column_stride| View {
            values: &[0.0; 4],
            rows,
            columns,
            row_stride,
            column_stride,
        };
        for wrong in [
            view(3, 1, usize::MAX / 2 + 1, 1),
            view(2, 2, usize::MAX, 1),
            view(2, 2, 1, usize::MAX),
            view(1, 1, usize::MAX, 1),
        ] {
            assert!(!wrong.is_inside(), "{wrong:?}");
        }
        assert!(view(2, 2, 2, 1).is_inside());
    }

    #[test]
    #[should_panic(expected = "the result reaches beyond its slice")]
    fn a_result_whose_stride_overflows_is_caught() {
        let (one, a) = (View::strided(&[0.0], 1, 1, 1), [0.0; 5]);
        let lhs = View::strided(&a, 5, 1, 1);
        // 4 · 2⁶² = 0.
        matmul(&mut [0.0; 4], 1 << 62, 1.0, lhs, one, Threads::One);
    }
}
