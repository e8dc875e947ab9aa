//! C ← C − E·U in place, for columns of C from a given column on.
//!
//! E `[rows, inner]`, U `[inner, columns of C from the given column on]` with the row length of C, C `[rows, columns]`; f32. Every
//! element of C is a single chain of sums along `inner` that begins with its old value, so neither the number of threads nor of rows
//! changes a bit.

use rayon::prelude::*;

use super::buffer_pool::BufferPool;
use super::gram::f32_kernel;
use super::product::{Factors, Line, Strided, Values};

/// Rows of a task: whole blocks of every kernel.
const ROWS: usize = 192;

/// Columns that are packed together: whole units of every kernel.
const UNIT: usize = 192;

/// Packed factors, reused by every call.
#[derive(Debug, Default)]
pub struct Update {
    u: Vec<Line>,
    e: BufferPool<(Vec<f32>, Vec<Line>)>,
}

impl Update {
    /// Subtracts E·U from the columns of C from `first` on.
    ///
    /// # Arguments
    /// * `c`: `[rows, columns]`
    /// * `e`: `[rows, inner]`
    /// * `u`: the first element of U; its rows begin `columns` elements apart
    ///
    /// # Panics
    /// Panics when the slices are smaller than their shapes.
    pub fn subtract_product(
        &mut self,
        c: &mut [f32],
        columns: usize,
        first: usize,
        e: &[f32],
        u: &[f32],
    ) {
        let (kernel, width) = (f32_kernel(), columns - first);
        let inner = e.len() * columns / c.len().max(1);
        if width == 0 || inner == 0 {
            return;
        }
        // Longer blocks of columns are multiplied slab by slab.
        for slab in (0..inner).step_by(kernel.slab()) {
            let steps = kernel.slab().min(inner - slab);
            let unit_lines = kernel.column_lines(UNIT, steps);
            let lines = unit_lines * width.div_ceil(UNIT);
            if self.u.len() < lines {
                self.u = bytemuck::allocation::zeroed_vec(lines);
            }
            let from = Strided::transposed(Values::F32(&u[slab * columns..]), columns);
            self.u[..lines].par_chunks_mut(unit_lines).enumerate().for_each(|(at, lines)| {
                let count = UNIT.min(width - at * UNIT);
                let lines = &mut lines[..kernel.column_lines(count, steps)];
                kernel.pack_columns(from.at(at * UNIT, 0), count, steps, lines);
            });
            let packed_u = &self.u[..lines];
            c.par_chunks_mut(ROWS * columns)
                .zip(e.par_chunks(ROWS * inner))
                .with_max_len(1)
                .for_each(|(c, e)| {
                    self.e.lend(Default::default, |(negative, lines)| {
                        let rows = e.len() / inner;
                        negative.clear();
                        for row in e.chunks_exact(inner) {
                            negative.extend(row[slab..slab + steps].iter().map(|value| -value));
                        }
                        let needed = kernel.row_lines(rows, steps);
                        if lines.len() < needed {
                            *lines = bytemuck::allocation::zeroed_vec(needed);
                        }
                        let x = Strided::rows(Values::F32(negative), steps);
                        kernel.pack_rows(x, rows, steps, &mut lines[..needed]);
                        let factors = Factors {
                            x: &lines[..needed],
                            w: packed_u,
                            rows,
                            columns: width,
                            inner: steps,
                        };
                        kernel.multiply(factors, &mut c[first..], columns, true);
                    });
                });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_is_subtracted_behind_the_first_column_only() {
        for (rows, columns, first, inner) in
            [(3, 9, 4, 2), (400, 300, 128, 128), (5, 1100, 600, 600)]
        {
            let number = |at: usize| ((at * 7919 % 1013) as f32 - 500.0) / 700.0;
            let c: Vec<f32> = (0..rows * columns).map(number).collect();
            let e: Vec<f32> = (0..rows * inner).map(|at| number(at + 5)).collect();
            let u: Vec<f32> = (0..inner * columns).map(|at| number(at * 3 + 1)).collect();
            let mut out = c.clone();
            let mut update = Update::default();
            update.subtract_product(&mut out, columns, first, &e, &u[first..]);
            for row in 0..rows {
                for column in 0..columns {
                    let at = row * columns + column;
                    let sum: f64 = (0..inner)
                        .map(|k| f64::from(e[row * inner + k]) * f64::from(u[k * columns + column]))
                        .sum();
                    let expected = match column < first {
                        true => f64::from(c[at]),
                        false => f64::from(c[at]) - sum,
                    };
                    assert!((f64::from(out[at]) - expected).abs() < 2e-4, "{row} {column}");
                }
            }
        }
    }
}
