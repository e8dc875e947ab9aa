//! Calibration statistics: how strongly each input column of a linear is driven.
//!
//! s_j = (1/n) Σ_samples Σ_tokens x_tj², x `[tokens, in_features]` the input of the linear, n the number of samples (not
//! tokens: the scale cannot change a ranking inside a row). Sun et al. 2023, arXiv:2306.11695 §3; reference: `WrappedGPT`
//! in locuslab/wanda. Within a sample we sum in f64; over samples we keep the reference's f32 recurrence, rounding at
//! the same places: s ← s · n/(n+1), then s ← s + ‖x_j‖² / (n+1) with the norm taken and squared in f32.

use crate::linalg::columns;

/// ‖x_j‖² of one sample at one observation point.
#[derive(Debug, Clone)]
pub struct SampleSquares(Vec<f64>);

impl SampleSquares {
    /// Sums over no rows yet, for an input with this many columns.
    pub fn new(in_features: usize) -> Self {
        Self(vec![0.0; in_features])
    }

    /// Adds rows `[tokens, in_features]`.
    pub fn add_rows(&mut self, rows: &[f32]) {
        columns::add_squares(rows, &mut self.0);
    }

    /// Adds what rows that are elsewhere sum up to, `[in_features]`.
    pub fn add_sums(&mut self, squares: &[f32]) {
        for (sum, &square) in self.0.iter_mut().zip(squares) {
            *sum += f64::from(square);
        }
    }
}

/// The recurrence for one observation point.
#[derive(Debug, Clone)]
pub struct ColumnSquares {
    mean: Vec<f32>,
    samples: usize,
}

impl ColumnSquares {
    /// Statistics of an input with this many columns, before any sample.
    pub fn new(in_features: usize) -> Self {
        Self {
            mean: vec![0.0; in_features],
            samples: 0,
        }
    }

    /// Bytes held for an input with this many columns, the sample on its way included.
    pub fn bytes(in_features: usize) -> usize {
        in_features * (size_of::<f64>() + size_of::<f32>())
    }

    /// Takes the next sample. Must be called in sample order.
    pub fn add_sample(&mut self, sample: &SampleSquares) {
        let before = self.samples as f64;
        self.samples += 1;
        let decay = (before / self.samples as f64) as f32;
        let samples = self.samples as f32;
        for (mean, sum) in self.mean.iter_mut().zip(&sample.0) {
            let norm = sum.sqrt() as f32;
            *mean = *mean * decay + norm * norm / samples;
        }
    }

    /// s_j, `[in_features]`.
    pub fn mean(&self) -> &[f32] {
        &self.mean
    }

    /// Samples seen.
    pub fn samples(&self) -> usize {
        self.samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_over_samples_not_tokens() {
        let mut statistics = ColumnSquares::new(2);
        let mut sample = SampleSquares::new(2);
        sample.add_rows(&[1.0, 0.0, 2.0, 0.0]);
        sample.add_rows(&[2.0, 0.0]);
        statistics.add_sample(&sample);
        assert_eq!(statistics.mean(), [9.0, 0.0]);
        let mut sample = SampleSquares::new(2);
        sample.add_sums(&[1.0, 16.0]);
        statistics.add_sample(&sample);
        assert_eq!(statistics.mean(), [5.0, 8.0]);
        assert_eq!(statistics.samples(), 2);
    }
}
