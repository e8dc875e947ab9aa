//! Weights of a matrix as f32, for methods that change them, and the support of what they keep.

use anyhow::Result;
use rayon::prelude::*;

use crate::linalg::StoredMatrix;
use crate::linalg::select::{self as lowest, Radix};
use crate::pruning::mask::Mask;
use crate::pruning::method::Request;
use crate::pruning::rows::OwnRows;
use crate::pruning::select::not_finite;

/// The weights as f32, `[out_features, in_features]`.
///
/// # Errors
/// Fails on weights that are not finite, naming matrix, row and column.
pub(crate) fn widened(weight: &StoredMatrix, request: &Request<'_>) -> Result<Vec<f32>> {
    let (columns, first) = (weight.columns(), request.rows_of(weight).first);
    let mut wide = vec![0.0f32; weight.elements()];
    wide.par_chunks_mut(columns.max(1)).enumerate().try_for_each(|(row, wide)| {
        weight.widen_rows(row, wide);
        match lowest::first_not_finite(wide) {
            Some(column) => Err(not_finite(request.name, "weight", first + row, column)),
            None => Ok(()),
        }
    })?;
    Ok(wide)
}

/// The weights that a mask keeps, `[rows, columns]`.
pub(crate) fn kept_of(mask: &Mask) -> Vec<bool> {
    let (rows, columns) = (mask.rows(), mask.columns());
    let mut is_kept = vec![true; rows * columns];
    is_kept.par_chunks_mut(columns.max(1)).enumerate().for_each(|(row, is_kept)| {
        for (column, is_kept) in is_kept.iter_mut().enumerate() {
            *is_kept = !mask.is_pruned(row, column);
        }
    });
    is_kept
}

/// The mask of the weights that are not kept.
pub(crate) fn mask_of(is_kept: &[bool], rows: usize, columns: usize) -> Result<Mask> {
    Mask::by_rows(
        rows,
        columns,
        || (),
        |(), row, bits| {
            let is_kept = &is_kept[row * columns..][..columns];
            bits.set_where(|column| !is_kept[column]);
            Ok(())
        },
    )
}

/// The zeros of the source, `[rows, columns]`; empty without a zero. They stay zero under every method.
pub(crate) fn zeros_of(weights: &[f32]) -> Vec<bool> {
    if weights.par_iter().all(|weight| *weight != 0.0) {
        return Vec::new();
    }
    weights.par_iter().map(|weight| *weight == 0.0).collect()
}

/// Unmarks the zeros of the source.
///
/// # Arguments
/// * `is_zero`: from [`zeros_of`]
pub(crate) fn unmark(is_kept: &mut [bool], is_zero: &[bool]) {
    is_kept.par_iter_mut().zip(is_zero).for_each(|(is_kept, is_zero)| *is_kept &= !is_zero);
}

/// A rule for the weights that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeepRule {
    /// This many of the whole matrix, whose rows other processes may share.
    OfMatrix(usize),
    /// All but `n` of each aligned group of `m`.
    OfGroups {
        /// Weights removed per group.
        n: usize,
        /// Weights per group.
        m: usize,
    },
}

impl KeepRule {
    /// Marks the values of the largest magnitude. On ties, later values are kept.
    ///
    /// # Arguments
    /// * `values`: `[own rows, columns]`, finite
    /// * `is_kept`: as long as `values`
    ///
    /// # Errors
    /// Fails when a process that shares the rows has left.
    pub(crate) fn largest(
        self,
        values: &[f32],
        columns: usize,
        rows: OwnRows<'_>,
        is_kept: &mut [bool],
    ) -> Result<()> {
        match self {
            Self::OfMatrix(count) => largest_of_all(values, columns, rows, count, is_kept)?,
            Self::OfGroups { n, m } => {
                let rows = values.par_chunks(columns).zip(is_kept.par_chunks_mut(columns));
                rows.for_each_init(
                    Default::default,
                    |(scores, keys, is_lowest), (values, is_kept)| {
                        magnitudes(0, values, scores);
                        lowest::lowest_of_groups(scores, m, n, keys, is_lowest);
                        for (is_kept, is_lowest) in is_kept.iter_mut().zip(&*is_lowest) {
                            *is_kept = !is_lowest;
                        }
                    },
                );
            }
        }
        Ok(())
    }
}

fn magnitudes(_row: usize, values: &[f32], scores: &mut Vec<f32>) {
    scores.clear();
    scores.extend(values.iter().map(|value| value.abs()));
}

/// Marks the `count` values of the largest magnitude of a matrix among the own values.
fn largest_of_all(
    values: &[f32],
    columns: usize,
    own: OwnRows<'_>,
    count: usize,
    is_kept: &mut [bool],
) -> Result<()> {
    let all = own.all * columns;
    if count >= all {
        is_kept.fill(true);
        return Ok(());
    }
    let position = all - count; // The magnitude here is the lowest that stays.
    let Some(limit) = score_at(values, columns, own, position as u64, magnitudes)? else {
        return Ok(());
    };
    let rows = values.par_chunks(columns).zip(is_kept.par_chunks_mut(columns));
    let ties: Vec<(usize, usize)> = rows
        .map(|(values, is_kept)| {
            let (mut above, mut ties) = (0, 0);
            for (value, is_kept) in values.iter().zip(is_kept) {
                *is_kept = value.abs() > limit;
                above += usize::from(*is_kept);
                ties += usize::from(value.abs() == limit);
            }
            (above, ties)
        })
        .collect();
    let sum = |of: fn(&(usize, usize)) -> usize| ties.iter().map(of).sum::<usize>() as u64;
    let all = own.gathered([sum(|row| row.0), sum(|row| row.1)])?;
    let above: u64 = all.iter().map(|[above, _]| above).sum();
    let later: u64 = all[own.solvers.place() + 1..].iter().map(|[_, ties]| ties).sum();
    let mut missing = (count as u64 - above).saturating_sub(later);
    for row in (0..ties.len()).rev() {
        if missing == 0 {
            break;
        }
        let range = row * columns..(row + 1) * columns;
        let places = values[range.clone()].iter().zip(&mut is_kept[range]);
        for (value, is_kept) in places.rev() {
            if missing > 0 && value.abs() == limit {
                *is_kept = true;
                missing -= 1;
            }
        }
    }
    Ok(())
}

/// The score at a position of the ascending order of all scores of a matrix, exactly. Large matrices are counted in two passes. Small
/// matrices are not counted, because the counters would take longer than the scores.
///
/// # Arguments
/// * `values`: `[own rows, columns]`
/// * `score(row, values, scores)`: fills the scores of an own row, finite and ≥ 0
///
/// # Errors
/// Fails when a process that shares the rows has left.
pub(crate) fn score_at(
    values: &[f32],
    columns: usize,
    own: OwnRows<'_>,
    position: u64,
    score: impl Fn(usize, &[f32], &mut Vec<f32>) + Sync,
) -> Result<Option<f32>> {
    /// Parts that are counted at the same time, at most.
    const PARTS: usize = 16;
    /// Scores of a part, at least, and of a small matrix, at most.
    const FEW: usize = 1 << 18;
    if own.solvers.count() == 1 && values.len() <= FEW {
        let (mut keys, mut scores) = (Vec::with_capacity(values.len()), Vec::new());
        for (row, values) in values.chunks_exact(columns).enumerate() {
            score(row, values, &mut scores);
            keys.extend(scores.iter().map(|&score| lowest::key(score)));
        }
        let position = usize::try_from(position).ok();
        let position = position.filter(|position| *position < keys.len());
        return Ok(position.map(|at| f32::from_bits(*keys.select_nth_unstable(at).1)));
    }
    let rows = values.len() / columns;
    let parts = (values.len() / FEW).clamp(1, PARTS);
    let rows_of_part = rows.div_ceil(parts).max(1);
    let count = |upper: Option<u16>| {
        let parts = values.par_chunks(rows_of_part * columns);
        let parts = parts.enumerate().map(|(part, values)| {
            let (mut counter, mut scores) = (Radix::new(upper), Vec::new());
            for (row, values) in values.chunks_exact(columns).enumerate() {
                score(part * rows_of_part + row, values, &mut scores);
                counter.feed(&scores);
            }
            counter
        });
        let counter = parts.reduce_with(|one, other| one.merge(&other));
        let mut counter = counter.unwrap_or_else(|| Radix::new(upper));
        own.solvers.sum(counter.counts_mut())?;
        anyhow::Ok(counter)
    };
    let Some((upper, rest)) = count(None)?.narrow(position) else {
        return Ok(None);
    };
    Ok(count(Some(upper))?.value(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_at_a_position_is_that_of_a_sort_however_it_is_found() {
        for rows in [3, 5000] {
            let columns = 100;
            let values: Vec<f32> = (0..rows * columns)
                .map(|at| ((at * 7919 % 10_007) as f32 - 5000.0) / 77.0)
                .collect();
            let mut sorted: Vec<f32> = values.iter().map(|value| value.abs()).collect();
            sorted.sort_by(f32::total_cmp);
            for at in [0, 1, sorted.len() / 2, sorted.len() - 1] {
                let own = OwnRows::whole(rows);
                let found = score_at(&values, columns, own, at as u64, magnitudes).unwrap();
                assert_eq!(found, Some(sorted[at]), "{rows} {at}");
            }
            let beyond = sorted.len() as u64;
            let own = OwnRows::whole(rows);
            assert_eq!(score_at(&values, columns, own, beyond, magnitudes).unwrap(), None);
        }
    }

    #[test]
    fn as_many_stay_as_the_rule_says_and_they_are_the_largest() {
        let values: Vec<f32> = (0..120).map(|at| ((at * 37 % 61) as f32 - 30.0) / 3.0).collect();
        let (mut is_kept, own) = (vec![false; 120], OwnRows::whole(10));
        for count in [0, 1, 47, 119, 120] {
            KeepRule::OfMatrix(count).largest(&values, 12, own, &mut is_kept).unwrap();
            assert_eq!(is_kept.iter().filter(|kept| **kept).count(), count);
            let lost = (0..120).filter(|&at| !is_kept[at]).map(|at| values[at].abs());
            let least = (0..120).filter(|&at| is_kept[at]).map(|at| values[at].abs());
            let least = least.fold(f32::INFINITY, f32::min);
            assert!(lost.fold(0.0, f32::max) <= least, "{count}");
        }
        KeepRule::OfGroups { n: 1, m: 4 }.largest(&values, 12, own, &mut is_kept).unwrap();
        assert!(is_kept.chunks(4).all(|group| group.iter().filter(|kept| **kept).count() == 3));
    }
}
