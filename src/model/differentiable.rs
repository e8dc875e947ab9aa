//! The forward pass of a model out of candle's basic operators, each of which has a backward pass: an oracle of the tests.
//!
//! ```text
//! x ← embedding[ids];  per layer: a = norm(x);  q, k, v = rotate(norm(a·Wqᵀ)), rotate(norm(a·Wkᵀ)), a·Wvᵀ
//!                                 x ← x + norm(softmax(cap(q·kᵀ·scale) + mask)·v·Woᵀ)
//!                                 m = norm(x);  x ← x + norm((act(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ)
//! logits = cap(norm(x)·headᵀ)
//! ```
//!
//! A norm that the family does not have is the identity. Linears add their biases. Everything is f32. Tests compare this pass and
//! candle's gradients of it with the program's layers.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use candle_core::{D, Device, Tensor};

use crate::linalg::attention::{Heads, Scoring};
use crate::model::LinearRole;
use crate::model::ModelConfig;
use crate::model::Rotary;
use crate::model::embedding::EMBEDDING;
use crate::model::family::Activation;
use crate::model::head::{Head, NORM};
use crate::model::norms::NormRole;
use crate::model::spec::LayerSpec;

/// The weights by their names in the checkpoint, in f32. The map is ordered, so that sums over all weights have a fixed order.
pub type Weights = BTreeMap<String, Tensor>;

/// Configuration and tables of a model. Callers pass the weights in, so that threads can share them.
#[derive(Debug)]
pub struct DifferentiableModel {
    config: ModelConfig,
    seqlen: usize,
    /// cos and sin of each of the configuration's ropes, `[seqlen, dims / 2]` each.
    tables: Vec<[Tensor; 2]>,
}

impl DifferentiableModel {
    /// Creates the tables for sequences of exactly `seqlen` tokens.
    pub fn new(config: &ModelConfig, seqlen: usize) -> Result<Self> {
        let tables = config.ropes.iter().map(|rope| {
            let rotary = Rotary::new(rope, seqlen);
            let (cos, sin) = rotary.tables();
            let table = |values| Tensor::from_slice(values, (seqlen, rope.dims / 2), &Device::Cpu);
            Ok([table(cos)?, table(sin)?])
        });
        Ok(Self { config: config.clone(), seqlen, tables: tables.collect::<Result<_>>()? })
    }

    /// Logits `[batch · seqlen, vocab_size]` of `ids` `[batch, seqlen]`.
    ///
    /// # Errors
    /// Fails when a weight is missing or a shape does not fit.
    pub fn logits(&self, weights: &Weights, ids: &Tensor) -> Result<Tensor> {
        let (batch, _) = ids.dims2()?;
        // [batch · seqlen, hidden_size] throughout: a product per matrix.
        let mut x = get(weights, EMBEDDING)?.index_select(&ids.flatten_all()?, 0)?;
        if let Some(scale) = self.config.embedding_scale {
            x = (x * f64::from(scale))?;
        }
        for layer in 0..self.config.num_hidden_layers {
            x = self.layer(weights, layer, &x, batch)?;
        }
        let head = get(weights, Head::tensor_name(&self.config))?;
        let logits = self.norm(&x, get(weights, NORM)?)?.matmul(&head.t()?)?;
        bounded(logits, self.config.logit_cap)
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
        let of_layer = OfLayer { model: self, weights, layer, spec: self.config.layer(layer) };
        let a = of_layer.norm(NormRole::BeforeAttention, x)?;
        let q = of_layer.norm(NormRole::Query, &of_layer.product(LinearRole::Q, &a)?)?;
        let k = of_layer.norm(NormRole::Key, &of_layer.product(LinearRole::K, &a)?)?;
        let v = of_layer.product(LinearRole::V, &a)?;
        let attended = of_layer.attention([&q, &k, &v], batch)?;
        let branch = of_layer.product(LinearRole::O, &attended)?;
        let x = (x + of_layer.norm(NormRole::AfterAttention, &branch)?)?;

        let m = of_layer.norm(NormRole::BeforeMlp, &x)?;
        let gate = of_layer.product(LinearRole::Gate, &m)?;
        let gate = match self.config.activation {
            Activation::Silu => gate.silu()?,
            Activation::GeluTanh => gate.gelu()?,
        };
        let wide = (gate * of_layer.product(LinearRole::Up, &m)?)?;
        let branch = of_layer.product(LinearRole::Down, &wide)?;
        Ok((x + of_layer.norm(NormRole::AfterMlp, &branch)?)?)
    }

    /// x / √(mean(x²) + ε) ∘ w, or ∘ (1 + w)
    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = x.broadcast_div(&(mean_square + self.config.rms_norm_eps)?.sqrt()?)?;
        Ok(match self.config.family.norms_add_one {
            true => normed.broadcast_mul(&(weight + 1.0)?)?,
            false => normed.broadcast_mul(weight)?,
        })
    }
}

/// A layer of a model, and its weights.
struct OfLayer<'a> {
    model: &'a DifferentiableModel,
    weights: &'a Weights,
    layer: usize,
    spec: LayerSpec,
}

impl OfLayer<'_> {
    /// A norm over the width of its weight; `x` itself without the norm.
    fn norm(&self, role: NormRole, x: &Tensor) -> Result<Tensor> {
        let mut names = self.spec.family.norm_names(self.layer);
        let Some((_, name)) = names.find(|(of, _)| *of == role) else {
            return Ok(x.clone());
        };
        let weight = get(self.weights, &name)?;
        let (tokens, width) = x.dims2()?;
        let rows = x.reshape((tokens * width / weight.elem_count(), weight.elem_count()))?;
        Ok(self.model.norm(&rows, weight)?.reshape((tokens, width))?)
    }

    /// x·Wᵀ + b of the rows of a role
    fn product(&self, role: LinearRole, x: &Tensor) -> Result<Tensor> {
        let (id, rows) = self.spec.part(role);
        let weight = get(self.weights, &id.tensor_name(self.layer))?;
        let out = x.matmul(&weight.narrow(0, rows.start, rows.len())?.t()?)?;
        if !self.model.config.has_bias(id) {
            return Ok(out);
        }
        let bias = get(self.weights, &id.bias_name(self.layer))?;
        Ok(out.broadcast_add(&bias.narrow(0, rows.start, rows.len())?)?)
    }

    /// softmax(cap(rotate(q)·rotate(k)ᵀ·scale) + mask)·v of `[batch · seqlen, heads · head_dim]`.
    fn attention(&self, [q, k, v]: [&Tensor; 3], batch: usize) -> Result<Tensor> {
        let Heads { num_heads: heads, num_key_value_heads: key_value_heads, head_dim } =
            self.spec.heads;
        let seqlen = self.model.seqlen;
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
        let Scoring { scale, soft_cap, window } = self.spec.scoring;
        let q = (q * f64::from(scale))?.reshape(grouped)?;
        let scores =
            bounded(q.matmul(&k.t()?)?, soft_cap)?.reshape((shared.0 * groups, seqlen, seqlen))?;
        let sees =
            |query: usize, key: usize| key <= query && window.is_none_or(|of| key + of > query);
        let mask = (0..seqlen * seqlen).map(|at| match sees(at / seqlen, at % seqlen) {
            true => 0.0,
            false => f32::NEG_INFINITY,
        });
        let mask = Tensor::from_vec(mask.collect(), (seqlen, seqlen), &Device::Cpu)?;
        let attended = softmax(&scores.broadcast_add(&mask)?)?
            .reshape((shared.0, groups * seqlen, seqlen))?
            .matmul(&v)?
            .reshape((batch, heads, seqlen, head_dim))?
            .transpose(1, 2)?
            .reshape((batch * seqlen, heads * head_dim))?;
        Ok(attended)
    }

    /// Rotates each head: the first half of its rotated elements is paired with the second half.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let Some(rope) = self.spec.rope else {
            return Ok(x.clone());
        };
        let [cos, sin] = &self.model.tables[rope];
        let (half, width) = (cos.dim(1)?, x.dim(D::Minus1)?);
        let (first, second) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
        let mut rotated = vec![
            (first.broadcast_mul(cos)? - second.broadcast_mul(sin)?)?,
            (second.broadcast_mul(cos)? + first.broadcast_mul(sin)?)?,
        ];
        if width > 2 * half {
            rotated.push(x.narrow(D::Minus1, 2 * half, width - 2 * half)?);
        }
        Ok(Tensor::cat(&rotated, D::Minus1)?)
    }
}

/// c·tanh(x/c) with a bound c, else x.
fn bounded(x: Tensor, cap: Option<f32>) -> Result<Tensor> {
    match cap {
        Some(cap) => Ok(((x / f64::from(cap))?.tanh()? * f64::from(cap))?),
        None => Ok(x),
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
