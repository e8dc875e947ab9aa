//! CPython's `random.Random`, so that `--seed 0` draws the samples that the Python reference draws.
//!
//! The generator is Makoto Matsumoto's and Takuji Nishimura's MT19937 (1998), from the `rand_mt` crate. CPython seeds and reads it
//! in its own way (`Modules/_randommodule.c`, `Lib/random.py`): the 32-bit words of the seed go through `init_by_array`,
//! `getrandbits` takes the *top* bits of an output, and `randint` rejects rather than scales. Two details keep the draws in
//! step: a draw takes as many bits as n has, not n−1 (n = 1024 takes 11 bits), and n = 1 still consumes outputs until a bit is 0.

use rand_mt::Mt;

/// A generator in the state of CPython's.
#[derive(Clone)]
pub struct PythonRandom {
    generator: Mt,
}

impl PythonRandom {
    /// The generator after `random.seed(seed)` with a non-negative integer.
    pub fn new(seed: u64) -> Self {
        Self::with_key([seed as u32, (seed >> 32) as u32, 0])
    }

    /// The generator after `random.seed((seed << 32) + part)`: each part of a run has its own stream, and all parts share the seed.
    pub fn of_part(seed: u64, part: u32) -> Self {
        Self::with_key([part, seed as u32, (seed >> 32) as u32])
    }

    /// The generator of an integer of 96 bits, its lowest word first.
    fn with_key(key: [u32; 3]) -> Self {
        // CPython's key has as many words as the number needs, and 1 word for 0.
        let words = key.iter().rposition(|word| *word != 0).unwrap_or(0) + 1;
        Self { generator: Mt::new_with_key(key.into_iter().take(words)) }
    }

    /// The next 32-bit output.
    pub fn next_u32(&mut self) -> u32 {
        self.generator.next_u32()
    }

    /// `random.random()`: uniform in [0, 1), with 53 bits.
    pub fn random(&mut self) -> f64 {
        let (high, low) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// `random.getrandbits(bits)` for at most 64 bits: the top bits of an output, or a whole output below the top bits of
    /// the next. 0 bits give 0 and consume nothing; more than 64 are read as 64.
    pub fn getrandbits(&mut self, bits: u32) -> u64 {
        match bits {
            0 => 0,
            1..=32 => u64::from(self.next_u32() >> (32 - bits)),
            _ => {
                let low = u64::from(self.next_u32());
                let high = u64::from(self.next_u32() >> (64 - bits.min(64)));
                low | (high << 32)
            }
        }
    }

    /// `random._randbelow(n)`: uniform in [0, n), 0 where n is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        let bits = u64::BITS - n.leading_zeros();
        loop {
            let draw = self.getrandbits(bits);
            if draw < n || n == 0 {
                return draw;
            }
        }
    }

    /// `random.randint(low, high)`: uniform in [low, high], both ends included. `high` below `low` is read as `low`.
    pub fn randint(&mut self, low: u64, high: u64) -> u64 {
        // A range of all 2^64 values has no length in a u64; we lose its last value rather than wrap around.
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// `random.shuffle(items)`: swaps each item, from the last to the second, with an item at or before its place.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.below(last as u64 + 1) as usize;
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` draws of `randint(0, high)` after `random.seed(seed)`.
    fn draws(seed: u64, high: u64, count: usize) -> Vec<u64> {
        let mut random = PythonRandom::new(seed);
        (0..count).map(|_| random.randint(0, high)).collect()
    }

    // The numbers of the next four tests: CPython 3.11, `random.seed(0)`.

    #[test]
    fn outputs_equal_cpython_after_seed_0() {
        let mut random = PythonRandom::new(0);
        let outputs: Vec<u32> = (0..4).map(|_| random.next_u32()).collect();
        assert_eq!(outputs, [3626764237, 1654615998, 3255389356, 3823568514]);
    }

    #[test]
    fn randint_equals_cpython_below_1000() {
        assert_eq!(draws(0, 999, 8), [864, 394, 776, 911, 430, 41, 265, 988]);
    }

    #[test]
    fn randint_equals_cpython_over_the_documents_of_a_c4_shard() {
        assert_eq!(
            draws(0, 356_316, 8),
            [201979, 220500, 21225, 135746, 268055, 254766, 212302, 159023]
        );
    }

    #[test]
    fn randint_equals_cpython_over_wikitext2_train() {
        // 2,824,491 tokens with the Llama-2 tokenizer, seqlen 2048: n = 2822443.
        assert_eq!(draws(0, 2_822_442, 6), [1615835, 1764005, 169803, 1085975, 2144441, 2038128]);
    }

    #[test]
    fn seeds_of_two_words_and_wide_draws_equal_cpython() {
        // r = random.Random(2**40+7); [r.getrandbits(k) for k in (1,8,31,32,33,48,64)]
        let mut random = PythonRandom::new((1 << 40) + 7);
        let wide: Vec<u64> =
            [1, 8, 31, 32, 33, 48, 64].into_iter().map(|bits| random.getrandbits(bits)).collect();
        assert_eq!(
            wide,
            [1, 191, 1750019418, 4028389051, 8353760805, 198606032543732, 4627263377227786602]
        );
        // r = random.Random(12345678901234567890); [r.randint(10, 10+5*10**12) for _ in range(4)]
        let mut random = PythonRandom::new(12_345_678_901_234_567_890);
        let far: Vec<u64> = (0..4).map(|_| random.randint(10, 10 + 5_000_000_000_000)).collect();
        assert_eq!(far, [4810070800743, 3936948752668, 2872698512167, 4622905356230]);
    }

    #[test]
    fn powers_of_two_take_a_bit_more_and_a_single_choice_still_draws() {
        // r = random.Random(42); [r.randint(0,1023) for _ in range(6)], [r.randint(0,0) for _ in range(3)], r.getrandbits(32)
        let mut random = PythonRandom::new(42);
        let tens: Vec<u64> = (0..6).map(|_| random.randint(0, 1023)).collect();
        assert_eq!(tens, [228, 51, 563, 501, 457, 285]);
        assert_eq!([random.randint(0, 0), random.randint(0, 0), random.randint(0, 0)], [0, 0, 0]);
        assert_eq!(random.getrandbits(32), 136505587);
    }

    #[test]
    fn shuffles_equal_cpython_and_leave_the_generator_in_its_state() {
        // r = random.Random(seed); x = list(range(10)); r.shuffle(x); x, r.getrandbits(32)
        for (seed, expected, after) in [
            (0, [7, 8, 1, 5, 3, 4, 2, 0, 9, 6], 1537810351),
            (42, [7, 3, 2, 8, 5, 6, 9, 4, 0, 1], 2536146025),
            ((1 << 40) + 7, [0, 5, 2, 3, 6, 1, 8, 4, 7, 9], 1688693473),
        ] {
            let mut random = PythonRandom::new(seed);
            let mut items: Vec<u32> = (0..10).collect();
            random.shuffle(&mut items);
            assert_eq!(items, expected, "seed {seed}");
            assert_eq!(random.getrandbits(32), after, "seed {seed}");
        }
        let mut random = PythonRandom::new(0);
        random.shuffle::<u32>(&mut []);
        random.shuffle(&mut [1]);
        assert_eq!(random.next_u32(), 3626764237, "nothing was drawn");
    }

    #[test]
    fn parts_of_a_seed_equal_cpython_with_integers_of_up_to_96_bits() {
        // r = random.Random((seed << 32) + part); x = list(range(n)); r.shuffle(x)
        for (seed, part, expected) in [
            (0, 0, vec![7, 8, 1, 5, 3, 4, 2, 0, 9, 6]),
            (0, 1, vec![6, 8, 9, 7, 5, 3, 0, 4, 1, 2]),
            (7, 3, vec![7, 4, 9, 2, 5, 3, 8, 6, 1, 0]),
            ((1 << 40) + 7, 5, vec![5, 2, 1, 3, 0, 4]),
            ((1 << 63) + 12345, u32::MAX, vec![0, 5, 3, 1, 4, 2]),
        ] {
            let mut items: Vec<u32> = (0..expected.len() as u32).collect();
            PythonRandom::of_part(seed, part).shuffle(&mut items);
            assert_eq!(items, expected, "seed {seed}, part {part}");
        }
    }

    #[test]
    fn empty_ranges_neither_hang_nor_panic() {
        let mut random = PythonRandom::new(1);
        assert_eq!(random.below(0), 0);
        assert_eq!(random.randint(5, 4), 5);
        assert_eq!(random.getrandbits(0), 0);
        random.randint(0, u64::MAX);
    }
}
