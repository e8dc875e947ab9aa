//! Mean sums of squares of input columns: the strength with which each column of a linear's input is driven.
//!
//! s_j = (1/n) Σ_samples Σ_tokens x_tj², x `[tokens, in_features]` the input of the linear, n the number of samples (not
//! tokens: the scale cannot change a ranking inside a row). Sun et al. 2023, arXiv:2306.11695 §3; reference: `WrappedGPT`
//! in locuslab/wanda. Sums within a sample are f64. Over samples this is the reference's f32 recurrence, rounded at
//! the same places: s ← s · n/(n+1), then s ← s + ‖x_j‖² / (n+1) with the norm taken and squared in f32.

use crate::bytes::ByteSize;
use crate::linalg::columns::ColumnSums;
use crate::linalg::{Products, columns, permute};
use crate::pruning::statistics::{
    MergedStatistics, SamplePart, Statistics, StatisticsKind, StatisticsRank,
};

/// The kind of statistics that collects [`ColumnSquares`].
#[derive(Debug, Clone, Copy)]
pub struct ColumnSquaresKind;

impl StatisticsKind for ColumnSquaresKind {
    fn bytes(&self, in_features: usize) -> ByteSize {
        ByteSize::of(in_features, size_of::<f64>() + size_of::<f32>())
    }

    fn rank(&self) -> Option<StatisticsRank> {
        Some(StatisticsRank::ColumnSquares)
    }

    fn begin(&self, in_features: usize, _products: Products) -> Statistics {
        Statistics::Merged(Box::new(ColumnSquares::new(in_features)))
    }
}

/// ‖x_j‖² of a sample.
pub(crate) struct SampleSquares(Vec<f64>);

impl SampleSquares {
    /// Sums of an input with this many columns, before any row.
    pub(crate) fn new(in_features: usize) -> Self {
        Self(vec![0.0; in_features])
    }
}

impl SamplePart for SampleSquares {
    fn add_rows(&mut self, rows: &[f32]) {
        columns::add_squares(rows, &mut self.0);
    }

    fn takes_sums(&self) -> bool {
        true
    }

    fn add_sums(&mut self, sums: &ColumnSums<'_>) {
        columns::add_sums(&mut self.0, sums.squares);
    }

    fn numbers(&self) -> &[f64] {
        &self.0
    }
}

/// s_j of an input.
#[derive(Debug, Clone)]
pub struct ColumnSquares {
    mean: Vec<f32>,
    samples: usize,
}

impl ColumnSquares {
    /// Statistics of an input with this many columns, before any sample.
    pub fn new(in_features: usize) -> Self {
        Self::from_mean(vec![0.0; in_features])
    }

    /// Statistics with this s_j `[in_features]`.
    pub fn from_mean(mean: Vec<f32>) -> Self {
        Self { mean, samples: 0 }
    }

    /// s_j, `[in_features]`.
    pub fn mean(&self) -> &[f32] {
        &self.mean
    }
}

impl MergedStatistics for ColumnSquares {
    fn part(&self) -> Box<dyn SamplePart> {
        Box::new(SampleSquares::new(self.mean.len()))
    }

    fn merge(&mut self, squares: &[f64]) {
        let before = self.samples as f64;
        self.samples += 1;
        let decay = (before / self.samples as f64) as f32;
        let samples = self.samples as f32;
        for (mean, sum) in self.mean.iter_mut().zip(squares) {
            let norm = sum.sqrt() as f32;
            *mean = *mean * decay + norm * norm / samples;
        }
    }

    fn permute(&mut self, order: &[usize]) {
        permute::permute(&mut self.mean, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_over_samples_not_tokens() {
        let mut statistics = ColumnSquares::new(2);
        let mut sample = statistics.part();
        sample.add_rows(&[1.0, 0.0, 2.0, 0.0]);
        sample.add_rows(&[2.0, 0.0]);
        statistics.merge(sample.numbers());
        assert_eq!(statistics.mean(), [9.0, 0.0]);
        let mut sample = statistics.part();
        let sums = ColumnSums { tokens: 2, squares: &[1.0, 16.0], values: &[1.0, 4.0] };
        sample.add_sums(&sums);
        statistics.merge(sample.numbers());
        assert_eq!(statistics.mean(), [5.0, 8.0]);
    }
}
