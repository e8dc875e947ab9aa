//! From scores to a mask: per row, per group of M, or over a whole matrix.
//!
//! Every thread scores row by row in a buffer of a single row: no f32 copy of a matrix, of its scores or of an order
//! ever exists. Selection is by value: finding the k lowest needs no order among them.

use anyhow::Result;
use rayon::prelude::*;

use super::mask::{Mask, RowBits};
use super::method::{Request, Score};
use super::target::Pattern;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;
use crate::linalg::buffer_pool::BufferPool;
use crate::linalg::select::{self as lowest, Radix};

/// The mask of [`super::SparsityRule::FromRows`]: the lowest scores of every row, ties to the lower column. N:M patterns take the N
/// lowest of each group instead.
///
/// # Errors
/// Fails on weights and scores that are not finite, naming matrix, row and column.
pub fn lowest_of_rows(
    weight: &StoredMatrix,
    request: &Request<'_>,
    score: &Score<'_>,
) -> Result<Mask> {
    let scorer = Scorer::new(weight, request, score);
    if let Pattern::NOfM { n, m } = request.target.pattern {
        return scorer.lowest_of_groups(n, m);
    }
    let count = request.target.count_of(weight.columns());
    scorer.mask(|RowScratch { scores, keys, .. }, bits| set_lowest(scores, count, keys, bits))
}

/// The mask of [`super::SparsityRule::FromMatrix`]: all scores of the matrix up to its threshold. N:M patterns take the N lowest of each
/// group instead.
pub fn lowest_of_matrix(
    weight: &StoredMatrix,
    request: &Request<'_>,
    score: &Score<'_>,
) -> Result<Mask> {
    let scorer = Scorer::new(weight, request, score);
    if let Pattern::NOfM { n, m } = request.target.pattern {
        return scorer.lowest_of_groups(n, m);
    }
    let position = request.target.count_of(weight.elements());
    let threshold = scorer.value_at(position as u64)?;
    scorer.mask(|RowScratch { scores, .. }, bits| {
        bits.set_where(|column| scores[column] <= threshold);
    })
}

/// Prunes the `count` lowest of a row's scores, on ties the lower columns.
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

/// The remedy of weights that are not finite.
pub(super) const DAMAGED: &str = "the checkpoint is damaged, or its training diverged: download it again or take an earlier state of the training, and repeat the command with --force; `prune inspect DIR` lists such weights";

/// The error of a weight or score that is not finite.
pub(super) fn not_finite(name: &str, what: &str, row: usize, column: usize) -> anyhow::Error {
    Failure::new(format!(
        "`{name}` has a {what} that is NaN or infinite at row {row}, column {column}"
    ))
    .hint(DAMAGED)
    .lasting()
    .into()
}

/// Buffers that a task reuses between rows.
#[derive(Debug, Default)]
pub(super) struct RowScratch {
    pub(super) scores: Vec<f32>,
    keys: Vec<u32>,
    is_pruned: Vec<bool>,
}

/// Scores the rows of a matrix.
pub(super) struct Scorer<'a> {
    weight: &'a StoredMatrix,
    name: &'a str,
    /// The first row of the weight in its matrix.
    first: usize,
    score: &'a Score<'a>,
}

impl<'a> Scorer<'a> {
    pub(super) fn new(
        weight: &'a StoredMatrix,
        request: &Request<'a>,
        score: &'a Score<'a>,
    ) -> Self {
        let (name, first) = (request.name, request.rows_of(weight).first);
        Self { weight, name, first, score }
    }

    /// Makes a mask row by row: `select` sets the bits of a row from its scores.
    pub(super) fn mask(
        &self,
        select: impl Fn(&mut RowScratch, &mut RowBits<'_>) + Sync + Send,
    ) -> Result<Mask> {
        let (rows, columns) = (self.weight.rows(), self.weight.columns());
        Mask::by_rows(rows, columns, RowScratch::default, |scratch, row, bits| {
            self.score(row, &mut scratch.scores)?;
            select(scratch, bits);
            Ok(())
        })
    }

    /// The n lowest of each aligned group of m, ties to the lower column.
    fn lowest_of_groups(&self, n: usize, m: usize) -> Result<Mask> {
        self.mask(|scratch, bits| {
            let RowScratch { scores, keys, is_pruned } = scratch;
            lowest::lowest_of_groups(scores, m, n, keys, is_pruned);
            bits.set_where(|column| is_pruned[column]);
        })
    }

    /// Writes the scores of a row into `scores`.
    pub(super) fn score(&self, row: usize, scores: &mut Vec<f32>) -> Result<()> {
        scores.resize(self.weight.columns(), 0.0);
        self.weight.widen_rows(row, scores);
        scores.iter_mut().for_each(|value| *value = value.abs());
        if let Some(column) = lowest::first_not_finite(scores) {
            return Err(not_finite(self.name, "weight", self.first + row, column));
        }
        (self.score)(scores);
        match lowest::first_not_finite(scores) {
            Some(column) => Err(not_finite(self.name, "score", self.first + row, column)),
            None => Ok(()),
        }
    }

    /// The score at `position` of the ascending order of the whole matrix, exactly, in two passes over the weights.
    fn value_at(&self, position: u64) -> Result<f32> {
        let (upper, rest) = self
            .count(None)?
            .narrow(position)
            .ok_or_else(|| Failure::new(format!("`{}` has no {position} weights", self.name)))?;
        let value = self.count(Some(upper))?.value(rest);
        value.ok_or_else(|| {
            Failure::new(format!("the scores of `{}` changed between two passes", self.name)).into()
        })
    }

    /// A pass over the matrix. A task takes an idle counter, so there are never more counters than threads.
    fn count(&self, upper: Option<u16>) -> Result<Radix> {
        const ROWS_PER_TASK: usize = 256;
        let rows = self.weight.rows();
        let counters = BufferPool::new();
        let new = || (Radix::new(upper), Vec::new());
        (0..rows).into_par_iter().step_by(ROWS_PER_TASK).try_for_each(|first| {
            counters.lend(new, |(counter, scores)| -> Result<()> {
                for row in first..rows.min(first + ROWS_PER_TASK) {
                    self.score(row, scores)?;
                    counter.feed(scores);
                }
                Ok(())
            })
        })?;
        let counters = counters.into_inner().into_iter().map(|(counter, _)| counter);
        let all = counters.reduce(|one, other| one.merge(&other));
        Ok(all.unwrap_or_else(|| Radix::new(upper)))
    }
}
