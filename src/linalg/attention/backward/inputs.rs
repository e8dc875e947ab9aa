//! The inputs of the backward pass of attention, and the sizes of its blocks.

use std::ops::Range;

use super::super::super::product::{Kernel, Strided, Values};
use super::super::scheme::{Heads, Scoring};

/// Queries of a block.
pub(super) const QUERIES: usize = 128;
/// Keys of a block; at most a slab of every kernel.
pub(super) const KEYS: usize = 512;

/// The inputs and the result of attention, and the gradient of the result.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    /// Scale, cap and window.
    pub scoring: Scoring,
    /// `[seqlen, num_heads * head_dim]`, rotary positions applied.
    pub q: &'a [f32],
    /// `[seqlen, num_key_value_heads * head_dim]`, rotary positions applied.
    pub k: &'a [f32],
    /// `[seqlen, num_key_value_heads * head_dim]`
    pub v: &'a [f32],
    /// The contexts, shaped as `q`.
    pub context: &'a [f32],
    /// The gradient with respect to the contexts, shaped as `q`.
    pub context_gradient: &'a [f32],
}

/// The inputs of all tasks.
pub(super) struct BackwardInputs<'a> {
    pub(super) kernel: Kernel,
    pub(super) heads: Heads,
    pub(super) seqlen: usize,
    pub(super) inputs: AttentionInputs<'a>,
}

/// The keys of the blocks that some queries of a sequence see.
pub(super) fn keys_of(scoring: Scoring, queries: &Range<usize>, seqlen: usize) -> Range<usize> {
    let first = scoring.first_key(queries.start) / KEYS * KEYS;
    first..seqlen.min(queries.end.next_multiple_of(KEYS))
}

impl<'a> BackwardInputs<'a> {
    /// A head's part of a matrix over all query heads, from a token on.
    pub(super) fn of_query(&self, values: &'a [f32], head: usize, token: usize) -> Strided<'a> {
        let Heads { num_heads, head_dim, .. } = self.heads;
        Strided::rows(Values::F32(values), num_heads * head_dim).at(token, head * head_dim)
    }

    /// The same by columns: `[head_dim, tokens]`.
    pub(super) fn of_query_turned(
        &self,
        values: &'a [f32],
        head: usize,
        token: usize,
    ) -> Strided<'a> {
        let Heads { num_heads, head_dim, .. } = self.heads;
        Strided::transposed(Values::F32(values), num_heads * head_dim).at(head * head_dim, token)
    }

    /// The keys of the blocks that some queries see.
    pub(super) fn keys_of(&self, queries: &Range<usize>) -> Range<usize> {
        keys_of(self.inputs.scoring, queries, self.seqlen)
    }
}

/// The blocks of keys, of which the first is whole.
pub(super) fn key_blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    keys.clone().step_by(KEYS).map(move |first| first..keys.end.min(first + KEYS))
}
