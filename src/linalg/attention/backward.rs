//! Gradients of causal attention, from the gradient of a loss with respect to its contexts.
//!
//! With scores s_ij = a·q_i·k_j, capped scores t_ij = cap·tanh(s_ij / cap), or s_ij without a cap, probabilities p_ij = softmax_j(t_ij)
//! over visible keys i − window < j ≤ i, and contexts c_i = Σ_j p_ij v_j:
//!
//! ```text
//! dv_j = Σ_i p_ij dc_i
//! ds_ij = a·p_ij (dc_i·v_j − dc_i·c_i) · (1 − (t_ij / cap)²), the last factor with a cap only
//! dq_i = Σ_j ds_ij k_j,    dk_j = Σ_i ds_ij q_i
//! ```
//!
//! Dao et al. 2022, arXiv:2205.14135, appendix B.2 and algorithm 4. Probabilities are computed again from q and k, for a block of
//! queries of a head and the blocks of keys that it sees. So no `[seqlen, seqlen]` matrix exists, and the forward pass stores no
//! statistics. Both passes use the same kernel; sums are f32.
//!
//! A task computes a query head. Query heads that share a key head have gradients of k and v of their own, which are added in the order
//! of heads. So the bits do not depend on threads. Memory, in f32 elements, with Q and K the widths of all queries and of all keys:
//!
//! ```text
//! results    seqlen·(Q + 2·K)
//! of heads   seqlen·2·Q                      (`partial`)
//! a thread   128·(seen + 512 + head_dim) and packed factors  ([`backward_scratch_bytes`])
//! ```
//!
//! `seen` is seqlen, or at most window + 1150; with a cap it counts twice.

mod block;
mod inputs;

use rayon::prelude::*;

use super::super::buffer_pool::BufferPool;
use super::super::product::{Kernel, Line};
use super::super::rectangles::{self, Rectangle};
use super::scheme::{Heads, Scoring};
use block::{GradientScratch, PackedLengths};
pub use inputs::AttentionInputs;
use inputs::{BackwardInputs, QUERIES};

/// Tokens of a task that adds the gradients of query heads.
const TOKENS_PER_TASK: usize = 16;

/// The gradients with respect to queries, keys and values, in the shapes of these.
#[derive(Debug)]
pub struct AttentionGradients<'a> {
    /// `[seqlen, num_heads * head_dim]`
    pub q: &'a mut [f32],
    /// `[seqlen, num_key_value_heads * head_dim]`
    pub k: &'a mut [f32],
    /// `[seqlen, num_key_value_heads * head_dim]`
    pub v: &'a mut [f32],
}

/// Elements of `partial` of [`causal_backward`].
pub fn partial_elements(heads: Heads, seqlen: usize) -> usize {
    2 * seqlen * heads.num_heads * heads.head_dim
}

/// Bytes of scratch of [`causal_backward`], with `threads` threads.
pub fn backward_scratch_bytes(
    kernel: Kernel,
    head_dim: usize,
    seqlen: usize,
    scoring: Scoring,
    threads: usize,
) -> usize {
    let lengths = PackedLengths::of(kernel, head_dim, seqlen, scoring);
    let packed = lengths.query_lines() + lengths.blocks * lengths.key_lines();
    let floats = lengths.queries * (lengths.seen + lengths.slopes + lengths.keys + head_dim + 1);
    threads * (packed * size_of::<Line>() + floats * size_of::<f32>())
}

/// Computes the gradients of [`Causal`](super::Causal) of a whole sequence.
///
/// # Arguments
/// * `out`: its old content is ignored
/// * `partial`: scratch of [`partial_elements`]
///
/// # Panics
/// Panics when a slice does not have the size of its shape.
pub fn causal_backward(
    kernel: Kernel,
    heads: Heads,
    inputs: AttentionInputs<'_>,
    out: AttentionGradients<'_>,
    partial: &mut [f32],
) {
    let Heads { num_heads, num_key_value_heads, head_dim } = heads;
    let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
    let seqlen = inputs.q.len() / query_width.max(1);
    let of_queries = [inputs.q, inputs.context, inputs.context_gradient, out.q];
    let of_keys = [inputs.k, inputs.v, out.k, out.v];
    assert!(
        of_queries.iter().all(|one| one.len() == seqlen * query_width)
            && of_keys.iter().all(|one| one.len() == seqlen * key_width)
            && partial.len() == partial_elements(heads, seqlen),
        "inputs and gradients of attention must have the shapes of {heads:?} and {seqlen} tokens"
    );
    if seqlen == 0 {
        return;
    }
    let source = BackwardInputs { kernel, heads, seqlen, inputs };
    let blocks: Vec<_> =
        (0..seqlen).step_by(QUERIES).map(|first| first..seqlen.min(first + QUERIES)).collect();
    let columns: Vec<_> =
        (0..num_heads).map(|head| head * head_dim..(head + 1) * head_dim).collect();
    let rectangles: Vec<_> = rectangles::cut(out.q, query_width, &blocks, &columns).collect();
    let mut rectangles = rectangles.into_iter();
    let (dk, dv) = partial.split_at_mut(seqlen * query_width);
    let tasks: Vec<_> = dk
        .chunks_exact_mut(seqlen * head_dim)
        .zip(dv.chunks_exact_mut(seqlen * head_dim))
        .map(|(dk, dv)| (dk, dv, rectangles.by_ref().take(blocks.len()).collect()))
        .collect();
    let scratch = BufferPool::<GradientScratch>::new();
    tasks.into_par_iter().enumerate().with_max_len(1).for_each(|(head, (dk, dv, rectangles))| {
        let rectangles: Vec<Rectangle<'_>> = rectangles;
        scratch.lend(
            || GradientScratch::new(&source),
            |scratch| {
                dk.fill(0.0);
                dv.fill(0.0);
                scratch.pack_keys(&source, head);
                for mut rectangle in rectangles {
                    scratch.block(&source, head, dk, dv, &mut rectangle);
                }
            },
        );
    });
    add_heads(heads, dk, out.k);
    add_heads(heads, dv, out.v);
}

/// Adds the gradients `[num_heads, seqlen, head_dim]` of the query heads that share a key head.
fn add_heads(heads: Heads, partial: &[f32], out: &mut [f32]) {
    let (dim, width) = (heads.head_dim, heads.num_key_value_heads * heads.head_dim);
    let queries_per_key = heads.num_heads / heads.num_key_value_heads;
    let per_head = partial.len() / heads.num_heads;
    out.par_chunks_mut(TOKENS_PER_TASK * width).enumerate().for_each(|(task, out)| {
        for (at, out) in out.chunks_exact_mut(dim).enumerate() {
            let (token, key_head) = (
                task * TOKENS_PER_TASK + at / heads.num_key_value_heads,
                at % heads.num_key_value_heads,
            );
            for query_head in 0..queries_per_key {
                let head = key_head * queries_per_key + query_head;
                let part = &partial[head * per_head + token * dim..][..dim];
                if query_head == 0 {
                    out.copy_from_slice(part);
                } else {
                    out.iter_mut().zip(part).for_each(|(out, part)| *out += part);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests;
