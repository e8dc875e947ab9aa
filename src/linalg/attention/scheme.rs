//! [`Causal`]: attention of a sequence; [`Scoring`]: its formula; [`Scheme`]: an algorithm for it.

use std::ops::Range;

use super::super::exp;
use super::super::product::{Kernel, Values};
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
    pub fn operations(&self, scoring: Scoring, past: usize, tokens: usize) -> usize {
        let window = scoring.window.unwrap_or(usize::MAX).max(1);
        // Queries that see all keys before them; every later query sees a window of keys.
        let growing = window.min(past + tokens).saturating_sub(past);
        let pairs = growing * past + growing * (growing + 1) / 2;
        let of_windows = (tokens - growing).saturating_mul(window);
        4 * self.head_dim * self.num_heads * (pairs + of_windows)
    }
}

/// The way from products of queries and keys to weights in an attention layer: scores are scaled, then capped, then masked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scoring {
    /// The factor of q·k.
    pub scale: f32,
    /// A bound c of scores, with which a score s becomes c·tanh(s / c).
    pub soft_cap: Option<f32>,
    /// The most keys that a query sees, with the key of its own token; at least 1.
    pub window: Option<usize>,
}

impl Scoring {
    /// The scale 1 / √head_dim, without a cap or a window.
    pub fn of_width(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f32).sqrt(), soft_cap: None, window: None }
    }

    /// The first key that the query at a position sees.
    pub fn first_key(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window.max(1)))
    }

    /// The places, among some keys, of the keys that the query at a position sees.
    pub fn visible(self, position: usize, keys: &Range<usize>) -> Range<usize> {
        let place = |key: usize| key.clamp(keys.start, keys.end) - keys.start;
        place(self.first_key(position))..place(position + 1)
    }

    /// Scales and caps scores, and returns 1. Without a cap, returns the scale and leaves the scores to the caller, whose softmax scales on
    /// the way. Callers must be compiled for the CPU's registers.
    #[inline(always)]
    pub(super) fn cap(self, scores: &mut [f32]) -> f32 {
        let Some(cap) = self.soft_cap else {
            return self.scale;
        };
        let factor = self.scale / cap;
        for score in scores {
            *score = cap * exp::tanh(*score * factor);
        }
        1.0
    }
}

/// Causal self-attention of a sequence, or of the tokens after `past` cached tokens.
#[derive(Clone, Copy)]
pub struct Causal<'a> {
    /// The kernel of the products.
    pub kernel: Kernel,
    /// The heads.
    pub heads: Heads,
    /// Scale, cap and window.
    pub scoring: Scoring,
    /// Tokens before the first query, 0 for a whole sequence.
    pub past: usize,
    /// Queries `[seqlen, num_heads * head_dim]`, rotary positions applied.
    pub q: &'a [f32],
    /// Keys `[past + seqlen, num_key_value_heads * head_dim]`.
    pub k: Values<'a>,
    /// Values, in the shape and the dtype of the keys.
    pub v: Values<'a>,
}

/// The inputs of all tasks.
pub(super) struct Inputs<'a> {
    pub(super) kernel: Kernel,
    pub(super) heads: Heads,
    pub(super) scoring: Scoring,
    /// Tokens before the first query.
    pub(super) past: usize,
    /// Queries.
    pub(super) seqlen: usize,
    /// Tokens visible to the last query.
    pub(super) keys: usize,
    pub(super) q: &'a [f32],
    pub(super) k: Values<'a>,
    pub(super) v: Values<'a>,
}

impl Inputs<'_> {
    /// The keys that some queries see, from the start of a block of `at_once` keys.
    pub(super) fn keys_of(&self, queries: Range<usize>, at_once: usize) -> Range<usize> {
        let first = self.scoring.first_key(self.past + queries.start);
        first / at_once * at_once..self.past + queries.end
    }
}

/// The queries of some blocks.
pub(super) fn queries_of(blocks: &[Rectangle<'_>]) -> Range<usize> {
    let first = blocks.first().map_or(0, |block| block.rows().start);
    first..blocks.last().map_or(0, |block| block.rows().end)
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
