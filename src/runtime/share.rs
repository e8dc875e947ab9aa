//! The samples of a rank: the blocks of samples are dealt to the ranks in turn.

use std::ops::Range;

use anyhow::Result;

use super::blocks::SampleBlocks;
use super::ordered_sums::gathered;
use crate::ranks::Ranks;

/// The samples of a stream that pass on a rank. Their hidden states exist nowhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleShare {
    samples: usize,
    ranks: usize,
    /// The samples of this rank, ascending.
    own: Vec<usize>,
}

impl SampleShare {
    /// All of this many samples.
    pub fn whole(samples: usize) -> Self {
        Self::of(samples, 0, 1)
    }

    /// The share of `rank` among `ranks`.
    pub fn of(samples: usize, rank: usize, ranks: usize) -> Self {
        let blocks = SampleBlocks::new(samples);
        let own = (rank..blocks.count()).step_by(ranks).flat_map(|block| blocks.samples_of(block));
        Self { samples, ranks, own: own.collect() }
    }

    /// The share of this rank.
    pub fn here(samples: usize, ranks: &Ranks) -> Self {
        Self::of(samples, ranks.rank(), ranks.size())
    }

    /// The number of all samples.
    pub fn all(&self) -> usize {
        self.samples
    }

    /// The samples of this rank, ascending.
    pub fn own(&self) -> &[usize] {
        &self.own
    }

    /// The number of blocks that the rank with the most blocks has.
    pub fn rounds(&self) -> usize {
        SampleBlocks::new(self.samples).count().div_ceil(self.ranks)
    }

    /// The rank of each block of samples.
    pub fn makers(&self) -> Vec<usize> {
        (0..SampleBlocks::new(self.samples).count()).map(|block| block % self.ranks).collect()
    }

    /// The blocks of this rank, ascending: their numbers, and the places of their samples among the samples of this rank.
    pub fn own_blocks(&self) -> Vec<(usize, Range<usize>)> {
        let blocks = SampleBlocks::new(self.samples);
        let mut start = 0;
        let of_block = |block: usize| {
            let places = start..start + blocks.samples_of(block).len();
            start = places.end;
            (block, places)
        };
        let Some(&first) = self.own.first() else { return Vec::new() };
        (blocks.block_of(first)..blocks.count()).step_by(self.ranks).map(of_block).collect()
    }

    /// The rank that has a sample, and the place of the sample among the samples of this rank where this is the rank.
    pub fn rank_and_place(&self, sample: usize) -> (usize, Option<usize>) {
        let block = SampleBlocks::new(self.samples).block_of(sample);
        (block % self.ranks, self.own.binary_search(&sample).ok())
    }

    /// Numbers of all samples in their order, from the number of each sample of this rank.
    ///
    /// # Errors
    /// Fails when a rank has left.
    pub fn gathered(&self, own: &[f64], ranks: &Ranks) -> Result<Vec<f64>> {
        let makers = (0..self.samples).map(|sample| self.rank_and_place(sample).0);
        gathered(&makers.collect::<Vec<_>>(), own, ranks)
    }

    /// Puts a value per sample, which every rank has for its own samples, into the order of the samples.
    pub fn in_order<T>(samples: usize, by_rank: Vec<Vec<T>>) -> Vec<T> {
        let ranks = by_rank.len();
        let blocks = SampleBlocks::new(samples);
        let mut by_rank: Vec<_> = by_rank.into_iter().map(Vec::into_iter).collect();
        let owners = (0..samples).map(|sample| blocks.block_of(sample) % ranks);
        owners.filter_map(|rank| by_rank[rank].next()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_has_one_rank_and_values_come_back_in_order() {
        for samples in [0, 1, 2, 7, 31, 32, 33, 70, 128, 166] {
            for ranks in 1..9 {
                let shares: Vec<_> =
                    (0..ranks).map(|rank| SampleShare::of(samples, rank, ranks)).collect();
                let by_rank = shares.iter().map(|share| share.own().to_vec()).collect();
                let together = SampleShare::in_order(samples, by_rank);
                for (rank, share) in shares.iter().enumerate() {
                    let places = share.own_blocks();
                    let places = places.iter().flat_map(|(block, places)| {
                        let samples = SampleBlocks::new(samples).samples_of(*block);
                        assert_eq!(share.makers()[*block], rank);
                        samples.zip(places.clone())
                    });
                    let own = share.own().iter().copied().zip(0..);
                    assert!(places.eq(own), "{samples} on {ranks}");
                }
                assert_eq!(together, (0..samples).collect::<Vec<_>>(), "{samples} on {ranks}");
                let blocks = SampleBlocks::new(samples);
                let most = shares.iter().map(|share| {
                    share.own().iter().filter(|&&sample| blocks.ends_with(sample)).count()
                });
                assert_eq!(most.max(), Some(shares[0].rounds()), "{samples} on {ranks}");
            }
        }
        assert_eq!(SampleShare::whole(5).own(), [0, 1, 2, 3, 4]);
    }
}
