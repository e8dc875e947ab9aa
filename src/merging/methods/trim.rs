//! Trimming: the choice of the entries of a difference D = W_t − W₀ that are kept. Removed entries become 0.
//!
//! | trim | kept |
//! | --- | --- |
//! | [`Trim::Between`] | magnitudes between two order statistics of a tensor, a layer or the model |
//! | [`Trim::Rows`] | the largest \|D_ij\|·a_j of each row, where a_j is the root of the mean square of input j |
//! | [`Trim::Random`] | entry i with probability p |
//! | [`Trim::Ramp`] | entry i with a probability that rises with the rank of its score in its row, from p − ε to p + ε |

use super::random::{Stream, WORDS};
use crate::linalg::order_statistics::{OrderStatistic, key};
use crate::linalg::select;

/// Elements that are compared at once.
const BLOCK: usize = 1024;
/// 2³², the number of values of a random word.
const WORDS_OF_32_BITS: f64 = 4_294_967_296.0;

/// An order statistic that bounds what is kept. A value equal to it is kept if its ordinal among the equal values, in the order of the
/// elements, lies in a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Edge {
    pub(super) key: u32,
    /// The first ordinal that is kept.
    pub(super) from: u64,
    /// The ordinal after the last that is kept.
    pub(super) to: u64,
}

impl Edge {
    /// Keeps the first `count` of the equal values.
    pub(super) fn first(found: OrderStatistic, count: u64) -> Self {
        Self { key: found.key, from: 0, to: count }
    }

    /// Keeps all equal values but the first `count`.
    pub(super) fn after(found: OrderStatistic, count: u64) -> Self {
        Self { key: found.key, from: count, to: u64::MAX }
    }

    /// Keeps all equal values.
    pub(super) fn all(found: OrderStatistic) -> Self {
        Self::after(found, 0)
    }
}

/// The choice of entries.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Trim {
    /// All entries.
    All,
    /// No entries.
    Nothing,
    /// By magnitude.
    Between { lower: Edge, upper: Option<Edge> },
    /// The `count` largest scores of each row; on ties, lower columns are kept.
    Rows {
        count: usize,
        /// a, `[columns]`.
        roots: Vec<f32>,
    },
    /// Each entry with probability `probability`; kept entries are multiplied by `factor`.
    Random { stream: Stream, probability: f64, factor: f32 },
    /// By rank in the row.
    Ramp {
        stream: Stream,
        density: f64,
        epsilon: f64,
        /// a, `[columns]`; empty for 1.
        roots: Vec<f32>,
        /// Kept entries are divided by their probability.
        is_unbiased: bool,
    },
}

/// Memory of [`Trimmer`].
#[derive(Debug, Default)]
struct Scratch {
    scores: Vec<f32>,
    keys: Vec<u32>,
    order: Vec<u64>,
    words: Vec<u32>,
}

/// A trim at work on the rows of a tensor, in order.
#[derive(Debug)]
pub(super) struct Trimmer {
    trim: Trim,
    /// Values equal to the lower and the upper edge before the current rows.
    seen: [u64; 2],
    kept: u64,
    scratch: Scratch,
}

impl Trimmer {
    /// Begins with the first row.
    pub(super) fn new(trim: Trim) -> Self {
        Self { trim, seen: [0; 2], kept: 0, scratch: Scratch::default() }
    }

    /// Entries kept so far.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    /// True if nothing is removed and nothing is scaled.
    pub(super) fn keeps_all(&self) -> bool {
        self.trim == Trim::All
    }

    /// Trims the next rows of a difference, `[rows, columns]`, of which the first is `first_row`.
    pub(super) fn trim(&mut self, first_row: usize, columns: usize, difference: &mut [f32]) {
        let first = (first_row * columns) as u64;
        let Self { trim, seen, kept, scratch } = self;
        *kept += match trim {
            Trim::All => difference.len() as u64,
            Trim::Nothing => {
                difference.fill(0.0);
                0
            }
            Trim::Between { lower, upper } => {
                let blocks = difference.chunks_mut(BLOCK);
                blocks.map(|block| between(block, *lower, *upper, seen)).sum()
            }
            Trim::Rows { count, roots } => {
                let rows = difference.chunks_mut(columns);
                rows.map(|row| largest(row, *count, roots, scratch)).sum()
            }
            Trim::Random { stream, probability, factor } => {
                let threshold = threshold(*probability);
                let lottery = Lottery { stream: *stream, threshold, factor: *factor };
                lottery.trim(difference, first, &mut scratch.words)
            }
            Trim::Ramp { stream, density, epsilon, roots, is_unbiased } => {
                let ramp = Ramp {
                    stream: *stream,
                    density: *density,
                    epsilon: *epsilon,
                    is_unbiased: *is_unbiased,
                };
                let rows = difference.chunks_mut(columns).enumerate();
                rows.map(|(at, row)| ramp.trim(row, first + (at * columns) as u64, roots, scratch))
                    .sum()
            }
        };
    }
}

/// Trims a block by magnitude and returns the number of kept entries. `seen` counts the values equal to each edge.
fn between(block: &mut [f32], lower: Edge, upper: Option<Edge>, seen: &mut [u64; 2]) -> u64 {
    let upper = upper.unwrap_or(Edge { key: u32::MAX, from: 0, to: 0 });
    let equal = |edge: Edge| block.iter().filter(|value| key(**value) == edge.key).count() as u64;
    let equals = [equal(lower), equal(upper)];
    let sides = [side(lower, seen[0], equals[0]), side(upper, seen[1], equals[1])];
    let kept = match sides {
        [Some(lower_stays), Some(upper_stays)] => {
            // All values equal to an edge are kept or removed together, so two comparisons decide.
            let least = lower.key + u32::from(!lower_stays);
            let most = upper.key.saturating_sub(u32::from(!upper_stays));
            let mut kept = 0u32;
            for value in block.iter_mut() {
                let stays = (least..=most).contains(&key(*value));
                *value = if stays { *value } else { 0.0 };
                kept += u32::from(stays);
            }
            u64::from(kept)
        }
        _ => {
            let (mut at, mut kept) = (*seen, 0);
            for value in block.iter_mut() {
                let key = key(*value);
                let mut stays = key >= lower.key && key <= upper.key;
                for (edge, at) in [lower, upper].iter().zip(&mut at) {
                    if key == edge.key {
                        stays &= (edge.from..edge.to).contains(at);
                        *at += 1;
                    }
                }
                *value = if stays { *value } else { 0.0 };
                kept += u64::from(stays);
            }
            kept
        }
    };
    seen[0] += equals[0];
    seen[1] += equals[1];
    kept
}

/// Returns whether the next `count` values equal to an edge are kept, after `seen` equal values; `None` if only some are kept.
fn side(edge: Edge, seen: u64, count: u64) -> Option<bool> {
    let end = seen + count;
    if count == 0 || (edge.from <= seen && end <= edge.to) {
        Some(true)
    } else if end <= edge.from || edge.to <= seen {
        Some(false)
    } else {
        None
    }
}

/// Keeps the `count` largest |D_j|·a_j of a row.
fn largest(row: &mut [f32], count: usize, roots: &[f32], scratch: &mut Scratch) -> u64 {
    let count = count.min(row.len());
    let removed = row.len() - count;
    // The lowest scores are removed; on ties, lower columns are kept.
    scratch.scores.clear();
    let scores = row.iter().zip(roots);
    scratch.scores.extend(scores.map(|(value, root)| value.abs() * root));
    if removed == 0 {
        return count as u64;
    }
    if count == 0 {
        row.fill(0.0);
        return 0;
    }
    // Selection picks the lower index among equal scores, so the reversed row removes the higher columns.
    scratch.scores.reverse();
    let last = row.len() - 1;
    let Scratch { scores, keys, .. } = scratch;
    select::lowest(scores, removed, keys, |at| row[last - at] = 0.0);
    count as u64
}

/// The words below this number keep an entry.
fn threshold(probability: f64) -> u64 {
    (probability.clamp(0.0, 1.0) * WORDS_OF_32_BITS).round() as u64
}

/// Entries kept with the same probability.
struct Lottery {
    stream: Stream,
    /// The words below this number keep an entry.
    threshold: u64,
    /// The factor of kept entries.
    factor: f32,
}

impl Lottery {
    /// Trims entries, of which the first has the index `first` in its tensor.
    fn trim(&self, difference: &mut [f32], first: u64, words: &mut Vec<u32>) -> u64 {
        let &Self { stream, threshold, factor } = self;
        let mut kept = 0;
        let mut at = first;
        for block in difference.chunks_mut(BLOCK) {
            let words = draw(&stream, at, block.len(), words);
            let mut stay = 0u32;
            for (value, word) in block.iter_mut().zip(words) {
                let stays = u64::from(*word) < threshold;
                *value = if stays { *value * factor } else { 0.0 };
                stay += u32::from(stays);
            }
            kept += u64::from(stay);
            at += block.len() as u64;
        }
        kept
    }
}

/// The random words of the elements from `first` on.
fn draw<'w>(stream: &Stream, first: u64, count: usize, words: &'w mut Vec<u32>) -> &'w [u32] {
    let skipped = (first % WORDS as u64) as usize;
    words.resize(skipped + count, 0);
    stream.fill(first - skipped as u64, words);
    &words[skipped..]
}

/// Probabilities by rank.
struct Ramp {
    stream: Stream,
    density: f64,
    epsilon: f64,
    is_unbiased: bool,
}

impl Ramp {
    /// p of the entry with this rank among `count`; the smallest score has rank 0.
    fn probability(&self, rank: usize, count: usize) -> f64 {
        let position = match count {
            0 | 1 => 0.5,
            _ => rank as f64 / (count - 1) as f64,
        };
        self.density - self.epsilon + position * 2.0 * self.epsilon
    }

    fn trim(&self, row: &mut [f32], first: u64, roots: &[f32], scratch: &mut Scratch) -> u64 {
        let Scratch { order, words, .. } = scratch;
        let words = draw(&self.stream, first, row.len(), words);
        // The score in the upper bits, the column in the lower bits: sorting ranks by score, and equal scores by column.
        order.clear();
        order.extend(row.iter().enumerate().map(|(column, value)| {
            let score = value.abs() * roots.get(column).copied().unwrap_or(1.0);
            u64::from(score.to_bits()) << 32 | column as u64
        }));
        order.sort_unstable();
        let (mut kept, count) = (0, row.len());
        for (rank, entry) in order.iter().enumerate() {
            let column = (entry & u64::from(u32::MAX)) as usize;
            let probability = self.probability(rank, count);
            let value = &mut row[column];
            if u64::from(words[column]) < threshold(probability) {
                if self.is_unbiased {
                    *value *= (1.0 / probability) as f32;
                }
                kept += 1;
            } else {
                *value = 0.0;
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(key: f32) -> OrderStatistic {
        OrderStatistic { key: key.to_bits(), below: 0, equal: 0 }
    }

    fn trimmed(trim: Trim, columns: usize, values: &[f32], rows_at_once: usize) -> (Vec<f32>, u64) {
        let mut values = values.to_vec();
        let mut trimmer = Trimmer::new(trim);
        for (at, rows) in values.chunks_mut(columns * rows_at_once).enumerate() {
            trimmer.trim(at * rows_at_once, columns, rows);
        }
        (values, trimmer.kept())
    }

    #[test]
    fn of_equal_magnitudes_the_first_are_kept() {
        let trim = Trim::Between { lower: Edge::first(found(2.0), 2), upper: None };
        let values = [1.0, -2.0, 3.0, 2.0, 2.0, -3.0];
        let expected = ([0.0, -2.0, 3.0, 2.0, 0.0, -3.0].to_vec(), 4);
        for rows in 1..4 {
            assert_eq!(trimmed(trim.clone(), 2, &values, rows), expected);
        }
    }

    #[test]
    fn both_edges_may_be_one_value() {
        // Ascending and stable, breadcrumbs keeps ranks 1 and 2 of three equal values.
        let trim = Trim::Between {
            lower: Edge::after(found(2.0), 1),
            upper: Some(Edge::first(found(2.0), 3)),
        };
        let values = [2.0, 1.0, -2.0, 2.0, 2.0, 5.0];
        let expected = ([0.0, 0.0, -2.0, 2.0, 0.0, 0.0].to_vec(), 2);
        for rows in [1, 2, 6] {
            assert_eq!(trimmed(trim.clone(), 1, &values, rows), expected);
        }
    }

    #[test]
    fn rows_keep_their_largest_scores_and_of_equal_ones_the_lower_column() {
        let trim = Trim::Rows { count: 2, roots: vec![1.0, 2.0, 1.0, 1.0] };
        let values = [2.0, 1.0, -2.0, 0.5, 0.0, 0.0, 0.0, 0.0, 9.0, 1.0, -8.0, 7.0];
        let expected = [2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0, -8.0, 0.0];
        let (found, kept) = trimmed(trim, 4, &values, 2);
        assert_eq!((found, kept), (expected.to_vec(), 6));
    }

    #[test]
    fn a_ramp_without_spread_is_plain_dropping() {
        let stream = Stream::new(3, 0, "w");
        let values: Vec<f32> = (0..5000u16).map(|i| f32::from(i % 97) - 48.0).collect();
        let (plain, kept) = trimmed(
            Trim::Random { stream, probability: 0.3, factor: (1.0f64 / 0.3) as f32 },
            50,
            &values,
            7,
        );
        let ramp =
            Trim::Ramp { stream, density: 0.3, epsilon: 0.0, roots: Vec::new(), is_unbiased: true };
        assert_eq!(trimmed(ramp, 50, &values, 3), (plain, kept));
        // Four standard deviations of a binomial.
        let deviation = (5000.0f64 * 0.3 * 0.7).sqrt();
        assert!((kept as f64 - 1500.0).abs() < 4.0 * deviation, "{kept}");
    }

    #[test]
    fn a_ramp_keeps_large_entries_more_often() {
        let values: Vec<f32> = (0..20_000u32).map(|i| (i % 100) as f32 + 1.0).collect();
        let (found, _) = trimmed(
            Trim::Ramp {
                stream: Stream::new(1, 0, "w"),
                density: 0.5,
                epsilon: 0.4,
                roots: Vec::new(),
                is_unbiased: false,
            },
            100,
            &values,
            1,
        );
        let kept_of = |range: std::ops::Range<usize>| {
            let rows = found.chunks(100);
            rows.map(|row| row[range.clone()].iter().filter(|v| **v != 0.0).count()).sum::<usize>()
                as f64
        };
        // The mean probabilities of the lowest and highest tenth are 0.136 and 0.864 of 2000 entries.
        assert!((kept_of(0..10) - 273.0).abs() < 4.0 * (2000.0f64 * 0.136 * 0.864).sqrt());
        assert!((kept_of(90..100) - 1727.0).abs() < 4.0 * (2000.0f64 * 0.136 * 0.864).sqrt());
    }
}
