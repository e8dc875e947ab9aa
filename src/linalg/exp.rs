//! e^x for slices: softmax, SiLU and log-sum-exp spend their time here.
//!
//! The C library's `expf` is one call per element; attention over 2048 tokens with 32 heads would make 67 million a layer.
//! It is straight-line arithmetic that the compiler turns into vector code on every CPU:
//!
//! n = round(x / ln 2), r = x − n·ln 2 in two parts, e^x = 2ⁿ · p(r), with Cephes' `expf` polynomial of degree 7 on
//! |r| ≤ ln 2 / 2 (S. Moshier, Cephes Mathematical Library). Within 2 units in the last place of the exact value (tested).
//! Multiply-adds are fused and sums run in a fixed number of lanes, so every CPU computes the same bits.

use pulp::{Arch, Simd, WithSimd};

/// Beyond these e^x leaves the normal f32 numbers; arguments are held inside, so the result never is 0 or infinite.
const LOWEST: f32 = -87.0;
const HIGHEST: f32 = 88.0;

/// Adding 1.5·2²³ leaves no room for a fraction: the sum is rounded to a whole number, which stands in its low bits.
const ROUNDER: f32 = 12_582_912.0;

/// e^x for −87 ≤ x ≤ 88, e^−87 below and e^88 above; NaN stays NaN. Call it where code is compiled for the registers the CPU has:
/// elsewhere every multiply-add is a call of the C library.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Comparisons, not min and max: those would lose a NaN.
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 0.166_666_65);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    let power_of_two = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * power_of_two
}

/// Partial results a loop keeps, so that it is not one long chain: four AVX-512 registers, sixteen of SSE. What is left over of a
/// slice goes beside them: indexed by a number that is not known to the compiler they would lie in memory.
const LANES: usize = 64;

/// The largest value, −∞ for none. A NaN may be passed over; it comes out of the exponentials that follow.
pub fn largest(values: &[f32]) -> f32 {
    struct Largest<'a>(&'a [f32]);
    impl WithSimd for Largest<'_> {
        type Output = f32;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> f32 {
            largest_of(self.0)
        }
    }
    Arch::new().dispatch(Largest(values))
}

/// [`largest`], for a caller that is compiled for the registers the CPU has.
#[inline(always)]
pub(super) fn largest_of(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max)
}

/// values ← e^(scale·values − offset); returns their sum. For a caller that is compiled for the registers the CPU has.
#[inline(always)]
pub(super) fn exp_minus(values: &mut [f32], scale: f32, offset: f32) -> f64 {
    let mut total = 0.0;
    // Sums of f32 stay short: 16 rounds per lane, then f64.
    for block in values.chunks_mut(16 * LANES) {
        let mut lanes = [0.0f32; LANES];
        let (chunks, rest) = block.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *value = exp(value.mul_add(scale, -offset));
                *lane += *value;
            }
        }
        total += added(&lanes);
        for value in &mut *rest {
            *value = exp(value.mul_add(scale, -offset));
        }
        total += rest.iter().copied().map(f64::from).sum::<f64>();
    }
    total
}

/// Σ e^(values − offset), the values left as they are.
pub fn sum_exp_minus(values: &[f32], offset: f32) -> f64 {
    struct Sum<'a>(&'a [f32], f32);
    impl WithSimd for Sum<'_> {
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> f64 {
            let Self(values, offset) = self;
            let mut total = 0.0;
            for block in values.chunks(16 * LANES) {
                let mut lanes = [0.0f32; LANES];
                let (chunks, rest) = block.as_chunks::<LANES>();
                for chunk in chunks {
                    for (lane, value) in lanes.iter_mut().zip(chunk) {
                        *lane += exp(value - offset);
                    }
                }
                total += added(&lanes);
                total += rest
                    .iter()
                    .map(|value| f64::from(exp(value - offset)))
                    .sum::<f64>();
            }
            total
        }
    }
    Arch::new().dispatch(Sum(values, offset))
}

/// The sum of the lanes: halves upon halves, then in f64.
#[inline(always)]
fn added(lanes: &[f32; LANES]) -> f64 {
    let (first, second) = lanes.split_at(LANES / 2);
    let halves = first.iter().zip(second).map(|(one, other)| one + other);
    halves.map(f64::from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for step in 0..=1_750_000 {
            let x = LOWEST + step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let unit =
                f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / unit);
        }
        assert!(worst <= 2.0, "{worst} units");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e30), exp(LOWEST));
        assert_eq!(exp(f32::NEG_INFINITY), exp(LOWEST));
        assert_eq!(exp(f32::INFINITY), exp(HIGHEST));
        assert!(exp(HIGHEST).is_finite() && exp(LOWEST) > 0.0 && exp(LOWEST) < 1e-37);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_the_largest_cover_any_length() {
        for length in [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000] {
            let values: Vec<f32> = (0..length)
                .map(|i| ((i * 37) % 101) as f32 / 10.0 - 5.0)
                .collect();
            let exact: f64 = values
                .iter()
                .map(|&value| f64::from(value - 2.0).exp())
                .sum();
            assert!(
                (sum_exp_minus(&values, 2.0) - exact).abs() <= 1e-6 * exact,
                "{length}"
            );
            let mut changed = values.clone();
            assert!(
                (exp_minus(&mut changed, 1.0, 2.0) - exact).abs() <= 1e-6 * exact,
                "{length}"
            );
            assert_eq!(
                largest(&values),
                values.iter().copied().fold(f32::NEG_INFINITY, f32::max)
            );
        }
    }
}
