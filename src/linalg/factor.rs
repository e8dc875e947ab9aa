//! Cholesky factors and inverses of symmetric positive definite matrices, in place, by the `faer` crate.
//!
//! H `[n, n]` is symmetric, so it reads the same by rows and by columns.
//!
//! | function | result |
//! | --- | --- |
//! | [`inverse_factor`] | U, upper triangular, with H⁻¹ = UᵀU |
//! | [`inverse`] | H⁻¹ |
//!
//! U needs no inverse of H. With the rows and columns of H in reverse order, written J·H·J, let J·H·J = L·Lᵀ. Then H = R·Rᵀ with
//! R = J·L·J, which is upper triangular, and H⁻¹ = (R⁻¹)ᵀ·R⁻¹. So U = R⁻¹ = J·L⁻¹·J: one factorisation and one triangular inverse, and
//! a smaller error than the Cholesky factor of a computed inverse has.

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor as llt;
use faer::linalg::matmul::matmul;
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::linalg::triangular_inverse;
use faer::prelude::{Reborrow, ReborrowMut};
use faer::traits::RealField;
use faer::{Accum, Mat, MatMut, Par};
use rayon::prelude::*;

use crate::bytes::ByteSize;

/// Parts of the work that may run at the same time. The number depends on the size alone, so that threads change no bit.
const PARTS: usize = 8;

/// Rows below which one thread computes alone: others would wait longer than they work.
const ALONE: usize = 768;

/// Bytes that these functions hold beside an f32 matrix `[n, n]`: two blocks of its columns.
pub fn working_bytes(n: usize) -> ByteSize {
    ByteSize::of(n.saturating_mul(2 * BLOCK), size_of::<f32>())
}

/// The parallelism for a matrix.
fn parallelism(n: usize) -> Par {
    match n < ALONE {
        true => Par::Seq,
        false => Par::rayon(PARTS),
    }
}

/// Columns of a block of the loops over blocks.
const BLOCK: usize = 192;

/// A precision of these functions: f32 or f64.
pub trait Real: RealField + Copy + std::ops::Neg<Output = Self> + Send + Sync {
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

/// A pivot that is not positive: H is not positive definite in this precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotPositive {
    /// The row of the pivot in the order of the factorisation.
    pub row: usize,
}

/// Replaces H by U, upper triangular with H⁻¹ = UᵀU, row by row, with zeros below the diagonal.
///
/// # Errors
/// Fails where H is not positive definite. The content of `h` is lost then.
pub fn inverse_factor(h: &mut [f32], n: usize) -> Result<(), NotPositive> {
    h.reverse();
    let mut matrix = MatMut::from_column_major_slice_mut(h, n, n);
    cholesky(matrix.rb_mut())?;
    invert_lower(matrix);
    h.reverse();
    // By columns this is U, so by rows it is Uᵀ.
    raise_lower(h, n);
    Ok(())
}

/// Replaces H by its inverse.
///
/// # Errors
/// Fails where H is not positive definite. The content of `h` is lost then.
pub fn inverse<T: Real>(h: &mut [T], n: usize) -> Result<(), NotPositive> {
    let mut matrix = MatMut::from_column_major_slice_mut(h, n, n);
    cholesky(matrix.rb_mut())?;
    invert_lower(matrix.rb_mut());
    square_lower(matrix);
    lower_upper(h, n);
    Ok(())
}

/// Replaces the lower triangle of H by L with H = L·Lᵀ.
fn cholesky<T: Real>(h: MatMut<'_, T>) -> Result<(), NotPositive> {
    let par = parallelism(h.nrows());
    let scratch = llt::cholesky_in_place_scratch::<T>(h.nrows(), par, Default::default());
    let mut buffer = MemBuffer::new(scratch);
    let stack = MemStack::new(&mut buffer);
    match llt::cholesky_in_place(h, Default::default(), par, stack, Default::default()) {
        Ok(_) => Ok(()),
        Err(llt::LltError::NonPositivePivot { index }) => Err(NotPositive { row: index }),
    }
}

/// Replaces L by its inverse. Blocks go from the last to the first: with L = [A 0; B C] and C⁻¹ known, the block below A⁻¹ is −C⁻¹·B·A⁻¹.
fn invert_lower<T: Real>(mut l: MatMut<'_, T>) {
    let n = l.nrows();
    let par = parallelism(n);
    for first in (0..n).step_by(BLOCK).rev() {
        let last = n.min(first + BLOCK);
        let (above, _, below, done) = l.rb_mut().split_at_mut(last, last);
        let mut diagonal = above.submatrix_mut(first, first, last - first, last - first);
        let mut inverse = Mat::<T>::zeros(last - first, last - first);
        triangular_inverse::invert_lower_triangular(inverse.as_mut(), diagonal.rb(), par);
        let mut below = below.subcols_mut(first, last - first);
        let mut product = Mat::<T>::zeros(n - last, last - first);
        let replace = Accum::Replace;
        matmul(
            product.as_mut(),
            replace,
            below.rb(),
            inverse.as_ref(),
            T::ONE,
            par,
        );
        triangular::matmul(
            below.rb_mut(),
            BlockStructure::Rectangular,
            replace,
            done.rb(),
            BlockStructure::TriangularLower,
            product.as_ref(),
            BlockStructure::Rectangular,
            -T::ONE,
            par,
        );
        diagonal.copy_from_triangular_lower(inverse.as_ref());
    }
}

/// Replaces the lower triangle M by that of Mᵀ·M. A block of rows reads only rows from its own on, so blocks go from the first to the last.
fn square_lower<T: Real>(mut m: MatMut<'_, T>) {
    let n = m.nrows();
    let par = parallelism(n);
    for first in (0..n).step_by(BLOCK) {
        let last = n.min(first + BLOCK);
        let (above, _, below, _) = m.rb_mut().split_at_mut(last, last);
        let mut own = above.subrows_mut(first, last - first);
        let mut old = own.to_owned();
        // What lies above the diagonal belongs to no result.
        for row in first..last {
            for column in row + 1..last {
                old[(row - first, column)] = T::ZERO;
            }
        }
        let diagonal = old.subcols(first, last - first);
        matmul(
            own.rb_mut(),
            Accum::Replace,
            diagonal.transpose(),
            old.as_ref(),
            T::ONE,
            par,
        );
        let left = below.rb().subcols(first, last - first);
        matmul(own, Accum::Add, left.transpose(), below.rb(), T::ONE, par);
    }
}

/// Rows of a task of the two functions below: neighbours in a cache line of the rows they read.
const LINE: usize = 16;

/// Copies the triangle below the diagonal to above it, row by row, and writes zeros below.
fn raise_lower(h: &mut [f32], n: usize) {
    for first in (0..n).step_by(BLOCK) {
        let last = n.min(first + BLOCK);
        let (head, tail) = h.split_at_mut(last * n);
        let own = &mut head[first * n..];
        for row in first..last {
            for column in row + 1..last {
                own[(row - first) * n + column] = own[(column - first) * n + row];
                own[(column - first) * n + row] = 0.0;
            }
        }
        own.par_chunks_mut(LINE * n)
            .enumerate()
            .for_each(|(task, own)| {
                for (at, source) in tail.chunks_exact(n).enumerate() {
                    for (row, own) in own.chunks_exact_mut(n).enumerate() {
                        own[last + at] = source[first + task * LINE + row];
                    }
                }
                own.chunks_exact_mut(n)
                    .for_each(|row| row[..first].fill(0.0));
            });
    }
}

/// Copies the triangle above the diagonal to below it, row by row.
fn lower_upper<T: Real>(h: &mut [T], n: usize) {
    for first in (0..n).step_by(BLOCK) {
        let last = n.min(first + BLOCK);
        let (head, own) = h[..last * n].split_at_mut(first * n);
        for row in first..last {
            for column in row + 1..last {
                own[(column - first) * n + row] = own[(row - first) * n + column];
            }
        }
        own.par_chunks_mut(LINE * n)
            .enumerate()
            .for_each(|(task, own)| {
                for (column, source) in head.chunks_exact(n).enumerate() {
                    for (row, own) in own.chunks_exact_mut(n).enumerate() {
                        own[column] = source[first + task * LINE + row];
                    }
                }
            });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix with a condition of some hundreds.
    fn positive(n: usize) -> Vec<f32> {
        let x: Vec<f32> = (0..n * n)
            .map(|at| ((at * 7919 % 1013) as f32 - 500.0) / 500.0)
            .collect();
        let mut h = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..n {
                let sum: f32 = (0..n).map(|k| x[k * n + i] * x[k * n + j]).sum();
                h[i * n + j] = sum / n as f32 + if i == j { 0.5 } else { 0.0 };
            }
        }
        h
    }

    /// The largest difference between A·B and the unit matrix.
    fn off_unit(a: &[f32], b: &[f32], n: usize) -> f64 {
        let mut worst = 0.0f64;
        for i in 0..n {
            for j in 0..n {
                let sum: f64 = (0..n)
                    .map(|k| f64::from(a[i * n + k]) * f64::from(b[k * n + j]))
                    .sum();
                worst = worst.max((sum - f64::from(u8::from(i == j))).abs());
            }
        }
        worst
    }

    #[test]
    fn inverses_and_their_factors_multiply_to_the_unit_matrix() {
        for n in [1, 2, 17, 191, 193, 420] {
            let h = positive(n);
            let mut inverted = h.clone();
            inverse(&mut inverted, n).unwrap();
            assert!(off_unit(&h, &inverted, n) < 1e-3, "{n}");
            let mut u = h.clone();
            inverse_factor(&mut u, n).unwrap();
            let mut product = vec![0.0f32; n * n];
            for i in 0..n {
                for j in 0..n {
                    assert!(j >= i || u[i * n + j] == 0.0, "{n}: upper triangular");
                    product[i * n + j] = (0..n).map(|k| u[k * n + i] * u[k * n + j]).sum();
                }
            }
            assert!(off_unit(&h, &product, n) < 1e-3, "{n}");
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let n = 900;
        let of = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.unwrap().install(|| {
                let (mut one, mut other) = (positive(n), positive(n));
                inverse(&mut one, n).unwrap();
                inverse_factor(&mut other, n).unwrap();
                (one, other)
            })
        };
        assert!(of(1) == of(8) && of(1) == of(3));
    }

    #[test]
    fn a_matrix_that_is_not_positive_is_refused() {
        let mut h = vec![1.0, 2.0, 2.0, 1.0];
        assert_eq!(inverse_factor(&mut h, 2), Err(NotPositive { row: 1 }));
        let mut h = vec![0.0; 9];
        assert!(inverse(&mut h, 3).is_err());
    }
}
