//! Element-wise steps of a decoder layer that candle has no in-place, multi-threaded version of.

use rayon::prelude::*;

use super::exp::exp;

/// Elements per task: large enough to hide the scheduling, small enough to spread.
const CHUNK: usize = 1 << 14;

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
    fn add_spans_chunks() {
        let mut values = vec![1.0; CHUNK + 3];
        let addend: Vec<f32> = (0..CHUNK + 3).map(|i| i as f32).collect();
        add(&mut values, &addend);
        assert_eq!(values[CHUNK + 2], (CHUNK + 3) as f32);
    }
}
