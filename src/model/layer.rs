//! A decoder layer: its weights as stored, and its forward pass with four observation points.
//!
//! ```text
//! x ← hidden;  a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k rotated
//! x ← x + attention(q, k, v)·Woᵀ;  m = norm(x);  x ← x + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ
//! ```
//!
//! norm(x) = x / √(mean(x²) + ε) ∘ w. Touvron et al. 2023, arXiv:2302.13971 §2.2; the arithmetic follows transformers'
//! `LlamaDecoderLayer` in f32 with eager attention. All steps work on slices, with scratch memory from the workspace. The MLP runs
//! over some tokens at a time, so its two wide activations never exist for a whole sequence. Attention can run over some key/value
//! heads at a time, with their queries. The [`MemorySettings`] set both numbers; they change no bit of the result.
//!
//! Memory that exists at once, in f32 elements, with L tokens, H hidden_size, I intermediate_size, Q and K the widths of all queries
//! and of all keys:
//!
//! ```text
//! always      L·H input (its owner counts it), L·H output
//! attention   L·max(H, Q) normed, then context; L·Q q; 2·L·K k and v; a block of scores per thread
//!   in parts  L·H normed; L·Q context; (L·Q + 2·L·K) / parts q, k and v; blocks of scores
//! MLP         t·H normed, then down's output; 2·t·I gate and up, for t tokens at once
//! ```
//!
//! Attention and MLP share the workspace. The rows of a weight at rest ([`Linear::rows_at_once`]) and the packed factors of products
//! (`footprint`) come in addition.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::attention_layout::AttentionLayout;
use super::config::ModelConfig;
use super::context::LayerContext;
use super::family::{Activation, Family};
use super::kv_cache::LayerCache;
use super::observe::{Observation, Observer};
use super::projection::Projection;
use super::reading::{matrix_at_rest, read_matrix, read_vector};
use crate::checkpoint::WeightSource;
use crate::linalg::attention::{self, Heads};
use crate::linalg::linear::{LinearOutput, SingleToken, forward_all};
use crate::linalg::parts::{LEAST_ROWS, parts};
use crate::linalg::profile::Part;
use crate::linalg::{Linear, ProductContext, StoredMatrix, Weight, elementwise, tensor};
use crate::run::MemorySettings;

/// A decoder layer in its stored dtype.
#[derive(Debug, Clone)]
pub struct DecoderLayer {
    index: usize,
    revision: u64,
    /// The revision of the norms, and of linears that are not in `changed`.
    base: u64,
    /// The revision of linears that were changed since.
    changed: BTreeMap<Projection, u64>,
    heads: Heads,
    rms_norm_eps: f32,
    family: &'static Family,
    /// Weights of the norms before attention and before the MLP.
    norms: [Vec<f32>; 2],
    linears: BTreeMap<Projection, Linear>,
}

impl DecoderLayer {
    /// Checks that all tensors of a layer exist with the right shapes and dtypes. Reads headers only.
    ///
    /// # Errors
    /// Fails for the first tensor that is missing or has a wrong shape, and names it.
    pub fn check(source: &dyn WeightSource, config: &ModelConfig, index: usize) -> Result<()> {
        for tensor in config.layer_tensors(index) {
            super::stored_dtype(source.require(&tensor.name, &tensor.shape)?)?;
        }
        Ok(())
    }

    /// Reads a layer.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig, index: usize) -> Result<Self> {
        Self::with_weights(source, config, index, |name, rows, columns| {
            Ok(read_matrix(source, name, rows, columns)?.into())
        })
    }

    /// Opens a layer whose matrices stay in the checkpoint and are read for every product. Norms and biases are in memory.
    pub fn at_rest(
        source: &Arc<dyn WeightSource>,
        config: &ModelConfig,
        index: usize,
    ) -> Result<Self> {
        Self::with_weights(&**source, config, index, |name, rows, columns| {
            Ok(Weight::AtRest(matrix_at_rest(source, name, rows, columns)?))
        })
    }

    fn with_weights(
        source: &dyn WeightSource,
        config: &ModelConfig,
        index: usize,
        weight: impl Fn(&str, usize, usize) -> Result<Weight>,
    ) -> Result<Self> {
        let mut linears = BTreeMap::new();
        for projection in config.projections() {
            let (rows, columns) = projection.shape(config);
            let weight = weight(&projection.tensor_name(index), rows, columns)?;
            let bias = config
                .has_bias(projection)
                .then(|| read_vector(source, &projection.bias_name(index), rows))
                .transpose()?;
            linears.insert(projection, Linear::new(weight, bias).reused());
        }
        let norm = |name: &str| {
            let name = format!("model.layers.{index}.{name}.weight");
            read_vector(source, &name, config.hidden_size)
        };
        let [before_attention, before_mlp] = config.family.norms;
        Ok(Self {
            index,
            revision: 0,
            base: 0,
            changed: BTreeMap::new(),
            heads: config.heads(),
            rms_norm_eps: config.rms_norm_eps as f32,
            family: config.family,
            norms: [norm(before_attention)?, norm(before_mlp)?],
            linears,
        })
    }

    /// The same layer with new linears, of the sizes of `config`. The norms stay.
    #[must_use]
    pub fn with_linears(
        &self,
        config: &ModelConfig,
        linears: BTreeMap<Projection, Linear>,
    ) -> Self {
        Self {
            revision: self.revision + 1,
            base: self.revision + 1,
            changed: BTreeMap::new(),
            heads: config.heads(),
            norms: self.norms.clone(),
            linears,
            ..*self
        }
    }

    /// The layer's index in the model, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The layer's linears, in the order of the reference.
    pub fn projections(&self) -> impl Iterator<Item = Projection> + use<'_> {
        self.linears.keys().copied()
    }

    /// A linear of the layer.
    ///
    /// # Panics
    /// Panics when the family has no such linear.
    pub fn linear(&self, projection: Projection) -> &Linear {
        &self.linears[&projection]
    }

    /// The revision of the weights, which counts accesses for a change. A copy is up to date only if its revision is the same.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// The revision of the norms, and of the linears that were not changed since.
    pub fn base_revision(&self) -> u64 {
        self.base
    }

    /// The revision of a linear's weights.
    pub fn linear_revision(&self, projection: Projection) -> u64 {
        self.changed.get(&projection).copied().unwrap_or(self.base)
    }

    /// The same layer as version `number`, from 1. No two versions share a revision, so a copy of an earlier version on a device is never
    /// taken for this layer.
    #[must_use]
    pub fn as_version(self, number: u32) -> Self {
        let revision = u64::from(number) << 32;
        Self { revision, base: revision, changed: BTreeMap::new(), ..self }
    }

    /// Weights of the norms before attention and before the MLP, as f32.
    pub fn norm_weights(&self) -> [&[f32]; 2] {
        self.norms()
    }

    /// The names of the norms' tensors.
    pub fn norm_names(&self) -> [String; 2] {
        self.family.norm_names(self.index)
    }

    /// Replaces the weights of a norm.
    ///
    /// # Panics
    /// Panics when there are not as many values as before.
    pub fn set_norm(&mut self, norm: usize, values: &[f32]) {
        self.revision += 1;
        (self.base, self.changed) = (self.revision, BTreeMap::new());
        self.norms[norm].copy_from_slice(values);
    }

    pub(super) fn norms(&self) -> [&[f32]; 2] {
        self.norms.each_ref().map(Vec::as_slice)
    }

    pub(super) fn rms_norm_eps(&self) -> f32 {
        self.rms_norm_eps
    }

    pub(super) fn activation(&self) -> Activation {
        self.family.activation
    }

    pub(super) fn heads(&self) -> Heads {
        self.heads
    }

    /// A linear of the layer, for a change.
    ///
    /// # Panics
    /// Panics when the family has no such linear.
    pub fn linear_mut(&mut self, projection: Projection) -> &mut Linear {
        self.revision += 1;
        self.changed.insert(projection, self.revision);
        self.linears.get_mut(&projection).expect("callers name linears of the layer's family")
    }

    /// Frees packed weights.
    pub fn drop_packed(&mut self) {
        self.linears.values_mut().for_each(Linear::drop_packed);
    }

    /// Takes the weight of a linear out, if it is in memory. The layer cannot be used afterwards.
    pub fn take_weight(&mut self, projection: Projection) -> Option<StoredMatrix> {
        let linear = self.linears.remove(&projection)?;
        linear.into_weight()
    }

    /// Puts the intermediate channels of the MLP into a new order, `order[new] = old`: the rows of gate and up with their biases, and
    /// the columns of down. The function stays the same but for the order of down's sums. The three weights must be in memory.
    ///
    /// # Panics
    /// Panics when `order` does not name every channel once.
    pub fn permute_intermediate(&mut self, order: &[usize]) {
        for projection in [Projection::Gate, Projection::Up] {
            self.linear_mut(projection).permute_outputs(order);
        }
        self.linear_mut(Projection::Down).permute_inputs(order);
    }

    /// Passes a sample through the layer: `[seqlen, hidden_size]` in, the same shape out.
    ///
    /// The pass runs on a thread of the pool, as in [`DecoderLayer::capture`]. A layer has dozens of loops; starting each of
    /// them from outside the pool would cost a small model as much time as the loops take.
    ///
    /// # Errors
    /// Fails when `hidden` has a wrong width or more tokens than the context was created for, and when a weight at rest cannot be read.
    pub fn forward(&self, hidden: &Tensor, context: &mut LayerContext) -> Result<Tensor> {
        let mut out = Self::allocate_output(hidden);
        rayon::scope(|_| self.pass(hidden, context, None, &mut out))?;
        tensor::from_vec(out, hidden.dims())
    }

    /// Passes the tokens after the cached tokens through the layer, and adds their keys and values to `cache`: `[tokens, hidden_size]` in,
    /// the same shape out. Except for rounding, the output equals the last rows of [`DecoderLayer::forward`] of the whole sequence.
    pub fn forward_cached(
        &self,
        hidden: &Tensor,
        cache: &mut LayerCache,
        context: &mut LayerContext,
    ) -> Result<Tensor> {
        let mut out = Self::allocate_output(hidden);
        self.pass(hidden, context, Some(cache), &mut out)?;
        tensor::from_vec(out, hidden.dims())
    }

    /// Allocates the output on the caller's thread, because it outlives the pass: a thread of the pool keeps the memory of its own heap.
    fn allocate_output(hidden: &Tensor) -> Vec<f32> {
        vec![0.0; hidden.elem_count()]
    }

    fn pass(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        cache: Option<&mut LayerCache>,
        out: &mut [f32],
    ) -> Result<()> {
        let single = single_token(cache.as_deref());
        self.attend(hidden, context, cache, None, out)?;
        self.mlp(out, context, single, None)
    }

    /// Shows the four observed inputs of a sample to `observer`. The pass ends before down's product, because its output is not needed.
    pub fn capture(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let mut out = Self::allocate_output(hidden);
        rayon::scope(|_| {
            self.attend(hidden, context, None, Some(&mut *observer), &mut out)?;
            self.mlp(&mut out, context, SingleToken::AsMany, Some(observer))
        })
    }

    /// out ← hidden + attention(norm(hidden))·Woᵀ
    fn attend(
        &self,
        hidden: &Tensor,
        context: &mut LayerContext,
        cache: Option<&mut LayerCache>,
        observer: Option<&mut dyn Observer>,
        out: &mut [f32],
    ) -> Result<()> {
        let (_, width) = hidden.dims2()?;
        let hidden_size = self.norms[0].len();
        ensure!(
            width == hidden_size,
            "hidden states are {width} wide, the layer needs {hidden_size}"
        );
        tensor::with_slice(hidden, |hidden| {
            self.attend_rows(hidden, context, cache, observer, out)
        })?
    }

    fn attend_rows(
        &self,
        hidden: &[f32],
        context: &mut LayerContext,
        mut cache: Option<&mut LayerCache>,
        mut observer: Option<&mut dyn Observer>,
        out: &mut [f32],
    ) -> Result<()> {
        let single = single_token(cache.as_deref());
        let past = cache.as_ref().map_or(0, |cache| cache.tokens());
        let hidden_size = self.norms[0].len();
        let seqlen = hidden.len() / hidden_size;
        let LayerContext { rotary, workspace, settings } = context;
        // A cache holds the keys of all heads.
        let whole = MemorySettings { attention_heads: None, ..settings.clone() };
        let settings = if cache.is_some() { &whole } else { &*settings };
        let layout = AttentionLayout::new(self.heads, seqlen, hidden_size, settings);
        let ([shared, q, k, v, apart], products) = workspace.buffers(layout.buffers());
        products.watch.enter(Part::Qkv);
        let normed = &mut shared[..seqlen * hidden_size];
        elementwise::rms_norm(hidden, &self.norms[0], self.rms_norm_eps, normed);
        show(&mut observer, Observation::AttentionInput, normed, products);
        for group in layout.groups() {
            products.watch.enter(Part::Qkv);
            let normed = &shared[..seqlen * hidden_size];
            let heads = layout.heads(&group);
            let (queries, keys) = (layout.query_columns(&group), layout.key_columns(&group));
            let q = &mut q[..seqlen * queries.len()];
            let k = &mut k[..seqlen * keys.len()];
            let v = &mut v[..seqlen * keys.len()];
            let [to_q, to_k, to_v] = [Projection::Q, Projection::K, Projection::V]
                .map(|projection| self.linear(projection));
            let mut outputs =
                [(to_q, &queries, &mut *q), (to_k, &keys, &mut *k), (to_v, &keys, &mut *v)].map(
                    |(linear, features, out)| LinearOutput {
                        linear,
                        features: features.clone(),
                        out,
                    },
                );
            forward_all(&mut outputs, normed, single, products)?;
            products.watch.enter(Part::Attention);
            products.watch.count(heads.operations(past, seqlen));
            let kernel = products.products.of_activations();
            rotary.apply(q, past, heads.num_heads, heads.head_dim)?;
            rotary.apply(k, past, heads.num_key_value_heads, heads.head_dim)?;
            let attended = layout.context(shared, apart);
            if let Some(cache) = cache.as_deref_mut() {
                cache.append(k, v)?;
                let (keys, values) = (cache.keys(), cache.values());
                attention::Causal { kernel, heads, past, q, k: keys, v: values }.context(attended);
            } else {
                let columns =
                    attention::Columns { width: layout.query_width(), first: queries.start };
                attention::Causal { kernel, heads, past: 0, q, k, v }
                    .context_columns(attended, columns);
            }
        }
        products.watch.enter(Part::O);
        let attended = layout.context(shared, apart);
        show(&mut observer, Observation::OInput, attended, products);
        let o = self.linear(Projection::O);
        o.forward(attended, out, single, products)?;
        elementwise::add(out, hidden);
        products.watch.enter(Part::Elsewhere);
        Ok(())
    }

    /// hidden ← hidden + (silu(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ with m = norm(hidden). With an observer the pass ends at down's input.
    fn mlp(
        &self,
        hidden: &mut [f32],
        context: &mut LayerContext,
        single: SingleToken,
        mut observer: Option<&mut dyn Observer>,
    ) -> Result<()> {
        let norm = &self.norms[1];
        let hidden_size = norm.len();
        let intermediate_size = self.linear(Projection::Gate).out_features();
        let seqlen = hidden.len() / hidden_size;
        for part in parts(seqlen, context.settings.mlp_tokens, LEAST_ROWS) {
            let (tokens, rows) = (part.len(), part.start * hidden_size..part.end * hidden_size);
            let rows = &mut hidden[rows];
            let wide = tokens * intermediate_size;
            let ([normed, gate, up], products) =
                context.workspace.buffers([tokens * hidden_size, wide, wide]);
            products.watch.enter(Part::Mlp);
            elementwise::rms_norm(rows, norm, self.rms_norm_eps, normed);
            show(&mut observer, Observation::MlpInput, normed, products);
            let mut outputs = [(Projection::Gate, &mut *gate), (Projection::Up, &mut *up)].map(
                |(projection, out)| LinearOutput {
                    linear: self.linear(projection),
                    features: 0..intermediate_size,
                    out,
                },
            );
            forward_all(&mut outputs, normed, single, products)?;
            match self.activation() {
                Activation::Silu => elementwise::silu_times(gate, up),
            }
            show(&mut observer, Observation::DownInput, gate, products);
            if observer.is_none() {
                // The normed rows are free from here on.
                self.linear(Projection::Down).forward(gate, normed, single, products)?;
                elementwise::add(rows, normed);
            }
            products.watch.enter(Part::Elsewhere);
        }
        Ok(())
    }
}

/// Arithmetic of a single token: fast with a cache, else as for many tokens.
fn single_token(cache: Option<&LayerCache>) -> SingleToken {
    match cache {
        Some(_) => SingleToken::MatrixVector,
        None => SingleToken::AsMany,
    }
}

/// Shows the rows of an observed input, and counts the time as statistics.
fn show(
    observer: &mut Option<&mut dyn Observer>,
    point: Observation,
    rows: &[f32],
    products: &mut ProductContext,
) {
    if let Some(observer) = observer {
        let part = products.watch.enter(Part::Statistics);
        observer.observe(point, rows);
        products.watch.enter(part);
    }
}
