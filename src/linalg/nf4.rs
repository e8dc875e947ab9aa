//! NF4: weights as 4-bit codes of 16 normal quantiles, with a scale per block of 64.
//!
//! ```text
//! absmax_b = max |w| over block b of the flattened row-major weight         f32
//! code(w)  = number of middles of the codebook below w · (1 / absmax_b)     f32; an exact middle takes the lower code
//! ŵ        = codebook[code] · absmax_b                                       f32
//! double:    z_b = absmax_b - offset, offset = mean of absmax                f32
//!            absmax_b ≈ dynamic map[code of z_b / max |z|] · max |z| + offset, blocks of 256 scales
//! ```
//!
//! Two codes are a byte, the first in its high half; an odd number of weights ends with the code of 0 in the low half. A block of
//! zeros has codes of 0 and the scale 0. Zero is in the codebook, so a pruned weight stays exactly +0. A weight that is small within its
//! block becomes 0 too: a mask of kept weights is taken before quantisation.
//!
//! Sources: T. Dettmers, A. Pagnoni, A. Holtzman, L. Zettlemoyer, "QLoRA" (2023, arXiv 2305.14314), §3; the reference is
//! `quantize_4bit` of bitsandbytes 0.50 on a CPU, which these functions equal to the bit.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::dynamic_map::DynamicMap;

/// Weights per scale.
pub const BLOCK: usize = 64;

/// Scales per scale of scales.
pub const NESTED_BLOCK: usize = 256;

/// Blocks of a task.
const TASK_BLOCKS: usize = 256;

/// Partial sums of scales; see [`mean`].
const LANES: usize = 8;

/// The values of the codes.
pub const CODEBOOK: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Bytes of the codes of `weights` weights.
pub const fn packed_bytes(weights: usize) -> usize {
    weights.div_ceil(2)
}

/// Scales of `weights` weights.
pub const fn blocks(weights: usize) -> usize {
    weights.div_ceil(BLOCK)
}

/// Quantises weights, which begin at the first element of a block.
///
/// # Arguments
/// * `weights`: a flattened matrix, or a piece of it; the length of every piece but the last is a multiple of [`BLOCK`]
/// * `packed`: [`packed_bytes`]
/// * `absmax`: [`blocks`]
///
/// # Panics
/// Panics where the lengths disagree.
pub fn quantise(weights: &[f32], packed: &mut [u8], absmax: &mut [f32]) {
    assert_eq!(packed.len(), packed_bytes(weights.len()), "half a byte per weight");
    assert_eq!(absmax.len(), blocks(weights.len()), "one scale per block");
    weights
        .par_chunks(TASK_BLOCKS * BLOCK)
        .zip(packed.par_chunks_mut(TASK_BLOCKS * BLOCK / 2))
        .zip(absmax.par_chunks_mut(TASK_BLOCKS))
        .for_each(|((weights, packed), absmax)| {
            Arch::new().dispatch(Quantise { weights, packed, absmax });
        });
}

struct Quantise<'a> {
    weights: &'a [f32],
    packed: &'a mut [u8],
    absmax: &'a mut [f32],
}

impl WithSimd for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut middles = [0.0f32; 15];
        for (middle, pair) in middles.iter_mut().zip(CODEBOOK.windows(2)) {
            *middle = (pair[0] + pair[1]) / 2.0;
        }
        let blocks = self.weights.chunks(BLOCK).zip(self.packed.chunks_mut(BLOCK / 2));
        for ((weights, packed), absmax) in blocks.zip(self.absmax) {
            // The last block of a matrix may be shorter; zeros do not change its scale.
            let mut block = [0.0f32; BLOCK];
            block[..weights.len()].copy_from_slice(weights);
            let mut top = [0.0f32; 16];
            for part in block.as_chunks::<16>().0 {
                for (top, weight) in top.iter_mut().zip(part) {
                    *top = top.max(weight.abs());
                }
            }
            *absmax = top.into_iter().fold(0.0, f32::max);
            let mut scale = 1.0 / *absmax;
            if scale.is_infinite() {
                // All are zero, or below 2^-128: the reciprocal does not exist in f32.
                (scale, *absmax) = (0.0, 0.0);
            }
            let mut codes = [0u32; BLOCK];
            for (code, weight) in codes.iter_mut().zip(block) {
                let scaled = (weight * scale).clamp(-1.0, 1.0);
                for middle in middles {
                    *code += u32::from(scaled > middle);
                }
            }
            for (byte, pair) in packed.iter_mut().zip(codes.as_chunks::<2>().0) {
                *byte = (pair[0] << 4 | pair[1]) as u8;
            }
        }
    }
}

/// Restores the weights `range` of a flattened matrix.
///
/// # Arguments
/// * `packed`: the codes from byte `range.start / 2` of the matrix on
/// * `absmax`: the scales from block `range.start / BLOCK` on
/// * `weights`: as many as the range has
///
/// # Panics
/// Panics where a slice is too short.
pub fn dequantise(range: Range<usize>, packed: &[u8], absmax: &[f32], weights: &mut [f32]) {
    assert_eq!(weights.len(), range.len(), "one weight per code");
    let (first_block, first_byte) = (range.start / BLOCK, range.start / 2);
    // Up to the next border of blocks, then whole blocks.
    let head = (range.start.next_multiple_of(BLOCK) - range.start).min(weights.len());
    let (begin, whole) = weights.split_at_mut(head);
    for (at, weight) in (range.start..).zip(begin) {
        let byte = packed[at / 2 - first_byte];
        let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
        *weight = CODEBOOK[usize::from(code)] * absmax[at / BLOCK - first_block];
    }
    if whole.is_empty() {
        return;
    }
    let start = range.start + head;
    let packed = &packed[start / 2 - first_byte..];
    let absmax = &absmax[start / BLOCK - first_block..];
    let (packed, absmax) = (&packed[..packed_bytes(whole.len())], &absmax[..blocks(whole.len())]);
    whole
        .par_chunks_mut(TASK_BLOCKS * BLOCK)
        .zip(packed.par_chunks(TASK_BLOCKS * BLOCK / 2))
        .zip(absmax.par_chunks(TASK_BLOCKS))
        .for_each(|((weights, packed), absmax)| {
            Arch::new().dispatch(Dequantise { weights, packed, absmax });
        });
}

struct Dequantise<'a> {
    weights: &'a mut [f32],
    packed: &'a [u8],
    absmax: &'a [f32],
}

impl WithSimd for Dequantise<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let blocks = self.weights.chunks_mut(BLOCK).zip(self.packed.chunks(BLOCK / 2));
        for ((weights, packed), absmax) in blocks.zip(self.absmax) {
            // The scaled codebook: a product per code, not per weight.
            let values = CODEBOOK.map(|value| value * absmax);
            let (pairs, last) = weights.as_chunks_mut::<2>();
            for (pair, byte) in pairs.iter_mut().zip(packed) {
                *pair = [values[usize::from(byte >> 4)], values[usize::from(byte & 15)]];
            }
            if let ([last], Some(byte)) = (last, packed.last()) {
                *last = values[usize::from(byte >> 4)];
            }
        }
    }
}

/// The scales of a matrix, themselves as 8-bit codes.
#[derive(Debug, Clone, PartialEq)]
pub struct NestedScales {
    /// A code per block.
    pub codes: Vec<u8>,
    /// The largest deviation from the offset in every [`NESTED_BLOCK`] scales.
    pub absmax: Vec<f32>,
    /// The mean of the scales.
    pub offset: f32,
}

impl NestedScales {
    /// Quantises the scales of a whole matrix.
    pub fn new(scales: &[f32]) -> Self {
        let offset = mean(scales);
        let map = DynamicMap::signed();
        let mut codes = Vec::with_capacity(scales.len());
        let mut absmax = Vec::with_capacity(scales.len().div_ceil(NESTED_BLOCK));
        for block in scales.chunks(NESTED_BLOCK) {
            let top = block.iter().fold(0.0f32, |top, scale| top.max((scale - offset).abs()));
            let inverse = if top == 0.0 { 0.0 } else { 1.0 / top };
            codes.extend(block.iter().map(|scale| map.code((scale - offset) * inverse)));
            absmax.push(top);
        }
        Self { codes, absmax, offset }
    }

    /// The scale of a block, from its code, the largest deviation in its [`NESTED_BLOCK`], and the offset.
    pub fn scale(&self, block: usize) -> f32 {
        nested_scale(self.codes[block], self.absmax[block / NESTED_BLOCK], self.offset)
    }

    /// All scales.
    pub fn scales(&self) -> Vec<f32> {
        (0..self.codes.len()).map(|block| self.scale(block)).collect()
    }
}

/// A scale from its code, the largest deviation in its [`NESTED_BLOCK`], and the offset.
pub fn nested_scale(code: u8, absmax: f32, offset: f32) -> f32 {
    DynamicMap::signed().values()[usize::from(code)] * absmax + offset
}

/// The mean of scales in f32, with the order of sums of PyTorch's `mean` on one thread: [`LANES`] lanes of four chains, joined by
/// level. PyTorch divides more than 32,768 scales among its threads, so the last bits differ there.
fn mean(values: &[f32]) -> f32 {
    if values.is_empty() {
        return 0.0;
    }
    let (vectors, rest) = values.as_chunks::<LANES>();
    let (groups, last) = vectors.as_chunks::<4>();
    let mut chains = cascade(groups);
    for vector in last {
        add(&mut chains[0], vector);
    }
    let [mut lanes, others @ ..] = chains;
    for other in &others {
        add(&mut lanes, other);
    }
    let rest: f32 = rest.iter().fold(0.0, |sum, value| sum + value);
    lanes.iter().fold(rest, |sum, lane| sum + lane) / values.len() as f32
}

fn add(sums: &mut [f32; LANES], values: &[f32; LANES]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value;
    }
}

/// Sums groups of four vectors, a chain per place in the group. Sums of 2^p groups are added to the next of four levels, so an
/// error grows with the logarithm of the length.
fn cascade(groups: &[[[f32; LANES]; 4]]) -> [[f32; LANES]; 4] {
    const LEVELS: usize = 4;
    let power = (groups.len().next_power_of_two().ilog2() as usize / LEVELS).max(4);
    let mut levels = [[[0.0f32; LANES]; 4]; LEVELS];
    let add_group = |sums: &mut [[f32; LANES]; 4], group: &[[f32; LANES]; 4]| {
        for (sums, vector) in sums.iter_mut().zip(group) {
            add(sums, vector);
        }
    };
    for (at, group) in groups.iter().enumerate() {
        add_group(&mut levels[0], group);
        let done = at + 1;
        for level in 1..LEVELS {
            if done & ((1 << (level * power)) - 1) != 0 {
                break;
            }
            let sums = std::mem::take(&mut levels[level - 1]);
            add_group(&mut levels[level], &sums);
        }
    }
    let [mut total, others @ ..] = levels;
    for other in &others {
        add_group(&mut total, other);
    }
    total
}

#[cfg(test)]
#[path = "nf4_tests.rs"]
mod tests;
