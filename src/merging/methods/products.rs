//! [`ScalarProducts`] and [`ProductMerge`]: linear combinations of models whose factors follow from the scalar products of the models.
//!
//! ```text
//! X_t = W_t, or W_t − W₀ with an origin W₀          P_st = X_s·X_t
//! W   = W₀ + Σ_t c_t X_t                            c = rule(P), with W₀ = 0 where there is no origin
//! ```
//!
//! A vector X_t is a whole tensor, or a row. Every number that such a rule needs (norms, angles, means on a sphere) is a product of
//! combinations, so one read of the models is enough for any number of steps. Products and factors are f64, the sum is f32.

use anyhow::Result;

use super::differences::subtract;
use super::method::{RowBlock, TensorMerge};
use super::mixer::{Divisor, Formula, Mixer, Mixture, OnCpu, Share, WeightedSum};
use super::sums::dot;

/// Scalar products of models, or of their differences from an origin.
#[derive(Debug)]
pub(super) struct ScalarProducts {
    columns: usize,
    origin: Option<usize>,
    models: Vec<usize>,
    /// X_t of the current rows, with an origin.
    differences: Vec<Vec<f32>>,
    /// P, `[models, models]`; the upper triangle counts.
    sums: Vec<f64>,
}

impl ScalarProducts {
    /// No products yet, of the sources `models` with rows of `columns` elements.
    pub(super) fn new(columns: usize, origin: Option<usize>, models: Vec<usize>) -> Self {
        let differences = origin.map_or(Vec::new(), |_| vec![Vec::new(); models.len()]);
        let sums = vec![0.0; models.len() * models.len()];
        Self { columns, origin, models, differences, sums }
    }

    /// The number of vectors.
    pub(super) fn count(&self) -> usize {
        self.models.len()
    }

    /// P_st.
    pub(super) fn of(&self, first: usize, second: usize) -> f64 {
        self.sums[first.min(second) * self.count() + first.max(second)]
    }

    /// |X_t|.
    pub(super) fn norm(&self, of: usize) -> f64 {
        self.of(of, of).sqrt()
    }

    /// Forgets all products.
    pub(super) fn clear(&mut self) {
        self.sums.fill(0.0);
    }

    /// Takes the next rows; their products are not added yet.
    pub(super) fn take(&mut self, rows: &RowBlock<'_>) {
        let Some(origin) = self.origin else {
            return;
        };
        for (&model, difference) in self.models.iter().zip(&mut self.differences) {
            subtract(rows.sources[model], rows.sources[origin], difference);
        }
    }

    /// X_t of the rows that were taken.
    fn vector<'v>(&'v self, rows: &RowBlock<'v>, of: usize) -> &'v [f32] {
        match self.origin {
            Some(_) => &self.differences[of],
            None => rows.sources[self.models[of]],
        }
    }

    /// Adds the products of row number `row` of the rows that were taken.
    pub(super) fn add(&mut self, rows: &RowBlock<'_>, row: usize) {
        let place = row * self.columns..(row + 1) * self.columns;
        let count = self.count();
        for first in 0..count {
            for second in first..count {
                let [one, other] = [first, second].map(|of| &self.vector(rows, of)[place.clone()]);
                self.sums[first * count + second] += dot(one, other);
            }
        }
    }

    /// Takes the next rows and adds their products. The first row of a tensor begins the sums again.
    pub(super) fn measure(&mut self, rows: &RowBlock<'_>) {
        if rows.first_row == 0 {
            self.clear();
        }
        self.take(rows);
        for row in 0..rows.sources[self.models[0]].len() / self.columns {
            self.add(rows, row);
        }
    }
}

/// The factors of the vectors, from their products.
pub(super) type FactorRule = Box<dyn Fn(&ScalarProducts) -> Result<Vec<f64>> + Send>;

/// The merge of a tensor.
pub(super) struct ProductMerge {
    products: ScalarProducts,
    /// True if every row is a vector.
    is_by_row: bool,
    rule: FactorRule,
    factors: Vec<f32>,
}

impl ProductMerge {
    /// A merge of whole tensors, or of rows, by `rule`.
    pub(super) fn new(products: ScalarProducts, is_by_row: bool, rule: FactorRule) -> Self {
        Self { products, is_by_row, rule, factors: Vec::new() }
    }

    fn learn(&mut self) -> Result<()> {
        let factors = (self.rule)(&self.products)?;
        self.factors = factors.into_iter().map(|factor| factor as f32).collect();
        Ok(())
    }

    /// The sum of the rows `first_row..` that are taken, with the current factors.
    fn mix(
        &self,
        rows: &RowBlock<'_>,
        row: usize,
        mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        let columns = self.products.columns;
        let place = row * columns..row * columns + merged.len();
        let vectors =
            (0..self.products.count()).map(|of| &self.products.vector(rows, of)[place.clone()]);
        let formula = match self.products.origin {
            None => Formula::Sum(WeightedSum {
                columns,
                sources: vectors.collect(),
                weights: &self.factors,
                divisor: 1.0,
            }),
            Some(origin) => Formula::Mixture(Mixture {
                columns,
                base: &rows.sources[origin][place.clone()],
                shares: vectors
                    .zip(&self.factors)
                    .map(|(trimmed, &weight)| Share { weight, votes: &[], trimmed })
                    .collect(),
                elects: false,
                divisor: Divisor::One,
                lambda: 1.0,
                tie: 1.0,
            }),
        };
        mixer.mix(&formula, merged)
    }
}

impl TensorMerge for ProductMerge {
    fn reads(&self) -> usize {
        usize::from(!self.is_by_row)
    }

    fn measure(&mut self, _read: usize, rows: &RowBlock<'_>) {
        self.products.measure(rows);
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        self.products.take(rows);
        if !self.is_by_row {
            if rows.first_row == 0 {
                self.learn()?;
            }
            return self.mix(rows, 0, mixer, merged);
        }
        for (row, merged) in merged.chunks_mut(self.products.columns).enumerate() {
            self.products.clear();
            self.products.add(rows, row);
            self.learn()?;
            self.mix(rows, row, &mut OnCpu, merged)?;
        }
        Ok(())
    }
}
