//! The forward pass of a model with gradients: the formulas of `layer.rs` and `head.rs` out of candle's basic operators, each of which
//! has a backward pass.
//!
//! ```text
//! x ← embedding[ids];  per layer: a = norm(x);  x ← x + softmax(rotate(a·Wqᵀ)·rotate(a·Wkᵀ)ᵀ/√d + causal)·(a·Wvᵀ)·Woᵀ
//!                                 m = norm(x);  x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! logits = norm(x)·headᵀ
//! ```
//!
//! Linears add their biases. Everything is f32. Training uses this pass; pruning and evaluation use [`DecoderLayer`](super::DecoderLayer),
//! whose fused norms and rotations have no backward pass. `tests/it/differentiable.rs` compares the two.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use candle_core::{D, Device, Tensor};

use super::config::ModelConfig;
use super::embedding::EMBEDDING;
use super::family::Activation;
use super::head::{Head, NORM};
use super::projection::Projection;
use super::rotary::Rotary;

/// The weights by their names in the checkpoint, in f32. The map is ordered, so that sums over all weights have a fixed order.
pub type Weights = BTreeMap<String, Tensor>;

/// Configuration and tables of a model. Callers pass the weights in, so that threads can share them.
#[derive(Debug)]
pub struct DifferentiableModel {
    config: ModelConfig,
    /// `[seqlen, head_dim / 2]`
    cos: Tensor,
    /// `[seqlen, head_dim / 2]`
    sin: Tensor,
    /// 0 where a query sees a key, else −∞: `[seqlen, seqlen]`.
    causal: Tensor,
}

impl DifferentiableModel {
    /// Creates the tables for sequences of exactly `seqlen` tokens.
    pub fn new(config: &ModelConfig, seqlen: usize) -> Result<Self> {
        let rotary = Rotary::new(config, seqlen);
        let (cos, sin) = rotary.tables();
        let table = |values: &[f32]| {
            Tensor::from_slice(values, (seqlen, config.head_dim / 2), &Device::Cpu)
        };
        let sees = |query: usize, key: usize| if key > query { f32::NEG_INFINITY } else { 0.0 };
        let causal: Vec<f32> =
            (0..seqlen).flat_map(|query| (0..seqlen).map(move |key| sees(query, key))).collect();
        Ok(Self {
            config: config.clone(),
            cos: table(cos)?,
            sin: table(sin)?,
            causal: Tensor::from_vec(causal, (seqlen, seqlen), &Device::Cpu)?,
        })
    }

    /// Logits `[batch · seqlen, vocab_size]` of `ids` `[batch, seqlen]`.
    ///
    /// # Errors
    /// Fails when a weight is missing or a shape does not fit.
    pub fn logits(&self, weights: &Weights, ids: &Tensor) -> Result<Tensor> {
        let (batch, _) = ids.dims2()?;
        // [batch · seqlen, hidden_size] throughout: a product per matrix.
        let mut x = get(weights, EMBEDDING)?.index_select(&ids.flatten_all()?, 0)?;
        for layer in 0..self.config.num_hidden_layers {
            x = self.layer(weights, layer, &x, batch)?;
        }
        let head = get(weights, Head::tensor_name(&self.config))?;
        Ok(self.norm(&x, get(weights, NORM)?)?.matmul(&head.t()?)?)
    }

    /// Passes `batch` sequences through a decoder layer: `[batch · seqlen, hidden_size]` in and out.
    ///
    /// # Errors
    /// Fails when a weight is missing or a shape does not fit.
    pub fn layer(
        &self,
        weights: &Weights,
        layer: usize,
        x: &Tensor,
        batch: usize,
    ) -> Result<Tensor> {
        let norm = |x: &Tensor, name: &str| {
            let name = format!("model.layers.{layer}.{name}.weight");
            self.norm(x, get(weights, &name)?)
        };
        let linear = |x: &Tensor, projection| self.linear(weights, layer, projection, x);
        let [before_attention, before_mlp] = self.config.family.norms;

        let a = norm(x, before_attention)?;
        let [q, k, v] =
            [Projection::Q, Projection::K, Projection::V].map(|projection| linear(&a, projection));
        let x = (x + linear(&self.attention(&q?, &k?, &v?, batch)?, Projection::O)?)?;

        let m = norm(&x, before_mlp)?;
        let gate = linear(&m, Projection::Gate)?;
        let gate = match self.config.family.activation {
            Activation::Silu => gate.silu()?,
        };
        let wide = (gate * linear(&m, Projection::Up)?)?;
        Ok((x + linear(&wide, Projection::Down)?)?)
    }

    /// softmax(rotate(q)·rotate(k)ᵀ/√d + causal)·v of `[batch · seqlen, heads · head_dim]`.
    fn attention(&self, q: &Tensor, k: &Tensor, v: &Tensor, batch: usize) -> Result<Tensor> {
        let ModelConfig {
            num_attention_heads: heads,
            num_key_value_heads: key_value_heads,
            head_dim,
            ..
        } = self.config;
        let seqlen = self.causal.dim(0)?;
        ensure!(
            q.dim(0)? == batch * seqlen,
            "{} tokens are not {batch} sequences of {seqlen}",
            q.dim(0)?
        );
        // [batch, heads, seqlen, head_dim]
        let split = |x: &Tensor, heads: usize| {
            x.reshape((batch, seqlen, heads, head_dim))?.transpose(1, 2)?.contiguous()
        };
        let groups = heads / key_value_heads;
        // The query heads of a key head are neighbours: [batch · key heads, groups · seqlen, head_dim].
        let grouped = (batch * key_value_heads, groups * seqlen, head_dim);
        let shared = (batch * key_value_heads, seqlen, head_dim);
        let q = self.rotate(&split(q, heads)?)?;
        let k = self.rotate(&split(k, key_value_heads)?)?.reshape(shared)?;
        let v = split(v, key_value_heads)?.reshape(shared)?;
        let q = (q / (head_dim as f64).sqrt())?.reshape(grouped)?;
        let scores = q
            .matmul(&k.t()?)?
            .reshape((shared.0 * groups, seqlen, seqlen))?
            .broadcast_add(&self.causal)?;
        let attended = softmax(&scores)?
            .reshape((shared.0, groups * seqlen, seqlen))?
            .matmul(&v)?
            .reshape((batch, heads, seqlen, head_dim))?
            .transpose(1, 2)?
            .reshape((batch * seqlen, heads * head_dim))?;
        Ok(attended)
    }

    /// x·Wᵀ + b
    fn linear(
        &self,
        weights: &Weights,
        layer: usize,
        projection: Projection,
        x: &Tensor,
    ) -> Result<Tensor> {
        let out = x.matmul(&get(weights, &projection.tensor_name(layer))?.t()?)?;
        if !self.config.has_bias(projection) {
            return Ok(out);
        }
        Ok(out.broadcast_add(get(weights, &projection.bias_name(layer))?)?)
    }

    /// x / √(mean(x²) + ε) ∘ w
    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = x.broadcast_div(&(mean_square + self.config.rms_norm_eps)?.sqrt()?)?;
        Ok(normed.broadcast_mul(weight)?)
    }

    /// Rotates each head: its first half is paired with its second half.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let half = self.config.head_dim / 2;
        let (first, second) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
        let rotated = [
            (first.broadcast_mul(&self.cos)? - second.broadcast_mul(&self.sin)?)?,
            (second.broadcast_mul(&self.cos)? + first.broadcast_mul(&self.sin)?)?,
        ];
        Ok(Tensor::cat(&rotated, D::Minus1)?)
    }
}

fn get<'a>(weights: &'a Weights, name: &str) -> Result<&'a Tensor> {
    weights.get(name).with_context(|| format!("there is no weight `{name}`"))
}

/// softmax over the last dimension. The largest value is subtracted as a constant, since it cancels.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}

/// The mean over all tokens of −ln softmax(logits)\[next\], in nat.
///
/// # Arguments
/// * `logits`: `[tokens, vocab_size]`
/// * `next`: `[tokens]` ids in any shape
pub fn loss(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    let logits = logits.broadcast_sub(&logits.detach().max_keepdim(D::Minus1)?)?;
    let log_sum = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let chosen = logits.gather(&next.flatten_all()?.unsqueeze(1)?, 1)?;
    Ok((log_sum - chosen)?.mean_all()?)
}
