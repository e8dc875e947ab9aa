//! The kernels of a block in `factor.rs`: its Cholesky factor, and solutions with a triangle for many right-hand sides.
//!
//! ```text
//! H = R·Rᵀ      r_jj = √(h_jj − Σ_k r_jk²)      r_ij = (h_ij − Σ_k r_ik·r_jk) / r_jj        k > j > i
//! R·y = x       y_i = (x_i − Σ_j r_ij·y_j) / r_ii        from the last i to the first, j > i
//! Rᵀ·y = x      y_i = (x_i − Σ_j r_ji·y_j) / r_ii        from the first i to the last, j < i
//! ```
//!
//! R `[n, n]` is upper triangular. The terms of a sum have a fixed order and are added by fused multiply-adds, so neither threads nor
//! vector units change a bit. Sources: Golub and Van Loan, "Matrix Computations", 4th edition, sections 3.1 and 4.2.

use std::ops::{Div, Neg};

use pulp::{Arch, Simd, WithSimd};

/// A pivot that is not positive: H is not positive definite in this precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotPositive;

/// A precision of these kernels: f32 or f64.
pub trait BlockFloat:
    Copy + Default + PartialOrd + Div<Output = Self> + Neg<Output = Self> + Send + Sync + 'static
{
    /// 1.
    const ONE: Self;
    /// The same row of several right-hand sides: few enough to stay in registers.
    type Lanes: Copy + AsRef<[Self]> + AsMut<[Self]> + Send;
    /// Zeros.
    const NO_LANES: Self::Lanes;

    /// self·factor + term, rounded once.
    fn fused(self, factor: Self, term: Self) -> Self;

    /// The square root.
    fn root(self) -> Self;
}

macro_rules! block_float {
    ($float:ty, $lanes:literal) => {
        impl BlockFloat for $float {
            const ONE: Self = 1.0;
            type Lanes = [Self; $lanes];
            const NO_LANES: Self::Lanes = [0.0; $lanes];

            #[inline(always)]
            fn fused(self, factor: Self, term: Self) -> Self {
                self.mul_add(factor, term)
            }

            #[inline(always)]
            fn root(self) -> Self {
                self.sqrt()
            }
        }
    };
}

block_float!(f32, 64);
block_float!(f64, 32);

/// The triangle of a block, by rows and by columns, so that both solutions read it in order.
#[derive(Debug)]
pub struct Triangle<T> {
    n: usize,
    /// R, row by row.
    rows: Vec<T>,
    /// R, column by column.
    columns: Vec<T>,
}

impl<T: BlockFloat> Triangle<T> {
    /// R of a symmetric matrix, of which `h(i, j)` gives the elements with i ≤ j < n.
    ///
    /// # Errors
    /// Fails where the matrix is not positive definite.
    pub fn factor(n: usize, h: impl Fn(usize, usize) -> T) -> Result<Self, NotPositive> {
        let mut columns = vec![T::default(); n * n];
        for (j, column) in columns.chunks_exact_mut(n.max(1)).enumerate() {
            for (i, value) in column[..=j].iter_mut().enumerate() {
                *value = h(i, j);
            }
        }
        Arch::new().dispatch(Factorisation { n, columns: &mut columns })?;
        let mut rows = vec![T::default(); n * n];
        for (i, row) in rows.chunks_exact_mut(n.max(1)).enumerate() {
            for (j, value) in row.iter_mut().enumerate().skip(i) {
                *value = columns[j * n + i];
            }
        }
        Ok(Self { n, rows, columns })
    }

    /// Replaces every column x of Q by the solution of R·y = x.
    ///
    /// # Arguments
    /// * `q`: `[columns, n]`, column by column
    pub fn solve(&self, q: &mut [T]) {
        Arch::new().dispatch(Solve { n: self.n, triangle: &self.rows, is_upper: true, q });
    }

    /// Replaces every column x of Q by the solution of Rᵀ·y = x, as [`Triangle::solve`].
    pub fn solve_transposed(&self, q: &mut [T]) {
        Arch::new().dispatch(Solve { n: self.n, triangle: &self.columns, is_upper: false, q });
    }
}

/// Replaces an upper triangle, column by column, by R.
struct Factorisation<'a, T> {
    n: usize,
    columns: &'a mut [T],
}

impl<T: BlockFloat> WithSimd for Factorisation<'_, T> {
    type Output = Result<(), NotPositive>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> Self::Output {
        let n = self.n;
        for j in (0..n).rev() {
            let (before, column) = self.columns.split_at_mut(j * n);
            let column = &mut column[..=j];
            let pivot = column[j];
            // NaN is not positive, either.
            let is_positive = pivot > T::default();
            if !is_positive {
                return Err(NotPositive);
            }
            let root = pivot.root();
            column[j] = root;
            column[..j].iter_mut().for_each(|value| *value = *value / root);
            // What the column takes from the columns before it.
            for (i, other) in before.chunks_exact_mut(n).enumerate() {
                let factor = -column[i];
                for (other, &value) in other[..=i].iter_mut().zip(&column[..=i]) {
                    *other = factor.fused(value, *other);
                }
            }
        }
        Ok(())
    }
}

/// Solves with a triangle whose row i has the coefficients of y_i.
struct Solve<'a, T> {
    n: usize,
    triangle: &'a [T],
    is_upper: bool,
    q: &'a mut [T],
}

impl<T: BlockFloat> WithSimd for Solve<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { n, triangle, is_upper, q } = self;
        // The rows of some columns, side by side.
        let mut x = vec![T::NO_LANES; n];
        for q in q.chunks_mut((T::NO_LANES.as_ref().len() * n).max(1)) {
            for (lane, column) in q.chunks_exact(n).enumerate() {
                for (x, &value) in x.iter_mut().zip(column) {
                    x.as_mut()[lane] = value;
                }
            }
            for step in 0..n {
                let i = if is_upper { n - 1 - step } else { step };
                let known = if is_upper { i + 1..n } else { 0..i };
                let row = &triangle[i * n..][..n];
                let mut sum = x[i];
                for (factor, y) in row[known.clone()].iter().zip(&x[known]) {
                    let factor = -*factor;
                    for (sum, &y) in sum.as_mut().iter_mut().zip(y.as_ref()) {
                        *sum = factor.fused(y, *sum);
                    }
                }
                sum.as_mut().iter_mut().for_each(|sum| *sum = *sum / row[i]);
                x[i] = sum;
            }
            for (lane, column) in q.chunks_exact_mut(n).enumerate() {
                for (x, value) in x.iter().zip(column) {
                    *value = x.as_ref()[lane];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R of a random triangle with a diagonal between 1 and 2.
    fn triangle(n: usize) -> Vec<f64> {
        let value = |i: usize, j: usize| ((i * 7919 + j * 104_729) % 1013) as f64 / 1013.0;
        let element = |at: usize| match (at / n, at % n) {
            (i, j) if i == j => 1.0 + value(i, j),
            (i, j) if i < j => (value(i, j) - 0.5) / n as f64,
            _ => 0.0,
        };
        (0..n * n).map(element).collect()
    }

    fn product(r: &[f64], n: usize, i: usize, j: usize) -> f64 {
        (0..n).map(|k| r[i * n + k] * r[j * n + k]).sum()
    }

    #[test]
    fn the_factor_of_a_product_is_the_triangle_and_its_equations_are_solved() {
        for n in [1, 2, 5, 33, 192] {
            let r = triangle(n);
            let found = Triangle::factor(n, |i, j| product(&r, n, i, j)).unwrap();
            for (found, expected) in found.rows.iter().zip(&r) {
                assert!((found - expected).abs() < 1e-13, "{n}: {found}, {expected}");
            }
            let single = Triangle::factor(n, |i, j| product(&r, n, i, j) as f32).unwrap();
            for (found, expected) in single.rows.iter().zip(&r) {
                assert!((f64::from(*found) - expected).abs() < 1e-5, "{n}: {found}, {expected}");
            }
            for count in [1, 31, 65] {
                let x: Vec<f64> = (0..count * n).map(|at| (at as f64).sin()).collect();
                let (mut of_r, mut of_transposed) = (x.clone(), x.clone());
                found.solve(&mut of_r);
                found.solve_transposed(&mut of_transposed);
                for (column, at) in (0..count * n).map(|at| (at / n * n, at % n)) {
                    let upper: f64 = (0..n).map(|j| r[at * n + j] * of_r[column + j]).sum();
                    assert!((upper - x[column + at]).abs() < 1e-13, "{n}, {count}");
                    let lower: f64 =
                        (0..n).map(|j| r[j * n + at] * of_transposed[column + j]).sum();
                    assert!((lower - x[column + at]).abs() < 1e-13, "{n}, {count}");
                }
            }
        }
    }

    #[test]
    fn pivots_that_are_zero_negative_or_no_number_are_refused() {
        for pivot in [0.0, -1.0, f64::NAN] {
            let of = Triangle::factor(2, |i, j| if i == j && i == 0 { pivot } else { 1.0 });
            assert_eq!(of.err(), Some(NotPositive), "{pivot}");
        }
    }
}
