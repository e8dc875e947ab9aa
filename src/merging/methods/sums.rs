//! Sums over the elements of a row, in f64 and in a fixed order of lanes: every CPU and every division into pieces gives the same
//! bits.

use pulp::{Arch, Simd, WithSimd};

/// Partial sums of a row.
const LANES: usize = 8;

/// Computes Σ f(aᵢ, bᵢ). Element i is added in lane i mod [`LANES`]; elements after the last whole block are added at the end.
struct Pairs<'a, F>(&'a [f32], &'a [f32], F);

impl<F: Fn(f64, f64) -> f64> WithSimd for Pairs<'_, F> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let Self(a, b, term) = self;
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        let mut lanes = [0.0f64; LANES];
        for (a, b) in a.iter().zip(b) {
            for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
                *lane += term(f64::from(*a), f64::from(*b));
            }
        }
        let rest = a_rest.iter().zip(b_rest);
        let rest: f64 = rest.map(|(a, b)| term(f64::from(*a), f64::from(*b))).sum();
        lanes.iter().sum::<f64>() + rest
    }
}

/// Returns a · b. Both have the same length.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    Arch::new().dispatch(Pairs(
        a,
        b,
        #[inline(always)]
        |a: f64, b: f64| a * b,
    ))
}

/// Returns Σ |aᵢ|.
pub(super) fn absolute(a: &[f32]) -> f64 {
    Arch::new().dispatch(Pairs(
        a,
        a,
        #[inline(always)]
        |a: f64, _| a.abs(),
    ))
}

/// Returns Σⱼ sⱼ (aⱼ − bⱼ)² of a row: the squared change of a linear's output, to diagonal order, where s holds the mean squares of
/// its input.
pub fn weighted_square_distance(a: &[f32], b: &[f32], squares: &[f32]) -> f64 {
    struct Distance<'a>(&'a [f32], &'a [f32], &'a [f32]);
    impl WithSimd for Distance<'_> {
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> f64 {
            let mut lanes = [0.0f64; LANES];
            let pieces = self.0.chunks(LANES).zip(self.1.chunks(LANES));
            for ((a, b), squares) in pieces.zip(self.2.chunks(LANES)) {
                for (lane, ((a, b), square)) in lanes.iter_mut().zip(a.iter().zip(b).zip(squares)) {
                    let difference = f64::from(*a) - f64::from(*b);
                    *lane += f64::from(*square) * difference * difference;
                }
            }
            lanes.iter().sum()
        }
    }
    Arch::new().dispatch(Distance(a, b, squares))
}

/// Returns Σ (aᵢ − bᵢ)².
pub fn square_distance(a: &[f32], b: &[f32]) -> f64 {
    Arch::new().dispatch(Pairs(
        a,
        b,
        #[inline(always)]
        |a: f64, b: f64| (a - b) * (a - b),
    ))
}

/// Counts the elements that one of the `experts` has above the base and another has below it.
pub fn sign_conflicts(base: &[f32], experts: &[&[f32]]) -> u64 {
    /// Elements whose signs are kept at a time.
    const PIECE: usize = 512;
    struct Conflicts<'a>(&'a [f32], &'a [&'a [f32]]);
    impl WithSimd for Conflicts<'_> {
        type Output = u64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) -> u64 {
            let Self(base, experts) = self;
            let mut count = 0;
            for (piece, base) in base.chunks(PIECE).enumerate() {
                // Bit 0: an expert is above the base; bit 1: an expert is below it.
                let mut signs = [0u32; PIECE];
                for expert in experts {
                    let expert = &expert[piece * PIECE..][..base.len()];
                    for (signs, (value, base)) in signs.iter_mut().zip(expert.iter().zip(base)) {
                        *signs |= u32::from(value > base) | (u32::from(value < base) << 1);
                    }
                }
                count += u64::from(signs.iter().map(|signs| u32::from(*signs == 3)).sum::<u32>());
            }
            count
        }
    }
    Arch::new().dispatch(Conflicts(base, experts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_have_all_elements_once() {
        let a: Vec<f32> = (0..19).map(|i| i as f32 - 9.0).collect();
        let b: Vec<f32> = (0..19).map(|i| i as f32).collect();
        // Σ (i − 9) i = Σ i² − 9 Σ i = 2109 − 9 · 171; Σ |i − 9| = 2 · 45.
        assert_eq!(dot(&a, &b), 2109.0 - 9.0 * 171.0);
        assert_eq!(absolute(&a), 90.0);
        // The difference is −9 everywhere.
        let squares = vec![2.0; 19];
        assert_eq!(weighted_square_distance(&a, &b, &squares), 19.0 * 162.0);
    }

    #[test]
    fn distances_and_conflicts_have_all_elements_once() {
        let b: Vec<f32> = (0..1030).map(|i| (i % 7) as f32 - 3.0).collect();
        let a: Vec<f32> = b.iter().map(|b| b + 0.5).collect();
        assert_eq!(square_distance(&a, &b), 0.25 * 1030.0);
        // The second expert is below the base at every third element, the third is the base.
        let other = |(i, b): (usize, &f32)| if i % 3 == 0 { b - 1.0 } else { b + 1.0 };
        let other: Vec<f32> = b.iter().enumerate().map(other).collect();
        assert_eq!(sign_conflicts(&b, &[&a, &other, &b]), 344);
        assert_eq!(sign_conflicts(&b, &[&a, &b]), 0);
    }
}
