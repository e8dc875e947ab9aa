//! Cholesky factors and inverses of symmetric positive definite matrices, in place, block by block.
//!
//! H `[n, n]` is symmetric; only its upper triangle is read.
//!
//! | function | result |
//! | --- | --- |
//! | [`inverse_factor`] | U, upper triangular, with H⁻¹ = UᵀU |
//! | [`inverse`] | H⁻¹ |
//!
//! H = R·Rᵀ with an upper triangular R, so U = R⁻¹. Blocks of columns are eliminated from the last to the first, and the same step of a
//! block does its part of the factorisation, of the inverse of R, and of UᵀU. Call the block k, the columns before it a, and the
//! columns after it b. The triangle of a is what is left of H, the triangle of b holds the result S so far, and T lies between the two.
//! R is now the factor of the block, H_kk = R·Rᵀ:
//!
//! ```text
//! Qa = R⁻¹·H_ka      Qb = R⁻¹·T_kb
//! H_aa −= Qaᵀ·Qa     T_ab −= Qaᵀ·Qb     S_bb += Qbᵀ·Qb
//! T_ak = −Qaᵀ·R⁻¹    S_kb = R⁻ᵀ·Qb      S_kk = R⁻ᵀ·R⁻¹
//! ```
//!
//! After the last step S = UᵀU = H⁻¹. For U itself, S_bb stays as it is, S_kb = Qb and S_kk = R⁻¹. The second line is one product of the
//! whole triangle. f32 has the kernel of products for it, f64 the `gemm` crate. `triangular.rs` factors and solves the blocks.

use rayon::prelude::*;

use super::matmul::{View, add_matmul};
use super::product::{Factors, Kernel, Line, Strided, Values, resize};
pub use super::triangular::NotPositive;
use super::triangular::{BlockFloat, Triangle};
use crate::bytes::ByteSize;

/// Columns of a block.
const BLOCK: usize = 192;

/// Rows of the triangle that a task updates: a multiple of the kernel's rows and columns on every CPU.
const ROWS: usize = 96;

/// Columns that a task updates at a time, a multiple of these. Their packed factor stays in the second-level cache.
const COLUMNS: usize = 768;

/// Columns for which a task solves.
const SOLVED: usize = 64;

/// Bytes that these functions hold beside a matrix `[n, n]`: Q, and Q packed as both factors.
pub fn working_bytes<T: Real>(n: usize) -> ByteSize {
    ByteSize::of(n.saturating_mul(3 * BLOCK.min(n)), size_of::<T>())
}

/// A precision of these functions: f32 or f64.
pub trait Real: BlockFloat {
    /// Columns `[columns, depth]` of a factor in the form that products read.
    type Packed: Sync + Default;

    /// Packs the left factor.
    fn pack_left(columns: &[Self], depth: usize, packed: &mut Self::Packed);

    /// Packs the right factor.
    fn pack_right(columns: &[Self], depth: usize, packed: &mut Self::Packed);

    /// Adds leftᵀ·right to some rows of a matrix `[_, n]`, from column `first` on.
    ///
    /// # Arguments
    /// * `at`: the numbers of the first row and of the first column, multiples of 96
    fn add_product(
        rows: &mut [Self],
        n: usize,
        at: (usize, usize),
        factors: (&Self::Packed, &Self::Packed),
        depth: usize,
    );
}

impl Real for f32 {
    type Packed = Vec<Line>;

    fn pack_left(columns: &[Self], depth: usize, packed: &mut Self::Packed) {
        let lines = Kernel::Fused.row_lines(ROWS, depth);
        pack(columns, depth, lines, packed, &|columns, count, lines| {
            let lines = &mut lines[..Kernel::Fused.row_lines(count, depth)];
            Kernel::Fused.pack_rows(columns, count, depth, lines);
        });
    }

    fn pack_right(columns: &[Self], depth: usize, packed: &mut Self::Packed) {
        let lines = Kernel::Fused.column_lines(ROWS, depth);
        pack(columns, depth, lines, packed, &|columns, count, lines| {
            let lines = &mut lines[..Kernel::Fused.column_lines(count, depth)];
            Kernel::Fused.pack_columns(columns, count, depth, lines);
        });
    }

    fn add_product(
        rows: &mut [Self],
        n: usize,
        (row, first): (usize, usize),
        (left, right): (&Self::Packed, &Self::Packed),
        depth: usize,
    ) {
        for first in (first..n).step_by(COLUMNS) {
            let factors = Factors {
                x: &left[Kernel::Fused.row_lines(row, depth)..],
                w: &right[Kernel::Fused.column_lines(first, depth)..],
                rows: rows.len() / n,
                columns: COLUMNS.min(n - first),
                inner: depth,
            };
            Kernel::Fused.multiply(factors, &mut rows[first..], n, true);
        }
    }
}

/// Packs columns `[columns, depth]`, [`ROWS`] at a time.
fn pack(
    columns: &[f32],
    depth: usize,
    lines: usize,
    packed: &mut Vec<Line>,
    pack: &(dyn Fn(Strided<'_>, usize, &mut [Line]) + Sync),
) {
    let all = lines * columns.len().div_ceil(ROWS * depth);
    resize(packed, all).par_chunks_mut(lines).zip(columns.par_chunks(ROWS * depth)).for_each(
        |(lines, columns)| {
            let strided = Strided::rows(Values::F32(columns), depth);
            pack(strided, columns.len() / depth, lines);
        },
    );
}

impl Real for f64 {
    type Packed = Vec<Self>;

    fn pack_left(columns: &[Self], _: usize, packed: &mut Self::Packed) {
        packed.clear();
        packed.reserve_exact(columns.len());
        packed.extend_from_slice(columns);
    }

    fn pack_right(columns: &[Self], depth: usize, packed: &mut Self::Packed) {
        Self::pack_left(columns, depth, packed);
    }

    fn add_product(
        rows: &mut [Self],
        n: usize,
        (row, first): (usize, usize),
        (left, right): (&Self::Packed, &Self::Packed),
        depth: usize,
    ) {
        let count = rows.len() / n;
        let left = View::strided(&left[row * depth..], count, depth, depth);
        let right = View::strided(&right[first * depth..], n - first, depth, depth);
        add_matmul(&mut rows[first..], n, left, right.transposed());
    }
}

/// Replaces H by U, upper triangular with H⁻¹ = UᵀU, with zeros below the diagonal.
///
/// # Errors
/// Fails where H is not positive definite. The content of `h` is lost then.
pub fn inverse_factor(h: &mut [f32], n: usize) -> Result<(), NotPositive> {
    eliminate(h, n, false)?;
    h.par_chunks_exact_mut(n).enumerate().for_each(|(row, values)| values[..row].fill(0.0));
    Ok(())
}

/// Replaces H by its inverse.
///
/// # Errors
/// Fails where H is not positive definite. The content of `h` is lost then.
pub fn inverse<T: Real>(h: &mut [T], n: usize) -> Result<(), NotPositive> {
    eliminate(h, n, true)?;
    mirror(h, n);
    Ok(())
}

/// Replaces the upper triangle of H by the upper triangle of U, or of UᵀU if U is `squared`.
fn eliminate<T: Real>(h: &mut [T], n: usize, squared: bool) -> Result<(), NotPositive> {
    // Columns of Q, `[n, columns of the block]`.
    let mut q = vec![T::default(); n * BLOCK.min(n)];
    let (mut left, mut right) = Default::default();
    for start in (0..n).step_by(BLOCK).rev() {
        let depth = BLOCK.min(n - start);
        let end = start + depth;
        let r = Triangle::factor(depth, |i, j| h[(start + i) * n + start + j])?;
        let q = &mut q[..n * depth];
        read_block(h, n, start, depth, q);
        q.par_chunks_mut(SOLVED * depth).for_each(|q| r.solve(q));
        // The block itself takes no part in the product.
        let own = q[start * depth..end * depth].to_vec();
        q[start * depth..end * depth].fill(T::default());
        T::pack_right(q, depth, &mut right);
        q[..start * depth].par_iter_mut().for_each(|value| *value = -*value);
        // Without the square, only rows before the block change.
        let rows = if squared { n } else { start };
        T::pack_left(&q[..rows * depth], depth, &mut left);
        h[..rows * n].par_chunks_mut(ROWS * n).enumerate().for_each(|(task, rows)| {
            let row = task * ROWS;
            T::add_product(rows, n, (row, row), (&left, &right), depth);
        });
        q[start * depth..end * depth].copy_from_slice(&own);
        let solved = if squared { n } else { start };
        q[..solved * depth].par_chunks_mut(SOLVED * depth).for_each(|q| r.solve_transposed(q));
        write_block(h, n, start, depth, q);
    }
    Ok(())
}

/// Elements of a cache line of f32, neighbours that a task reads or writes together.
const LINE: usize = 16;

/// Copies the columns above the block and the rows to its right to Q `[n, depth]`, and puts the unit matrix between them.
fn read_block<T: Real>(h: &[T], n: usize, start: usize, depth: usize, q: &mut [T]) {
    let end = start + depth;
    let (before, rest) = q.split_at_mut(start * depth);
    let (own, behind) = rest.split_at_mut(depth * depth);
    before
        .par_chunks_exact_mut(depth)
        .enumerate()
        .for_each(|(row, q)| q.copy_from_slice(&h[row * n + start..][..depth]));
    own.fill(T::default());
    own.iter_mut().step_by(depth + 1).for_each(|q| *q = T::ONE);
    behind.par_chunks_mut(LINE * depth).enumerate().for_each(|(task, q)| {
        let count = q.len() / depth;
        for at in 0..depth {
            let row = &h[(start + at) * n + end + task * LINE..][..count];
            for (q, value) in q.iter_mut().skip(at).step_by(depth).zip(row) {
                *q = *value;
            }
        }
    });
}

/// Copies Q `[n, depth]` back to where [`read_block`] found it, and the upper triangle of the block.
fn write_block<T: Real>(h: &mut [T], n: usize, start: usize, depth: usize, q: &[T]) {
    let (before, rest) = h.split_at_mut(start * n);
    before
        .par_chunks_exact_mut(n)
        .zip(q.par_chunks_exact(depth))
        .for_each(|(row, q)| row[start..start + depth].copy_from_slice(q));
    rest[..depth * n].par_chunks_mut(LINE * n).enumerate().for_each(|(task, rows)| {
        let first = task * LINE;
        let lines = q[start * depth..].chunks_exact(depth);
        for (column, q) in (start..n).zip(lines) {
            for (row, value) in rows.chunks_exact_mut(n).zip(&q[first..]) {
                row[column] = *value;
            }
        }
    });
}

/// Copies the triangle above the diagonal to below it, row by row.
fn mirror<T: Real>(h: &mut [T], n: usize) {
    for first in (0..n).step_by(BLOCK) {
        let last = n.min(first + BLOCK);
        let (head, own) = h[..last * n].split_at_mut(first * n);
        for row in first..last {
            for column in row + 1..last {
                own[(column - first) * n + row] = own[(row - first) * n + column];
            }
        }
        own.par_chunks_mut(LINE * n).enumerate().for_each(|(task, own)| {
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
        let x: Vec<f32> =
            (0..n * n).map(|at| ((at * 7919 % 1013) as f32 - 500.0) / 500.0).collect();
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
                let sum: f64 =
                    (0..n).map(|k| f64::from(a[i * n + k]) * f64::from(b[k * n + j])).sum();
                worst = worst.max((sum - f64::from(u8::from(i == j))).abs());
            }
        }
        worst
    }

    /// Its upper triangle.
    fn upper(h: &[f32], n: usize) -> Vec<f32> {
        let mut h = h.to_vec();
        for (row, values) in h.chunks_exact_mut(n).enumerate() {
            values[..row].fill(f32::NAN);
        }
        h
    }

    #[test]
    fn inverses_and_their_factors_multiply_to_the_unit_matrix() {
        for n in [1, 2, 17, 191, 193, 420] {
            let h = positive(n);
            let mut inverted = upper(&h, n);
            inverse(&mut inverted, n).unwrap();
            assert!(off_unit(&h, &inverted, n) < 1e-3, "{n}");
            let mut precise: Vec<f64> = upper(&h, n).iter().map(|&h| f64::from(h)).collect();
            inverse(&mut precise, n).unwrap();
            for (precise, inverted) in precise.iter().zip(&inverted) {
                assert!((precise - f64::from(*inverted)).abs() < 1e-3, "{n}");
            }
            let rounded: Vec<f32> = precise.iter().map(|&value| value as f32).collect();
            assert!(off_unit(&h, &rounded, n) < 1e-5, "{n}: f64");
            let mut u = upper(&h, n);
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
        assert_eq!(inverse_factor(&mut h, 2), Err(NotPositive));
        let mut h = vec![0.0; 9];
        assert!(inverse(&mut h, 3).is_err());
    }
}
