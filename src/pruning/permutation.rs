//! Channel permutation for N:M patterns: an order of the input columns in which groups of M keep more importance.
//!
//! kept(σ) = Σ_rows Σ_groups of the K = M − N highest scores among the M columns that σ puts into the group; score `[out_features,
//! in_features]` is the method's own. `order[new] = old`. Zhang, Bai, Lin, Zhao, Hou, Cannistraci 2024, "Plug-and-Play: An Efficient
//! Post-training Pruning Method for Large Language Models", ICLR 2024, §3.2; reference: `prune_ria` with `reallocation` and `lsa` in
//! biomedical-cybernetics/Relative-importance-and-activation-pruning. Two steps:
//!
//! 1. *Deal.* Columns are sorted by the sum of their scores and dealt to the groups in M equal parts, in alternating direction.
//! 2. *Assign.* For every place p of a group: the columns at p are taken out of all groups and assigned anew, so that kept is the largest.
//!    Group g keeps with column c: a constant + Σ_rows max(t_g, x_c), t_g the K-th highest score of g without its column at p. This is
//!    a linear sum assignment (`linalg/assignment.rs`).
//!
//! Gains are added in f32 over `ROWS` rows and in f64 beyond, in fixed parts, so results do not depend on threads. Scores are made anew
//! for every place and part of the rows: no copy of all scores exists. Where an order keeps no more than the columns as they are, the
//! columns stay as they are; the reference has no such check. Ties in a sort fall to the lower column.

use anyhow::Result;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::method::{Request, Score};
use super::select::Scorer;
use crate::bytes::ByteSize;
use crate::linalg::StoredMatrix;
use crate::linalg::assignment::assign;

/// Rows of a part.
const ROWS: usize = 128;

/// Groups whose gains a task adds up.
const GROUPS_PER_TASK: usize = 8;

/// Columns whose scores of a part stay in the first-level cache.
const COLUMNS_AT_ONCE: usize = 32;

/// Partial sums of a gain.
const LANES: usize = 16;

/// An order of columns, and its worth.
#[derive(Debug, Clone, PartialEq)]
pub struct ChannelOrder {
    /// `[in_features]`: the old column at every new place.
    pub order: Vec<usize>,
    /// Importance that the pattern keeps in the old order.
    pub kept_before: f64,
    /// Importance that it keeps in this order.
    pub kept_after: f64,
}

/// Bytes of the search for a matrix with this many columns, in groups of `m`.
pub fn working_bytes(in_features: usize, m: usize) -> ByteSize {
    let groups = in_features / m.max(1);
    let rows = ByteSize::of((in_features + 2 * groups) * ROWS, size_of::<f32>());
    let gains = ByteSize::of(groups.saturating_mul(groups), size_of::<f64>());
    // Orders, the state of the assignment, and sums of columns, also the sums that a score needs.
    let per_column = 32 * size_of::<f64>();
    rows + gains + ByteSize::of(in_features, per_column)
}

/// Chooses the order of the columns of a matrix for a pattern: the best of the present, the dealt and the assigned order.
///
/// # Errors
/// Fails on weights and scores that are not finite, naming matrix, row and column.
pub fn choose(
    weight: &StoredMatrix,
    request: &Request<'_>,
    score: &Score<'_>,
    (n, m): (usize, usize),
) -> Result<ChannelOrder> {
    let search = ChannelSearch::new(weight, request, score, (n, m));
    let present: Vec<usize> = (0..weight.columns()).collect();
    let kept_before = search.kept(&present)?;
    let dealt = search.deal()?;
    let assigned = search.assign(&dealt)?;
    let mut best = ChannelOrder { order: present, kept_before, kept_after: kept_before };
    for order in [dealt, assigned] {
        let kept_after = search.kept(&order)?;
        if kept_after > best.kept_after {
            best = ChannelOrder { order, kept_after, ..best };
        }
    }
    Ok(best)
}

/// The search for an order of the columns of a matrix.
pub struct ChannelSearch<'a> {
    weight: &'a StoredMatrix,
    scorer: Scorer<'a>,
    /// Weights kept per group.
    kept: usize,
    /// Columns per group, which divide the columns.
    m: usize,
}

impl<'a> ChannelSearch<'a> {
    /// A search for a pattern that prunes `n` of `m`.
    pub fn new(
        weight: &'a StoredMatrix,
        request: &Request<'a>,
        score: &'a Score<'a>,
        (n, m): (usize, usize),
    ) -> Self {
        Self { weight, scorer: Scorer::new(weight, request, score), kept: m.saturating_sub(n), m }
    }

    /// The importance that the pattern keeps in an order.
    ///
    /// # Errors
    /// Fails on weights and scores that are not finite.
    pub fn kept(&self, order: &[usize]) -> Result<f64> {
        let sums = self.of_parts(|scores| {
            let mut group = Vec::with_capacity(self.m);
            let mut sum = 0.0;
            for columns in order.chunks_exact(self.m) {
                group.clear();
                group.extend(columns.iter().map(|&column| scores[column]));
                group.sort_unstable_by(|a, b| b.total_cmp(a));
                sum += group[..self.kept].iter().map(|&score| f64::from(score)).sum::<f64>();
            }
            sum
        })?;
        Ok(sums.into_iter().sum())
    }

    /// A number per part of the rows: the sum of what `of` returns for each row.
    fn of_parts(&self, of: impl Fn(&[f32]) -> f64 + Sync) -> Result<Vec<f64>> {
        let rows = self.weight.rows();
        let firsts = (0..rows).into_par_iter().step_by(ROWS);
        let sums = firsts.map(|first| {
            let (mut scores, mut sum) = (Vec::new(), 0.0);
            for row in first..rows.min(first + ROWS) {
                self.scorer.score(row, &mut scores)?;
                sum += of(&scores);
            }
            Ok(sum)
        });
        sums.collect()
    }

    /// The first step: columns dealt to groups by the sums of their scores.
    ///
    /// # Errors
    /// Fails on weights and scores that are not finite.
    pub fn deal(&self) -> Result<Vec<usize>> {
        let columns = self.weight.columns();
        let mut sums = vec![0.0f64; columns];
        let mut part = Vec::new();
        for first in (0..self.weight.rows()).step_by(ROWS) {
            self.score_part(first, &mut part)?;
            for row in part.chunks_exact(columns.max(1)) {
                for (sum, &score) in sums.iter_mut().zip(row) {
                    *sum += f64::from(score);
                }
            }
        }
        let mut ascending: Vec<usize> = (0..columns).collect();
        ascending.sort_by(|&a, &b| sums[a].total_cmp(&sums[b]));
        let groups = columns / self.m;
        let mut order = vec![0; columns];
        for (place, part) in ascending.chunks_exact(groups.max(1)).enumerate() {
            for (at, &column) in part.iter().enumerate() {
                let group = match place % 2 {
                    0 => at,
                    _ => groups - 1 - at,
                };
                order[group * self.m + place] = column;
            }
        }
        Ok(order)
    }

    /// The second step: for every place of a group, the columns there are assigned anew.
    ///
    /// # Errors
    /// Fails on weights and scores that are not finite.
    pub fn assign(&self, order: &[usize]) -> Result<Vec<usize>> {
        let mut order = order.to_vec();
        let groups = order.len() / self.m;
        let mut gains = vec![0.0f64; groups * groups];
        for place in 0..self.m {
            self.gains(&order, place, &mut gains)?;
            // Sums of scores near the largest f32 overflow; such a place is left as it is.
            if !gains.iter().all(|gain| gain.is_finite()) {
                continue;
            }
            let old: Vec<usize> = order.iter().skip(place).step_by(self.m).copied().collect();
            for (group, from) in assign(&gains, groups).into_iter().enumerate() {
                order[group * self.m + place] = old[from];
            }
        }
        Ok(order)
    }

    /// Gains `[groups, groups]`: what group g keeps with the column of group c at `place`, less a constant of g.
    fn gains(&self, order: &[usize], place: usize, gains: &mut [f64]) -> Result<()> {
        let (columns, m) = (order.len(), self.m);
        let groups = columns / m;
        gains.fill(0.0);
        let mut scores = Vec::new();
        let (mut own, mut limits) = (vec![0.0f32; groups * ROWS], vec![0.0f32; groups * ROWS]);
        for first in (0..self.weight.rows()).step_by(ROWS) {
            self.score_part(first, &mut scores)?;
            // Rows that the last part lacks score 0 in every column, and add 0 to every gain.
            own.par_chunks_mut(ROWS)
                .zip(limits.par_chunks_mut(ROWS))
                .zip(order.par_chunks_exact(m))
                .for_each_init(Vec::new, |others, ((own, limits), group)| {
                    own.fill(0.0);
                    limits.fill(0.0);
                    let rows = scores.chunks_exact(columns);
                    for (row, (own, limit)) in rows.zip(own.iter_mut().zip(limits)) {
                        *own = row[group[place]];
                        others.clear();
                        let places = group.iter().enumerate().filter(|(at, _)| *at != place);
                        others.extend(places.map(|(_, &column)| row[column]));
                        others.sort_unstable_by(|a: &f32, b: &f32| b.total_cmp(a));
                        *limit = others[self.kept - 1];
                    }
                });
            let tile = GROUPS_PER_TASK;
            gains.par_chunks_mut(groups * tile).zip(limits.par_chunks(ROWS * tile)).for_each(
                |(gains, limits)| {
                    Arch::new().dispatch(AddLarger { limits, own: &own, gains });
                },
            );
        }
        Ok(())
    }

    /// The scores of a part of the rows, `[rows, in_features]`.
    fn score_part(&self, first: usize, scores: &mut Vec<f32>) -> Result<()> {
        let columns = self.weight.columns();
        let rows = ROWS.min(self.weight.rows() - first);
        scores.resize(rows * columns, 0.0);
        scores.par_chunks_mut(columns.max(1)).enumerate().try_for_each_init(
            Vec::new,
            |buffer, (at, row)| {
                self.scorer.score(first + at, buffer)?;
                row.copy_from_slice(buffer);
                Ok(())
            },
        )
    }
}

/// gains_gc ← gains_gc + Σ_rows max(limits_g, own_c), for some groups g and all columns c.
struct AddLarger<'a> {
    /// `[some groups, ROWS]`
    limits: &'a [f32],
    /// `[groups, ROWS]`
    own: &'a [f32],
    /// `[some groups, groups]`
    gains: &'a mut [f64],
}

impl WithSimd for AddLarger<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let groups = self.own.len() / ROWS;
        for (at, own) in self.own.chunks(COLUMNS_AT_ONCE * ROWS).enumerate() {
            let limits = self.limits.as_chunks::<ROWS>().0;
            for (limits, gains) in limits.iter().zip(self.gains.chunks_exact_mut(groups)) {
                let gains = &mut gains[at * COLUMNS_AT_ONCE..];
                for (own, gain) in own.as_chunks::<ROWS>().0.iter().zip(gains) {
                    *gain += f64::from(sum_of_larger(limits, own));
                }
            }
        }
    }
}

/// Σ max(a, b), with a fixed number of partial sums.
#[inline(always)]
fn sum_of_larger(a: &[f32; ROWS], b: &[f32; ROWS]) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (a, b) = (a.as_chunks::<LANES>().0, b.as_chunks::<LANES>().0);
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            // Scores are not NaN, so this is the maximum, in one instruction.
            sums[lane] += if a[lane] > b[lane] { a[lane] } else { b[lane] };
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
#[path = "permutation_tests.rs"]
mod tests;
