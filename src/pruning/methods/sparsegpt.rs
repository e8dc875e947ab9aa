//! SparseGPT: weights are removed block of columns by block of columns, and the weights after each column make up for its loss.
//!
//! W `[out_features, in_features]` in f32; H = (2/n)·XᵀX + λI `[in_features, in_features]` over n samples (`input_gram.rs`), λ = percdamp
//! times the mean of the diagonal; U `[in_features, in_features]` upper triangular with H⁻¹ = UᵀU. For each block of columns in turn:
//!
//! ```text
//! score_ij = W_ij² / U_jj²; the lowest scores of the block are removed
//! for each column j of the block:  e_i = W_ij / U_jj where W_ij is removed, else 0
//!                                  W_ik ← W_ik − e_i · U_jk    for all k > j
//! ```
//!
//! Frantar and Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", arXiv:2301.00774, algorithm 1;
//! reference: `SparseGPT.fasterprune` in IST-DASLab/sparsegpt and locuslab/wanda. As there, a block of all rows loses every score up to
//! and including the score at position `int(weights of the block · ratio)`; N:M groups are chosen when their first column is reached; a
//! column that was never active has a diagonal of 1 in H, and its weights are 0 before the first block. A zero of the source has score 0
//! and is removed, whatever the updates make of it.
//!
//! Differences: U comes from one factorisation (`linalg/factor.rs`), not from an inverse. Where H is not positive definite in f32, λ grows
//! tenfold with a warning. Rows are independent inside a block, so threads share the rows. A block's updates reach the columns after
//! it as one product. Weights stay in f32 until the end and are rounded once.

use anyhow::Result;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;
use crate::linalg::factor::{self, NotPositive, inverse_factor};
use crate::linalg::gram::GramMatrix;
use crate::linalg::update::Update;
use crate::pruning::mask::Mask;
use crate::pruning::method::{PruningMethod, Request, SparsityRule};
use crate::pruning::options::{MethodOption, MethodOptions, OptionValue};
use crate::pruning::rows::OwnRows;
use crate::pruning::solvers::dense::{mask_of, score_at, widened, zeros_of};
use crate::pruning::statistics::StatisticsKind;
use crate::pruning::statistics::input_gram::{InputGram, InputGramKind};
use crate::pruning::target::{Pattern, Target};

/// Second-order pruning with updates of the weights that stay.
#[derive(Debug, Clone, Copy)]
pub struct SparseGpt;

/// Damping of the Gram matrix; the default is the reference's.
pub const PERCDAMP: MethodOption = MethodOption {
    name: "percdamp",
    value_name: "FRACTION",
    help: "Damping of sparsegpt, as a fraction of the mean square of the inputs",
    default: OptionValue::Number(0.01),
    least: 0,
};

/// Columns of a block; the default is the reference's.
pub const BLOCKSIZE: MethodOption = MethodOption {
    name: "blocksize",
    value_name: "COLUMNS",
    help: "Columns that sparsegpt prunes together",
    default: OptionValue::Count(128),
    least: 1,
};

/// Growths of λ before a matrix is given up: from 0.01 to 10,000 times the mean of the diagonal.
const GROWTHS: usize = 6;

/// U of an input, and the columns that were never active.
struct InverseFactor {
    u: Vec<f32>,
    is_dead: Vec<bool>,
}

impl PruningMethod for SparseGpt {
    fn name(&self) -> &'static str {
        "sparsegpt"
    }

    fn summary(&self) -> &'static str {
        "blocks of columns; the weights behind them make up for the loss"
    }

    fn removes(&self, options: &MethodOptions) -> SparsityRule {
        SparsityRule::FromBlocks { columns: options.count(&BLOCKSIZE) }
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&InputGramKind)
    }

    fn can_share_rows(&self) -> bool {
        true
    }

    fn searches(&self, in_features: usize, options: &MethodOptions) -> usize {
        in_features.div_ceil(options.count(&BLOCKSIZE))
    }

    fn options(&self) -> &'static [MethodOption] {
        &[PERCDAMP, BLOCKSIZE]
    }

    fn changes_weights(&self) -> bool {
        true
    }

    fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize {
        // U, the weights in f32, their support and the zeros of the source.
        let weights = out_features.saturating_mul(in_features);
        GramMatrix::square_bytes(in_features)
            + factor::working_bytes::<f32>(in_features)
            + ByteSize::of(weights, size_of::<f32>() + 1)
    }

    fn operations(&self, out_features: usize, in_features: usize) -> f64 {
        // The factor of the inverse, which is counted for each of the matrices that share it, and the updates.
        let (rows, n) = (out_features as f64, in_features as f64);
        n * n * (n * 2.0 / 3.0 + rows)
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        request.mean_squares()?;
        let block = request.options.count(&BLOCKSIZE);
        if let Pattern::NOfM { m, .. } = request.target.pattern
            && !block.is_multiple_of(m)
        {
            return Err(Failure::usage(format!(
                "--blocksize {block} does not hold whole groups of {m}"
            ))
            .hint(format!("use a multiple of {m}, like --blocksize {}", 32 * m))
            .into());
        }
        let statistics = request.statistics_as::<InputGram>()?;
        let factor = statistics.prepared(|statistics| InverseFactor::of(statistics, request))?;
        let mut values = widened(weight, request)?;
        let (rows, columns) = (weight.rows(), weight.columns());
        let (is_zero, own) = (zeros_of(&values), request.rows_of(weight));
        values.par_chunks_mut(columns).for_each(|row| {
            for (value, is_dead) in row.iter_mut().zip(&factor.is_dead) {
                if *is_dead {
                    *value = 0.0;
                }
            }
        });
        let mut is_kept = vec![true; rows * columns];
        let mut update = Update::default();
        for first in (0..columns).step_by(block) {
            let last = columns.min(first + block);
            let block = ColumnBlock::new(&factor.u, columns, first, last);
            let errors = block.prune(&mut values, &mut is_kept, &is_zero, request.target, own)?;
            let behind = &factor.u[first * columns + last..];
            update.subtract_product(&mut values, columns, last, &errors, behind);
        }
        weight.set_f32(&values);
        mask_of(&is_kept, rows, columns)
    }
}

impl InverseFactor {
    /// Factors H of an input.
    ///
    /// # Errors
    /// Fails where H is not positive definite even with the largest λ.
    fn of(statistics: &InputGram, request: &Request<'_>) -> Result<Self> {
        let (gram, n) = (statistics.gram(), statistics.gram().width());
        let scale = 2.0 / statistics.samples().max(1) as f32;
        let mut diagonal = gram.diagonal();
        diagonal.iter_mut().for_each(|value| *value *= scale);
        let is_dead: Vec<bool> = diagonal.iter().map(|value| *value == 0.0).collect();
        for (value, is_dead) in diagonal.iter_mut().zip(&is_dead) {
            if *is_dead {
                *value = 1.0;
            }
        }
        let mean = diagonal.iter().map(|value| f64::from(*value)).sum::<f64>() / n.max(1) as f64;
        let mut percdamp = request.options.number(&PERCDAMP);
        for _ in 0..=GROWTHS {
            let mut h = gram.square();
            h.par_iter_mut().for_each(|value| *value *= scale);
            let damp = (percdamp * mean) as f32;
            for (at, value) in diagonal.iter().enumerate() {
                h[at * (n + 1)] = value + damp;
            }
            match inverse_factor(&mut h, n) {
                Ok(()) => return Ok(Self { u: h, is_dead }),
                Err(NotPositive) => {
                    let next = if percdamp > 0.0 { percdamp * 10.0 } else { 1e-4 };
                    (request.warn)(format!(
                        "the inputs of `{}` are too alike for a damping of {percdamp}: it is raised to {next}",
                        request.name
                    ));
                    percdamp = next;
                }
            }
        }
        Err(Failure::new(format!(
            "the inputs of `{}` have no inverse, even with a damping of {percdamp} times their mean square",
            request.name
        ))
        .hint("check the checkpoint with `prune eval --model DIR`, or use more calibration samples")
        .into())
    }
}

/// A block of columns.
struct ColumnBlock {
    first: usize,
    last: usize,
    /// All columns of the matrix.
    columns: usize,
    /// U within the block, `[columns of the block, columns of the block]`.
    u: Vec<f32>,
    /// U_jj², by column of the block.
    squares: Vec<f32>,
}

impl ColumnBlock {
    fn new(u: &[f32], columns: usize, first: usize, last: usize) -> Self {
        let width = last - first;
        let mut own = Vec::with_capacity(width * width);
        for row in first..last {
            own.extend_from_slice(&u[row * columns + first..row * columns + last]);
        }
        let squares = (0..width).map(|at| own[at * (width + 1)]);
        Self { first, last, columns, squares: squares.map(|value| value * value).collect(), u: own }
    }

    fn width(&self) -> usize {
        self.last - self.first
    }

    /// Prunes the block in the own rows, and returns the errors e `[own rows, columns of the block]`.
    ///
    /// # Arguments
    /// * `is_zero`: the zeros of the source, whose scores are 0; empty without a zero
    fn prune(
        &self,
        values: &mut [f32],
        is_kept: &mut [bool],
        is_zero: &[bool],
        target: Target,
        own: OwnRows<'_>,
    ) -> Result<Vec<f32>> {
        let (columns, width) = (self.columns, self.width());
        let rows = values.len() / columns;
        let pattern = target.pattern;
        let threshold = match pattern {
            Pattern::Unstructured => {
                let position = target.count_of(own.all * width);
                self.score_at(values, is_zero, own, position as u64)?
            }
            Pattern::NOfM { .. } => None,
        };
        let mut errors = vec![0.0f32; rows * width];
        values
            .par_chunks_mut(columns)
            .zip(is_kept.par_chunks_mut(columns))
            .zip(errors.par_chunks_mut(width))
            .enumerate()
            .for_each(|(row, ((values, is_kept), errors))| {
                let row = RowOfBlock {
                    block: self,
                    values: &mut values[self.first..self.last],
                    is_kept: &mut is_kept[self.first..self.last],
                    is_zero: self.of_row(is_zero, row),
                    errors,
                    threshold,
                    pattern,
                };
                Arch::new().dispatch(row);
            });
        Ok(errors)
    }

    /// The flags of a row in the block; empty if `flags` is empty.
    fn of_row<'f>(&self, flags: &'f [bool], row: usize) -> &'f [bool] {
        let first = row * self.columns;
        let of_block = flags.get(first + self.first..first + self.last);
        of_block.unwrap_or_default()
    }

    /// The score at a position of the ascending order of the block's scores.
    fn score_at(
        &self,
        values: &[f32],
        is_zero: &[bool],
        own: OwnRows<'_>,
        position: u64,
    ) -> Result<Option<f32>> {
        score_at(values, self.columns, own, position, |row, values, scores| {
            let weights = values[self.first..self.last].iter().zip(&self.squares);
            scores.clear();
            scores.extend(weights.map(|(weight, square)| weight * weight / square));
            for (score, is_zero) in scores.iter_mut().zip(self.of_row(is_zero, row)) {
                *score = if *is_zero { 0.0 } else { *score };
            }
        })
    }
}

/// The weights of a row in a block.
struct RowOfBlock<'a> {
    block: &'a ColumnBlock,
    values: &'a mut [f32],
    is_kept: &'a mut [bool],
    is_zero: &'a [bool],
    errors: &'a mut [f32],
    threshold: Option<f32>,
    pattern: Pattern,
}

impl WithSimd for RowOfBlock<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let ColumnBlock { u, squares, .. } = self.block;
        let (values, is_kept) = (self.values, self.is_kept);
        let width = values.len();
        if let Some(threshold) = self.threshold {
            for ((is_kept, weight), square) in is_kept.iter_mut().zip(&*values).zip(squares) {
                *is_kept = weight * weight / square > threshold;
            }
            for (is_kept, is_zero) in is_kept.iter_mut().zip(self.is_zero) {
                *is_kept &= !is_zero;
            }
        }
        for column in 0..width {
            if let Pattern::NOfM { n, m } = self.pattern
                && column % m == 0
            {
                let group = column..column + m;
                keep_of_group(
                    &values[group.clone()],
                    &squares[group.clone()],
                    self.is_zero.get(group.clone()).unwrap_or_default(),
                    n,
                    &mut is_kept[group],
                );
            }
            if is_kept[column] {
                continue;
            }
            let error = values[column] / u[column * (width + 1)];
            self.errors[column] = error;
            let behind = &u[column * width + column + 1..(column + 1) * width];
            for (value, u) in values[column + 1..].iter_mut().zip(behind) {
                *value -= error * u;
            }
            values[column] = 0.0;
        }
    }
}

/// Marks all of a group but the `n` lowest scores and the zeros of the source, whose scores are 0. Of equal scores the lower columns go.
#[inline(always)]
fn keep_of_group(
    values: &[f32],
    squares: &[f32],
    is_zero: &[bool],
    n: usize,
    is_kept: &mut [bool],
) {
    let is_zero = |at: usize| is_zero.get(at).is_some_and(|is_zero| *is_zero);
    let score = |at: usize| match is_zero(at) {
        true => 0.0,
        false => values[at] * values[at] / squares[at],
    };
    for (at, is_kept) in is_kept.iter_mut().enumerate() {
        let own = score(at);
        let before = (0..values.len())
            .filter(|&other| score(other) < own || (score(other) == own && other < at));
        *is_kept = before.count() >= n && !is_zero(at);
    }
}
