//! The choice of the weights that a closing mask removes from a matrix.
//!
//! ```text
//! key = |W| · √v         v: second moment of the optimizer, 1 where it has none
//! ```
//!
//! This is the order of W² · v, whose smallest values f32 does not hold. v estimates the squared gradient, so W² · v is the squared
//! change of the loss by a removal, to first order. Of equal keys the lower index is removed first. Where v is rounded to a code, and where
//! keys are 0 because no gradient came yet, the smaller |W| is removed first. A weight with a mask bit of 0 is removed already, and never
//! comes back.
//!
//! - **Unstructured**: int(s · n) of the n weights of a matrix are removed in the end, by exact order statistics (`linalg::order_statistics`).
//! - **N:M**: N of every group of M neighbours.
//!
//! Keys are f32. They are computed in pieces of 64 KiB, once per pass over the matrix.

use super::kept::KeptMask;
use super::optimizer::Optimizer;
use crate::linalg::order_statistics::{LOWER_BINS, OrderStatistic, Search, key};
use crate::pruning::{Pattern, Target};

/// Elements of a piece.
const PIECE: usize = 1 << 14;

/// Bytes of a choice: the bins of a search, ranks and keys of a piece.
pub const CHOICE_BYTES: usize =
    LOWER_BINS * size_of::<u64>() + PIECE * (size_of::<(usize, Rank)>() + size_of::<f32>());

/// A choice at its edge: how near a tie was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChoiceEdge {
    /// The largest key that was removed.
    pub removed: f32,
    /// The smallest key that stays.
    pub kept: f32,
}

/// A matrix in training.
#[derive(Debug)]
pub struct TrainedMatrix<'a> {
    /// Its values.
    pub values: &'a mut [f32],
    /// Its mask.
    pub kept: &'a mut KeptMask,
    /// Its state of the optimizer.
    pub state: &'a mut [u8],
}

/// The rank of a weight in the order of removal: its key, and |W| if that decides between equal keys.
type Rank = (u32, u32);

impl TrainedMatrix<'_> {
    /// Removes the weights with the lowest keys until the matrix has a sparsity: their mask bits become 0, their values and first moments
    /// +0. Returns the edge of an unstructured choice; `None` where it removes nothing.
    ///
    /// # Panics
    /// Panics where the lengths disagree, and where groups do not divide the matrix.
    pub fn close(&mut self, goal: Target, optimizer: &dyn Optimizer) -> Option<ChoiceEdge> {
        assert_eq!(self.kept.elements(), self.values.len(), "one bit per element");
        let edge = match goal.pattern {
            Pattern::Unstructured => {
                let elements = self.values.len();
                let removed = elements - self.kept.count();
                let count = goal.count_of(elements).saturating_sub(removed);
                (count > 0).then(|| self.close_whole(count, optimizer))
            }
            Pattern::NOfM { n, m } => {
                self.close_groups(n, m, optimizer);
                None
            }
        };
        self.kept.apply(self.values);
        optimizer.clear_first_moments(self.state, self.kept);
        edge
    }

    /// Removes the `count` kept weights with the lowest keys, at least 1.
    fn close_whole(&mut self, count: usize, optimizer: &dyn Optimizer) -> ChoiceEdge {
        let found = self.order_statistic(count, optimizer, &|rank| Some(rank.0));
        let (mut last, mut ties) = ((found.key, 0), count as u64 - found.below);
        if last.0 == 0 || optimizer.has_coded_moments(self.values.len()) {
            let of_ties = |rank: Rank| (rank.0 == last.0).then_some(rank.1);
            let by_magnitude = self.order_statistic(ties as usize, optimizer, &of_ties);
            last.1 = by_magnitude.key;
            ties -= by_magnitude.below;
        }
        let mut edge = ChoiceEdge { removed: f32::from_bits(last.0), kept: f32::INFINITY };
        let mut scratch = Vec::new();
        for first in (0..self.values.len()).step_by(PIECE) {
            self.ranks(first, PIECE, optimizer, &mut scratch);
            for &(at, rank) in &scratch {
                let is_tie = rank == last && ties > 0;
                ties -= u64::from(is_tie);
                match rank < last || is_tie {
                    true => self.kept.remove(at),
                    false => edge.kept = edge.kept.min(f32::from_bits(rank.0)),
                }
            }
        }
        edge
    }

    /// Removes the kept weights with the lowest keys from every group of `size`, until `removed` are removed.
    fn close_groups(&mut self, removed: usize, size: usize, optimizer: &dyn Optimizer) {
        assert!(self.values.len().is_multiple_of(size), "groups divide the matrix");
        let piece = (PIECE / size).max(1) * size;
        let mut scratch = Vec::new();
        for first in (0..self.values.len()).step_by(piece) {
            self.ranks(first, piece, optimizer, &mut scratch);
            for group in scratch.chunk_by_mut(|one, other| one.0 / size == other.0 / size) {
                let count = (removed + group.len()).saturating_sub(size);
                group.sort_unstable_by_key(|&(at, rank)| (rank, at));
                group[..count].iter().for_each(|&(at, _)| self.kept.remove(at));
            }
        }
    }

    /// The number at a position, from 1, of the ascending order of the numbers that `of` makes of the ranks of kept weights.
    fn order_statistic(
        &self,
        position: usize,
        optimizer: &dyn Optimizer,
        of: &dyn Fn(Rank) -> Option<u32>,
    ) -> OrderStatistic {
        let mut search = Search::new(vec![position as u64 - 1]);
        let (mut scratch, mut numbers) = (Vec::new(), Vec::new());
        loop {
            for first in (0..self.values.len()).step_by(PIECE) {
                self.ranks(first, PIECE, optimizer, &mut scratch);
                numbers.clear();
                let ranks = scratch.iter().filter_map(|&(_, rank)| of(rank));
                numbers.extend(ranks.map(f32::from_bits));
                search.add_values(&numbers);
            }
            search.advance();
            if let Some([found]) = search.found() {
                return *found;
            }
        }
    }

    /// The ranks of the kept weights among `count` weights from `first` on, in the order of their indices.
    fn ranks(
        &self,
        first: usize,
        count: usize,
        optimizer: &dyn Optimizer,
        ranks: &mut Vec<(usize, Rank)>,
    ) {
        let values = &self.values[first..(first + count).min(self.values.len())];
        let mut roots = [0.0; 256];
        let by_magnitude = optimizer.has_coded_moments(self.values.len());
        ranks.clear();
        ranks.reserve_exact(values.len());
        for (block, values) in values.chunks(roots.len()).enumerate() {
            let start = first + block * roots.len();
            let roots = &mut roots[..values.len()];
            optimizer.root_second_moments(self.state, self.values.len(), start, roots);
            for (at, (value, root)) in values.iter().zip(roots).enumerate() {
                if self.kept.is_kept(start + at) {
                    let of_product = key(value * *root);
                    let decides = by_magnitude || of_product == 0;
                    ranks.push((start + at, (of_product, if decides { key(*value) } else { 0 })));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Hyperparameters, OPTIMIZERS, TrainingStep, find};
    use super::*;

    /// Values of mixed sizes with ties, and a state after a step on gradients of mixed sizes.
    fn trained(name: &str, count: usize) -> (Vec<f32>, KeptMask, Vec<u8>, Box<dyn Optimizer>) {
        let optimizer = (find(name).unwrap().build)(Hyperparameters::default());
        let wave = |at: usize, pace: f32| ((at as f32) * pace).sin();
        let mut values: Vec<f32> =
            (0..count).map(|at| (wave(at, 0.37) * 40.0).round() / 64.0).collect();
        for at in (0..count).step_by(7) {
            values[at] = 0.0;
        }
        let kept = KeptMask::of_nonzero(&values);
        let gradient: Vec<f32> =
            (0..count).map(|at| (wave(at, 0.11) * 8.0).round() * 1e-3).collect();
        let mut state = vec![0; optimizer.state_bytes(count)];
        let step = TrainingStep { number: 1, rate: 0.0 };
        optimizer.update(step, &mut values, &gradient, Some(&kept), &mut state);
        (values, kept, state, optimizer)
    }

    /// The order of removal by a sort: removed weights first, then by key, |W| where it counts, and index.
    fn order(
        values: &[f32],
        kept: &KeptMask,
        state: &[u8],
        optimizer: &dyn Optimizer,
    ) -> Vec<usize> {
        let mut roots = vec![0.0; values.len()];
        optimizer.root_second_moments(state, values.len(), 0, &mut roots);
        let coded = optimizer.has_coded_moments(values.len());
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&one, &other| {
            let of = |at: usize| {
                let magnitude = values[at].abs();
                let product = magnitude * roots[at];
                let second = if coded || product == 0.0 { magnitude } else { 0.0 };
                (f32::from(u8::from(kept.is_kept(at))), product, second)
            };
            of(one).partial_cmp(&of(other)).unwrap().then(one.cmp(&other))
        });
        order
    }

    #[test]
    fn the_lowest_keys_go_and_removed_weights_stay_removed() {
        for kind in OPTIMIZERS {
            for count in [1000, 70_001] {
                let (mut values, mut kept, mut state, optimizer) = trained(kind.name, count);
                for ratio in [0.1, 0.3, 0.55, 0.9] {
                    let before = kept.clone();
                    let order = order(&values, &kept, &state, &*optimizer);
                    let goal = Target { ratio, pattern: Pattern::Unstructured };
                    let mut matrix =
                        TrainedMatrix { values: &mut values, kept: &mut kept, state: &mut state };
                    let edge = matrix.close(goal, &*optimizer);
                    let removed = goal.count_of(count).max(count - before.count());
                    assert_eq!(count - kept.count(), removed, "{kind:?} {ratio}");
                    for (place, &at) in order.iter().enumerate() {
                        assert_eq!(kept.is_kept(at), place >= removed, "{kind:?} {ratio} {at}");
                        assert!(kept.is_kept(at) || values[at].to_bits() == 0);
                    }
                    assert_eq!(edge.is_some(), kept != before);
                    assert!(edge.is_none_or(|edge| edge.removed <= edge.kept), "{edge:?}");
                }
            }
        }
    }

    #[test]
    fn every_group_loses_its_lowest_keys() {
        for (name, size, count) in [("adamw", 4, 20_000), ("adamw8bit", 8, 4800), ("sgd", 5, 500)] {
            let (mut values, mut kept, mut state, optimizer) = trained(name, count);
            for removed in [0, 1, size / 2] {
                let order = order(&values, &kept, &state, &*optimizer);
                let before = kept.clone();
                let goal = Target {
                    ratio: removed as f64 / size as f64,
                    pattern: Pattern::NOfM { n: removed, m: size },
                };
                let mut matrix =
                    TrainedMatrix { values: &mut values, kept: &mut kept, state: &mut state };
                assert_eq!(matrix.close(goal, &*optimizer), None);
                let mut places = vec![0; count / size];
                for at in order {
                    let group = at / size;
                    let gone = (0..size).filter(|at| !before.is_kept(group * size + at)).count();
                    assert_eq!(kept.is_kept(at), places[group] >= removed.max(gone), "{name} {at}");
                    places[group] += 1;
                }
            }
        }
    }

    #[test]
    fn where_no_gradient_came_magnitudes_and_then_indices_decide() {
        for name in ["adamw", "adamw8bit"] {
            let optimizer = (find(name).unwrap().build)(Hyperparameters::default());
            let mut values = vec![3.0; 5000];
            (values[2], values[4093], values[4999]) = (-1.0, 1.0, 1.0);
            let mut kept = KeptMask::of_nonzero(&values);
            let mut state = vec![0; optimizer.state_bytes(values.len())];
            let mut matrix =
                TrainedMatrix { values: &mut values, kept: &mut kept, state: &mut state };
            let goal = Target { ratio: 2.0 / 5000.0, pattern: Pattern::Unstructured };
            let edge = matrix.close(goal, &*optimizer).unwrap();
            assert_eq!((edge.removed, edge.kept), (0.0, 0.0));
            let gone: Vec<usize> = (0..5000).filter(|&at| !kept.is_kept(at)).collect();
            assert_eq!(gone, [2, 4093], "{name}");
        }
    }
}
