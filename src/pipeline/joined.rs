//! The observations of several ranks, put together: every rank ends with the statistics of all samples, with the bits of a single process.
//!
//! ```text
//! per input, at every rank
//!   numbers of a sample (f64)        sent to all ranks, merged in the order of the samples
//!   XᵀX of a block (f32)             cut into equal parts, each sent to its owner, who adds parts in the order of the blocks
//!   rows of the output error (f32)   sent to all ranks, joined in the order of the samples
//! after the last block               the owners send their parts of G to all ranks
//! ```
//!
//! Blocks are dealt to the ranks in turn, so a round of one block per rank is a run of consecutive blocks. A rank without a block in the last
//! round sends nothing. Bytes that a rank sends per input of n columns: 8 · numbers · samples/R · (R − 1), and with G of g = 4 · n(n + 1)/2
//! bytes or a little more: ⌈B/R⌉ · g · (R − 1)/R for blocks, g · (R − 1)/R for its part of G.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;

use super::output_error::{self, SampleRows};
use crate::bytes::ByteSize;
use crate::linalg::Products;
use crate::linalg::gram::GramMatrix;
use crate::model::{InputId, InputMap, ModelConfig};
use crate::pruning::{Statistics, StatisticsKind};
use crate::ranks::arrays::owned;
use crate::ranks::{PIECE, Ranks};
use crate::runtime::SampleShare;
use crate::runtime::blocks::SampleBlocks;

/// The statistics by input; `None` for an input that the pass does not observe.
pub(super) type Points = InputMap<Option<Mutex<Statistics>>>;

/// A panic elsewhere ends the run; the statistics are not used after it.
pub(super) fn lock(statistics: &Mutex<Statistics>) -> MutexGuard<'_, Statistics> {
    statistics.lock().unwrap_or_else(PoisonError::into_inner)
}

/// f32 sums of a message.
const SUMS: usize = PIECE / size_of::<f32>();

/// Bytes beside the statistics while the observations of all ranks are put together.
///
/// # Arguments
/// * `samples`: the samples of this rank, and of all ranks
pub(super) fn bytes(
    config: &ModelConfig,
    kind: &'static dyn StatisticsKind,
    samples: [usize; 2],
    seqlen: usize,
) -> ByteSize {
    let [own, all] = samples;
    let widths = config.input_widths();
    let of_sample: Vec<usize> = widths.values().map(|&width| numbers(kind, width)).collect();
    let largest = of_sample.iter().copied().max().unwrap_or_default();
    // The numbers of an input arrive as bytes, become numbers, and are cut into samples.
    let numbers = own * of_sample.iter().sum::<usize>() + 3 * all * largest;
    let rows = output_error::tokens(all, seqlen) * widths.values().sum::<usize>();
    let pieces = match kind.is_in_place() {
        true => 4 * PIECE,
        false => 0,
    };
    ByteSize::of(numbers, size_of::<f64>())
        + ByteSize::of(3 * rows, size_of::<f32>())
        + ByteSize(pieces as u64)
}

/// Bytes that a rank with the most samples sends in a layer; the formula is in the first lines of this file.
pub(super) fn bytes_sent(
    config: &ModelConfig,
    kind: &'static dyn StatisticsKind,
    samples: usize,
    seqlen: usize,
    ranks: usize,
) -> f64 {
    let own = SampleBlocks::new(samples).most_of(ranks) as f64;
    let others = ranks.saturating_sub(1) as f64;
    let widths = config.input_widths();
    let of_sample: usize = widths.values().map(|&width| numbers(kind, width)).sum();
    let row = widths.values().sum::<usize>() as f64 * size_of::<f32>() as f64;
    let rows = output_error::tokens(samples, seqlen) as f64 * own / samples.max(1) as f64;
    let rounds = SampleBlocks::new(samples).count().div_ceil(ranks) as f64;
    let grams: f64 = match kind.is_in_place() {
        true => widths.values().map(|&width| GramMatrix::collecting_bytes(width).0 as f64).sum(),
        false => 0.0,
    };
    own * (of_sample * size_of::<f64>()) as f64 * others
        + rows * row * others
        + grams * (rounds + 1.0) * others / ranks as f64
}

/// Numbers of a sample for an input.
fn numbers(kind: &'static dyn StatisticsKind, width: usize) -> usize {
    if kind.is_in_place() {
        // Large statistics are not made to count their numbers.
        let part = kind.part_beside_gram(width);
        return part.map_or(0, |part| part.numbers().len());
    }
    match kind.begin(width, Products::default()) {
        Statistics::Merged(statistics) => statistics.part().numbers().len(),
        Statistics::InPlace(_) => 0,
    }
}

/// Observations of this rank's own samples, in their order.
pub(super) struct OwnSamples<'a> {
    ranks: &'a Ranks,
    share: &'a SampleShare,
    /// By input and sample, the numbers to merge; empty for an input that is not observed.
    numbers: InputMap<Vec<Vec<f64>>>,
    rows: Vec<SampleRows>,
    /// Rounds of blocks that are over.
    rounds: usize,
}

impl<'a> OwnSamples<'a> {
    /// No samples yet.
    pub(super) fn new(ranks: &'a Ranks, share: &'a SampleShare) -> Self {
        Self { ranks, share, numbers: InputMap::new(|_| Vec::new()), rows: Vec::new(), rounds: 0 }
    }

    /// Keeps the numbers of the next sample for an input.
    pub(super) fn keep(&mut self, point: InputId, numbers: Vec<f64>) {
        self.numbers[point].push(numbers);
    }

    /// Keeps the rows of the next sample.
    pub(super) fn keep_rows(&mut self, rows: SampleRows) {
        self.rows.push(rows);
    }

    /// Ends a round of blocks: the owners add up the sums of all ranks. Ranks call this equally often.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub(super) fn end_block(&mut self, points: &Points) -> Result<()> {
        self.rounds += 1;
        each_gram(points, |gram| add_blocks(self.ranks, gram))
    }

    /// Merges the samples of all ranks. Returns the rows of all samples, in their order.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub(super) fn join(
        mut self,
        points: &Points,
        new: &dyn Fn(usize) -> SampleRows,
    ) -> Result<Vec<SampleRows>> {
        while self.rounds < self.share.rounds() {
            self.end_block(points)?;
        }
        each_gram(points, |gram| gather(self.ranks, gram))?;
        for (point, numbers) in self.numbers {
            let Some(statistics) = &points[point] else {
                continue;
            };
            let mut statistics = lock(statistics);
            for numbers in in_order(self.ranks, self.share, &numbers)? {
                match &mut *statistics {
                    Statistics::Merged(statistics) => statistics.merge(&numbers),
                    Statistics::InPlace(statistics) => statistics.merge_beside_gram(&numbers),
                }
            }
        }
        let observed = |point: InputId| points[point].is_some();
        let own: Vec<Vec<f32>> = self.rows.iter().map(|rows| rows.of(&observed)).collect();
        let all = in_order(self.ranks, self.share, &own)?;
        let samples = all.into_iter().enumerate();
        Ok(samples.map(|(sample, rows)| new(sample).with(&observed, &rows)).collect())
    }
}

/// Calls `each` with the Gram matrices of the observed inputs.
fn each_gram(points: &Points, each: impl Fn(&mut GramMatrix) -> Result<()>) -> Result<()> {
    let each_of = |point: &Mutex<Statistics>| match &mut *lock(point) {
        Statistics::InPlace(statistics) => each(statistics.gram_mut()),
        Statistics::Merged(_) => Ok(()),
    };
    points.values().flatten().try_for_each(each_of)
}

/// The pieces of the largest part.
fn pieces(sums: usize, ranks: usize) -> usize {
    let largest = (0..ranks).map(|rank| owned(sums, rank, ranks).len()).max();
    largest.unwrap_or(0).div_ceil(SUMS)
}

/// A piece of a part.
fn piece(part: Range<usize>, number: usize) -> Range<usize> {
    let at = |piece: usize| part.end.min(part.start + piece * SUMS);
    at(number)..at(number + 1)
}

/// Adds the current blocks of all ranks to the parts of G that this rank owns, in the order of the ranks, which is the order of the blocks.
fn add_blocks(ranks: &Ranks, gram: &mut GramMatrix) -> Result<()> {
    let (rank, size) = (ranks.rank(), ranks.size());
    gram.take_block(|block, sums| {
        let all = sums.len();
        for number in 0..pieces(all, size) {
            let parts = ranks.exchange(&|to| {
                let part = block.get(piece(owned(all, to, size), number));
                bytemuck::cast_slice(part.unwrap_or_default()).to_vec()
            })?;
            let own = &mut sums[piece(owned(all, rank, size), number)];
            for part in parts {
                let part: Vec<f32> = bytemuck::pod_collect_to_vec(&part);
                own.iter_mut().zip(part).for_each(|(sum, more)| *sum += more);
            }
        }
        Ok(())
    })
}

/// Gives all ranks the whole G.
fn gather(ranks: &Ranks, gram: &mut GramMatrix) -> Result<()> {
    let all = gram.sums().len();
    let part_of = |rank: usize| {
        let own = owned(all, rank, ranks.size());
        own.start * size_of::<f32>()..own.end * size_of::<f32>()
    };
    ranks.gather_parts(bytemuck::cast_slice_mut(gram.sums_mut()), &part_of)
}

/// The numbers of all samples in their order, from the numbers of the samples of each rank. The numbers of a sample may be fewer than
/// the numbers of the sample before it.
fn in_order<T: bytemuck::Pod>(
    ranks: &Ranks,
    share: &SampleShare,
    own: &[Vec<T>],
) -> Result<Vec<Vec<T>>> {
    let lengths: Vec<u64> = own.iter().map(|numbers| numbers.len() as u64).collect();
    let lengths = ranks.all_gather(bytemuck::cast_slice(&lengths))?;
    let values = ranks.all_gather(bytemuck::cast_slice(&own.concat()))?;
    let by_rank = lengths.iter().zip(values).map(|(lengths, values)| {
        let lengths: Vec<u64> = bytemuck::pod_collect_to_vec(lengths);
        let values: Vec<T> = bytemuck::pod_collect_to_vec(&values);
        let mut rest = &values[..];
        let cut = |length: u64| {
            let (numbers, later) = rest.split_at(rest.len().min(length as usize));
            rest = later;
            numbers.to_vec()
        };
        lengths.into_iter().map(cut).collect()
    });
    Ok(SampleShare::in_order(share.all(), by_rank.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::threads;

    /// Rows of a sample.
    fn rows(sample: usize, width: usize) -> Vec<f32> {
        let at = |index: usize| ((sample * 31 + index) % 97) as f32 / 97.0 - 0.4;
        (0..5 * width).map(at).collect()
    }

    #[test]
    fn gram_matrices_of_ranks_have_the_bits_of_one_process() {
        // Two panels.
        let width = 200;
        for samples in [1, 7, 40] {
            let mut alone = GramMatrix::new(width, Products::F32);
            let blocks = SampleBlocks::new(samples);
            for sample in 0..samples {
                alone.add_rows(&rows(sample, width));
                if blocks.ends_with(sample) {
                    alone.end_block();
                }
            }
            alone.finish();
            for size in [2, 3, 8] {
                let joined = threads::run(size, |ranks| {
                    let share = SampleShare::here(samples, ranks);
                    let mut gram = GramMatrix::new(width, Products::F32);
                    let mut rounds = 0;
                    for &sample in share.own() {
                        gram.add_rows(&rows(sample, width));
                        if blocks.ends_with(sample) {
                            add_blocks(ranks, &mut gram)?;
                            rounds += 1;
                        }
                    }
                    for _ in rounds..share.rounds() {
                        add_blocks(ranks, &mut gram)?;
                    }
                    gather(ranks, &mut gram)?;
                    let sent = ranks.traffic().bytes_sent as usize;
                    Ok((gram.sums().to_vec(), sent, share.rounds()))
                });
                let g = size_of_val(alone.sums());
                for of_rank in joined {
                    let (sums, sent, rounds) = of_rank.unwrap();
                    assert_eq!(sums, alone.sums(), "{samples} samples on {size} ranks");
                    let most = (rounds + 1) * (g * (size - 1) / size + 16 * size);
                    assert!(sent <= most, "{sent} bytes, at most {most}");
                }
            }
        }
    }

    #[test]
    fn numbers_come_in_the_order_of_the_samples() {
        for samples in [1, 7, 40] {
            for size in [1, 2, 3, 8] {
                let joined = threads::run(size, |ranks| {
                    let share = SampleShare::here(samples, ranks);
                    let own = share.own().iter().map(|&sample| vec![sample as f64; 1 + sample % 3]);
                    in_order(ranks, &share, &own.collect::<Vec<_>>())
                });
                for of_rank in joined {
                    let expected = (0..samples).map(|sample| vec![sample as f64; 1 + sample % 3]);
                    assert_eq!(of_rank.unwrap(), expected.collect::<Vec<_>>());
                }
            }
        }
    }
}
