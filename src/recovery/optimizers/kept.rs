//! The mask of kept weights: one bit per element of a flattened parameter, 1 = kept, least significant bit first.
//!
//! Every optimizer takes the sizes of a task and of an f32 from here.
//!
//! A pruned weight has bit 0. Its parameter and its states stay exactly +0, whatever its gradient is.

use rayon::prelude::*;

/// Elements of a task.
pub(super) const TASK: usize = 1 << 14;

/// Bytes of an f32.
pub(super) const F32: usize = 4;

/// Elements per byte of a mask.
pub(super) const PER_BYTE: usize = 8;

/// A mask of kept weights; see the module's first lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptMask {
    bits: Vec<u8>,
    elements: usize,
}

impl KeptMask {
    /// The mask of the weights that are not zero. Take it before a quantisation, which can make kept weights zero.
    pub fn of_nonzero(weights: &[f32]) -> Self {
        let byte = |weights: &[f32]| {
            let bits = weights.iter().enumerate();
            bits.fold(0, |byte, (at, &weight)| byte | u8::from(weight != 0.0) << at)
        };
        Self { bits: weights.chunks(PER_BYTE).map(byte).collect(), elements: weights.len() }
    }

    /// The mask with these bits. Bits beyond the last element are ignored. `None` if there are fewer or more bytes than `elements`
    /// need.
    pub fn from_bits(bits: Vec<u8>, elements: usize) -> Option<Self> {
        (bits.len() == elements.div_ceil(PER_BYTE)).then_some(Self { bits, elements })
    }

    /// The elements of the parameter.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The bits of all elements.
    pub fn bits(&self) -> &[u8] {
        &self.bits
    }

    /// Returns whether an element is kept.
    ///
    /// # Panics
    /// Panics where `element` is outside.
    pub fn is_kept(&self, element: usize) -> bool {
        is_kept(&self.bits, element)
    }

    /// The number of kept weights.
    pub fn count(&self) -> usize {
        let ones: usize = self.bits.iter().map(|byte| byte.count_ones() as usize).sum();
        // Bits beyond the last element do not count.
        let beyond = self.elements..self.bits.len() * PER_BYTE;
        ones - beyond.filter(|&at| self.is_kept(at)).count()
    }

    /// Removes an element.
    ///
    /// # Panics
    /// Panics where `element` is outside.
    pub fn remove(&mut self, element: usize) {
        self.bits[element / PER_BYTE] &= !(1 << (element % PER_BYTE));
    }

    /// Sets the values of pruned weights to +0.
    ///
    /// # Panics
    /// Panics where there are not as many values as elements.
    pub fn apply(&self, values: &mut [f32]) {
        self.fill_pruned(values, 0.0);
    }

    /// Puts a value in the place of every pruned weight.
    pub(super) fn fill_pruned<T: Copy + Send + Sync>(&self, values: &mut [T], pruned: T) {
        assert_eq!(values.len(), self.elements, "a mask of these values");
        let tasks = values.par_chunks_mut(TASK);
        let tasks = tasks.zip(self.bits.par_chunks(TASK / PER_BYTE));
        tasks.for_each(|(values, bits)| {
            for (values, &byte) in values.chunks_mut(PER_BYTE).zip(bits) {
                for (at, value) in values.iter_mut().enumerate() {
                    *value = if byte >> at & 1 == 1 { *value } else { pruned };
                }
            }
        });
    }
}

/// The bit of an element in the bits of a part that begins at a byte.
#[inline(always)]
pub(super) fn is_kept(bits: &[u8], element: usize) -> bool {
    bits[element / PER_BYTE] >> (element % PER_BYTE) & 1 == 1
}

/// Iterates over the bits of parts of `part` elements, a multiple of 8: `None` for every part where there is no mask.
pub(super) fn parts(mask: Option<&KeptMask>, part: usize, count: usize) -> Vec<Option<&[u8]>> {
    debug_assert_eq!(part % PER_BYTE, 0, "a part begins at a byte");
    match mask {
        None => vec![None; count],
        Some(mask) => mask.bits.chunks(part / PER_BYTE).map(Some).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_knows_the_weights_that_are_not_zero() {
        let weights = [1.0, 0.0, -0.0, f32::MIN_POSITIVE, -2.0, 0.0, 0.0, 0.0, 5.0, 0.0];
        let mask = KeptMask::of_nonzero(&weights);
        assert_eq!(mask.bits(), [0b0001_1001, 0b01]);
        assert_eq!((mask.count(), mask.elements()), (4, 10));
        let mut values = [-1.0; 10];
        mask.apply(&mut values);
        for (at, value) in values.iter().enumerate() {
            let expected = if weights[at] == 0.0 { 0.0f32 } else { -1.0 };
            assert_eq!(value.to_bits(), expected.to_bits(), "{at}");
            assert_eq!(mask.is_kept(at), weights[at] != 0.0);
        }
        assert_eq!(KeptMask::from_bits(vec![25, 1], 10), Some(mask));
        assert_eq!(KeptMask::from_bits(vec![25], 10), None);
        let mut wide = KeptMask::from_bits(vec![25, 0xff], 10).unwrap();
        assert_eq!(wide.count(), 5);
        wide.remove(9);
        assert!((wide.count(), wide.is_kept(8), wide.is_kept(9)) == (4, true, false));
    }
}
