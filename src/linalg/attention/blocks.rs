//! Attention by products of packed factors, for kernels that round or split them. Scores of a block of queries and a block of keys
//! become e^(score − largest) row by row, and are packed again for the product with the values.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::super::exp;
use super::super::product::{Factors, Kernel, Line, Strided, Values};
use super::super::rectangles::Rectangle;
use super::scheme::{Heads, Inputs, Scheme, Scoring, queries_of};

const QUERIES_AT_ONCE: usize = 128;
/// Keys per block. Their scores take 256 KiB, which is at most half of a second-level cache.
const KEYS_AT_ONCE: usize = 512;

pub(super) fn scratch_bytes(kernel: Kernel, head_dim: usize, queries: usize, keys: usize) -> usize {
    let queries = QUERIES_AT_ONCE.min(queries);
    BlockLengths::of(kernel, head_dim, queries, keys).bytes(queries, head_dim)
}

/// Lines of packed factors.
struct BlockLengths {
    /// A block of queries.
    q: usize,
    /// A block of keys.
    k: usize,
    /// A block of values.
    v: usize,
    /// A block of probabilities.
    p: usize,
    /// Blocks of keys.
    blocks: usize,
}

impl BlockLengths {
    fn of(kernel: Kernel, head_dim: usize, queries: usize, keys: usize) -> Self {
        let block = KEYS_AT_ONCE.min(keys);
        let slabs = |lines: &dyn Fn(usize) -> usize| -> usize {
            slabs(kernel, head_dim).map(|slab| lines(slab.len())).sum()
        };
        Self {
            q: slabs(&|inner| kernel.row_lines(queries, inner)),
            k: slabs(&|inner| kernel.column_lines(block, inner)),
            v: kernel.column_lines(head_dim, block),
            p: kernel.row_lines(queries, block),
            blocks: keys.div_ceil(KEYS_AT_ONCE),
        }
    }

    fn bytes(&self, queries: usize, head_dim: usize) -> usize {
        let lines = self.q + self.p + self.blocks * (self.k + self.v);
        lines * size_of::<Line>()
            + queries * (KEYS_AT_ONCE + head_dim) * size_of::<f32>()
            + queries * size_of::<QuerySums>()
    }
}

/// The slabs of an inner size.
fn slabs(kernel: Kernel, inner: usize) -> impl Iterator<Item = Range<usize>> {
    let slab = kernel.slab();
    (0..inner).step_by(slab).map(move |first| first..inner.min(first + slab))
}

/// The softmax of a query over the keys so far.
#[derive(Debug, Clone, Copy)]
struct QuerySums {
    largest: f32,
    /// Σ e^(score − largest).
    sum: f64,
}

pub(super) struct BlockScratch {
    q: Vec<Line>,
    k: Vec<Line>,
    v: Vec<Line>,
    p: Vec<Line>,
    scores: Vec<f32>,
    context: Vec<f32>,
    running: Vec<QuerySums>,
}

impl Inputs<'_> {
    /// The blocks of keys that some queries see.
    fn key_blocks(&self, queries: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (all, keys) = (self.keys, self.keys_of(queries, KEYS_AT_ONCE));
        keys.step_by(KEYS_AT_ONCE).map(move |first| first..all.min(first + KEYS_AT_ONCE))
    }

    /// All keys that are packed.
    fn packed_keys(&self) -> Range<usize> {
        self.keys_of(0..self.seqlen, KEYS_AT_ONCE)
    }

    fn lengths(&self, queries: usize) -> BlockLengths {
        BlockLengths::of(self.kernel, self.heads.head_dim, queries, self.packed_keys().len())
    }

    /// The place of a block of keys among the packed blocks.
    fn place(&self, keys: &Range<usize>) -> usize {
        (keys.start - self.packed_keys().start) / KEYS_AT_ONCE
    }
}

impl Scheme for BlockScratch {
    const QUERIES_AT_ONCE: usize = QUERIES_AT_ONCE;

    fn new(source: &Inputs<'_>) -> Self {
        let head_dim = source.heads.head_dim;
        let queries = QUERIES_AT_ONCE.min(source.seqlen);
        let lengths = source.lengths(queries);
        let lines = bytemuck::allocation::zeroed_vec;
        let nothing = QuerySums { largest: f32::NEG_INFINITY, sum: 0.0 };
        Self {
            q: lines(lengths.q),
            k: lines(lengths.blocks * lengths.k),
            v: lines(lengths.blocks * lengths.v),
            p: lines(lengths.p),
            scores: vec![0.0; queries * KEYS_AT_ONCE],
            context: vec![0.0; queries * head_dim],
            running: vec![nothing; queries],
        }
    }

    fn pack(&mut self, source: &Inputs<'_>, key_head: usize, rectangles: &[Rectangle<'_>]) {
        let Heads { num_key_value_heads, head_dim, .. } = source.heads;
        let width = num_key_value_heads * head_dim;
        let lengths = source.lengths(0);
        for keys in source.key_blocks(queries_of(rectangles)) {
            let block = source.place(&keys);
            let k = Strided::rows(source.k, width).at(keys.start, key_head * head_dim);
            let mut packed = &mut self.k[block * lengths.k..][..lengths.k];
            for slab in slabs(source.kernel, head_dim) {
                let lines = source.kernel.column_lines(keys.len(), slab.len());
                let (now, behind) = packed.split_at_mut(lines);
                packed = behind;
                source.kernel.pack_columns(k.at(0, slab.start), keys.len(), slab.len(), now);
            }
            let v = Strided::transposed(source.v, width).at(key_head * head_dim, keys.start);
            let packed = &mut self.v[block * lengths.v..][..lengths.v];
            source.kernel.pack_columns(v, head_dim, keys.len(), packed);
        }
    }

    fn block(
        &mut self,
        source: &Inputs<'_>,
        key_head: usize,
        query_head: usize,
        out: &mut Rectangle<'_>,
    ) {
        let Heads { num_heads, num_key_value_heads, head_dim } = source.heads;
        let (kernel, rows) = (source.kernel, out.rows());
        let queries = rows.len();
        let lengths = source.lengths(queries);
        let head = key_head * (num_heads / num_key_value_heads) + query_head;
        let q = Strided::rows(Values::F32(source.q), num_heads * head_dim)
            .at(rows.start, head * head_dim);
        let mut packed = &mut self.q[..];
        for slab in slabs(kernel, head_dim) {
            let (now, behind) = packed.split_at_mut(kernel.row_lines(queries, slab.len()));
            packed = behind;
            kernel.pack_rows(q.at(0, slab.start), queries, slab.len(), now);
        }
        let context = &mut self.context[..queries * head_dim];
        let running = &mut self.running[..queries];
        running.fill(QuerySums { largest: f32::NEG_INFINITY, sum: 0.0 });
        let seen = source.past + rows.end;
        for (number, keys) in source.key_blocks(rows.clone()).enumerate() {
            let block = source.place(&keys);
            // No query sees the last keys of the last block, but the packed values include them.
            let some = keys.len().min(seen - keys.start);
            let scores = &mut self.scores[..queries * keys.len()];
            let (mut q, mut k) = (&self.q[..], &self.k[block * lengths.k..]);
            for slab in slabs(kernel, head_dim) {
                let factors =
                    Factors { x: q, w: k, rows: queries, columns: some, inner: slab.len() };
                kernel.multiply(factors, scores, keys.len(), slab.start > 0);
                q = &q[kernel.row_lines(queries, slab.len())..];
                k = &k[kernel.column_lines(keys.len(), slab.len())..];
            }
            Arch::new().dispatch(Soften {
                scores,
                keys: keys.clone(),
                scoring: source.scoring,
                position: source.past + rows.start,
                running,
                context: (number > 0).then_some((&mut *context, head_dim)),
            });
            let probabilities = Strided::rows(Values::F32(scores), keys.len());
            let p = &mut self.p[..kernel.row_lines(queries, keys.len())];
            kernel.pack_rows(probabilities, queries, keys.len(), p);
            let factors = Factors {
                x: p,
                w: &self.v[block * lengths.v..],
                rows: queries,
                columns: head_dim,
                inner: keys.len(),
            };
            kernel.multiply(factors, context, head_dim, number > 0);
        }
        let columns = query_head * head_dim..(query_head + 1) * head_dim;
        let context = context.chunks_exact(head_dim).zip(running);
        for (query, (context, running)) in context.enumerate() {
            let scale = (1.0 / running.sum) as f32;
            let out = &mut out.row(query)[columns.clone()];
            for (out, value) in out.iter_mut().zip(context) {
                *out = value * scale;
            }
        }
    }
}

/// The softmax of a block of scores, compiled for the CPU's registers.
struct Soften<'a> {
    /// `[queries, keys]`.
    scores: &'a mut [f32],
    keys: Range<usize>,
    scoring: Scoring,
    /// The position of the first query.
    position: usize,
    running: &'a mut [QuerySums],
    /// The sums over earlier keys, and their width.
    context: Option<(&'a mut [f32], usize)>,
}

impl WithSimd for Soften<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { scores, keys, scoring, position, running, mut context } = self;
        let lines = scores.chunks_exact_mut(keys.len()).zip(running);
        for (query, (scores, running)) in lines.enumerate() {
            let visible = scoring.visible(position + query, &keys);
            let shrinks = soften(simd, scores, visible, scoring, running);
            if let Some((context, width)) = &mut context
                && shrinks != 1.0
            {
                for value in &mut context[query * *width..][..*width] {
                    *value *= shrinks;
                }
            }
        }
    }
}

/// scores ← e^(score − largest), scaled and capped, for the `visible` scores, and 0 for the scores of hidden keys. Returns the
/// factor for earlier sums, since the largest score may have changed.
#[inline(always)]
fn soften<S: Simd>(
    simd: S,
    scores: &mut [f32],
    visible: Range<usize>,
    scoring: Scoring,
    running: &mut QuerySums,
) -> f32 {
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    if visible.is_empty() {
        return 1.0;
    }
    let seen = &mut scores[visible];
    let scale = scoring.cap(seen);
    let before = running.largest;
    running.largest = before.max(exp::largest_of(simd, seen) * scale);
    let shrinks =
        if before == f32::NEG_INFINITY { 0.0 } else { exp::exp(before - running.largest) };
    let sum = exp::exp_minus(simd, seen, scale, running.largest);
    running.sum = running.sum * f64::from(shrinks) + sum;
    shrinks
}
