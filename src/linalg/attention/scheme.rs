//! [`Causal`]: attention of a sequence; [`Scheme`]: an algorithm for it.

use super::super::product::Kernel;
use super::super::rectangles::Rectangle;

/// The head counts and width of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_key_value_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl Heads {
    /// Floating-point operations of scores and context for `tokens` after `past` cached tokens: 4·head_dim for every pair of a query
    /// and a visible key, in every query head.
    pub fn operations(&self, past: usize, tokens: usize) -> usize {
        let pairs = tokens * past + tokens * (tokens + 1) / 2;
        4 * self.head_dim * self.num_heads * pairs
    }
}

/// Causal self-attention of a sequence, or of the tokens after `past` cached tokens.
#[derive(Clone, Copy)]
pub struct Causal<'a> {
    /// The kernel of the products.
    pub kernel: Kernel,
    /// The heads.
    pub heads: Heads,
    /// Tokens before the first query, 0 for a whole sequence.
    pub past: usize,
    /// Queries `[seqlen, num_heads * head_dim]`, rotary positions applied.
    pub q: &'a [f32],
    /// Keys `[past + seqlen, num_key_value_heads * head_dim]`.
    pub k: &'a [f32],
    /// Values, in the shape of the keys.
    pub v: &'a [f32],
}

/// The inputs of all tasks.
pub(super) struct Inputs<'a> {
    pub(super) kernel: Kernel,
    pub(super) heads: Heads,
    /// Tokens before the first query.
    pub(super) past: usize,
    /// Queries.
    pub(super) seqlen: usize,
    /// Tokens visible to the last query.
    pub(super) keys: usize,
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
}

/// An algorithm for a head's context of a block of queries, with the scratch of a thread.
pub(super) trait Scheme: Send {
    const QUERIES_AT_ONCE: usize;

    /// Scratch for any head.
    fn new(source: &Inputs<'_>) -> Self;

    /// Packs the keys and values of a head that the last block of queries sees.
    fn pack(&mut self, source: &Inputs<'_>, key_head: usize, rectangles: &[Rectangle<'_>]);

    /// Computes a head's context of a block of queries.
    /// `query_head` counts among the query heads of the key head, and `out` is the context of all of them.
    fn block(
        &mut self,
        source: &Inputs<'_>,
        key_head: usize,
        query_head: usize,
        out: &mut Rectangle<'_>,
    );
}
