//! Column moments of a linear's input: mean squares as for Wanda, means, and variances.
//!
//! For column j of the input x `[tokens, in_features]`, n samples of T_k tokens each:
//! s_j as in `column_squares.rs`; m_j = (1/n) Σ_k Σ_tokens x_tj, the mean over samples of *sums* over tokens; v_j the mean of the
//! (population) variances of the samples, weighted by their tokens. Sums run in f64, on a GPU in f32
//! over at most 1024 tokens. Zhang et al. 2023, "Dynamic Sparse No
//! Training", arXiv:2310.08915 §3; reference: `WrappedGPT` in zyxxmu/DSnoT.

use crate::bytes::ByteSize;
use crate::linalg::columns::ColumnSums;
use crate::linalg::{Products, columns, permute};
use crate::pruning::statistics::column_squares::ColumnSquares;
use crate::pruning::statistics::{
    MergedStatistics, SamplePart, Statistics, StatisticsKind, StatisticsRank,
};

/// The kind of statistics that collects [`ColumnMoments`].
#[derive(Debug, Clone, Copy)]
pub struct ColumnMomentsKind;

impl StatisticsKind for ColumnMomentsKind {
    fn bytes(&self, in_features: usize) -> ByteSize {
        ColumnMoments::bytes(in_features)
    }

    fn rank(&self) -> Option<StatisticsRank> {
        Some(StatisticsRank::ColumnMoments)
    }

    fn begin(&self, in_features: usize, _products: Products) -> Statistics {
        Statistics::Merged(Box::new(ColumnMoments::new(in_features)))
    }
}

/// Sums of a sample: squares `[in_features]`, values `[in_features]`, and the number of tokens.
struct SampleMoments {
    width: usize,
    sums: Vec<f64>,
}

impl SampleMoments {
    fn new(width: usize) -> Self {
        Self { width, sums: vec![0.0; 2 * width + 1] }
    }
}

impl SamplePart for SampleMoments {
    fn add_rows(&mut self, rows: &[f32]) {
        let (squares, rest) = self.sums.split_at_mut(self.width);
        columns::add_squares(rows, squares);
        let (sums, tokens) = rest.split_at_mut(self.width);
        for row in rows.chunks_exact(self.width.max(1)) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += f64::from(*value);
            }
            tokens[0] += 1.0;
        }
    }

    fn takes_sums(&self) -> bool {
        true
    }

    fn add_sums(&mut self, sums: &ColumnSums<'_>) {
        let (squares, rest) = self.sums.split_at_mut(self.width);
        let (values, tokens) = rest.split_at_mut(self.width);
        columns::add_sums(squares, sums.squares);
        columns::add_sums(values, sums.values);
        tokens[0] += sums.tokens as f64;
    }

    fn numbers(&self) -> &[f64] {
        &self.sums
    }
}

/// s_j, m_j and v_j of an input.
#[derive(Debug, Clone)]
pub struct ColumnMoments {
    squares: ColumnSquares,
    /// Σ over samples of sums over tokens.
    sums: Vec<f64>,
    /// Σ over samples of tokens times variance.
    spreads: Vec<f64>,
    /// Σ over samples of squared sums over tokens, each over its tokens.
    squared_sums: Vec<f64>,
    samples: usize,
    tokens: f64,
}

impl ColumnMoments {
    /// Moments of an input with this many columns, before any sample.
    pub fn new(in_features: usize) -> Self {
        Self {
            squares: ColumnSquares::new(in_features),
            sums: vec![0.0; in_features],
            spreads: vec![0.0; in_features],
            squared_sums: vec![0.0; in_features],
            samples: 0,
            tokens: 0.0,
        }
    }

    /// An empty part for a sample of an input with this many columns.
    pub(crate) fn part_of(in_features: usize) -> Box<dyn SamplePart> {
        Box::new(SampleMoments::new(in_features))
    }

    /// Bytes of the moments and of a sample's part.
    pub fn bytes(in_features: usize) -> ByteSize {
        ByteSize::of(in_features, 5 * size_of::<f64>() + size_of::<f32>())
    }

    /// The number of samples.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// s_j.
    pub fn squares(&self) -> &ColumnSquares {
        &self.squares
    }

    /// m_j, `[in_features]`.
    pub fn mean(&self) -> Vec<f32> {
        let of = |sum: &f64| (sum / self.samples as f64) as f32;
        self.sums.iter().map(of).collect()
    }

    /// v_j, `[in_features]`.
    pub fn variance(&self) -> Vec<f32> {
        let of = |spread: &f64| (spread / self.tokens) as f32;
        self.spreads.iter().map(of).collect()
    }

    /// The (population) variance over the tokens of all samples together, `[in_features]`: v_j, and the variance of the samples' means.
    pub fn variance_of_all(&self) -> Vec<f64> {
        let columns = self.spreads.iter().zip(&self.squared_sums).zip(&self.sums);
        let of = |((spread, squared), sum): ((&f64, &f64), &f64)| {
            // Rounding must not make it negative.
            let between = (squared - sum * sum / self.tokens).max(0.0);
            (spread + between) / self.tokens
        };
        columns.map(of).collect()
    }
}

impl MergedStatistics for ColumnMoments {
    fn part(&self) -> Box<dyn SamplePart> {
        Self::part_of(self.sums.len())
    }

    fn merge(&mut self, numbers: &[f64]) {
        let width = self.sums.len();
        let (squares, rest) = numbers.split_at(width);
        let (sums, tokens) = rest.split_at(width);
        self.squares.merge(squares);
        let tokens = tokens[0];
        for (at, (square, sum)) in squares.iter().zip(sums).enumerate() {
            self.sums[at] += sum;
            // tokens · (mean of squares − square of mean); rounding must not make it negative.
            self.squared_sums[at] += sum * sum / tokens;
            self.spreads[at] += (square - sum * sum / tokens).max(0.0);
        }
        self.samples += 1;
        self.tokens += tokens;
    }

    fn permute(&mut self, order: &[usize]) {
        self.squares.permute(order);
        permute::permute(&mut self.sums, order);
        permute::permute(&mut self.spreads, order);
        permute::permute(&mut self.squared_sums, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_by_hand() {
        let mut moments = ColumnMoments::new(2);
        for rows in [&[1.0f32, 2.0, 3.0, 2.0][..], &[5.0, 0.0, 5.0, 4.0, 2.0, 2.0]] {
            let mut part = moments.part();
            part.add_rows(rows);
            moments.merge(part.numbers());
        }
        // Sums 4 and 12; 4 and 6. Variances 1 and 2 in column 0, 0 and 8/3 in column 1, of 2 and 3 tokens.
        assert_eq!(moments.mean(), [8.0, 5.0]);
        assert_eq!(moments.variance(), [8.0 / 5.0, 8.0 / 5.0]);
        assert_eq!(moments.squares().mean(), [32.0, 14.0]);
        // 1, 3, 5, 5, 2: squares 64, mean 16/5. 2, 2, 0, 4, 2: squares 28, mean 2.
        let all = moments.variance_of_all();
        assert!(
            (all[0] - (64.0 / 5.0 - 256.0 / 25.0)).abs() < 1e-12
                && (all[1] - 8.0 / 5.0).abs() < 1e-12
        );
    }
}
