//! One decoder layer: its weights as stored, and its forward pass with four observation points.
//!
//! ```text
//! x ← hidden;  a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k rotated
//! x ← x + attention(q, k, v)·Woᵀ;  m = norm(x);  x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```
//!
//! norm(x) = x / √(mean(x²) + ε) ∘ w. Touvron et al. 2023, arXiv:2302.13971 §2.2; the arithmetic is that of transformers'
//! `LlamaDecoderLayer` in f32 with eager attention. Norms and rotary are candle's fused operators; products,
//! attention and the MLP work on slices with scratch from the workspace. The MLP runs over [`MLP_TOKENS`] tokens at a
//! time, so its two wide activations never exist for a whole sequence.

use anyhow::Result;
use candle_core::Tensor;

use super::config::LlamaConfig;
use super::observe::{Need, Observation, Observer};
use super::rotary::Rotary;
use super::{read_matrix, read_vector};
use crate::checkpoint::WeightSource;
use crate::linalg::attention::{self, Heads};
use crate::linalg::{Linear, Workspace, elementwise, tensor};

/// Tokens the MLP handles at once.
pub const MLP_TOKENS: usize = 1024;

/// The seven linear layers of a decoder layer, in the order of the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are those of the tensors")]
pub enum Projection {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl Projection {
    /// All seven, in the reference's order.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// The name inside the layer: `self_attn.q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// The module's full name: `model.layers.3.self_attn.q_proj`.
    pub fn full_name(self, layer: usize) -> String {
        format!("model.layers.{layer}.{}", self.name())
    }

    /// The tensor that holds its weight: `model.layers.3.self_attn.q_proj.weight`.
    pub fn tensor_name(self, layer: usize) -> String {
        format!("{}.weight", self.full_name(layer))
    }

    /// Where its input is observed.
    pub fn observed_at(self) -> Observation {
        match self {
            Self::Q | Self::K | Self::V => Observation::AttentionInput,
            Self::O => Observation::OInput,
            Self::Gate | Self::Up => Observation::MlpInput,
            Self::Down => Observation::DownInput,
        }
    }

    /// (out_features, in_features) in a model of this configuration.
    pub fn shape(self, config: &LlamaConfig) -> (usize, usize) {
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        let queries = config.num_attention_heads * config.head_dim;
        let keys = config.num_key_value_heads * config.head_dim;
        match self {
            Self::Q => (queries, hidden),
            Self::K | Self::V => (keys, hidden),
            Self::O => (hidden, queries),
            Self::Gate | Self::Up => (intermediate, hidden),
            Self::Down => (hidden, intermediate),
        }
    }

    fn has_bias(self, config: &LlamaConfig) -> bool {
        match self {
            Self::Q | Self::K | Self::V | Self::O => config.attention_bias,
            Self::Gate | Self::Up | Self::Down => config.mlp_bias,
        }
    }
}

/// What every layer of a model shares: rotary tables and scratch.
#[derive(Debug)]
pub struct LayerContext {
    rotary: Rotary,
    workspace: Workspace,
}

impl LayerContext {
    /// For sequences of up to `seqlen` tokens.
    ///
    /// # Errors
    /// Fails only when a tensor cannot be built.
    pub fn new(config: &LlamaConfig, seqlen: usize) -> Result<Self> {
        Ok(Self {
            rotary: Rotary::new(config, seqlen)?,
            workspace: Workspace::new(),
        })
    }

    /// The scratch memory, for products outside a layer.
    pub fn workspace(&mut self) -> &mut Workspace {
        &mut self.workspace
    }
}

/// A decoder layer in its stored dtype.
#[derive(Debug, Clone)]
pub struct DecoderLayer {
    index: usize,
    heads: Heads,
    rms_norm_eps: f32,
    input_layernorm: Tensor,
    post_attention_layernorm: Tensor,
    linears: [Linear; 7],
}

impl DecoderLayer {
    /// Checks that all tensors of a layer are there with the right shapes and dtypes, reading headers only.
    ///
    /// # Errors
    /// Fails for the first tensor that is missing or of another shape, by its name.
    pub fn check(source: &dyn WeightSource, config: &LlamaConfig, index: usize) -> Result<()> {
        for projection in Projection::ALL {
            let (rows, columns) = projection.shape(config);
            super::stored_dtype(source.require(&projection.tensor_name(index), &[rows, columns])?)?;
            if projection.has_bias(config) {
                source.require(&format!("{}.bias", projection.full_name(index)), &[rows])?;
            }
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            source.require(
                &format!("model.layers.{index}.{norm}.weight"),
                &[config.hidden_size],
            )?;
        }
        Ok(())
    }

    /// Reads a layer.
    ///
    /// # Errors
    /// As [`DecoderLayer::check`], and when reading fails.
    pub fn load(source: &dyn WeightSource, config: &LlamaConfig, index: usize) -> Result<Self> {
        let mut linears = Vec::with_capacity(7);
        for projection in Projection::ALL {
            let (rows, columns) = projection.shape(config);
            let weight = read_matrix(source, &projection.tensor_name(index), rows, columns)?;
            let bias = projection
                .has_bias(config)
                .then(|| {
                    read_vector(
                        source,
                        &format!("{}.bias", projection.full_name(index)),
                        rows,
                    )
                })
                .transpose()?;
            linears.push(Linear { weight, bias });
        }
        let norm = |name: &str| {
            let weight = read_vector(
                source,
                &format!("model.layers.{index}.{name}.weight"),
                config.hidden_size,
            )?;
            tensor::from_vec(weight, &[config.hidden_size])
        };
        Ok(Self {
            index,
            heads: config.heads(),
            rms_norm_eps: config.rms_norm_eps as f32,
            input_layernorm: norm("input_layernorm")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            linears: linears
                .try_into()
                .map_err(|_| anyhow::anyhow!("a layer has seven linears"))?,
        })
    }

    /// Its place in the model, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// One of its linears.
    pub fn linear(&self, projection: Projection) -> &Linear {
        &self.linears[projection as usize]
    }

    /// One of its linears, to be changed.
    pub fn linear_mut(&mut self, projection: Projection) -> &mut Linear {
        &mut self.linears[projection as usize]
    }

    /// Passes one sample through: `[seqlen, hidden_size]` in, the same shape out.
    ///
    /// # Errors
    /// Fails when `hidden` is of another width, or longer than the context was made for.
    pub fn forward(&self, hidden: &Tensor, context: &mut LayerContext) -> Result<Tensor> {
        let mut out = self.attend(hidden, context, None)?;
        self.mlp(&mut out, context, None)?;
        tensor::from_vec(out, hidden.dims())
    }

    /// Shows one sample's four observation points to `observer`, and stops before down's product, which no one needs.
    ///
    /// # Errors
    /// As [`DecoderLayer::forward`].
    pub fn capture(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let mut hidden = self.attend(hidden, context, Some(&mut *observer))?;
        self.mlp(&mut hidden, context, Some(observer))
    }

    /// hidden + attention(norm(hidden))·Woᵀ
    fn attend(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<Vec<f32>> {
        let Heads {
            num_heads,
            num_key_value_heads,
            head_dim,
        } = self.heads;
        let panel = context.workspace.panel();
        let (seqlen, _) = hidden.dims2()?;
        let normed = candle_nn::ops::rms_norm(hidden, &self.input_layernorm, self.rms_norm_eps)?;
        let (q, k, v) = tensor::with_slice(&normed, |a| {
            show(&mut observer, Observation::AttentionInput, a);
            let mut project = |projection| self.linear(projection).forward(a, panel);
            (
                project(Projection::Q),
                project(Projection::K),
                project(Projection::V),
            )
        })?;
        drop(normed);
        let q = context.rotary.apply(q, num_heads, head_dim)?;
        let k = context.rotary.apply(k, num_key_value_heads, head_dim)?;
        let mut attended = vec![0.0; seqlen * num_heads * head_dim];
        tensor::with_slice(&q, |q| {
            tensor::with_slice(&k, |k| {
                attention::causal(self.heads, q, k, &v, &mut attended)
            })
        })??;
        drop((q, k, v));
        show(&mut observer, Observation::OInput, &attended);
        let mut out = self.linear(Projection::O).forward(&attended, panel);
        tensor::with_slice(hidden, |hidden| elementwise::add(&mut out, hidden))?;
        Ok(out)
    }

    /// hidden ← hidden + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ with m = norm(hidden); with an observer, up to down's input only.
    fn mlp(
        &self,
        hidden: &mut [f32],
        context: &mut LayerContext,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let hidden_size = self.post_attention_layernorm.elem_count();
        let intermediate_size = self.linear(Projection::Gate).out_features();
        for rows in hidden.chunks_mut(MLP_TOKENS * hidden_size) {
            let tokens = rows.len() / hidden_size;
            let x = tensor::from_vec(rows.to_vec(), &[tokens, hidden_size])?;
            let normed =
                candle_nn::ops::rms_norm(&x, &self.post_attention_layernorm, self.rms_norm_eps)?;
            drop(x);
            let (gate, up, panel) = context.workspace.two_buffers(tokens * intermediate_size);
            tensor::with_slice(&normed, |m| {
                show(&mut observer, Observation::MlpInput, m);
                self.linear(Projection::Gate).forward_into(m, gate, panel);
                self.linear(Projection::Up).forward_into(m, up, panel);
            })?;
            drop(normed);
            elementwise::silu_times(gate, up);
            show(&mut observer, Observation::DownInput, gate);
            if observer.is_none() {
                // `up` is free again and at least as long where intermediate_size ≥ hidden_size; a new buffer otherwise.
                let length = tokens * hidden_size;
                if up.len() >= length {
                    self.linear(Projection::Down)
                        .forward_into(gate, &mut up[..length], panel);
                    elementwise::add(rows, &up[..length]);
                } else {
                    elementwise::add(rows, &self.linear(Projection::Down).forward(gate, panel));
                }
            }
        }
        Ok(())
    }
}

fn show(observer: &mut Option<&mut dyn Observer>, point: Observation, rows: &[f32]) {
    if let Some(observer) = observer
        && observer.needs(point) != Need::Nothing
    {
        observer.observe(point, rows);
    }
}
