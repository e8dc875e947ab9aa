//! CPython's `random.Random`, so that `--seed 0` draws the samples that the Python reference draws.
//!
//! From Makoto Matsumoto's and Takuji Nishimura's MT19937 (1998) as CPython seeds and reads it (`Modules/_randommodule.c`,
//! `Lib/random.py`): the seed's 32-bit words go through `init_by_array`, `getrandbits` takes the *top* bits of an output,
//! and `randint` rejects rather than scales. Two details decide whether the draws stay in step: the number of bits is that of
//! n, not of n−1 (n = 1024 takes 11 bits), and n = 1 still consumes outputs until a bit is 0.

/// Length of the generator's state, in 32-bit words.
const STATE: usize = 624;
/// Distance of the word that is mixed into each new one.
const SHIFT: usize = 397;

/// A generator in the state CPython's would be in.
#[derive(Clone)]
pub struct PythonRandom {
    state: [u32; STATE],
    next: usize,
}

impl PythonRandom {
    /// The generator after `random.seed(seed)` with a non-negative integer.
    pub fn new(seed: u64) -> Self {
        let (low, high) = (seed as u32, (seed >> 32) as u32);
        // CPython's key has as many words as the number needs, and one for 0.
        if high == 0 {
            Self::from_key(&[low])
        } else {
            Self::from_key(&[low, high])
        }
    }

    /// `init_by_array` of the reference implementation of MT19937.
    fn from_key(key: &[u32]) -> Self {
        let mut state = [0u32; STATE];
        state[0] = 19_650_218;
        for i in 1..STATE {
            let previous = state[i - 1];
            state[i] = 1_812_433_253u32
                .wrapping_mul(previous ^ (previous >> 30))
                .wrapping_add(i as u32);
        }
        let mut i = 1;
        for (j, &word) in key.iter().cycle().take(STATE.max(key.len())).enumerate() {
            let previous = state[i - 1];
            let mixed = state[i] ^ (previous ^ (previous >> 30)).wrapping_mul(1_664_525);
            state[i] = mixed
                .wrapping_add(word)
                .wrapping_add((j % key.len()) as u32);
            i = Self::after(i, &mut state);
        }
        for _ in 1..STATE {
            let previous = state[i - 1];
            let mixed = state[i] ^ (previous ^ (previous >> 30)).wrapping_mul(1_566_083_941);
            state[i] = mixed.wrapping_sub(i as u32);
            i = Self::after(i, &mut state);
        }
        state[0] = 0x8000_0000;
        Self { state, next: STATE }
    }

    /// The index after `i` in the seeding loops: past the end they go on at 1, with the last word copied to the front.
    fn after(i: usize, state: &mut [u32; STATE]) -> usize {
        if i + 1 < STATE {
            return i + 1;
        }
        state[0] = state[STATE - 1];
        1
    }

    /// Renews all words of the state.
    fn twist(&mut self) {
        for i in 0..STATE {
            let joined =
                (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % STATE] & 0x7fff_ffff);
            let odd = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + SHIFT) % STATE] ^ (joined >> 1) ^ odd;
        }
        self.next = 0;
    }

    /// The next 32-bit output.
    pub fn next_u32(&mut self) -> u32 {
        if self.next >= STATE {
            self.twist();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// `random.getrandbits(bits)` for at most 64 bits: the top bits of one output, or a whole output below the top bits of
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
            [
                201979, 220500, 21225, 135746, 268055, 254766, 212302, 159023
            ]
        );
    }

    #[test]
    fn randint_equals_cpython_over_wikitext2_train() {
        // 2,824,491 tokens with the Llama-2 tokenizer, seqlen 2048: n = 2822443.
        assert_eq!(
            draws(0, 2_822_442, 6),
            [1615835, 1764005, 169803, 1085975, 2144441, 2038128]
        );
    }

    #[test]
    fn seeds_of_two_words_and_wide_draws_equal_cpython() {
        // r = random.Random(2**40+7); [r.getrandbits(k) for k in (1,8,31,32,33,48,64)]
        let mut random = PythonRandom::new((1 << 40) + 7);
        let wide: Vec<u64> = [1, 8, 31, 32, 33, 48, 64]
            .into_iter()
            .map(|bits| random.getrandbits(bits))
            .collect();
        assert_eq!(
            wide,
            [
                1,
                191,
                1750019418,
                4028389051,
                8353760805,
                198606032543732,
                4627263377227786602
            ]
        );
        // r = random.Random(12345678901234567890); [r.randint(10, 10+5*10**12) for _ in range(4)]
        let mut random = PythonRandom::new(12_345_678_901_234_567_890);
        let far: Vec<u64> = (0..4)
            .map(|_| random.randint(10, 10 + 5_000_000_000_000))
            .collect();
        assert_eq!(
            far,
            [4810070800743, 3936948752668, 2872698512167, 4622905356230]
        );
    }

    #[test]
    fn powers_of_two_take_a_bit_more_and_a_single_choice_still_draws() {
        // r = random.Random(42); [r.randint(0,1023) for _ in range(6)], [r.randint(0,0) for _ in range(3)], r.getrandbits(32)
        let mut random = PythonRandom::new(42);
        let tens: Vec<u64> = (0..6).map(|_| random.randint(0, 1023)).collect();
        assert_eq!(tens, [228, 51, 563, 501, 457, 285]);
        assert_eq!(
            [
                random.randint(0, 0),
                random.randint(0, 0),
                random.randint(0, 0)
            ],
            [0, 0, 0]
        );
        assert_eq!(random.getrandbits(32), 136505587);
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
