//! Gram matrices of a linear's input, for the methods that repair what they prune.
//!
//! G = Σ_samples XᵀX `[in_features, in_features]`, X `[tokens, in_features]` the input of the linear; f32 sums over blocks of samples, which
//! are added in order (`linalg/gram.rs`). Beside it are the column statistics of `column_moments.rs`, so that every score can be computed from these
//! statistics too. The reference implementations divide by the number of samples, which changes no mask and no weight.
//!
//! A factorisation of G, or whatever else a method derives from it for an input, serves all linears with that input (q, k and v; gate
//! and up): [`InputGram::prepared`] keeps it until the statistics go.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::linalg::Products;
use crate::linalg::gram::GramMatrix;
use crate::pruning::statistics::column_moments::ColumnMoments;
use crate::pruning::statistics::{
    InPlaceStatistics, MergedStatistics, SamplePart, Statistics, StatisticsKind, StatisticsRank,
};

/// The kind of statistics that collects an [`InputGram`].
#[derive(Debug, Clone, Copy)]
pub struct InputGramKind;

impl StatisticsKind for InputGramKind {
    fn bytes(&self, in_features: usize) -> ByteSize {
        GramMatrix::bytes(in_features) + ColumnMoments::bytes(in_features)
    }

    fn collecting_bytes(&self, in_features: usize) -> ByteSize {
        GramMatrix::collecting_bytes(in_features)
    }

    fn adding_bytes(&self, in_features: usize, products: Products) -> ByteSize {
        GramMatrix::adding_bytes(in_features, products)
    }

    fn rank(&self) -> Option<StatisticsRank> {
        Some(StatisticsRank::Gram)
    }

    fn operations(&self, in_features: usize) -> f64 {
        // One triangle of XᵀX.
        (in_features as f64).powi(2)
    }

    fn part_beside_gram(&self, in_features: usize) -> Option<Box<dyn SamplePart>> {
        Some(ColumnMoments::part_of(in_features))
    }

    fn begin(&self, in_features: usize, products: Products) -> Statistics {
        Statistics::InPlace(Box::new(InputGram::new(in_features, products)))
    }
}

/// G of an input, and its column statistics.
pub struct InputGram {
    columns: ColumnMoments,
    /// The column statistics of the current sample.
    sample: Box<dyn SamplePart>,
    gram: GramMatrix,
    prepared: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
}

impl InputGram {
    /// Statistics of an input with this many columns, before any sample; `products` is the arithmetic of the layer.
    pub fn new(in_features: usize, products: Products) -> Self {
        let columns = ColumnMoments::new(in_features);
        Self {
            sample: columns.part(),
            columns,
            gram: GramMatrix::new(in_features, products),
            prepared: Mutex::default(),
        }
    }

    /// The column statistics.
    pub fn columns(&self) -> &ColumnMoments {
        &self.columns
    }

    /// G.
    pub fn gram(&self) -> &GramMatrix {
        &self.gram
    }

    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.columns.samples()
    }

    /// A value that a method derives from these statistics: made by the first call for its type, and returned by later calls.
    ///
    /// # Errors
    /// Fails with the error of `make`.
    pub fn prepared<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<Arc<T>> {
        let of_type = |one: &Arc<dyn Any + Send + Sync>| Arc::clone(one).downcast::<T>().ok();
        // The lock is not held while `make` computes on all threads. One matrix is pruned at a time, so nothing is made twice.
        let found = self.all_prepared().iter().find_map(of_type);
        if let Some(found) = found {
            return Ok(found);
        }
        let made = Arc::new(make(self)?);
        self.all_prepared().push(Arc::clone(&made) as _);
        Ok(made)
    }

    fn all_prepared(&self) -> std::sync::MutexGuard<'_, Vec<Arc<dyn Any + Send + Sync>>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InPlaceStatistics for InputGram {
    fn add_rows(&mut self, rows: &[f32]) {
        self.sample.add_rows(rows);
        self.gram.add_rows(rows);
    }

    fn end_sample(&mut self) {
        self.columns.merge(self.sample.numbers());
        self.sample = self.columns.part();
    }

    fn end_block(&mut self) {
        self.gram.end_block();
    }

    fn merge_beside_gram(&mut self, numbers: &[f64]) {
        self.columns.merge(numbers);
    }

    fn add_gram(&mut self, first: usize, sums: &[f32]) {
        self.gram.add_upper(first, sums);
    }

    fn take_sample(&mut self) -> Vec<f64> {
        let numbers = self.sample.numbers().to_vec();
        self.sample = self.columns.part();
        numbers
    }

    fn gram_mut(&mut self) -> &mut GramMatrix {
        &mut self.gram
    }

    fn finish(&mut self) {
        self.gram.finish();
    }

    fn forget_derived(&self) {
        self.all_prepared().clear();
    }

    fn permute(&mut self, order: &[usize]) {
        self.columns.permute(order);
        self.gram.permute(order);
        // What was derived is of the old order.
        self.all_prepared().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_statistics_are_those_collected_alone() {
        let rows: Vec<f32> = (0..60).map(|at| (at * 37 % 23) as f32 - 11.0).collect();
        let mut gram = InputGram::new(3, Products::F32);
        let mut alone = ColumnMoments::new(3);
        for sample in rows.chunks(15) {
            let mut part = alone.part();
            part.add_rows(sample);
            alone.merge(part.numbers());
            sample.chunks(6).for_each(|rows| gram.add_rows(rows));
            gram.end_sample();
        }
        gram.finish();
        assert_eq!(gram.samples(), 4);
        assert_eq!(gram.columns().squares().mean(), alone.squares().mean());
        assert_eq!(gram.columns().mean(), alone.mean());
        let squares: f32 = rows.iter().step_by(3).map(|x| x * x).sum();
        assert_eq!(gram.gram().diagonal()[0], squares);
    }

    #[test]
    fn a_preparation_is_made_once_per_type() {
        let gram = InputGram::new(2, Products::F32);
        let mut made = 0;
        for _ in 0..3 {
            let width = gram.prepared(|gram| {
                made += 1;
                Ok(gram.gram().width())
            });
            assert_eq!(*width.unwrap(), 2);
        }
        assert_eq!(made, 1);
        assert!(gram.prepared(|_| Ok("another type")).is_ok());
        assert!(gram.prepared::<u8>(|_| anyhow::bail!("no")).is_err());
    }
}
