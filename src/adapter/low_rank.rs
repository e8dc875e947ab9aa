//! [`Panels`]: a low-rank change s·B·A, added to rows.
//!
//! ```text
//! W[i, j] ← W[i, j] + s · Σ_k B[i, k] · A[k, j]      B [rows, r], A [r, columns], k ascending, all in f32
//! ```
//!
//! An embedding's change is (B A)ᵀ in the adapter's file: here, A is the file's Bᵀ, and B the file's Aᵀ.
//!
//! A is cut into panels of [`WIDTH`] columns. The sums of a panel stay in registers over k, and a panel stays in the cache over
//! rows. Every product and every sum is rounded, so every CPU gives the same bits.

use pulp::{Arch, Simd, WithSimd};

use crate::linalg::LowRank;

/// Columns of a panel.
const WIDTH: usize = 32;

/// A [`LowRank`] with A in panels.
#[derive(Debug)]
pub(super) struct Panels {
    columns: usize,
    rank: usize,
    scale: f32,
    b: Vec<f32>,
    /// `[panels, rank, WIDTH]`; the last panel ends with zeros.
    panels: Vec<f32>,
}

impl Panels {
    pub(super) fn new(factors: LowRank) -> Self {
        let LowRank { columns, rank, scale, a, b, .. } = factors;
        let mut panels = vec![0.0; columns.div_ceil(WIDTH) * rank * WIDTH];
        for (panel, first) in panels.chunks_mut(rank * WIDTH).zip((0..).step_by(WIDTH)) {
            let width = WIDTH.min(columns - first);
            for (step, row) in panel.chunks_mut(WIDTH).zip(a.chunks(columns)) {
                step[..width].copy_from_slice(&row[first..first + width]);
            }
        }
        Self { columns, rank, scale, b, panels }
    }

    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.b[..]) + size_of_val(&self.panels[..])
    }

    /// Adds the change to `values`, rows of the tensor from `first_row`.
    pub(super) fn add_to(&self, first_row: usize, values: &mut [f32]) {
        let count = values.len() / self.columns;
        let b = &self.b[first_row * self.rank..(first_row + count) * self.rank];
        Arch::new().dispatch(AddPanels { of: self, b, values });
    }
}

struct AddPanels<'a> {
    of: &'a Panels,
    b: &'a [f32],
    values: &'a mut [f32],
}

impl WithSimd for AddPanels<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Panels { columns, rank, scale, panels, .. } = self.of;
        for (panel, first) in panels.chunks(rank * WIDTH).zip((0..).step_by(WIDTH)) {
            let place = first..(first + WIDTH).min(*columns);
            let pairs = self.values.chunks_mut(2 * columns).zip(self.b.chunks(2 * rank));
            for (rows, b) in pairs {
                let (one, two) = rows.split_at_mut(*columns);
                let (b_one, b_two) = b.split_at(*rank);
                if two.is_empty() {
                    let [sums] = products(panel, [b_one]);
                    add(&mut one[place.clone()], &sums, *scale);
                } else {
                    let [sums_one, sums_two] = products(panel, [b_one, b_two]);
                    add(&mut one[place.clone()], &sums_one, *scale);
                    add(&mut two[place.clone()], &sums_two, *scale);
                }
            }
        }
    }
}

/// Σ_k b[k] · panel[k, ·] for some rows at once.
#[inline(always)]
fn products<const ROWS: usize>(panel: &[f32], b: [&[f32]; ROWS]) -> [[f32; WIDTH]; ROWS] {
    let mut sums = [[0.0f32; WIDTH]; ROWS];
    let (steps, _) = panel.as_chunks::<WIDTH>();
    let b = b.map(|b| &b[..steps.len()]);
    for (k, step) in steps.iter().enumerate() {
        for (sums, b) in sums.iter_mut().zip(b) {
            for (sum, value) in sums.iter_mut().zip(step) {
                *sum += b[k] * value;
            }
        }
    }
    sums
}

#[inline(always)]
fn add(values: &mut [f32], sums: &[f32; WIDTH], scale: f32) {
    for (value, sum) in values.iter_mut().zip(sums) {
        *value += sum * scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(rows: usize, columns: usize, rank: usize) -> LowRank {
        let some = |count: usize, step: f32| (0..count).map(|i| (i as f32 * step).sin()).collect();
        LowRank {
            rows,
            columns,
            rank,
            scale: 0.75,
            a: some(rank * columns, 0.11),
            b: some(rows * rank, 0.37),
        }
    }

    /// The formula, element by element.
    fn plain(of: &LowRank, row: usize, column: usize, base: f32) -> f32 {
        let mut sum = 0.0;
        for k in 0..of.rank {
            sum += of.b[row * of.rank + k] * of.a[k * of.columns + column];
        }
        base + sum * of.scale
    }

    #[test]
    fn rows_get_the_bits_of_the_formula_however_they_are_cut() {
        for (rows, columns, rank) in [(5, 70, 3), (1, 32, 1), (4, 31, 8), (7, 64, 2)] {
            let factors = factors(rows, columns, rank);
            let base: Vec<f32> = (0..rows * columns).map(|i| (i as f32).cos()).collect();
            let expected: Vec<u32> = (0..rows * columns)
                .map(|i| plain(&factors, i / columns, i % columns, base[i]).to_bits())
                .collect();
            let panels = Panels::new(factors);
            for step in 1..=rows {
                let mut values = base.clone();
                for (piece, first) in values.chunks_mut(step * columns).zip((0..).step_by(step)) {
                    panels.add_to(first, piece);
                }
                let found: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
                assert_eq!(found, expected, "{rows} x {columns}, r {rank}, {step} rows");
            }
        }
    }
}
