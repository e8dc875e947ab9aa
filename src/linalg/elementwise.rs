//! Row- and element-wise steps of a decoder layer, on slices and all threads, into memory the caller has.

use rayon::prelude::*;

use super::exp::exp;

/// Elements per task: large enough to hide the scheduling, small enough to spread.
const CHUNK: usize = 1 << 14;

/// out ← x / √(mean(x²) + ε) ∘ weight, row by row, with candle's arithmetic: the mean of squares is one sequential f32 sum.
///
/// # Arguments
/// * `x`, `out`: `[tokens, hidden_size]`
/// * `weight`: `[hidden_size]`
///
/// # Panics
/// When `x` and `out` differ in length.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "a norm keeps the shape");
    let width = weight.len().max(1);
    out.par_chunks_mut(width)
        .zip(x.par_chunks(width))
        .with_min_len((CHUNK / width).max(1))
        .for_each(|(out, x)| {
            let squares = x.iter().map(|value| value * value).sum::<f32>();
            let root = (squares / width as f32 + epsilon).sqrt();
            for ((out, value), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = value / root * weight;
            }
        });
}

/// gate ← silu(gate) · up, with silu(x) = x / (1 + e⁻ˣ). Both `[tokens, intermediate_size]`.
pub fn silu_times(gate: &mut [f32], up: &[f32]) {
    gate.par_chunks_mut(CHUNK)
        .zip(up.par_chunks(CHUNK))
        .for_each(|(gate, up)| {
            for (g, u) in gate.iter_mut().zip(up) {
                *g = *g / (1.0 + exp(-*g)) * u;
            }
        });
}

/// values ← values + addend: a residual connection.
pub fn add(values: &mut [f32], addend: &[f32]) {
    values
        .par_chunks_mut(CHUNK)
        .zip(addend.par_chunks(CHUNK))
        .for_each(|(values, addend)| {
            values
                .iter_mut()
                .zip(addend)
                .for_each(|(value, addend)| *value += addend);
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
    fn rms_norm_has_candles_bits() {
        let (tokens, width) = (67, 300);
        let x: Vec<f32> = (0..tokens * width)
            .map(|i| (i as f32 * 0.37).sin())
            .collect();
        let weight: Vec<f32> = (0..width).map(|i| 1.0 + (i as f32 * 0.1).cos()).collect();
        let mut out = vec![f32::NAN; x.len()];
        rms_norm(&x, &weight, 1e-5, &mut out);
        let tensor = |values: &[f32], shape: &[usize]| {
            super::super::tensor::from_vec(values.to_vec(), shape).unwrap()
        };
        let (x, weight) = (tensor(&x, &[tokens, width]), tensor(&weight, &[width]));
        let candles = candle_nn::ops::rms_norm(&x, &weight, 1e-5).unwrap();
        assert_eq!(
            out,
            candles.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        );
    }

    #[test]
    fn add_spans_chunks() {
        let mut values = vec![1.0; CHUNK + 3];
        let addend: Vec<f32> = (0..CHUNK + 3).map(|i| i as f32).collect();
        add(&mut values, &addend);
        assert_eq!(values[CHUNK + 2], (CHUNK + 3) as f32);
    }
}
