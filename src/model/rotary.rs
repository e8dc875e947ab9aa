//! Rotary position tables: θ_i = rope_theta^(−2i/head_dim), angle(t, i) = t·θ_i, stretched as the config says.
//!
//! Su et al. 2021, arXiv:2104.09864 §3.2.2; the scalings follow transformers' `modeling_rope_utils` (`linear`, `dynamic`,
//! `llama3`). Frequencies and angles are rounded to f32 at the same steps as there: an angle of 2000 rad in f32 is off
//! by 10⁻⁴, so a table computed in f64 would be *more* exact than the model was trained with and would not reproduce
//! the reference's statistics. The rotation itself is candle's fused `rope_thd` (first half paired with second half).

use anyhow::Result;
use candle_core::Tensor;

use super::config::{LlamaConfig, RopeScaling};
use crate::linalg::tensor;

/// cos and sin tables, `[seqlen, head_dim / 2]` each.
#[derive(Debug, Clone)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Tables for sequences of up to `seqlen` tokens.
    ///
    /// # Errors
    /// Fails only when a tensor cannot be built.
    pub fn new(config: &LlamaConfig, seqlen: usize) -> Result<Self> {
        let frequencies = frequencies(config, seqlen);
        let shape = [seqlen, frequencies.len()];
        let table = |function: fn(f32) -> f32| {
            (0..seqlen)
                .flat_map(|t| {
                    frequencies
                        .iter()
                        .map(move |&frequency| function(t as f32 * frequency))
                })
                .collect()
        };
        Ok(Self {
            cos: tensor::from_vec(table(f32::cos), &shape)?,
            sin: tensor::from_vec(table(f32::sin), &shape)?,
        })
    }

    /// Rotates every head of `x` `[seqlen, num_heads * head_dim]` by its position.
    ///
    /// # Errors
    /// Fails when `x` does not have that shape.
    pub fn apply(&self, x: Vec<f32>, num_heads: usize, head_dim: usize) -> Result<Tensor> {
        let seqlen = x.len() / (num_heads * head_dim);
        let x = tensor::from_vec(x, &[1, seqlen, num_heads, head_dim])?;
        Ok(candle_nn::rotary_emb::rope_thd(&x, &self.cos, &self.sin)?)
    }
}

/// One frequency per pair of elements, in rad per token.
fn frequencies(config: &LlamaConfig, seqlen: usize) -> Vec<f32> {
    let dim = config.head_dim as f32;
    let base = match config.rope_scaling {
        RopeScaling::Dynamic { factor } if seqlen > config.max_position_embeddings => {
            // base · (factor · s / max − (factor − 1))^(d / (d − 2))
            let stretch =
                factor * seqlen as f64 / config.max_position_embeddings as f64 - (factor - 1.0);
            config.rope_theta * stretch.powf(f64::from(dim) / (f64::from(dim) - 2.0))
        }
        _ => config.rope_theta,
    };
    (0..config.head_dim / 2)
        .map(|i| {
            let frequency = 1.0 / (base as f32).powf((2 * i) as f32 / dim);
            scaled(config.rope_scaling, frequency)
        })
        .collect()
}

fn scaled(scaling: RopeScaling, frequency: f32) -> f32 {
    match scaling {
        RopeScaling::Default | RopeScaling::Dynamic { .. } => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let (factor, low, high) = (
                factor as f32,
                low_freq_factor as f32,
                high_freq_factor as f32,
            );
            let original = original_max_position_embeddings as f32;
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(rope_scaling: serde_json::Value) -> LlamaConfig {
        LlamaConfig::from_json(&json!({"model_type": "llama", "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 300, "rope_theta": 500000.0, "max_position_embeddings": 4096,
            "rope_scaling": rope_scaling}))
        .unwrap()
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
        assert_eq!(
            stretched[last],
            plain[last] / 32.0,
            "wavelength 2·π·331000 > 8192"
        );
        let ramp = plain
            .iter()
            .zip(&stretched)
            .filter(|(plain, stretched)| *stretched < plain && **stretched > **plain / 32.0);
        assert!(ramp.count() > 0, "some frequencies lie on the ramp");
    }

    #[test]
    fn linear_divides_and_dynamic_waits_for_long_sequences() {
        let plain = frequencies(&config(json!(null)), 16);
        let linear = frequencies(&config(json!({"type": "linear", "factor": 4.0})), 16);
        assert!(
            plain
                .iter()
                .zip(&linear)
                .all(|(plain, linear)| plain / 4.0 == *linear)
        );
        let dynamic = config(json!({"type": "dynamic", "factor": 2.0}));
        assert_eq!(frequencies(&dynamic, 4096), plain);
        // Twice the context: base · (2 · 2 − 1)^(64 / 62).
        let base = 500_000.0 * 3f64.powf(64.0 / 62.0);
        let expected = 1.0 / base.powf(2.0 / 64.0);
        let got = f64::from(frequencies(&dynamic, 8192)[1]);
        assert!((got / expected - 1.0).abs() < 1e-6);
    }
}
