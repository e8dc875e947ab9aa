//! A decoder layer as the papers define it: f64, one loop per sum, no blocks, no scratch memory, no candle.
//!
//! It has the features that candle's Llama lacks: biases, a head_dim other than hidden_size / heads, linear and dynamic rotary
//! scaling. Only the rotary angles are rounded to f32, frequency and product, because the model was trained with those.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{DType, Device, safetensors};
use prune::model::{LinearId, ModelConfig, RopeScaling};

/// One layer's tensors by their names inside it, `[out_features, in_features]` row-major.
pub(super) struct PlainLayer {
    pub(super) config: ModelConfig,
    tensors: HashMap<String, Vec<f64>>,
}

/// Inputs of the seven linears, and the output of the layer.
pub(super) struct Passed {
    pub(super) inputs: Vec<(LinearId, Vec<f64>)>,
    pub(super) hidden: Vec<f64>,
}

impl PlainLayer {
    pub(super) fn load(folder: &Path, index: usize) -> Result<Self> {
        let prefix = format!("model.layers.{index}.");
        let mut tensors = HashMap::new();
        for (name, tensor) in safetensors::load(folder.join("model.safetensors"), &Device::Cpu)? {
            if let Some(name) = name.strip_prefix(&prefix) {
                let values = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                tensors.insert(name.to_owned(), values);
            }
        }
        Ok(Self { config: ModelConfig::load(folder)?, tensors })
    }

    fn tensor(&self, name: &str) -> Result<&[f64]> {
        let tensor = self.tensors.get(name).with_context(|| name.to_owned())?;
        Ok(tensor)
    }

    /// `[tokens, hidden_size]` through the layer.
    pub(super) fn forward(&self, hidden: &[f64]) -> Result<Passed> {
        let config = &self.config;
        let tokens = hidden.len() / config.hidden_size;
        let mut inputs = Vec::new();
        let mut linear = |id: LinearId, x: &[f64]| {
            inputs.push((id, x.to_vec()));
            self.linear(id, x)
        };
        // x ← x + attention(norm(x))·Woᵀ
        let normed = self.norm("input_layernorm.weight", hidden)?;
        let q = linear(LinearId::Q, &normed)?;
        let k = linear(LinearId::K, &normed)?;
        let v = linear(LinearId::V, &normed)?;
        let q = self.rotate(q, config.num_attention_heads, tokens);
        let k = self.rotate(k, config.num_key_value_heads, tokens);
        let context = linear(LinearId::O, &self.attention(&q, &k, &v, tokens))?;
        let middle = sum(hidden, &context);
        // x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
        let normed = self.norm("post_attention_layernorm.weight", &middle)?;
        let gate = linear(LinearId::GATE, &normed)?;
        let up = linear(LinearId::UP, &normed)?;
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let product: Vec<f64> = gate.iter().zip(&up).map(|(&gate, up)| silu(gate) * up).collect();
        let down = linear(LinearId::DOWN, &product)?;
        Ok(Passed { hidden: sum(&middle, &down), inputs })
    }

    /// x / √(mean(x²) + ε) ∘ w
    fn norm(&self, name: &str, x: &[f64]) -> Result<Vec<f64>> {
        let (weight, eps) = (self.tensor(name)?, self.config.rms_norm_eps);
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks(weight.len()) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            out.extend(row.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w));
        }
        Ok(out)
    }

    /// x·Wᵀ + b
    fn linear(&self, id: LinearId, x: &[f64]) -> Result<Vec<f64>> {
        let name = id.name();
        let (_, columns) = id.shape(&self.config);
        let weight = self.tensor(&format!("{name}.weight"))?;
        let bias =
            self.config.has_bias(id).then(|| self.tensor(&format!("{name}.bias"))).transpose()?;
        let mut out = Vec::new();
        for x in x.chunks(columns) {
            for (i, w) in weight.chunks(columns).enumerate() {
                let product: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
                out.push(product + bias.map_or(0.0, |bias| bias[i]));
            }
        }
        Ok(out)
    }

    /// (a, b) of the two halves of every head ← (a cos − b sin, b cos + a sin)
    fn rotate(&self, mut x: Vec<f64>, heads: usize, tokens: usize) -> Vec<f64> {
        let (head_dim, half) = (self.config.head_dim, self.config.head_dim / 2);
        let frequencies = frequencies(&self.config, tokens);
        for (place, head) in x.chunks_mut(head_dim).enumerate() {
            for i in 0..half {
                let angle = f64::from((place / heads) as f32 * frequencies[i] as f32);
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + half] = b * angle.cos() + a * angle.sin();
            }
        }
        x
    }

    /// softmax(q·kᵀ / √head_dim, earlier tokens and this one)·v; query head h reads key head h / (heads per key head)
    fn attention(&self, q: &[f64], k: &[f64], v: &[f64], tokens: usize) -> Vec<f64> {
        let (d, heads, keys) = (
            self.config.head_dim,
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
        );
        let mut out = vec![0.0; q.len()];
        for t in 0..tokens {
            for head in 0..heads {
                let q_at = (t * heads + head) * d;
                let key = |s: usize| (s * keys + head / (heads / keys)) * d;
                let score = |s: usize| {
                    let dot: f64 = (0..d).map(|i| q[q_at + i] * k[key(s) + i]).sum();
                    dot / (d as f64).sqrt()
                };
                let scores: Vec<f64> = (0..=t).map(score).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (s, weight) in weights.iter().enumerate() {
                    for i in 0..d {
                        out[q_at + i] += weight / total * v[key(s) + i];
                    }
                }
            }
        }
        out
    }
}

fn sum(one: &[f64], other: &[f64]) -> Vec<f64> {
    one.iter().zip(other).map(|(one, other)| one + other).collect()
}

/// θ_i = base^(−2i / head_dim), stretched.
fn frequencies(config: &ModelConfig, tokens: usize) -> Vec<f64> {
    let dim = config.head_dim as f64;
    let max = config.max_position_embeddings as f64;
    let rope = &config.ropes[0];
    let base = match rope.scaling {
        RopeScaling::Dynamic { factor, .. } if tokens as f64 > max => {
            let stretch = factor * tokens as f64 / max - (factor - 1.0);
            rope.theta * stretch.powf(dim / (dim - 2.0))
        }
        _ => rope.theta,
    };
    let stretched = |frequency: f64| match rope.scaling {
        RopeScaling::Default | RopeScaling::Dynamic { .. } => frequency,
        RopeScaling::Yarn { .. } | RopeScaling::Longrope { .. } => {
            unreachable!("compared with the states of transformers")
        }
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let turns = original_max_position_embeddings as f64 * frequency / std::f64::consts::TAU;
            let ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let kept = ramp.clamp(0.0, 1.0);
            kept * frequency + (1.0 - kept) * frequency / factor
        }
    };
    (0..config.head_dim / 2).map(|i| stretched(base.powf(-2.0 * i as f64 / dim))).collect()
}
