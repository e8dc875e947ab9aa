//! From scores to a mask: per row, per group of M, or over a whole matrix.
//!
//! Rows are scored one at a time in a buffer of one row per thread: no f32 copy of a matrix, of its scores or of an order
//! ever exists. Selection is by value: finding the k lowest needs no order among them.

use anyhow::Result;
use rayon::prelude::*;

use super::mask::{Mask, RowBits};
use super::method::{Request, ScoreTime, check_groups};
use super::target::Pattern;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;
use crate::linalg::buffer_pool::BufferPool;
use crate::linalg::select::{self as lowest, Radix};

/// A method that is only a score: the lowest go first.
pub trait ScoreMethod: Sync {
    /// Turns one row of |W| into scores in place; all inputs are finite, and so must be the scores, which must be ≥ 0.
    ///
    /// # Arguments
    /// * `magnitudes`: |W_i| `[in_features]`, widened to f32
    /// * `columns`: what [`ScoreMethod::column_factors`] made
    fn score_row(&self, magnitudes: &mut [f32], columns: &[f32]);

    /// One factor per input column, made once per matrix.
    fn column_factors(&self, _statistics: &[f32]) -> Vec<f32> {
        Vec::new()
    }

    /// Whether an unstructured mask compares weights within a row or over the whole matrix.
    fn compares(&self) -> Compares;
}

/// What competes with what in an unstructured mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compares {
    /// `int(in_features · ratio)` go from every row.
    Rows,
    /// Everything up to the score at position `int(elements · ratio)` of the ascending order goes, ties included: at least one
    /// weight more than the ratio says. The original's rule for magnitude.
    WholeMatrix,
}

/// The mask of a scoring method. A ratio of 0 prunes nothing.
///
/// # Errors
/// See [`super::PruningMethod::prune`].
pub fn mask_by_score(
    method: &dyn ScoreMethod,
    weight: &StoredMatrix,
    request: &Request<'_>,
) -> Result<Mask> {
    let (rows, columns) = (weight.rows(), weight.columns());
    if request.target.ratio == 0.0 && request.target.pattern == Pattern::Unstructured {
        return Ok(Mask::none(rows, columns));
    }
    let scorer = Scorer::new(method, weight, request)?;
    match (request.target.pattern, method.compares()) {
        (Pattern::NOfM { n, m }, _) => {
            check_groups(request.name, columns, n, m)?;
            Mask::by_rows(rows, columns, RowScratch::default, |scratch, row, bits| {
                scorer.score(row, &mut scratch.scores)?;
                let RowScratch {
                    scores,
                    keys,
                    is_pruned,
                } = scratch;
                lowest::lowest_of_groups(scores, m, n, keys, is_pruned);
                bits.set_where(|column| is_pruned[column]);
                Ok(())
            })
        }
        (Pattern::Unstructured, Compares::Rows) => {
            let count = request.target.count_of(columns);
            Mask::by_rows(rows, columns, RowScratch::default, |scratch, row, bits| {
                scorer.score(row, &mut scratch.scores)?;
                set_lowest(&scratch.scores, count, &mut scratch.keys, bits);
                Ok(())
            })
        }
        (Pattern::Unstructured, Compares::WholeMatrix) => {
            let threshold = scorer.value_at(request.target.count_of(rows * columns) as u64)?;
            Mask::by_rows(rows, columns, RowScratch::default, |scratch, row, bits| {
                scorer.score(row, &mut scratch.scores)?;
                let scores = scratch.scores.as_slice();
                bits.set_where(|column| scores[column] <= threshold);
                Ok(())
            })
        }
    }
}

/// Prunes the `count` lowest of a row's scores, of equal ones the lower columns.
fn set_lowest(scores: &[f32], count: usize, scratch: &mut Vec<u32>, bits: &mut RowBits<'_>) {
    if count == 0 {
        return;
    }
    let found = lowest::find_lowest(scores, count.min(scores.len()), scratch);
    let threshold = found.threshold;
    if found.takes_all_ties {
        bits.set_where(|column| lowest::key(scores[column]) <= threshold);
        return;
    }
    let mut ties = found.ties;
    bits.set_where(|column| {
        let key = lowest::key(scores[column]);
        let is_tie = key == threshold && ties > 0;
        ties -= usize::from(is_tie);
        key < threshold || is_tie
    });
}

/// Buffers one task reuses between rows.
#[derive(Debug, Default)]
pub(super) struct RowScratch {
    pub(super) scores: Vec<f32>,
    pub(super) keys: Vec<u32>,
    pub(super) is_pruned: Vec<bool>,
}

/// Scores the rows of one matrix.
pub(super) struct Scorer<'a> {
    method: &'a dyn ScoreMethod,
    weight: &'a StoredMatrix,
    factors: Vec<f32>,
    name: &'a str,
    time: Option<&'a ScoreTime>,
}

impl<'a> Scorer<'a> {
    /// Checks the statistics and prepares the column factors.
    pub(super) fn new(
        method: &'a dyn ScoreMethod,
        weight: &'a StoredMatrix,
        request: &Request<'a>,
    ) -> Result<Self> {
        if let Some(column) = request
            .statistics
            .iter()
            .position(|value| !value.is_finite())
        {
            return Err(Failure::new(format!(
                "the input of `{}` is not finite: column {column} has a mean square of {}",
                request.name, request.statistics[column]
            ))
            .hint("the checkpoint or its arithmetic overflows; check it with `prune eval --model DIR`")
            .into());
        }
        Ok(Self {
            method,
            weight,
            factors: method.column_factors(request.statistics),
            name: request.name,
            time: request.score_time,
        })
    }

    /// Writes the scores of a row into `scores`.
    pub(super) fn score(&self, row: usize, scores: &mut Vec<f32>) -> Result<()> {
        match self.time {
            Some(time) => time.measure(|| self.score_now(row, scores)),
            None => self.score_now(row, scores),
        }
    }

    fn score_now(&self, row: usize, scores: &mut Vec<f32>) -> Result<()> {
        scores.resize(self.weight.columns(), 0.0);
        self.weight.widen_rows(row, scores);
        scores.iter_mut().for_each(|value| *value = value.abs());
        if let Some(column) = lowest::first_not_finite(scores) {
            return Err(self.not_finite("weight", row, column));
        }
        self.method.score_row(scores, &self.factors);
        match lowest::first_not_finite(scores) {
            Some(column) => Err(self.not_finite("score", row, column)),
            None => Ok(()),
        }
    }

    fn not_finite(&self, what: &str, row: usize, column: usize) -> anyhow::Error {
        Failure::new(format!(
            "`{}` has a {what} that is NaN or infinite at row {row}, column {column}",
            self.name
        ))
        .hint("the checkpoint is damaged; copy or download it again")
        .into()
    }

    /// The score at `position` of the ascending order of the whole matrix, exactly, in two passes over the weights.
    fn value_at(&self, position: u64) -> Result<f32> {
        let (upper, rest) = self
            .count(None)?
            .narrow(position)
            .ok_or_else(|| Failure::new(format!("`{}` has no {position} weights", self.name)))?;
        let value = self.count(Some(upper))?.value(rest);
        value.ok_or_else(|| {
            Failure::new(format!(
                "the scores of `{}` changed between two passes",
                self.name
            ))
            .into()
        })
    }

    /// One pass over the matrix; a task takes a counter that no other works with, so that there are never more than threads.
    fn count(&self, upper: Option<u16>) -> Result<Radix> {
        const ROWS_PER_TASK: usize = 256;
        let rows = self.weight.rows();
        let counters = BufferPool::new();
        let new = || (Radix::new(upper), Vec::new());
        (0..rows)
            .into_par_iter()
            .step_by(ROWS_PER_TASK)
            .try_for_each(|first| {
                counters.lend(new, |(counter, scores)| -> Result<()> {
                    for row in first..rows.min(first + ROWS_PER_TASK) {
                        self.score(row, scores)?;
                        counter.feed(scores);
                    }
                    Ok(())
                })
            })?;
        let counters = counters
            .into_inner()
            .into_iter()
            .map(|(counter, _)| counter);
        let all = counters.reduce(|one, other| one.merge(&other));
        Ok(all.unwrap_or_else(|| Radix::new(upper)))
    }
}
