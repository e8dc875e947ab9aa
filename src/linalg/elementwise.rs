//! Row- and element-wise steps of a decoder layer, on slices and all threads, into the caller's memory.
//!
//! The loops are compiled for every width of registers, and run with the CPU's. Sums have an order of lanes that depends only on
//! lengths, so every width gives the same bits.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::exp::exp;

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
            let (whole, rest) = x.as_chunks::<LANES>();
            let mut squares = [0.0f32; LANES];
            for x in whole {
                for (sum, x) in squares.iter_mut().zip(x) {
                    *sum += x * x;
                }
            }
            let rest = rest.iter().map(|x| x * x).sum::<f32>();
            let squares = squares.iter().sum::<f32>() + rest;
            let root = (squares / width as f32 + self.epsilon).sqrt();
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
