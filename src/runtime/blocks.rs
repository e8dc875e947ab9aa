//! Blocks of samples: the order in which large sums over samples are added up.
//!
//! ```text
//! B = min(32, samples)
//! block k = the samples from ⌊k · samples / B⌋ up to ⌊(k + 1) · samples / B⌋
//! sum = ((block 0 + block 1) + block 2) + …        a block is summed by a single device
//! ```
//!
//! The number of samples alone decides the blocks, so sums do not depend on the number of devices.

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

    /// The samples of a block.
    pub fn samples_of(self, block: usize) -> Range<usize> {
        let start = |block: usize| block * self.samples / self.count().max(1);
        start(block)..start(block + 1)
    }

    /// The block of a sample.
    pub fn block_of(self, sample: usize) -> usize {
        ((sample + 1) * self.count() - 1) / self.samples.max(1)
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
    }
}
