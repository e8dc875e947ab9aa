//! Rotary position tables: θ_k = rope_theta^(−2k/r) for pair k of the first r elements of a head, angle(t, k) = t·θ_k, with the scaling of
//! the configuration. Pair k is elements k and k + r/2; the elements after the first r stay.
//!
//! Su et al. 2021, arXiv:2104.09864 §3.2.2; the scalings follow transformers' `modeling_rope_utils`. With s the length of the tables, L
//! the trained context and f the factor:
//!
//! ```text
//! linear    θ / f
//! dynamic   rope_theta · (f·s/L − (f − 1))^(r/(r − 2)) as the base, where s > L
//! llama3    θ for wavelengths below L/high, θ/f above L/low, and a ramp between
//! yarn      θ/f · ramp_k + θ · (1 − ramp_k);  ramp_k = (k − low)/(high − low) within 0 and 1,
//!           low = floor(r·ln(L/(2π·beta_fast)) / (2·ln rope_theta)), high = ceil(the same of beta_slow)
//! longrope  θ / short_k, or θ / long_k where s > L
//! ```
//!
//! yarn and longrope multiply cos and sin by an attention factor. Frequencies and angles are rounded to f32 at the same steps as in
//! transformers. An angle of 2000 rad in f32 has an error of 10⁻⁴. A table computed in f64 would be more exact than the table of the
//! model's training, and would not reproduce the statistics of the reference. The sine and cosine of the C library decide the last bit of
//! an entry.

use std::f64::consts::PI;

use anyhow::{Result, ensure};
use rayon::prelude::*;

use super::config::{Rope, RopeScaling};

/// cos and sin tables, `[seqlen, dims / 2]` each.
#[derive(Debug, Clone)]
pub struct Rotary {
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Rotated elements of a head.
    dims: usize,
}

const TOKENS_PER_TASK: usize = 16;

impl Rotary {
    /// Computes the tables for sequences of up to `seqlen` tokens.
    pub fn new(rope: &Rope, seqlen: usize) -> Self {
        let frequencies = frequencies(rope, seqlen);
        let factor = match rope.scaling {
            RopeScaling::Yarn { attention_factor, .. }
            | RopeScaling::Longrope { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        };
        let table = |function: fn(f32) -> f32| {
            let angles = (0..seqlen).flat_map(|t| frequencies.iter().map(move |of| t as f32 * of));
            angles.map(|angle| function(angle) * factor).collect()
        };
        Self { cos: table(f32::cos), sin: table(f32::sin), dims: rope.dims }
    }

    /// Bytes of the tables of a model for `seqlen` tokens.
    pub fn bytes(ropes: &[Rope], seqlen: usize) -> usize {
        ropes.iter().map(|rope| 2 * 4 * seqlen * (rope.dims / 2)).sum()
    }

    /// cos and sin, `[seqlen, dims / 2]` each.
    pub(crate) fn tables(&self) -> (&[f32], &[f32]) {
        (&self.cos, &self.sin)
    }

    /// Rotated elements of a head.
    pub(super) fn dims(&self) -> usize {
        self.dims
    }

    /// Rotates every head of `x` `[seqlen, num_heads * head_dim]` in place, by the position of its row. `first` is the position of the
    /// first row. A pair (a, b) becomes (a·cos − b·sin, a·sin + b·cos).
    ///
    /// # Errors
    /// Fails when `x` has a wrong shape, or positions beyond the tables.
    pub fn apply(
        &self,
        x: &mut [f32],
        first: usize,
        num_heads: usize,
        head_dim: usize,
    ) -> Result<()> {
        self.rotate(x, first, num_heads, head_dim, |(a, b), cos, sin| {
            (a * cos - b * sin, a * sin + b * cos)
        })
    }

    /// Rotates every head of `x` by the negative angle of its row, from position 0 on: the gradient of [`Rotary::apply`]. A pair (a, b)
    /// becomes (a·cos + b·sin, b·cos − a·sin).
    ///
    /// # Errors
    /// Fails when `x` has a wrong shape, or positions beyond the tables.
    pub fn apply_back(&self, x: &mut [f32], num_heads: usize, head_dim: usize) -> Result<()> {
        self.rotate(x, 0, num_heads, head_dim, |(a, b), cos, sin| {
            (a * cos + b * sin, b * cos - a * sin)
        })
    }

    /// Replaces every pair of `x` by a function of it and its row of the tables.
    fn rotate(
        &self,
        x: &mut [f32],
        first: usize,
        num_heads: usize,
        head_dim: usize,
        turn: impl Fn((f32, f32), f32, f32) -> (f32, f32) + Sync,
    ) -> Result<()> {
        let (width, half) = (num_heads * head_dim, self.dims / 2);
        let seqlen = x.len() / width.max(1);
        ensure!(
            x.len() == seqlen * width && (first + seqlen) * half <= self.cos.len(),
            "{} elements do not form a sequence of {num_heads} heads of {head_dim} within the rotary tables",
            x.len()
        );
        x.par_chunks_mut(TOKENS_PER_TASK * width)
            .zip(self.cos[first * half..].par_chunks(TOKENS_PER_TASK * half))
            .zip(self.sin[first * half..].par_chunks(TOKENS_PER_TASK * half))
            .for_each(|((x, cos), sin)| {
                let tables = cos.chunks_exact(half).zip(sin.chunks_exact(half));
                for (token, (cos, sin)) in x.chunks_exact_mut(width).zip(tables) {
                    for head in token.chunks_exact_mut(head_dim) {
                        let (first, second) = head[..2 * half].split_at_mut(half);
                        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                            (*a, *b) = turn((*a, *b), *cos, *sin);
                        }
                    }
                }
            });
        Ok(())
    }
}

/// A frequency per pair of elements, in rad per token.
fn frequencies(rope: &Rope, seqlen: usize) -> Vec<f32> {
    let dims = rope.dims as f32;
    let base = match rope.scaling {
        RopeScaling::Dynamic { factor, max_position_embeddings: trained } if seqlen > trained => {
            let stretch = factor * seqlen as f64 / trained as f64 - (factor - 1.0);
            rope.theta * stretch.powf(f64::from(dims) / (f64::from(dims) - 2.0))
        }
        _ => rope.theta,
    };
    let powers = (0..rope.dims / 2).map(|k| (base as f32).powf((2 * k) as f32 / dims));
    let scaled = powers.enumerate().map(|(k, power)| scaled(rope, seqlen, k, power));
    scaled.collect()
}

/// The frequency of pair k, 1 / `power` without scaling.
fn scaled(rope: &Rope, seqlen: usize, k: usize, power: f32) -> f32 {
    let frequency = 1.0 / power;
    match &rope.scaling {
        RopeScaling::Default | RopeScaling::Dynamic { .. } => frequency,
        RopeScaling::Linear { factor } => frequency / *factor as f32,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let (factor, low, high) =
                (*factor as f32, *low_freq_factor as f32, *high_freq_factor as f32);
            let original = *original_max_position_embeddings as f32;
            let wavelength = 2.0 * std::f32::consts::PI / frequency;
            if wavelength < original / high {
                frequency
            } else if wavelength > original / low {
                frequency / factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
        RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } => {
            // The pair that turns so often in the trained context.
            let pair = |turns: f64| {
                let share = (*original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * rope.theta.ln());
                rope.dims as f64 * share
            };
            let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
            if *truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(rope.dims as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let ramp = ((k as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            1.0 / (*factor as f32 * power) * (1.0 - kept) + frequency * kept
        }
        RopeScaling::Longrope {
            short_factor,
            long_factor,
            original_max_position_embeddings,
            ..
        } => {
            let is_long = seqlen > *original_max_position_embeddings;
            let divisors = if is_long { long_factor } else { short_factor };
            1.0 / (divisors[k] as f32 * power)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelConfig;
    use serde_json::json;

    fn config(rope_scaling: serde_json::Value) -> Rope {
        let config = ModelConfig::from_json(
            &json!({"model_type": "llama", "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 300, "rope_theta": 500000.0, "max_position_embeddings": 4096,
            "rope_scaling": rope_scaling}),
        );
        config.unwrap().ropes.remove(0)
    }

    #[test]
    fn llama3_scaling_keeps_high_and_divides_low_frequencies() {
        let plain = frequencies(&config(json!(null)), 16);
        let llama3 = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192});
        let stretched = frequencies(&config(llama3), 16);
        assert_eq!(plain[0], 1.0);
        assert_eq!(stretched[0], plain[0], "wavelength 6.3 < 8192 / 4");
        let last = plain.len() - 1;
        assert_eq!(stretched[last], plain[last] / 32.0, "wavelength 2·π·331000 > 8192");
        let ramp = plain
            .iter()
            .zip(&stretched)
            .filter(|(plain, stretched)| *stretched < plain && **stretched > **plain / 32.0);
        assert!(ramp.count() > 0, "some frequencies lie on the ramp");
    }

    #[test]
    fn the_rotation_has_candles_bits() {
        let (seqlen, heads, head_dim) = (37, 3, 64);
        let rotary = Rotary::new(&config(json!(null)), 40);
        let mut x: Vec<f32> =
            (0..seqlen * heads * head_dim).map(|i| (i as f32 * 0.37).sin()).collect();
        let tensor = |values: &[f32], shape: &[usize]| {
            crate::linalg::tensor::from_vec(values.to_vec(), shape).unwrap()
        };
        let shape = [1, seqlen, heads, head_dim];
        let [cos, sin] = [&rotary.cos, &rotary.sin].map(|table| tensor(table, &[40, head_dim / 2]));
        let candles = candle_nn::rotary_emb::rope_thd(&tensor(&x, &shape), &cos, &sin).unwrap();
        rotary.apply(&mut x, 0, heads, head_dim).unwrap();
        assert_eq!(x, candles.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        assert!(
            rotary.apply(&mut [0.0; 41 * 64], 0, 1, head_dim).is_err(),
            "longer than the tables"
        );
    }

    #[test]
    fn linear_divides_and_dynamic_waits_for_long_sequences() {
        let plain = frequencies(&config(json!(null)), 16);
        let linear = frequencies(&config(json!({"type": "linear", "factor": 4.0})), 16);
        assert!(plain.iter().zip(&linear).all(|(plain, linear)| plain / 4.0 == *linear));
        let dynamic = config(json!({"type": "dynamic", "factor": 2.0}));
        assert_eq!(frequencies(&dynamic, 4096), plain);
        // Twice the context: base · (2 · 2 − 1)^(64 / 62).
        let base = 500_000.0 * 3f64.powf(64.0 / 62.0);
        let expected = 1.0 / base.powf(2.0 / 64.0);
        let got = f64::from(frequencies(&dynamic, 8192)[1]);
        assert!((got / expected - 1.0).abs() < 1e-6);
    }
}
