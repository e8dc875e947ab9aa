//! e^x for slices: softmax, SiLU and log-sum-exp spend their time here.
//!
//! The C library's `expf` is one call per element; attention over 2048 tokens with 32 heads would make 67 million a layer.
//! [`exp`] is straight-line arithmetic that the compiler turns into vector code on every CPU:
//!
//! n = round(x / ln 2), r = x − n·ln 2 in two parts, e^x = 2ⁿ · p(r), with Cephes' `expf` polynomial of degree 7 on
//! |r| ≤ ln 2 / 2 (S. Moshier, Cephes Mathematical Library). Within 2 units in the last place of the exact value (tested).
//! No fused multiply-add is used, so every CPU computes the same bits.

/// Beyond these e^x leaves the normal f32 numbers; arguments are held inside, so the result never is 0 or infinite.
const LOWEST: f32 = -87.0;
const HIGHEST: f32 = 88.0;

/// Adding 1.5·2²³ leaves no room for a fraction: the sum is rounded to a whole number, which stands in its low bits.
const ROUNDER: f32 = 12_582_912.0;

/// e^x for −87 ≤ x ≤ 88, e^−87 below and e^88 above; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons, not min and max: those would lose a NaN.
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let power_of_two = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    p * power_of_two
}

/// Partial results a loop keeps, so that it is not one long chain: one AVX-512 register, four of SSE.
const LANES: usize = 16;

/// The largest value, −∞ for none. A NaN may be passed over; it comes out of the exponentials that follow.
pub fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
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

/// values ← e^(values − offset); returns their sum.
pub fn exp_minus(values: &mut [f32], offset: f32) -> f64 {
    values
        .iter_mut()
        .for_each(|value| *value = exp(*value - offset));
    sum_of(values, |value| value)
}

/// Σ e^(values − offset), the values left as they are.
pub fn sum_exp_minus(values: &[f32], offset: f32) -> f64 {
    sum_of(values, |value| exp(value - offset))
}

/// Σ term(value), in an order that depends on the length alone.
#[inline(always)]
fn sum_of(values: &[f32], term: impl Fn(f32) -> f32) -> f64 {
    let mut total = 0.0;
    // Sums of f32 stay short: 64 rounds per lane, then f64.
    for block in values.chunks(64 * LANES) {
        let mut lanes = [0.0f32; LANES];
        let chunks = block.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane += term(value);
            }
        }
        total += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        total += rest
            .iter()
            .map(|&value| f64::from(term(value)))
            .sum::<f64>();
    }
    total
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
                (exp_minus(&mut changed, 2.0) - exact).abs() <= 1e-6 * exact,
                "{length}"
            );
            assert_eq!(
                largest(&values),
                values.iter().copied().fold(f32::NEG_INFINITY, f32::max)
            );
        }
    }
}
