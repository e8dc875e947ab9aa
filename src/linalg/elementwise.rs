//! Row- and element-wise steps of a decoder layer, on slices and all threads, into the caller's memory.
//!
//! The loops are compiled for every width of registers, and run with the CPU's. Sums have an order of lanes that depends only on
//! lengths, so every width gives the same bits.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::exp::{exp, tanh};

/// Elements per task: enough to hide the cost of scheduling, few enough for all threads.
const CHUNK: usize = 1 << 14;

/// Partial sums of a row.
const LANES: usize = 64;

/// out ← x / √(mean(x²) + ε) ∘ weight, row by row.
///
/// # Arguments
/// * `x`, `out`: `[tokens, hidden_size]`
/// * `weight`: `[hidden_size]`
///
/// # Panics
/// Panics when `x` and `out` differ in length.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "a norm keeps the shape");
    let width = weight.len().max(1);
    let rows = (CHUNK / width).max(1);
    out.par_chunks_mut(rows * width).zip(x.par_chunks(rows * width)).for_each(|(out, x)| {
        Arch::new().dispatch(RmsNorm { x, weight, epsilon, out });
    });
}

/// values ← values / √(mean(values²) + ε) ∘ weight, row by row; see [`rms_norm`].
pub fn rms_norm_in_place(values: &mut [f32], weight: &[f32], epsilon: f32) {
    let width = weight.len().max(1);
    let rows = (CHUNK / width).max(1);
    values.par_chunks_mut(rows * width).for_each(|values| {
        Arch::new().dispatch(RmsNormInPlace { values, weight, epsilon });
    });
}

struct RmsNormInPlace<'a> {
    values: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f32,
}

impl WithSimd for RmsNormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for row in self.values.chunks_mut(self.weight.len().max(1)) {
            let root = root_mean_square(row, self.epsilon);
            for (value, weight) in row.iter_mut().zip(self.weight) {
                *value = *value / root * weight;
            }
        }
    }
}

/// √(mean(x²) + ε) of a row.
#[inline(always)]
fn root_mean_square(x: &[f32], epsilon: f32) -> f32 {
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut squares = [0.0f32; LANES];
    for x in whole {
        for (sum, x) in squares.iter_mut().zip(x) {
            *sum += x * x;
        }
    }
    let rest = rest.iter().map(|x| x * x).sum::<f32>();
    let squares = squares.iter().sum::<f32>() + rest;
    (squares / x.len() as f32 + epsilon).sqrt()
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl WithSimd for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let width = self.weight.len().max(1);
        for (out, x) in self.out.chunks_mut(width).zip(self.x.chunks(width)) {
            let root = root_mean_square(x, self.epsilon);
            for ((out, value), weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = value / root * weight;
            }
        }
    }
}

/// gate ← silu(gate) · up, with silu(x) = x / (1 + e⁻ˣ). Both `[tokens, intermediate_size]`.
pub fn silu_times(gate: &mut [f32], up: &[f32]) {
    struct SiluTimes<'a>(&'a mut [f32], &'a [f32]);
    impl WithSimd for SiluTimes<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            for (gate, up) in self.0.iter_mut().zip(self.1) {
                *gate = *gate / (1.0 + exp(-*gate)) * up;
            }
        }
    }
    gate.par_chunks_mut(CHUNK)
        .zip(up.par_chunks(CHUNK))
        .for_each(|(gate, up)| Arch::new().dispatch(SiluTimes(gate, up)));
}

/// values ← c·tanh(values / c)
pub fn soft_cap(values: &mut [f32], cap: f32) {
    struct SoftCap<'a>(&'a mut [f32], f32);
    impl WithSimd for SoftCap<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            let Self(values, cap) = self;
            for value in values {
                *value = cap * tanh(*value / cap);
            }
        }
    }
    values.par_chunks_mut(CHUNK).for_each(|values| Arch::new().dispatch(SoftCap(values, cap)));
}

/// The bound beyond which gelu_tanh(x) is 0 or x in f32; cubes of larger numbers might overflow.
const GELU_REACH: f32 = 10.0;

/// Returns e⁻ᶻ and x·dz/dx of z = 2·√(2/π)·(x + 0.044715·x³), with which gelu_tanh(x) = x·σ(z). For callers compiled for the CPU's registers.
#[inline(always)]
pub(super) fn gelu_parts(x: f32) -> (f32, f32) {
    const TWO_ROOTS: f32 = 1.595_769;
    const CUBIC: f32 = 0.044_715 * TWO_ROOTS;
    // Comparisons keep a NaN.
    let x = if x > GELU_REACH { GELU_REACH } else { x };
    let x = if x < -GELU_REACH { -GELU_REACH } else { x };
    let square = x * x;
    (exp(-x * square.mul_add(CUBIC, TWO_ROOTS)), x * square.mul_add(3.0 * CUBIC, TWO_ROOTS))
}

/// gate ← gelu_tanh(gate) · up, with gelu_tanh(x) = 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks and Gimpel 2016,
/// arXiv:1606.08415). Both `[tokens, intermediate_size]`. As 0.5·(1 + tanh(z/2)) = 1 / (1 + e⁻ᶻ), negative numbers keep their digits.
pub fn gelu_tanh_times(gate: &mut [f32], up: &[f32]) {
    struct GeluTimes<'a>(&'a mut [f32], &'a [f32]);
    impl WithSimd for GeluTimes<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            for (gate, up) in self.0.iter_mut().zip(self.1) {
                let (exponential, _) = gelu_parts(*gate);
                *gate = *gate / (1.0 + exponential) * up;
            }
        }
    }
    gate.par_chunks_mut(CHUNK)
        .zip(up.par_chunks(CHUNK))
        .for_each(|(gate, up)| Arch::new().dispatch(GeluTimes(gate, up)));
}

/// values ← values + addend: a residual connection.
pub fn add(values: &mut [f32], addend: &[f32]) {
    values.par_chunks_mut(CHUNK).zip(addend.par_chunks(CHUNK)).for_each(|(values, addend)| {
        values.iter_mut().zip(addend).for_each(|(value, addend)| *value += addend);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silu_times_follows_its_definition_at_the_edges() {
        let mut gate = [0.0, 1.0, -1.0, 100.0, -100.0];
        silu_times(&mut gate, &[2.0; 5]);
        // silu(1) = 1 / (1 + e^-1) = 0.7310586, silu(-1) = silu(1) - 1.
        let expected = [0.0, 2.0 * 0.731_058_6, -2.0 * 0.268_941_4, 200.0, 0.0];
        for (got, expected) in gate.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-6, "{got} {expected}");
        }
    }

    #[test]
    fn gelu_tanh_times_follows_its_definition() {
        let exact = |x: f64| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            // 1 + tanh(y) = 2 / (1 + e^-2y), which is exact for negative y.
            x / (1.0 + (-2.0 * inner).exp())
        };
        // Python: 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)) = 0.8411919906.
        assert!((exact(1.0) - 0.841_191_990_6).abs() < 1e-9);
        let inputs: Vec<f32> = (0..=26_000).map(|step| step as f32 * 1e-3 - 13.0).collect();
        let mut gate = inputs.clone();
        gelu_tanh_times(&mut gate, &vec![0.5; inputs.len()]);
        for (got, x) in gate.iter().zip(inputs) {
            let exact = 0.5 * exact(f64::from(x));
            // The exponent is rounded: 2⁻²³ of up to 87.
            let allowed = if x > -3.0 { 1e-6 } else { 2e-5 } * exact.abs() + 1e-36;
            assert!((f64::from(*got) - exact).abs() <= allowed, "{x}: {got} {exact}");
        }
        let mut far = [-1e30, 1e30, f32::NAN];
        gelu_tanh_times(&mut far, &[1.0; 3]);
        assert!(far[0].abs() < 1e-6 && far[1] == 1e30 && far[2].is_nan(), "{far:?}");
    }

    #[test]
    fn rms_norm_is_candles_but_for_the_order_of_a_sum() {
        let (tokens, width) = (67, 300);
        let x: Vec<f32> = (0..tokens * width).map(|i| (i as f32 * 0.37).sin()).collect();
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + (i as f32 * 0.1).cos()).collect();
        let mut out = vec![f32::NAN; x.len()];
        rms_norm(&x, &weight, 1e-5, &mut out);
        let tensor = |values: &[f32], shape: &[usize]| {
            super::super::tensor::from_vec(values.to_vec(), shape).unwrap()
        };
        let (x, weight) = (tensor(&x, &[tokens, width]), tensor(&weight, &[width]));
        let candles = candle_nn::ops::rms_norm(&x, &weight, 1e-5).unwrap();
        let candles = candles.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (out, candles) in out.iter().zip(candles) {
            // A sum of 300 squares: a few units in the last place.
            assert!((out - candles).abs() <= 1e-6 * candles.abs(), "{out} {candles}");
        }
    }

    #[test]
    fn add_spans_chunks() {
        let mut values = vec![1.0; CHUNK + 3];
        let addend: Vec<f32> = (0..CHUNK + 3).map(|i| i as f32).collect();
        add(&mut values, &addend);
        assert_eq!(values[CHUNK + 2], (CHUNK + 3) as f32);
    }
}
