//! Sizes of the memory of a layer's passes, and the activations that are kept between them. Passes cut their memory by these numbers, and
//! plans add them up.

use std::ops::Range;

use crate::linalg::attention::backward::partial_elements;
use crate::linalg::parts::{LEAST_ROWS, largest_part};
use crate::model::ModelConfig;
use crate::model::linears::{InputId, LinearRole};
use crate::model::norms::NormRole;
use crate::model::spec::LayerSpec;

/// Sizes of a layer and a sample, in f32 elements.
#[derive(Debug, Clone, Copy)]
pub(in crate::model) struct PassSizes {
    spec: LayerSpec,
    pub(super) seqlen: usize,
    /// All queries, and all keys.
    queries: usize,
    keys: usize,
    /// The hidden states.
    states: usize,
}

impl PassSizes {
    pub(in crate::model) fn new(spec: LayerSpec, seqlen: usize) -> Self {
        Self {
            spec,
            seqlen,
            queries: seqlen * spec.rows(LinearRole::Q),
            keys: seqlen * spec.rows(LinearRole::K),
            states: seqlen * spec.hidden_size,
        }
    }

    /// The elements of some tokens: of hidden states, and of the MLP's width.
    pub(super) fn rows(&self, tokens: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let of = |width: usize| tokens.start * width..tokens.end * width;
        (of(self.spec.hidden_size), of(self.spec.intermediate_size))
    }

    /// `elements` if the layer has a norm, else 0.
    fn with(&self, role: NormRole, elements: usize) -> usize {
        if self.spec.has_norm(role) { elements } else { 0 }
    }

    /// The gradients of an input's linears side by side, if a matrix has the rows of several roles.
    fn joined(&self, input: InputId, elements: usize) -> usize {
        if self.spec.is_fused(input) { elements } else { 0 }
    }

    /// Activations of attention: q, k, v, the context, q and k before their norms, the output of o before its norm, and the states between
    /// attention and MLP.
    fn attention_tape(&self) -> [usize; 8] {
        let Self { queries, keys, states, .. } = *self;
        let raw = [self.with(NormRole::Query, queries), self.with(NormRole::Key, keys)];
        let branch = self.with(NormRole::AfterAttention, states);
        [queries, keys, keys, queries, raw[0], raw[1], branch, states]
    }

    /// Kept activations: of attention, gate, up, and the output of down before its norm.
    pub(super) fn kept(&self) -> [usize; 11] {
        let wide = self.seqlen * self.spec.intermediate_size;
        let [q, k, v, context, raw_q, raw_k, branch, between] = self.attention_tape();
        let of_mlp = self.with(NormRole::AfterMlp, self.states);
        [q, k, v, context, raw_q, raw_k, branch, between, wide, wide, of_mlp]
    }

    /// The same, where the MLP is computed again for some tokens at a time.
    pub(super) fn recomputed(&self) -> [usize; 11] {
        let [q, k, v, context, raw_q, raw_k, branch, between] = self.attention_tape();
        [q, k, v, context, raw_q, raw_k, branch, between, 0, 0, 0]
    }

    /// Memory of the MLP backwards for some tokens: the normed rows and their gradient, gate, up, the gradient of their product, the output
    /// of down before its norm and its gradient, and the gradients of gate and up side by side.
    pub(super) fn mlp(&self, tokens: usize, is_kept: bool) -> [usize; 8] {
        let (states, wide) = (tokens * self.spec.hidden_size, tokens * self.spec.intermediate_size);
        let computed = |elements: usize| if is_kept { 0 } else { elements };
        let normed = self.with(NormRole::BeforeMlp, states);
        let branch = self.with(NormRole::AfterMlp, states);
        let joined = self.joined(InputId::Mlp, 2 * wide);
        [normed, states, computed(wide), computed(wide), wide, computed(branch), branch, joined]
    }

    /// Memory of attention's gradients: of the context, of q, of k, of v, of query heads, of the output of o before its norm, and of q, k
    /// and v side by side.
    pub(super) fn attention(&self) -> [usize; 7] {
        let Self { queries, keys, states, .. } = *self;
        let partial = partial_elements(self.spec.heads, self.seqlen);
        let branch = self.with(NormRole::AfterAttention, states);
        let joined = self.joined(InputId::Attention, queries + 2 * keys);
        [queries, queries, keys, keys, partial, branch, joined]
    }

    /// Memory of a backward pass: normed states; activations that are computed again; memory that MLP and attention use in turn.
    pub(super) fn backward(&self, mlp_tokens: usize, is_kept: bool) -> [usize; 3] {
        let tokens = largest_part(self.seqlen, mlp_tokens, LEAST_ROWS);
        let mlp: usize = self.mlp(tokens, is_kept).iter().sum();
        let attention: usize = self.attention().iter().sum();
        let computed = if is_kept { 0 } else { self.recomputed().iter().sum() };
        [self.with(NormRole::BeforeAttention, self.states), computed, mlp.max(attention)]
    }
}

/// Elements (f32) of activations and their gradients that exist at once in
/// [`DecoderLayer::backward`](super::DecoderLayer::backward).
///
/// With L tokens, H hidden_size, I intermediate_size, Q and K the widths of all queries and all keys, and t tokens of the MLP at once,
/// of a layer with norms before attention and MLP: L·(2·H + 2·Q + 2·K) + max(t·(2·H + 3·I), L·(4·Q + 2·K)). Each further norm takes its
/// input, and a matrix of several roles their gradients. The input, the gradient of the output and the gradient of the input (L·H
/// each) come in addition, as do [`LayerGradients`](crate::model::LayerGradients), packed factors of products, and the scratch of
/// attention ([`backward_scratch_bytes`](crate::linalg::attention::backward::backward_scratch_bytes)).
///
/// # Arguments
/// * `mlp_tokens`: tokens of the MLP at once, of the memory settings
/// * `is_kept`: activations come from the forward pass
pub fn backward_elements(
    config: &ModelConfig,
    seqlen: usize,
    mlp_tokens: usize,
    is_kept: bool,
) -> usize {
    PassSizes::new(config.layer(0), seqlen).backward(mlp_tokens, is_kept).iter().sum()
}

/// Cuts a buffer into parts of these lengths.
pub(super) fn cut<const N: usize>(mut rest: &mut [f32], lengths: [usize; N]) -> [&mut [f32]; N] {
    lengths.map(|length| {
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(length);
        rest = behind;
        part
    })
}

/// The activations of a layer and a sample, kept from the forward pass to the backward pass.
///
/// With L tokens, H hidden_size, I intermediate_size, Q and K the widths of all queries and all keys: L·(2·Q + 2·K + H + 2·I) f32, and the
/// inputs of norms of q, k, o and down. Norms and the product of gate and up are cheaper to compute than to keep.
#[derive(Debug)]
pub struct KeptActivations(pub(super) Vec<f32>);

/// Elements (f32) of [`KeptActivations`].
pub fn kept_elements(config: &ModelConfig, seqlen: usize) -> usize {
    PassSizes::new(config.layer(0), seqlen).kept().iter().sum()
}
