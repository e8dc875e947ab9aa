//! The plain twin of the program's forward pass: the same Llama out of candle's basic operators, each of which has a
//! backward. The program's own layer (`src/model/layer.rs`) uses fused norms and rotations, which have none.
//!
//! ```text
//! x ← embedding[ids];  per layer: a = norm(x);  x ← x + softmax(rotate(a·Wqᵀ)·rotate(a·Wkᵀ)ᵀ/√d + causal)·(a·Wvᵀ)·Woᵀ
//!                                 m = norm(x);  x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! logits = norm(x)·embeddingᵀ
//! ```
//!
//! A test holds its logits to those of the program (`tests/it/demo.rs`).

use std::collections::BTreeMap;

use candle_core::{D, Device, Result, Tensor};
use prune::model::{ModelConfig, Projection};

/// The weights by their names in the checkpoint; a map with an order, so that a run is the same every time.
pub(crate) type Weights = BTreeMap<String, Tensor>;

/// Tables and shape; the weights are passed in, so that threads can share them.
pub(crate) struct Twin {
    config: ModelConfig,
    /// cos and sin of every position, `[seqlen, head_dim / 2]`.
    rotary: (Tensor, Tensor),
    /// 0 where a token may look, −∞ where it may not: `[seqlen, seqlen]`.
    causal: Tensor,
}

impl Twin {
    /// For sequences of exactly `seqlen` tokens.
    pub(crate) fn new(config: &ModelConfig, seqlen: usize) -> Result<Self> {
        let half = config.head_dim / 2;
        let frequency = |i: usize| {
            1.0 / (config.rope_theta as f32).powf((2 * i) as f32 / config.head_dim as f32)
        };
        let angles: Vec<f32> = (0..seqlen)
            .flat_map(|t| (0..half).map(move |i| t as f32 * frequency(i)))
            .collect();
        let angles = Tensor::from_vec(angles, (seqlen, half), &Device::Cpu)?;
        let causal: Vec<f32> = (0..seqlen)
            .flat_map(|query| {
                (0..seqlen).map(move |key| if key > query { f32::NEG_INFINITY } else { 0.0 })
            })
            .collect();
        Ok(Self {
            config: config.clone(),
            rotary: (angles.cos()?, angles.sin()?),
            causal: Tensor::from_vec(causal, (seqlen, seqlen), &Device::Cpu)?,
        })
    }

    /// Logits `[batch · seqlen, vocab_size]` of `ids` `[batch, seqlen]`.
    pub(crate) fn logits(&self, weights: &Weights, ids: &Tensor) -> Result<Tensor> {
        let (batch, seqlen) = ids.dims2()?;
        let embedding = &weights["model.embed_tokens.weight"];
        // [batch · seqlen, hidden_size] throughout: one product per matrix.
        let mut x = embedding.index_select(&ids.flatten_all()?, 0)?;
        for layer in 0..self.config.num_hidden_layers {
            x = self.layer(weights, layer, &x, (batch, seqlen))?;
        }
        self.norm(&x, &weights["model.norm.weight"])?
            .matmul(&embedding.t()?)
    }

    /// One decoder layer: `[batch · seqlen, hidden_size]` in and out.
    pub(crate) fn layer(
        &self,
        weights: &Weights,
        layer: usize,
        x: &Tensor,
        (batch, seqlen): (usize, usize),
    ) -> Result<Tensor> {
        let times = |x: &Tensor, projection: Projection| {
            x.matmul(&weights[&projection.tensor_name(layer)].t()?)
        };
        let norm = |x: &Tensor, name: &str| {
            self.norm(x, &weights[&format!("model.layers.{layer}.{name}.weight")])
        };
        let ModelConfig {
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            ..
        } = self.config;
        // [batch, heads, seqlen, head_dim]
        let split = |x: Tensor, heads: usize| {
            x.reshape((batch, seqlen, heads, head_dim))?
                .transpose(1, 2)?
                .contiguous()
        };
        let groups = num_attention_heads / num_key_value_heads;
        // Query heads of a group stand one after the other: [batch · kv heads, groups · seqlen, head_dim].
        let grouped = (batch * num_key_value_heads, groups * seqlen, head_dim);
        let shared = (batch * num_key_value_heads, seqlen, head_dim);

        let a = norm(x, "input_layernorm")?;
        let q = self.rotate(&split(times(&a, Projection::Q)?, num_attention_heads)?)?;
        let k = self.rotate(&split(times(&a, Projection::K)?, num_key_value_heads)?)?;
        let v = split(times(&a, Projection::V)?, num_key_value_heads)?;
        let q = (q / (head_dim as f64).sqrt())?.reshape(grouped)?;
        let scores = q.matmul(&k.reshape(shared)?.t()?)?;
        let scores = scores
            .reshape((shared.0 * groups, seqlen, seqlen))?
            .broadcast_add(&self.causal)?;
        let attended = softmax(&scores)?
            .reshape((shared.0, groups * seqlen, seqlen))?
            .matmul(&v.reshape(shared)?)?
            .reshape((batch, num_attention_heads, seqlen, head_dim))?
            .transpose(1, 2)?
            .reshape((batch * seqlen, num_attention_heads * head_dim))?;
        let x = (x + times(&attended, Projection::O)?)?;

        let m = norm(&x, "post_attention_layernorm")?;
        let wide = (times(&m, Projection::Gate)?.silu()? * times(&m, Projection::Up)?)?;
        x + times(&wide, Projection::Down)?
    }

    /// x / √(mean(x²) + ε) ∘ w
    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean_square + self.config.rms_norm_eps)?.sqrt()?)?
            .broadcast_mul(weight)
    }

    /// First half paired with second half, as transformers stores the weights.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let half = self.config.head_dim / 2;
        let (first, second) = (
            x.narrow(D::Minus1, 0, half)?,
            x.narrow(D::Minus1, half, half)?,
        );
        let (cos, sin) = &self.rotary;
        let turned = [
            (first.broadcast_mul(cos)? - second.broadcast_mul(sin)?)?,
            (second.broadcast_mul(cos)? + first.broadcast_mul(sin)?)?,
        ];
        Tensor::cat(&turned, D::Minus1)
    }
}

/// softmax over the last dimension; the largest value is subtracted as a constant, since it cancels.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x
        .broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)?
        .exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// The mean over all tokens of −ln softmax(logits)[next], in nat.
pub(crate) fn loss(logits: &Tensor, next: &Tensor) -> Result<Tensor> {
    let logits = logits.broadcast_sub(&logits.detach().max_keepdim(D::Minus1)?)?;
    let log_sum = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let chosen = logits.gather(&next.flatten_all()?.unsqueeze(1)?, 1)?;
    (log_sum - chosen)?.mean_all()
}

/// The names and shapes of all weights: the embedding is also the head.
pub(crate) fn shapes(config: &ModelConfig) -> BTreeMap<String, Vec<usize>> {
    let hidden = config.hidden_size;
    let mut shapes = BTreeMap::from([
        (
            "model.embed_tokens.weight".to_string(),
            vec![config.vocab_size, hidden],
        ),
        ("model.norm.weight".to_string(), vec![hidden]),
    ]);
    for layer in 0..config.num_hidden_layers {
        let tensors = config.layer_tensors(layer);
        shapes.extend(tensors.map(|tensor| (tensor.name, tensor.shape)));
    }
    shapes
}

/// Ids `[rows, seqlen]` as a tensor.
pub(crate) fn ids(tokens: &[u32], seqlen: usize) -> Result<Tensor> {
    Tensor::from_slice(tokens, (tokens.len() / seqlen, seqlen), &Device::Cpu)
}
