//! Eight elements of 1, 2 or 4 bytes at a time, moved as a row of a table says: how values without zeros and rows with zeros become each
//! other ([`super::bitmask`]).

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m128i, __m256i};

use pulp::NullaryFnOnce;

/// The mark of a place that gets zeros. A shuffle of bytes gives 0 for it.
pub(super) const NONE: u8 = 0x80;

/// A set of instructions that moves elements.
pub(super) trait Move: Copy {
    /// For each place the element whose number is there, or zeros for [`NONE`]. `N` is 1, 2 or 4.
    fn eight<const N: usize>(self, elements: &[[u8; N]; 8], places: &[u8; 8]) -> [[u8; N]; 8];
}

/// Work on rows with any set.
pub(super) trait Moving {
    fn with<M: Move>(self, by: M);
}

/// Does the work with the best set of this CPU.
pub(super) fn dispatch(work: impl Moving) {
    #[cfg(target_arch = "x86_64")]
    if let Some(v3) = pulp::x86::V3::try_new() {
        return v3.vectorize(On(v3, work));
    }
    work.with(OneByOne);
}

/// Work with a set, in the form that is compiled for the set.
struct On<M, W>(M, W);

impl<M: Move, W: Moving> NullaryFnOnce for On<M, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.1.with(self.0);
    }
}

#[derive(Clone, Copy)]
struct OneByOne;

impl Move for OneByOne {
    #[inline(always)]
    fn eight<const N: usize>(self, elements: &[[u8; N]; 8], places: &[u8; 8]) -> [[u8; N]; 8] {
        places.map(|place| match place {
            NONE => [0; N],
            place => elements[usize::from(place) % 8],
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Move for pulp::x86::V3 {
    #[inline(always)]
    fn eight<const N: usize>(self, elements: &[[u8; N]; 8], places: &[u8; 8]) -> [[u8; N]; 8] {
        let mut bytes = [0; 32];
        bytes[..8 * N].copy_from_slice(elements.as_flattened());
        let places: __m128i = bytemuck::cast([u64::from_le_bytes(*places), 0]);
        if N == 4 {
            let places = self.avx2._mm256_cvtepi8_epi32(places);
            let elements: __m256i = bytemuck::cast(bytes);
            let moved = self.avx2._mm256_permutevar8x32_epi32(elements, places);
            // A mark is negative, and stays so in 32 bits.
            let marks = self.avx2._mm256_srai_epi32::<31>(places);
            bytes = bytemuck::cast(self.avx2._mm256_andnot_si256(marks, moved));
        } else {
            let places = match N {
                1 => places,
                // The bytes 2p and 2p + 1. A mark keeps its highest bit.
                _ => {
                    let twice = self.sse2._mm_unpacklo_epi8(places, places);
                    let twice = self.sse2._mm_adds_epu8(twice, twice);
                    self.sse2._mm_or_si128(twice, self.sse2._mm_set1_epi16(0x0100))
                }
            };
            let [elements, _]: [__m128i; 2] = bytemuck::cast(bytes);
            let moved: [u8; 16] = bytemuck::cast(self.ssse3._mm_shuffle_epi8(elements, places));
            bytes[..16].copy_from_slice(&moved);
        }
        let mut out = [[0; N]; 8];
        out.as_flattened_mut().copy_from_slice(&bytes[..8 * N]);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Check<const N: usize>;

    impl<const N: usize> Moving for Check<N> {
        fn with<M: Move>(self, by: M) {
            let elements: [[u8; N]; 8] =
                std::array::from_fn(|at| std::array::from_fn(|byte| (10 * at + byte + 200) as u8));
            for places in [[0, 1, 2, 3, 4, 5, 6, 7], [NONE; 8], [7, NONE, 0, 0, NONE, 3, 6, NONE]] {
                assert_eq!(by.eight(&elements, &places), OneByOne.eight(&elements, &places));
            }
        }
    }

    #[test]
    fn every_set_moves_elements_as_the_table_says() {
        assert_eq!(OneByOne.eight(&[[1], [2], [3], [4], [5], [6], [7], [8]], &[7; 8]), [[8]; 8]);
        dispatch(Check::<1>);
        dispatch(Check::<2>);
        dispatch(Check::<4>);
    }
}
