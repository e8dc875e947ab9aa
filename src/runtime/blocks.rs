//! Blocks of samples: the order in which large sums over samples are added up.
//!
//! ```text
//! B = min(32, samples)       the first (samples mod B) blocks have ⌈samples / B⌉ samples, the others ⌊samples / B⌋, in order
//! sum = ((block 0 + block 1) + block 2) + …        a block is summed by a single device
//! ```
//!
//! The number of samples alone decides the blocks, so sums do not depend on the number of devices. Devices get the blocks in turn.

use std::ops::Range;

/// Blocks, at most.
const BLOCKS: usize = 32;

/// The blocks of a number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleBlocks {
    samples: usize,
}

impl SampleBlocks {
    /// The blocks of this many samples.
    pub fn new(samples: usize) -> Self {
        Self { samples }
    }

    /// The number of blocks.
    pub fn count(self) -> usize {
        self.samples.min(BLOCKS)
    }

    /// Samples of a smaller block, and the number of larger blocks.
    fn sizes(self) -> (usize, usize) {
        let count = self.count().max(1);
        (self.samples / count, self.samples % count)
    }

    /// The samples of a block.
    pub fn samples_of(self, block: usize) -> Range<usize> {
        let (size, larger) = self.sizes();
        let start = |block: usize| block * size + block.min(larger);
        start(block)..start(block + 1)
    }

    /// The block of a sample.
    pub fn block_of(self, sample: usize) -> usize {
        let (size, larger) = self.sizes();
        let in_larger = larger * (size + 1);
        match sample.checked_sub(in_larger) {
            None => sample / (size + 1),
            Some(after) => larger + after / size.max(1),
        }
    }

    /// The most samples that a device gets where this many devices share them.
    pub fn most_of(self, devices: usize) -> usize {
        let (size, larger) = self.sizes();
        self.count().div_ceil(devices.max(1)) * size + larger.div_ceil(devices.max(1))
    }

    /// Returns whether a sample is the last sample of its block.
    pub fn ends_with(self, sample: usize) -> bool {
        self.samples_of(self.block_of(sample)).end == sample + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_in_a_single_block() {
        for samples in [0, 1, 2, 31, 32, 33, 63, 100, 128, 129, 1000] {
            let blocks = SampleBlocks::new(samples);
            assert_eq!(blocks.count(), samples.min(32));
            let mut next = 0;
            for block in 0..blocks.count() {
                let own = blocks.samples_of(block);
                assert_eq!(own.start, next, "{samples}");
                assert!((samples / 32..=samples.div_ceil(32)).contains(&own.len()), "{samples}");
                assert!(!own.is_empty());
                for sample in own.clone() {
                    assert_eq!(blocks.block_of(sample), block, "{samples} {sample}");
                    assert_eq!(blocks.ends_with(sample), sample + 1 == own.end);
                }
                next = own.end;
            }
            assert_eq!(next, samples);
        }
        assert_eq!(SampleBlocks::new(128).samples_of(31), 124..128);
        assert_eq!(SampleBlocks::new(0).block_of(3), 3);
    }

    #[test]
    fn devices_get_nearly_equal_shares() {
        for (samples, devices, most) in [
            (0, 3, 0),
            (5, 2, 3),
            (40, 4, 10),
            (48, 2, 24),
            (80, 2, 40),
            (128, 6, 24),
            (341, 6, 64),
        ] {
            let blocks = SampleBlocks::new(samples);
            let share = |device: usize| -> usize {
                let own = (device..blocks.count()).step_by(devices);
                own.map(|block| blocks.samples_of(block).len()).sum()
            };
            let shares: Vec<usize> = (0..devices).map(share).collect();
            assert_eq!(shares.iter().sum::<usize>(), samples);
            assert_eq!(shares.iter().max(), Some(&most), "{samples} {devices}");
            assert_eq!(blocks.most_of(devices), most, "{samples} {devices}");
        }
    }
}
