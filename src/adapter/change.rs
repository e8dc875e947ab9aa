//! [`TensorChange`]: the change of a tensor, ready to be applied to its rows.

use std::ops::Range;

use anyhow::Result;
use pulp::{Arch, Simd, WithSimd};

use super::low_rank::Panels;
use super::stored::Stored;
use crate::failure::Failure;

/// Partial sums of a norm.
const LANES: usize = 8;

/// The change of a tensor of the base. Its factors are in memory; a tensor that replaces the base's tensor is read when rows are
/// asked for.
#[derive(Debug)]
pub struct TensorChange {
    pub(super) tensor: String,
    pub(super) columns: usize,
    /// A tensor in place of the base's.
    pub(super) whole: Option<Stored>,
    pub(super) tokens: Option<TokenRows>,
    pub(super) product: Option<Panels>,
    /// DoRA's m, by row.
    pub(super) magnitude: Option<Vec<f32>>,
}

/// Rows in place of the base's.
#[derive(Debug)]
pub(super) struct TokenRows {
    /// Rows of the tensor and their places in `values`, by row.
    pub(super) places: Vec<(usize, usize)>,
    /// `[tokens, columns]`.
    pub(super) values: Vec<f32>,
}

impl TensorChange {
    /// Changes some rows.
    ///
    /// ```text
    /// W' = W₀ + s·B·A                                  W₀: the base's tensor, or what the adapter has in its place
    /// W' = m / ‖W₀ + s·B·A‖ ∘ (W₀ + s·B·A)             DoRA, the norm of a row over its columns in f64
    /// ```
    ///
    /// An element has the same bits whatever rows are asked for together.
    ///
    /// # Arguments
    /// * `rows`: rows of the tensor; a vector is one row
    /// * `values`: `[rows, columns]`, in f32: the base's rows, which become the adapted rows
    ///
    /// # Errors
    /// Fails when the adapter's file cannot be read, for elements there that are not finite, and for a row of zeros under DoRA.
    ///
    /// # Panics
    /// Panics when `values` does not hold `rows`.
    pub fn apply(&self, rows: Range<usize>, values: &mut [f32]) -> Result<()> {
        assert_eq!(values.len(), rows.len() * self.columns, "rows of {} columns", self.columns);
        self.replace(rows.clone(), values)?;
        if let Some(product) = &self.product {
            product.add_to(rows.start, values);
        }
        if let Some(magnitude) = &self.magnitude {
            for (row, values) in rows.zip(values.chunks_mut(self.columns)) {
                self.rescale(row, magnitude[row], values)?;
            }
        }
        Ok(())
    }

    /// Changes some rows, without factors and magnitudes: the result is W₀ of [`TensorChange::apply`].
    ///
    /// # Errors
    /// Fails when the adapter's file cannot be read, and for elements there that are not finite.
    pub fn replace(&self, rows: Range<usize>, values: &mut [f32]) -> Result<()> {
        if let Some(whole) = &self.whole {
            whole.read_rows(rows.clone(), self.columns, values)?;
        }
        if let Some(tokens) = &self.tokens {
            tokens.put(rows, self.columns, values);
        }
        Ok(())
    }

    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> usize {
        let product = self.product.as_ref().map_or(0, Panels::bytes);
        let tokens = self.tokens.as_ref().map_or(0, |of| of.values.len() * 4);
        product + tokens + self.magnitude.as_ref().map_or(0, |of| of.len() * 4)
    }

    /// DoRA (Liu et al. 2024, arXiv 2402.09353, equation 5): gives a row the norm `magnitude`.
    fn rescale(&self, row: usize, magnitude: f32, values: &mut [f32]) -> Result<()> {
        let norm = Arch::new().dispatch(SquaredNorm(values)).sqrt() as f32;
        if norm == 0.0 {
            return Err(Failure::new(format!(
                "row {row} of `{}` is zero, so DoRA cannot scale it",
                self.tensor
            ))
            .detail("check that the adapter belongs to this base")
            .into());
        }
        let factor = magnitude / norm;
        values.iter_mut().for_each(|value| *value *= factor);
        Ok(())
    }
}

impl TokenRows {
    fn put(&self, rows: Range<usize>, columns: usize, values: &mut [f32]) {
        let first = self.places.partition_point(|(row, _)| *row < rows.start);
        let here = self.places[first..].iter();
        for (row, place) in here.take_while(|(row, _)| *row < rows.end) {
            let to = (row - rows.start) * columns;
            let from = place * columns;
            values[to..to + columns].copy_from_slice(&self.values[from..from + columns]);
        }
    }
}

/// Σ v², in f64, in an order that depends only on the length.
struct SquaredNorm<'a>(&'a [f32]);

impl WithSimd for SquaredNorm<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let (whole, rest) = self.0.as_chunks::<LANES>();
        let mut sums = [0.0f64; LANES];
        for values in whole {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += f64::from(*value) * f64::from(*value);
            }
        }
        for (sum, value) in sums.iter_mut().zip(rest) {
            *sum += f64::from(*value) * f64::from(*value);
        }
        sums.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::LowRank;

    /// W = [[3, 4], [0, 0]], B = [[1], [1]], A = [[0, 1]], s = 2: W + s·B·A = [[3, 6], [0, 2]].
    fn change(magnitude: Option<Vec<f32>>) -> TensorChange {
        TensorChange {
            tensor: "w".into(),
            columns: 2,
            whole: None,
            tokens: None,
            product: Some(Panels::new(LowRank {
                rows: 2,
                columns: 2,
                rank: 1,
                scale: 2.0,
                a: vec![0.0, 1.0],
                b: vec![1.0; 2],
            })),
            magnitude,
        }
    }

    #[test]
    fn a_product_is_added() {
        let mut values = [3.0, 4.0, 0.0, 0.0];
        change(None).apply(0..2, &mut values).unwrap();
        assert_eq!(values, [3.0, 6.0, 0.0, 2.0]);
    }

    #[test]
    fn dora_gives_every_row_its_magnitude() {
        let mut values = [3.0, 4.0, 0.0, 0.0];
        let change = change(Some(vec![5.0, -7.0]));
        change.apply(0..2, &mut values).unwrap();
        // √(9 + 36) = √45; the second row is [0, 2] / 2 · -7.
        let factor = 5.0 / 45f64.sqrt() as f32;
        assert_eq!(values, [3.0 * factor, 6.0 * factor, 0.0, -7.0]);
        let mut last = [0.0, 0.0];
        change.apply(1..2, &mut last).unwrap();
        assert_eq!(last, values[2..]);
        let error = change.apply(1..2, &mut [0.0, -2.0]).unwrap_err();
        assert!(error.to_string().contains("row 1 of `w` is zero"));
    }

    #[test]
    fn tokens_replace_their_rows() {
        let change = TensorChange {
            tokens: Some(TokenRows {
                places: vec![(1, 1), (4, 0)],
                values: vec![1.0, 2.0, 3.0, 4.0],
            }),
            product: None,
            ..change(None)
        };
        let mut values = [0.0; 10];
        change.apply(0..5, &mut values).unwrap();
        assert_eq!(values, [0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0]);
        let mut piece = [0.0; 6];
        change.apply(2..5, &mut piece).unwrap();
        assert_eq!(piece, values[4..]);
    }
}
