//! Selection of the k lowest scores, ties to the lower index, without sorting.
//!
//! Scores are finite and not negative, so their f32 bit patterns order like the numbers themselves (IEEE 754 §5.10) and
//! selection works on integers.

use pulp::{Arch, Simd, WithSimd};

/// The bits of a score that is finite and ≥ 0; adding +0 turns −0 into +0.
#[inline]
pub fn key(score: f32) -> u32 {
    (score + 0.0).to_bits()
}

/// The number of weights that are removed from a matrix, row by row: the lowest scores, of equal scores the lower columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// So many of every row.
    OfRow(usize),
    /// `n` of every aligned group of `m` columns.
    OfGroup {
        /// Removed per group.
        n: usize,
        /// Columns of a group.
        m: usize,
    },
}

/// The lowest scores: all below a threshold, and the first few equal to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lowest {
    /// The key of the highest selected score.
    pub threshold: u32,
    /// The number of selected scores equal to the threshold, in ascending index order.
    pub ties: usize,
    /// All scores equal to the threshold are selected.
    pub takes_all_ties: bool,
}

/// Finds the `count` lowest scores, 0 < count ≤ the number of scores.
///
/// # Arguments
/// * `scores`: finite, ≥ 0
/// * `scratch`: reused between calls
pub fn find_lowest(scores: &[f32], count: usize, scratch: &mut Vec<u32>) -> Lowest {
    scratch.clear();
    scratch.extend(scores.iter().map(|&score| key(score)));
    let (lower, &mut threshold, higher) = scratch.select_nth_unstable(count - 1);
    let below = lower.iter().filter(|&&key| key < threshold).count();
    let equal_above = higher.iter().filter(|&&key| key == threshold).count();
    Lowest { threshold, ties: count - below, takes_all_ties: equal_above == 0 }
}

/// The index of the first value that is not finite.
pub fn first_not_finite(values: &[f32]) -> Option<usize> {
    /// The largest bits of |v|. As bits, infinity is larger than any number and smaller than any NaN.
    struct Highest<'a>(&'a [f32]);
    impl WithSimd for Highest<'_> {
        type Output = u32;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> u32 {
            let bits = self.0.iter().map(|value| value.abs().to_bits());
            bits.fold(0, u32::max)
        }
    }
    if Arch::new().dispatch(Highest(values)) < f32::INFINITY.to_bits() {
        return None;
    }
    values.iter().position(|value| !value.is_finite())
}

/// Calls `pick(index)` for the `count` lowest scores, in ascending index order; among equal scores the lower index comes first.
///
/// # Arguments
/// * `scores`: finite, ≥ 0
/// * `scratch`: reused between calls
pub fn lowest(scores: &[f32], count: usize, scratch: &mut Vec<u32>, mut pick: impl FnMut(usize)) {
    if count == 0 {
        return;
    }
    if count >= scores.len() {
        (0..scores.len()).for_each(pick);
        return;
    }
    let Lowest { threshold, ties: mut ties_left, .. } = find_lowest(scores, count, scratch);
    for (index, &score) in scores.iter().enumerate() {
        let score = key(score);
        if score < threshold {
            pick(index);
        } else if score == threshold && ties_left > 0 {
            ties_left -= 1;
            pick(index);
        }
    }
}

/// Marks the `count` lowest scores of each group of `size`, the choice of [`lowest`] for all groups of an N:M pattern.
///
/// A score is selected if fewer than `count` scores of its group precede it; smaller scores precede it, and equal scores of lower index.
/// All pairs of a group are compared, sixteen groups at a time, without unpredictable branches.
///
/// # Arguments
/// * `scores`: finite, ≥ 0; whole groups
/// * `scratch`: reused between calls
/// * `is_lowest`: becomes as long as `scores`
///
/// # Panics
/// Panics when `size` is 0.
pub fn lowest_of_groups(
    scores: &[f32],
    size: usize,
    count: usize,
    scratch: &mut Vec<u32>,
    is_lowest: &mut Vec<bool>,
) {
    is_lowest.clear();
    is_lowest.resize(scores.len(), false);
    if size <= LARGEST_RANKED {
        Arch::new().dispatch(Ranked { scores, size, count, is_lowest });
        return;
    }
    // Such groups have too many pairs.
    let groups = scores.chunks_exact(size);
    for (scores, is_lowest) in groups.zip(is_lowest.chunks_exact_mut(size)) {
        lowest(scores, count, scratch, |index| is_lowest[index] = true);
    }
}

/// The largest group whose pairs are all compared.
const LARGEST_RANKED: usize = 32;

struct Ranked<'a> {
    scores: &'a [f32],
    size: usize,
    count: usize,
    is_lowest: &'a mut [bool],
}

impl WithSimd for Ranked<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        /// Groups that are ranked together.
        const GROUPS: usize = 16;
        let Self { size, count, .. } = self;
        // Indexed by position in the group. Keys of finite scores have the same order as signed and unsigned numbers.
        let mut keys = [[0i32; GROUPS]; LARGEST_RANKED];
        let mut before = [[0u32; GROUPS]; LARGEST_RANKED];
        let chunks = self.scores.chunks(GROUPS * size);
        for (scores, is_lowest) in chunks.zip(self.is_lowest.chunks_mut(GROUPS * size)) {
            for (group, scores) in scores.chunks_exact(size).enumerate() {
                for (keys, score) in keys.iter_mut().zip(scores) {
                    keys[group] = key(*score) as i32;
                }
            }
            before[..size].fill([0; GROUPS]);
            for place in 1..size {
                let (earlier, later) = before[..=place].split_at_mut(place);
                let of_later = keys[place];
                for (earlier, of_earlier) in earlier.iter_mut().zip(&keys) {
                    for group in 0..GROUPS {
                        let is_less = u32::from(of_later[group] < of_earlier[group]);
                        earlier[group] += is_less;
                        later[0][group] += 1 - is_less;
                    }
                }
            }
            for (group, is_lowest) in is_lowest.chunks_exact_mut(size).enumerate() {
                for (is_lowest, before) in is_lowest.iter_mut().zip(&before) {
                    *is_lowest = (before[group] as usize) < count;
                }
            }
        }
    }
}

/// Finds the score at a position of the ascending order of very many scores. They are fed twice; the memory is 512 KiB.
///
/// A radix selection: the first pass counts the upper 16 bits of every score, the second the lower 16 bits of the scores that share
/// the wanted score's upper half. The result is exact, and the scores are never copied.
#[derive(Debug)]
pub struct Radix {
    counts: Vec<u64>,
    upper: Option<u16>,
}

impl Radix {
    /// An empty counter: of the first pass, or of the second among scores whose upper half [`Radix::narrow`] found.
    pub fn new(upper: Option<u16>) -> Self {
        Self { counts: vec![0; 1 << 16], upper }
    }

    /// Counts scores of the current pass.
    pub fn feed(&mut self, scores: &[f32]) {
        for &score in scores {
            let key = key(score);
            match self.upper {
                None => self.counts[(key >> 16) as usize] += 1,
                Some(upper) if (key >> 16) as u16 == upper => {
                    self.counts[(key & 0xffff) as usize] += 1
                }
                Some(_) => {}
            }
        }
    }

    /// The counts of the current pass, to which counts of other scores are added.
    pub fn counts_mut(&mut self) -> &mut [u64] {
        &mut self.counts
    }

    /// Adds the counts of a second counter of the same pass.
    pub fn merge(mut self, other: &Self) -> Self {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self
    }

    /// Ends the first pass: returns the upper half of the wanted score, and its position among the scores with this upper half. `None`
    /// when fewer than `position + 1` scores were fed.
    pub fn narrow(&self, position: u64) -> Option<(u16, u64)> {
        self.bucket(position)
    }

    /// Ends the second pass: returns the score at the position that the first pass returned.
    pub fn value(&self, position: u64) -> Option<f32> {
        let upper = self.upper?;
        let (lower, _) = self.bucket(position)?;
        Some(f32::from_bits(u32::from(upper) << 16 | u32::from(lower)))
    }

    fn bucket(&self, mut position: u64) -> Option<(u16, u64)> {
        for (bucket, &count) in self.counts.iter().enumerate() {
            if position < count {
                return Some((bucket as u16, position));
            }
            position -= count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn by_stable_sort(scores: &[f32], count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        let mut lowest = order[..count].to_vec();
        lowest.sort_unstable();
        lowest
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        let mut picked = Vec::new();
        lowest(&[1.0, 0.5, 0.5, -0.0, 0.5, 0.0], 3, &mut Vec::new(), |index| picked.push(index));
        assert_eq!(picked, [1, 3, 5]);
    }

    #[test]
    fn zeros_of_both_signs_are_ties_in_a_group() {
        let mut is_lowest = Vec::new();
        let scores = [0.0, -0.0, f32::MAX, -0.0, 3.0, f32::MIN_POSITIVE / 2.0, 2.0, 1.0];
        lowest_of_groups(&scores, 4, 2, &mut Vec::new(), &mut is_lowest);
        assert_eq!(is_lowest, [true, true, false, false, false, true, false, true]);
    }

    #[test]
    fn long_rows_with_plateaus_give_what_a_stable_sort_gives() {
        // Exponents over the whole range, plateaus, and zeros of both signs.
        let scores: Vec<f32> = (0..5000u32)
            .map(|i| match i % 5 {
                0 => -0.0,
                1 => (i % 7) as f32,
                2 => f32::MAX / (1 + i) as f32,
                3 => f32::from_bits(i * 97),
                _ => 1.0 + (i * 31 % 1009) as f32 / 1e4,
            })
            .collect();
        for count in [1, 2, 999, 1000, 1001, 2500, 3333, 4998, 4999] {
            let mut picked = Vec::new();
            lowest(&scores, count, &mut vec![9; 3], |index| picked.push(index));
            // −0 and +0 are the same score.
            let unsigned: Vec<f32> = scores.iter().map(|score| score + 0.0).collect();
            assert_eq!(picked, by_stable_sort(&unsigned, count), "{count}");
            let found = find_lowest(&scores, count, &mut Vec::new());
            let at_most = |key_of: &&f32| key(**key_of) <= found.threshold;
            let taken = scores.iter().filter(at_most).count();
            assert_eq!(taken == count, found.takes_all_ties);
        }
    }

    proptest! {
        #[test]
        fn selection_equals_a_stable_sort(values in prop::collection::vec(0u8..20, 1..200), share in 0.0f64..=1.0) {
            let scores: Vec<f32> = values.iter().map(|&value| f32::from(value) / 7.0).collect();
            let count = (scores.len() as f64 * share) as usize;
            let mut picked = Vec::new();
            lowest(&scores, count, &mut Vec::new(), |index| picked.push(index));
            prop_assert_eq!(picked, by_stable_sort(&scores, count));
        }

        #[test]
        fn groups_select_what_a_stable_sort_selects(
            values in prop::collection::vec(0u8..6, 1..1500),
            size in 1usize..=40,
            share in 0.0f64..=1.0,
        ) {
            let scores: Vec<f32> = values.iter().map(|&value| f32::from(value)).collect();
            let scores = &scores[..scores.len() / size * size];
            let count = (size as f64 * share) as usize;
            let mut is_lowest = vec![true; 7];
            lowest_of_groups(scores, size, count, &mut Vec::new(), &mut is_lowest);
            prop_assert_eq!(is_lowest.len(), scores.len());
            for (scores, is_lowest) in scores.chunks(size).zip(is_lowest.chunks(size)) {
                let picked: Vec<usize> = (0..size).filter(|&index| is_lowest[index]).collect();
                prop_assert_eq!(picked, by_stable_sort(scores, count));
            }
        }

        #[test]
        fn radix_selection_equals_a_sort(scores in prop::collection::vec(0.0f32..1e3, 1..300), share in 0.0f64..1.0) {
            let position = (scores.len() as f64 * share) as u64;
            let (left, right) = scores.split_at(scores.len() / 2);
            let count = |mut radix: Radix, part: &[f32]| { radix.feed(part); radix };
            let both = |upper| count(Radix::new(upper), left).merge(&count(Radix::new(upper), right));
            let (upper, rest) = both(None).narrow(position).unwrap();
            let second = both(Some(upper));
            let mut sorted = scores.clone();
            sorted.sort_by(f32::total_cmp);
            prop_assert_eq!(second.value(rest), Some(sorted[position as usize]));
        }
    }
}
