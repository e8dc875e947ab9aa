//! Sums over the tokens of an activation, column by column, in f64.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Sums over some rows `[tokens, columns]` of an activation. A GPU adds up some rows at a time.
#[derive(Debug, Clone, Copy)]
pub struct ColumnSums<'a> {
    /// The number of rows.
    pub tokens: usize,
    /// Σ_t x_tj², `[columns]`.
    pub squares: &'a [f64],
    /// Σ_t x_tj, `[columns]`.
    pub values: &'a [f64],
}

/// sums_j ← sums_j + more_j.
pub fn add_sums<T: Copy + Into<f64>>(sums: &mut [f64], more: &[T]) {
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += (*more).into();
    }
}

/// Columns of a task: 4 KiB of f64 sums stay in the first-level cache while rows stream through.
const COLUMNS_AT_ONCE: usize = 512;

/// sums_j ← sums_j + Σ_t x_tj², rows in order. So the bits do not depend on the number of calls for the rows, or of threads.
///
/// # Arguments
/// * `x`: `[tokens, columns]`, row-major
/// * `sums`: `[columns]`
pub fn add_squares(x: &[f32], sums: &mut [f64]) {
    let columns = sums.len();
    sums.par_chunks_mut(COLUMNS_AT_ONCE).enumerate().for_each(|(block, sums)| {
        let x = &x[x.len().min(block * COLUMNS_AT_ONCE)..];
        Arch::new().dispatch(AddSquares { x, columns, sums });
    });
}

/// The sums of some columns, compiled for the CPU's registers.
struct AddSquares<'a> {
    /// The values from the first of these columns on.
    x: &'a [f32],
    columns: usize,
    sums: &'a mut [f64],
}

impl WithSimd for AddSquares<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // The last row ends with the last column, so it may be shorter than `columns`.
        for row in self.x.chunks(self.columns) {
            for (sum, &value) in self.sums.iter_mut().zip(row) {
                *sum += f64::from(value) * f64::from(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_add_up_the_same_in_one_call_or_many() {
        let (tokens, columns) = (37, 1100);
        let x: Vec<f32> = (0..tokens * columns).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut whole = vec![0.0; columns];
        add_squares(&x, &mut whole);
        let mut parts = vec![0.0; columns];
        for rows in x.chunks(5 * columns) {
            add_squares(rows, &mut parts);
        }
        assert_eq!(whole, parts);
        let exact: f64 = (0..tokens).map(|t| f64::from(x[t * columns + 1023]).powi(2)).sum();
        assert_eq!(whole[1023], exact);
    }
}
