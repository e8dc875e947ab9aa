//! Random numbers that belong to elements: Philox4x32-10 with the element's index as its counter.
//!
//! ```text
//! u(seed, model, tensor, element) = Philox(counter = [element / 4, stream], key = seed)[element mod 4]
//! stream = the first 8 bytes of SHA-256("model:tensor"), little endian
//! kept   = u < p · 2³²
//! ```
//!
//! The counter is four words of 32 bits: the low and high word of element / 4, then of the stream. The key is the low and high word
//! of the seed. So a mask does not depend on threads, pieces, devices or the order of tensors, and a resumed run draws the same mask.
//!
//! Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the test vectors
//! come from its library Random123.

use pulp::{Arch, Simd, WithSimd};
use sha2::{Digest, Sha256};

/// Rounds of the generator.
const ROUNDS: usize = 10;
/// Factors of the rounds.
const FACTORS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// Increments of the key.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
/// Counters that are computed at once.
const WIDTH: usize = 8;

/// Numbers per counter.
pub(super) const WORDS: usize = 4;

/// The random numbers of a tensor of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    stream: [u32; 2],
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

impl Stream {
    /// The numbers of model number `model` and the output tensor `tensor`.
    pub fn new(seed: u64, model: usize, tensor: &str) -> Self {
        let digest = Sha256::digest(format!("{model}:{tensor}"));
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        Self { key: halves(seed), stream: halves(u64::from_le_bytes(first)) }
    }

    /// Fills `numbers` with the numbers of the elements from `first` on; `first` is a multiple of 4.
    pub fn fill(&self, first: u64, numbers: &mut [u32]) {
        debug_assert_eq!(first % WORDS as u64, 0, "a counter has four elements");
        Arch::new().dispatch(Fill { of: self, counter: first / WORDS as u64, numbers });
    }
}

/// The number of an element.
pub fn uniform(stream: &Stream, element: u64) -> u32 {
    let mut four = [0; WORDS];
    let at = (element % WORDS as u64) as usize;
    stream.fill(element - at as u64, &mut four);
    four[at]
}

struct Fill<'a> {
    of: &'a Stream,
    counter: u64,
    numbers: &'a mut [u32],
}

impl WithSimd for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut counter = self.counter;
        for numbers in self.numbers.chunks_mut(WORDS * WIDTH) {
            let words = philox(counter, self.of.stream, self.of.key);
            for (at, number) in numbers.iter_mut().enumerate() {
                *number = words[at % WORDS][at / WORDS];
            }
            counter += WIDTH as u64;
        }
    }
}

/// The four words of [`WIDTH`] successive counters.
#[inline(always)]
fn philox(counter: u64, stream: [u32; 2], key: [u32; 2]) -> [[u32; WIDTH]; WORDS] {
    let counters: [[u32; 2]; WIDTH] =
        std::array::from_fn(|at| halves(counter.wrapping_add(at as u64)));
    let [mut a, mut b] = [0, 1].map(|half| counters.map(|counter| counter[half]));
    let [mut c, mut d] = stream.map(|half| [half; WIDTH]);
    let mut key = key;
    for _ in 0..ROUNDS {
        for (((a, b), c), d) in a.iter_mut().zip(&mut b).zip(&mut c).zip(&mut d) {
            let first = u64::from(*a) * u64::from(FACTORS[0]);
            let second = u64::from(*c) * u64::from(FACTORS[1]);
            *a = (second >> 32) as u32 ^ *b ^ key[0];
            *b = second as u32;
            *c = (first >> 32) as u32 ^ *d ^ key[1];
            *d = first as u32;
        }
        key[0] = key[0].wrapping_add(WEYL[0]);
        key[1] = key[1].wrapping_add(WEYL[1]);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123 1.14 for philox4x32-10 (`tests/kat_vectors`).
    #[test]
    fn numbers_are_those_of_the_library() {
        let of = |counter: [u32; 4], key: [u32; 2]| {
            let first = u64::from(counter[0]) | u64::from(counter[1]) << 32;
            let words = philox(first, [counter[2], counter[3]], key);
            words.map(|word| word[0])
        };
        let zero = of([0; 4], [0; 2]);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = of([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi =
            of([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn an_element_has_its_number_in_any_piece() {
        let stream = Stream::new(7, 1, "model.norm.weight");
        let mut whole = vec![0; 100];
        stream.fill(0, &mut whole);
        let mut piece = vec![0; 37];
        stream.fill(24, &mut piece);
        assert_eq!(piece, whole[24..61]);
        for (at, number) in whole.iter().enumerate() {
            assert_eq!(uniform(&stream, at as u64), *number);
        }
    }

    /// From a separate implementation, in Python's integers: `hashlib.sha256(b"1:model.norm.weight")` and the rounds above.
    #[test]
    fn streams_differ_by_seed_model_and_tensor() {
        let first = |seed, model, tensor| uniform(&Stream::new(seed, model, tensor), 0);
        let base = first(7, 1, "model.norm.weight");
        assert_eq!(base, 0x4a5d_b2db);
        for other in [
            first(8, 1, "model.norm.weight"),
            first(7, 2, "model.norm.weight"),
            first(7, 1, "lm_head.weight"),
        ] {
            assert_ne!(base, other);
        }
    }
}
