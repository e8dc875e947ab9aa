//! Sizes of the buffers of a layer's backward pass, and the activations that are kept for it.

use crate::linalg::attention::Heads;
use crate::linalg::attention::backward::partial_elements;
use crate::linalg::parts::{LEAST_ROWS, largest_part};
use crate::model::ModelConfig;

/// Sizes of a layer and a sample.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassSizes {
    pub(super) seqlen: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    /// Width of all queries.
    queries: usize,
    /// Width of all keys.
    keys: usize,
}

impl PassSizes {
    pub(super) fn new(
        heads: Heads,
        hidden_size: usize,
        intermediate_size: usize,
        seqlen: usize,
    ) -> Self {
        Self {
            seqlen,
            hidden_size,
            intermediate_size,
            queries: heads.num_heads * heads.head_dim,
            keys: heads.num_key_value_heads * heads.head_dim,
        }
    }

    /// Elements of the MLP's buffers for some tokens: the normed rows and their gradient, gate, up, and the gradient of their product.
    /// Gate and up may be in kept activations.
    pub(super) fn mlp(&self, tokens: usize, is_kept: bool) -> [usize; 5] {
        let (normed, wide) = (tokens * self.hidden_size, tokens * self.intermediate_size);
        let computed = if is_kept { 0 } else { wide };
        [normed, normed, computed, computed, wide]
    }

    /// Elements of the gradients of attention: of the context, of q, of k, of v, and of query heads.
    pub(super) fn attention(&self, heads: Heads) -> [usize; 5] {
        let (queries, keys) = (self.seqlen * self.queries, self.seqlen * self.keys);
        [queries, queries, keys, keys, partial_elements(heads, self.seqlen)]
    }

    /// Elements of kept activations: q, k, v, the context, the states between attention and MLP, gate and up.
    pub(super) fn kept(&self) -> [usize; 7] {
        let of = |width: usize| self.seqlen * width;
        let (queries, keys, wide) = (of(self.queries), of(self.keys), of(self.intermediate_size));
        [queries, keys, keys, queries, of(self.hidden_size), wide, wide]
    }

    /// Elements of the buffers of the whole pass: normed states; q; k; v; the context; the states between attention and MLP, then the
    /// gradient of the normed states; memory that MLP and attention use in turn.
    pub(super) fn buffers(&self, heads: Heads, mlp_tokens: usize, is_kept: bool) -> [usize; 7] {
        let (hidden, queries, keys) =
            (self.seqlen * self.hidden_size, self.seqlen * self.queries, self.seqlen * self.keys);
        let tokens = largest_part(self.seqlen, mlp_tokens, LEAST_ROWS);
        let total = |sizes: [usize; 5]| sizes.iter().sum::<usize>();
        let shared = total(self.mlp(tokens, is_kept)).max(total(self.attention(heads)));
        match is_kept {
            // The rest is in the kept activations.
            true => [hidden, 0, 0, 0, 0, 0, shared],
            false => [hidden, queries, keys, keys, queries, hidden, shared],
        }
    }
}

/// Elements (f32) of activations and their gradients that exist at once in
/// [`DecoderLayer::backward`](super::super::DecoderLayer::backward).
///
/// With L tokens, H hidden_size, I intermediate_size, Q and K the widths of all queries and all keys, and t tokens of the MLP at once:
/// L·(2·H + 2·Q + 2·K) + max(t·(2·H + 3·I), L·(4·Q + 2·K)). The input, the gradient of the output and the gradient of the input (L·H
/// each) come in addition, as do [`LayerGradients`](super::LayerGradients), packed factors of products, and the scratch of attention
/// ([`backward_scratch_bytes`](crate::linalg::attention::backward::backward_scratch_bytes)).
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
    let heads = config.heads();
    PassSizes::new(heads, config.hidden_size, config.intermediate_size, seqlen)
        .buffers(heads, mlp_tokens, is_kept)
        .iter()
        .sum()
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
/// With L tokens, H hidden_size, I intermediate_size, Q and K the widths of all queries and all keys: L·(2·Q + 2·K + H + 2·I) f32. Norms
/// and the product of gate and up are cheaper to compute than to keep.
#[derive(Debug)]
pub struct KeptActivations(pub(super) Vec<f32>);

/// Elements (f32) of [`KeptActivations`].
pub fn kept_elements(
    heads: Heads,
    hidden_size: usize,
    intermediate_size: usize,
    seqlen: usize,
) -> usize {
    PassSizes::new(heads, hidden_size, intermediate_size, seqlen).kept().iter().sum()
}
