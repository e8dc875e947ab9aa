//! e^x for slices, the costly part of softmax, SiLU and log-sum-exp, and tanh.
//!
//! The C library's `expf` is a call per element, or 67 million calls a layer in attention over 2048 tokens with 32 heads. This
//! version is arithmetic without branches, which the compiler turns into vector code on every CPU:
//!
//! n = round(x / ln 2), r = x − n·ln 2 in two parts, e^x = 2ⁿ · p(r), with Cephes' `expf` polynomial of degree 7 on
//! |r| ≤ ln 2 / 2 (S. Moshier, Cephes Mathematical Library). Within 2 units in the last place of the exact value (tested).
//! Multiply-adds are fused and sums run in a fixed number of lanes, so every CPU computes the same bits.

use pulp::{Arch, Simd, WithSimd};

/// The arguments for which e^x is a normal f32. Arguments outside are clamped, so the result is never 0 or infinite.
const LOWEST: f32 = -87.0;
const HIGHEST: f32 = 88.0;

/// 1.5·2²³. A sum with it has no bits for a fraction, so it is rounded to an integer, which its low bits hold.
const ROUNDER: f32 = 12_582_912.0;

/// ln 2 in two parts, the first of few bits.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// (p(r) − 1 − r) / r², from the highest power down.
const POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5];

/// e^x for −87 ≤ x ≤ 88, e^−87 below and e^88 above; NaN stays NaN. Callers must be compiled for the CPU's registers: otherwise every
/// multiply-add is a call of the C library.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let (p, power_of_two) = parts(x);
    (p + 1.0) * power_of_two
}

/// tanh x = (e^2|x| − 1) / (e^2|x| + 1) with the sign of x, within 3 units in the last place (tested), also near 0; NaN stays NaN. Callers
/// must be compiled for the CPU's registers, as for [`exp`].
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let (p, power_of_two) = parts(2.0 * x.abs());
    // e^2|x| − 1, which keeps the digits of small numbers.
    let minus_one = p.mul_add(power_of_two, power_of_two - 1.0);
    (minus_one / (minus_one + 2.0)).copysign(x)
}

/// Returns e^r − 1 and 2ⁿ, with which e^x = 2ⁿ·e^r.
#[inline(always)]
fn parts(x: f32) -> (f32, f32) {
    // Comparisons keep a NaN; min and max would lose it.
    let x = if x < LOWEST { LOWEST } else { x };
    let x = if x > HIGHEST { HIGHEST } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = n.mul_add(-LN_2[0], x);
    let r = n.mul_add(-LN_2[1], r);
    let mut p = POLYNOMIAL[0];
    for next in &POLYNOMIAL[1..] {
        p = p.mul_add(r, *next);
    }
    let power_of_two = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    (p.mul_add(r * r, r), power_of_two)
}

/// [`exp`] of every element of some registers, none above [`HIGHEST`], by the same steps and so with the same bits. Each step runs for
/// all registers before the next, so that no instruction waits for its predecessor and all share the registers of constants. (Loops
/// take the place of closures, which would not be compiled for these registers.)
#[inline(always)]
pub(super) fn exps<S: Simd, const WIDE: usize, const HIGH: usize>(
    simd: S,
    mut x: [[S::f32s; WIDE]; HIGH],
) -> [[S::f32s; WIDE]; HIGH] {
    let (lowest, rounder) = (simd.splat_f32s(LOWEST), simd.splat_f32s(ROUNDER));
    for x in x.as_flattened_mut() {
        *x = simd.select_f32s(simd.less_than_f32s(*x, lowest), lowest, *x);
    }
    let mut shifted = x;
    for shifted in shifted.as_flattened_mut() {
        *shifted = simd.mul_add_f32s(*shifted, simd.splat_f32s(std::f32::consts::LOG2_E), rounder);
    }
    let mut r = x;
    for (r, &shifted) in r.as_flattened_mut().iter_mut().zip(shifted.as_flattened()) {
        let n = simd.sub_f32s(shifted, rounder);
        *r = simd.mul_add_f32s(n, simd.splat_f32s(-LN_2[0]), *r);
        *r = simd.mul_add_f32s(n, simd.splat_f32s(-LN_2[1]), *r);
    }
    let mut p = [[simd.splat_f32s(POLYNOMIAL[0]); WIDE]; HIGH];
    for &next in &POLYNOMIAL[1..] {
        for (p, &r) in p.as_flattened_mut().iter_mut().zip(r.as_flattened()) {
            *p = simd.mul_add_f32s(*p, r, simd.splat_f32s(next));
        }
    }
    let powers = p.as_flattened_mut().iter_mut();
    for ((p, &r), &shifted) in powers.zip(r.as_flattened()).zip(shifted.as_flattened()) {
        *p = simd.mul_add_f32s(*p, simd.mul_f32s(r, r), r);
        *p = simd.add_f32s(*p, simd.splat_f32s(1.0));
        let bits =
            simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
        let power_of_two = simd.add_u32s(bits, simd.splat_u32s(127 << 23));
        *p = simd.mul_f32s(*p, simd.transmute_f32s_u32s(power_of_two));
    }
    p
}

/// Clamps an argument of [`exps`] to [`HIGHEST`].
#[inline(always)]
fn not_above<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    let highest = simd.splat_f32s(HIGHEST);
    simd.select_f32s(simd.greater_than_f32s(x, highest), highest, x)
}

/// Partial results of a loop, which break up a long chain of dependent steps: four AVX-512 registers, eight of AVX2, sixteen of NEON.
/// They are arrays of registers: an array of numbers would be in memory, and each step would wait for the last store.
const LANES: usize = 64;

/// A reduction of lanes, half by half.
const HALVES: [usize; 6] = [32, 16, 8, 4, 2, 1];

/// Work on [`LANES`] values at a time, in `N` registers.
trait InLanes {
    type Output;

    fn run<S: Simd, const N: usize>(self, simd: S) -> Self::Output;
}

/// Runs work with the number of registers that holds the lanes.
#[inline(always)]
fn in_lanes<S: Simd, W: InLanes>(simd: S, work: W) -> W::Output {
    match S::F32_LANES {
        16 => work.run::<S, 4>(simd),
        8 => work.run::<S, 8>(simd),
        4 => work.run::<S, 16>(simd),
        _ => work.run::<S, LANES>(simd),
    }
}

/// Lanes in `N` registers.
#[inline(always)]
pub(super) fn registers<S: Simd, const N: usize, const L: usize>(
    simd: S,
    lanes: &[f32; L],
) -> [S::f32s; N] {
    let mut registers = [simd.splat_f32s(0.0); N];
    for (register, &values) in registers.iter_mut().zip(S::as_simd_f32s(lanes).0) {
        *register = values;
    }
    registers
}

#[inline(always)]
fn lanes<S: Simd, const N: usize>(registers: [S::f32s; N]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    for (values, register) in S::as_mut_simd_f32s(&mut lanes).0.iter_mut().zip(registers) {
        *values = register;
    }
    lanes
}

/// Registers in a step; every number of registers that holds the lanes is a multiple of 4.
#[inline(always)]
fn fours<R>(registers: &mut [R]) -> std::slice::IterMut<'_, [R; 4]> {
    registers.as_chunks_mut().0.iter_mut()
}

/// The rest of a slice, filled up to whole lanes.
#[inline(always)]
fn filled(rest: &[f32], filler: f32) -> [f32; LANES] {
    let mut lanes = [filler; LANES];
    lanes[..rest.len()].copy_from_slice(rest);
    lanes
}

/// The largest value, −∞ for none. A NaN may be ignored here; the later exponentials show it.
pub fn largest(values: &[f32]) -> f32 {
    struct LargestOfSlice<'a>(&'a [f32]);
    impl WithSimd for LargestOfSlice<'_> {
        type Output = f32;
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            largest_of(simd, self.0)
        }
    }
    Arch::new().dispatch(LargestOfSlice(values))
}

/// [`largest`], for a caller compiled for the CPU's registers.
#[inline(always)]
pub(super) fn largest_of<S: Simd>(simd: S, values: &[f32]) -> f32 {
    struct Largest<'a>(&'a [f32]);
    impl InLanes for Largest<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<S: Simd, const N: usize>(self, simd: S) -> f32 {
            let (chunks, rest) = self.0.as_chunks::<LANES>();
            let mut largest = [simd.splat_f32s(f32::NEG_INFINITY); N];
            for chunk in chunks {
                larger_of(simd, &mut largest, chunk);
            }
            if !rest.is_empty() {
                larger_of(simd, &mut largest, &filled(rest, f32::NEG_INFINITY));
            }
            let mut lanes = lanes::<S, N>(largest);
            for half in HALVES {
                let (first, second) = lanes.split_at_mut(half);
                for (one, &other) in first.iter_mut().zip(&*second) {
                    *one = if other > *one { other } else { *one };
                }
            }
            lanes[0]
        }
    }
    in_lanes(simd, Largest(values))
}

/// Keeps the larger value of each pair, and the old value if the new value is a NaN.
#[inline(always)]
fn larger_of<S: Simd, const N: usize>(simd: S, largest: &mut [S::f32s; N], values: &[f32; LANES]) {
    for (largest, value) in largest.iter_mut().zip(registers::<S, N, LANES>(simd, values)) {
        let is_larger = simd.greater_than_f32s(value, *largest);
        *largest = simd.select_f32s(is_larger, value, *largest);
    }
}

/// values ← e^(scale·values − offset); returns their sum. For a caller compiled for the CPU's registers.
#[inline(always)]
pub(super) fn exp_minus<S: Simd>(simd: S, values: &mut [f32], scale: f32, offset: f32) -> f64 {
    struct Exponentials<'a> {
        values: &'a mut [f32],
        scale: f32,
        offset: f32,
    }
    impl InLanes for Exponentials<'_> {
        type Output = f64;
        #[inline(always)]
        fn run<S: Simd, const N: usize>(self, simd: S) -> f64 {
            let (scale, offset) = (simd.splat_f32s(self.scale), simd.splat_f32s(-self.offset));
            let mut total = 0.0;
            for block in self.values.chunks_mut(SHORT * LANES) {
                let mut sums = [simd.splat_f32s(0.0); N];
                let (chunks, rest) = block.as_chunks_mut::<LANES>();
                for chunk in chunks {
                    let mut values = registers::<S, N, LANES>(simd, chunk);
                    for (values, sums) in fours(&mut values).zip(fours(&mut sums)) {
                        for value in &mut *values {
                            let x = simd.mul_add_f32s(*value, scale, offset);
                            *value = not_above(simd, x);
                        }
                        [*values] = exps(simd, [*values]);
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = simd.add_f32s(*sum, *value);
                        }
                    }
                    *chunk = lanes::<S, N>(values);
                }
                if !rest.is_empty() {
                    let mut values = registers::<S, N, LANES>(simd, &filled(rest, 0.0));
                    for values in fours(&mut values) {
                        for value in &mut *values {
                            let x = simd.mul_add_f32s(*value, scale, offset);
                            *value = not_above(simd, x);
                        }
                        [*values] = exps(simd, [*values]);
                    }
                    rest.copy_from_slice(&lanes::<S, N>(values)[..rest.len()]);
                    let values = registers::<S, N, LANES>(simd, &filled(rest, 0.0));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = simd.add_f32s(*sum, value);
                    }
                }
                total += added(lanes::<S, N>(sums));
            }
            total
        }
    }
    in_lanes(simd, Exponentials { values, scale, offset })
}

/// Values that a lane adds in f32; longer sums continue in f64.
const SHORT: usize = 16;

/// Σ e^(values − offset), without changing the values.
pub fn sum_exp_minus(values: &[f32], offset: f32) -> f64 {
    struct Sum<'a>(&'a [f32], f32);
    impl WithSimd for Sum<'_> {
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f64 {
            let Self(values, offset) = self;
            let mut total = 0.0;
            let mut piece = [0.0; SHORT * LANES];
            for values in values.chunks(SHORT * LANES) {
                let piece = &mut piece[..values.len()];
                piece.copy_from_slice(values);
                total += exp_minus(simd, piece, 1.0, offset);
            }
            total
        }
    }
    Arch::new().dispatch(Sum(values, offset))
}

/// The sum of the lanes, half by half: in f32 down to a quarter of the lanes, then in f64.
#[inline(always)]
fn added(mut lanes: [f32; LANES]) -> f64 {
    const WIDE: usize = LANES / 4;
    for half in [2 * WIDE, WIDE] {
        for at in 0..half {
            lanes[at] += lanes[at + half];
        }
    }
    let mut wide: [f64; WIDE] = std::array::from_fn(|at| f64::from(lanes[at]));
    let mut half = WIDE / 2;
    while half > 0 {
        for at in 0..half {
            wide[at] += wide[at + half];
        }
        half /= 2;
    }
    wide[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// values ← e^(values − 2), and their sum.
    fn sum_of(values: &mut [f32]) -> f64 {
        struct Sum<'a>(&'a mut [f32]);
        impl WithSimd for Sum<'_> {
            type Output = f64;
            fn with_simd<S: Simd>(self, simd: S) -> f64 {
                exp_minus(simd, self.0, 1.0, 2.0)
            }
        }
        Arch::new().dispatch(Sum(values))
    }

    #[test]
    fn sums_have_the_same_bits_in_registers_of_any_width() {
        struct Sum<'a>(&'a [f32]);
        impl WithSimd for Sum<'_> {
            type Output = (f64, f32, Vec<f32>);
            fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
                let mut values = self.0.to_vec();
                let sum = exp_minus(simd, &mut values, 0.7, 1.5);
                (sum, largest_of(simd, self.0), values)
            }
        }
        for length in [1, 63, 64, 65, 200, 1024, 1500] {
            let values: Vec<f32> = (0..length).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
            let wide = Arch::new().dispatch(Sum(&values));
            assert_eq!(wide, Sum(&values).with_simd(pulp::Scalar), "{length}");
        }
    }

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
    fn tanh_is_within_three_units_in_the_last_place() {
        let mut worst = 0.0f64;
        // Numbers of all sizes: from 1e-38 to 100, in steps of 1e-4 of each.
        for step in 0..=940_000 {
            let x = (1e-38 * (f64::from(step) * 1e-4).exp()) as f32;
            let exact = f64::from(x).tanh();
            let unit =
                f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            worst = worst.max((f64::from(tanh(x)) - exact).abs() / unit);
            assert_eq!(tanh(-x), -tanh(x));
        }
        assert!(worst <= 3.0, "{worst} units");
        assert_eq!([0.0, 20.0, f32::INFINITY].map(tanh), [0.0, 1.0, 1.0]);
        assert!(tanh(f32::NAN).is_nan());
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
            let values: Vec<f32> =
                (0..length).map(|i| ((i * 37) % 101) as f32 / 10.0 - 5.0).collect();
            let exact: f64 = values.iter().map(|&value| f64::from(value - 2.0).exp()).sum();
            assert!((sum_exp_minus(&values, 2.0) - exact).abs() <= 1e-6 * exact, "{length}");
            let mut changed = values.clone();
            assert!((sum_of(&mut changed) - exact).abs() <= 1e-6 * exact, "{length}");
            for (changed, value) in changed.iter().zip(&values) {
                assert_eq!(changed.to_bits(), exp(value - 2.0).to_bits(), "{value}");
            }
            assert_eq!(largest(&values), values.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
