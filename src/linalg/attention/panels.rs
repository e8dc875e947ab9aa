//! Attention by f32 multiply-adds: scores of a panel of queries, as wide as a block of C, lie key by key, so that softmax goes down
//! the lanes of registers, one query each, and what comes out is the packed factor of the product with the values.
//!
//! S ᵀ = K·Qᵀ,  P ᵀ = e^(scale·Sᵀ − largest),  context ᵀ = Vᵀ·Pᵀ, for a block of keys at a time; K and Vᵀ are the factors whose
//! rows are broadcast. Nothing is computed for keys of the future but what shares a block of C with those of the past: the last
//! few of each panel. Blocks of keys are as long on every CPU, and a query's sums depend on no other, so the bits are the same.

use std::ops::Range;

use pulp::Simd;

use super::super::exp;
use super::super::product::{
    InBlocks, Line, Strided, UNROLLED, Values, block_of_c, in_blocks, interleave, plus_block,
};
use super::super::rectangles::Rectangle;
use super::{Heads, Scheme, Source};

/// Queries per block: keys and values that come into the second-level cache are used for so many. A multiple of all panels' widths.
const QUERIES_AT_ONCE: usize = 144;
/// Keys per block: 30 KiB of scores in panels of 16. A multiple of all blocks' heights.
const KEYS_AT_ONCE: usize = 480;
/// Keys whose exponentials are added up in f32, before sums go on in f64.
const SHORT: usize = 16;
/// A multiple of all blocks' heights, so that scores are whole lines.
const STEP: usize = 48;
/// The widest panel: three registers of 512 bits.
const WIDEST: usize = 48;
/// Rows of which the largest score is looked for side by side.
const CHAINS: usize = 4;
/// f32 in a line.
const LINE: usize = size_of::<Line>() / size_of::<f32>();

/// Bytes of [`Scratch`].
pub(super) fn scratch_bytes(head_dim: usize, queries: usize, keys: usize) -> usize {
    let lengths = Lengths::of(block_of_c(), head_dim, queries, keys);
    (lengths.k + lengths.v + lengths.q + lengths.scores + lengths.context) * size_of::<Line>()
        + lengths.panels * size_of::<Running>()
}

/// Lines of packed factors and results.
struct Lengths {
    k: usize,
    v: usize,
    q: usize,
    scores: usize,
    context: usize,
    panels: usize,
}

impl Lengths {
    /// For blocks of C of so many rows and columns.
    fn of((rows, columns): (usize, usize), head_dim: usize, queries: usize, keys: usize) -> Self {
        let panels = QUERIES_AT_ONCE.min(queries).div_ceil(columns);
        let (high, steps) = (
            head_dim.next_multiple_of(rows),
            head_dim.next_multiple_of(LINE),
        );
        Self {
            k: keys.next_multiple_of(rows) * steps / LINE,
            v: high * keys.next_multiple_of(LINE) / LINE,
            q: panels * columns * steps / LINE,
            scores: KEYS_AT_ONCE.min(keys.next_multiple_of(STEP)) * columns / LINE,
            context: (panels * columns * high).div_ceil(LINE),
            panels,
        }
    }
}

/// What the queries of a panel have seen so far.
#[derive(Debug, Clone, Copy)]
struct Running {
    /// The largest score of each, scaled.
    largest: [f32; WIDEST],
    /// Σ e^(score − largest).
    sums: [f64; WIDEST],
}

impl Running {
    const NOTHING: Self = Self {
        largest: [f32::NEG_INFINITY; WIDEST],
        sums: [0.0; WIDEST],
    };
}

/// What a thread works on.
pub(super) struct Scratch {
    /// Rows and columns of a block of C.
    block: (usize, usize),
    /// Keys that are packed.
    keys: usize,
    k: Vec<Line>,
    v: Vec<Line>,
    q: Vec<Line>,
    scores: Vec<Line>,
    context: Vec<Line>,
    running: Vec<Running>,
}

impl Scratch {
    fn with_blocks(block: (usize, usize), source: &Source<'_>) -> Self {
        let lengths = Lengths::of(block, source.heads.head_dim, source.seqlen, source.keys);
        let lines = bytemuck::allocation::zeroed_vec;
        Self {
            block,
            keys: 0,
            k: lines(lengths.k),
            v: lines(lengths.v),
            q: lines(lengths.q),
            scores: lines(lengths.scores),
            context: lines(lengths.context),
            running: vec![Running::NOTHING; lengths.panels],
        }
    }

    /// Packs the queries of a block, and says what is to be done with them.
    fn start<'a, 'o>(
        &'a mut self,
        source: &Source<'_>,
        key_head: usize,
        query_head: usize,
        out: &'a mut Rectangle<'o>,
    ) -> Block<'a, 'o> {
        let Heads {
            num_heads,
            num_key_value_heads,
            head_dim,
        } = source.heads;
        let head = key_head * (num_heads / num_key_value_heads) + query_head;
        let rows = out.rows();
        let q = Strided::rows(Values::F32(source.q), num_heads * head_dim)
            .at(rows.start, head * head_dim);
        interleave(q, rows.len(), head_dim, self.block.1, &mut self.q);
        self.running.fill(Running::NOTHING);
        Block {
            scratch: self,
            head_dim,
            queries: rows.len(),
            first_seen: source.past + rows.start + 1,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out,
            column: query_head * head_dim,
        }
    }
}

impl Scheme for Scratch {
    const QUERIES_AT_ONCE: usize = QUERIES_AT_ONCE;

    fn new(source: &Source<'_>) -> Self {
        Self::with_blocks(block_of_c(), source)
    }

    fn pack(&mut self, source: &Source<'_>, key_head: usize, rectangles: &[Rectangle<'_>]) {
        let Heads {
            num_key_value_heads,
            head_dim,
            ..
        } = source.heads;
        let width = num_key_value_heads * head_dim;
        let keys = source.past + rectangles.last().map_or(0, |block| block.rows().end);
        let k = Strided::rows(Values::F32(source.k), width).at(0, key_head * head_dim);
        interleave(k, keys, head_dim, self.block.0, &mut self.k);
        let v = Strided::transposed(Values::F32(source.v), width).at(key_head * head_dim, 0);
        interleave(v, head_dim, keys, self.block.0, &mut self.v);
        self.keys = keys;
    }

    fn block(
        &mut self,
        source: &Source<'_>,
        key_head: usize,
        query_head: usize,
        out: &mut Rectangle<'_>,
    ) {
        in_blocks(self.start(source, key_head, query_head, out));
    }
}

/// A head's context of a block of queries.
struct Block<'a, 'o> {
    scratch: &'a mut Scratch,
    head_dim: usize,
    queries: usize,
    /// Keys the first query sees.
    first_seen: usize,
    scale: f32,
    out: &'a mut Rectangle<'o>,
    /// Of `out`, the first of this head.
    column: usize,
}

impl InBlocks for Block<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const ROWS: usize, const WIDE: usize>(self, simd: S) {
        let Self {
            scratch,
            head_dim,
            queries,
            first_seen,
            scale,
            out,
            column,
        } = self;
        let width = WIDE * S::F32_LANES;
        let floats = bytemuck::cast_slice::<Line, f32>;
        let (k, v, q) = (floats(&scratch.k), floats(&scratch.v), floats(&scratch.q));
        let scores = bytemuck::cast_slice_mut::<Line, f32>(&mut scratch.scores);
        let context = bytemuck::cast_slice_mut::<Line, f32>(&mut scratch.context);
        let (steps, key_steps) = (
            head_dim.next_multiple_of(LINE),
            scratch.keys.next_multiple_of(LINE),
        );
        let in_context = head_dim.next_multiple_of(ROWS) * width;
        for first in (0..first_seen + queries - 1).step_by(KEYS_AT_ONCE) {
            let panels = q
                .chunks_exact(steps * width)
                .zip(context.chunks_exact_mut(in_context))
                .zip(&mut scratch.running);
            for (panel, ((q, context), running)) in panels.enumerate() {
                let before = panel * width;
                if before >= queries {
                    break;
                }
                let first_seen = first_seen + before;
                let last_seen = first_seen + width.min(queries - before) - 1;
                let keys = first..last_seen.min(first + KEYS_AT_ONCE);
                if keys.is_empty() {
                    continue;
                }
                // Scores.
                let blocks = k[first * steps..].chunks_exact(steps * ROWS);
                let results = scores.chunks_exact_mut(ROWS * width);
                for (k, scores) in blocks.zip(results).take(keys.len().div_ceil(ROWS)) {
                    let nothing = [[simd.splat_f32s(0.0); WIDE]; ROWS];
                    let sums = plus_block::<S, ROWS, WIDE>(simd, k, q, nothing);
                    let (scores, _) = S::as_mut_simd_f32s(scores);
                    scores.copy_from_slice(sums.as_flattened());
                }
                // Probabilities, in their place.
                let padded = keys.len().next_multiple_of(UNROLLED);
                let (rows, _) = S::as_mut_simd_f32s(&mut scores[..padded * width]);
                let (rows, _) = rows.as_chunks_mut::<WIDE>();
                let shrinks = soften(simd, rows, keys, first_seen, scale, running);
                // The context so far.
                let blocks = v.chunks_exact(key_steps * ROWS);
                for (v, context) in blocks.zip(context.chunks_exact_mut(ROWS * width)) {
                    let (context, _) = S::as_mut_simd_f32s(context);
                    let (rows, _) = context.as_chunks_mut::<WIDE>();
                    let mut sums = [[simd.splat_f32s(0.0); WIDE]; ROWS];
                    if first > 0 {
                        for (sums, before) in sums.iter_mut().zip(&*rows) {
                            for ((sum, before), shrink) in sums.iter_mut().zip(before).zip(shrinks)
                            {
                                *sum = simd.mul_f32s(*before, shrink);
                            }
                        }
                    }
                    let v = &v[first * ROWS..][..padded * ROWS];
                    let p = &scores[..padded * width];
                    rows.copy_from_slice(&plus_block::<S, ROWS, WIDE>(simd, v, p, sums));
                }
            }
        }
        let panels = context.chunks_exact(in_context).zip(&scratch.running);
        for (panel, (context, running)) in panels.enumerate() {
            let before = panel * width;
            for query in 0..width.min(queries.saturating_sub(before)) {
                let scale = (1.0 / running.sums[query]) as f32;
                let out = &mut out.row(before + query)[column..][..head_dim];
                for (out, context) in out.iter_mut().zip(context.chunks_exact(width)) {
                    *out = context[query] * scale;
                }
            }
        }
    }
}

/// scores ← e^(scale·score − largest), zero for keys of the future and in the rows behind the last key; returns what everything summed
/// before must be multiplied with, now that the largest score is another.
///
/// # Arguments
/// * `scores`: a row for each key, a lane for each query
/// * `first_seen`: keys that the first query sees, each other one more than the one before
#[inline(always)]
fn soften<S: Simd, const WIDE: usize>(
    simd: S,
    scores: &mut [[S::f32s; WIDE]],
    keys: Range<usize>,
    first_seen: usize,
    scale: f32,
    running: &mut Running,
) -> [S::f32s; WIDE] {
    // Rows of keys that every query sees.
    let all_see = first_seen.saturating_sub(keys.start).min(keys.len());
    let (zero, lowest) = (simd.splat_f32s(0.0), simd.splat_f32s(f32::NEG_INFINITY));
    let (scores, beyond) = scores.split_at_mut(keys.len());
    beyond.as_flattened_mut().fill(zero);
    // A row's key is seen by this lane and those behind it.
    let mut numbers = [0.0f32; WIDEST];
    for (lane, number) in numbers.iter_mut().enumerate() {
        *number = lane as f32;
    }
    let lanes = S::as_simd_f32s(&numbers).0;
    let sees = keys.start as i64 + 1 - first_seen as i64;

    let (common, edge) = scores.split_at_mut(all_see);
    for (row, scores) in (all_see..).zip(&mut *edge) {
        let least = simd.splat_f32s((row as i64 + sees) as f32);
        for (score, lane) in scores.iter_mut().zip(lanes) {
            *score = simd.select_f32s(simd.less_than_f32s(*lane, least), lowest, *score);
        }
    }
    let mut largest = [[lowest; WIDE]; CHAINS];
    let (chunks, rest) = common.as_chunks::<CHAINS>();
    for chunk in chunks {
        for (largest, scores) in largest.iter_mut().zip(chunk) {
            larger_of(simd, largest, scores);
        }
    }
    let [mut most, others @ ..] = largest;
    for scores in others.iter().chain(rest).chain(&*edge) {
        larger_of(simd, &mut most, scores);
    }
    let wide_scale = simd.splat_f32s(scale);
    let (before, _) = S::as_mut_simd_f32s(&mut running.largest);
    let mut offsets = [lowest; WIDE];
    let mut shrinks = [lowest; WIDE];
    for (((before, most), offset), shrink) in before
        .iter_mut()
        .zip(most)
        .zip(&mut offsets)
        .zip(&mut shrinks)
    {
        let most = simd.mul_f32s(most, wide_scale);
        let is_larger = simd.greater_than_f32s(most, *before);
        let now = simd.select_f32s(is_larger, most, *before);
        *shrink = simd.sub_f32s(*before, now);
        *offset = simd.neg_f32s(now);
        *before = now;
    }
    let [shrinks] = exp::exps(simd, [shrinks]);

    let width = WIDE * S::F32_LANES;
    let mut narrow = [1.0; WIDEST];
    S::as_mut_simd_f32s(&mut narrow).0[..WIDE].copy_from_slice(&shrinks);
    for (sum, shrink) in running.sums[..width].iter_mut().zip(narrow) {
        *sum *= f64::from(shrink);
    }
    for (chunk, scores) in scores.chunks_mut(SHORT).enumerate() {
        let first = chunk * SHORT;
        let common = all_see.saturating_sub(first).min(scores.len());
        let (common, edge) = scores.split_at_mut(common);
        let mut sums = [zero; WIDE];
        let (pairs, odd) = common.as_chunks_mut::<2>();
        for pair in pairs.iter_mut() {
            for scores in pair.iter_mut() {
                for (score, offset) in scores.iter_mut().zip(offsets) {
                    *score = simd.mul_add_f32s(*score, wide_scale, offset);
                }
            }
            *pair = exp::exps(simd, *pair);
            for scores in pair {
                for (sum, score) in sums.iter_mut().zip(scores) {
                    *sum = simd.add_f32s(*sum, *score);
                }
            }
        }
        let first = first + 2 * pairs.len();
        for (row, scores) in (first..).zip(odd.iter_mut().chain(edge)) {
            for (score, offset) in scores.iter_mut().zip(offsets) {
                *score = simd.mul_add_f32s(*score, wide_scale, offset);
            }
            [*scores] = exp::exps(simd, [*scores]);
            let least = simd.splat_f32s((row as i64 + sees) as f32);
            let values = scores.iter_mut().zip(lanes).zip(&mut sums);
            for ((score, lane), sum) in values {
                *score = simd.select_f32s(simd.less_than_f32s(*lane, least), zero, *score);
                *sum = simd.add_f32s(*sum, *score);
            }
        }
        S::as_mut_simd_f32s(&mut narrow).0[..WIDE].copy_from_slice(&sums);
        for (total, sum) in running.sums[..width].iter_mut().zip(narrow) {
            *total += f64::from(sum);
        }
    }
    shrinks
}

/// The larger of each pair; what was there where the other is a NaN.
#[inline(always)]
fn larger_of<S: Simd, const WIDE: usize>(
    simd: S,
    largest: &mut [S::f32s; WIDE],
    values: &[S::f32s; WIDE],
) {
    for (largest, value) in largest.iter_mut().zip(values) {
        let is_larger = simd.greater_than_f32s(*value, *largest);
        *largest = simd.select_f32s(is_larger, *value, *largest);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::product::Kernel;
    use super::super::super::rectangles;
    use super::super::causal;
    use super::*;

    /// Blocks of another shape than this CPU's: those of AVX-512, of narrower registers.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn blocks_of_any_shape_give_the_same_bits() {
        use pulp::WithSimd;
        struct Run<'a, 'o>(Block<'a, 'o>);
        impl WithSimd for Run<'_, '_> {
            type Output = ();
            #[inline(always)]
            fn with_simd<S: Simd>(self, simd: S) {
                match self.0.scratch.block {
                    (8, 48) => self.0.run::<S, 8, 6>(simd),
                    (6, 16) => self.0.run::<S, 6, 2>(simd),
                    (rows, columns) => panic!("no blocks of {rows} by {columns} here"),
                }
            }
        }
        // Older CPUs have no registers of eight to try them with.
        let Some(simd) = pulp::x86::V3::try_new() else {
            return;
        };
        let heads = Heads {
            num_heads: 1,
            num_key_value_heads: 1,
            head_dim: 20,
        };
        let seqlen = KEYS_AT_ONCE + 100;
        let wave = |pace: f32| -> Vec<f32> {
            (0..seqlen * 20)
                .map(|i| 2.0 * (i as f32 * pace).sin())
                .collect()
        };
        let (q, k, v) = (wave(0.71), wave(0.37), wave(0.53));
        let source = Source {
            kernel: Kernel::Fused,
            heads,
            past: 0,
            seqlen,
            keys: seqlen,
            q: &q,
            k: &k,
            v: &v,
        };
        let by = |block: (usize, usize)| {
            let mut out = vec![f32::NAN; seqlen * 20];
            let rows: Vec<_> = (0..seqlen)
                .step_by(QUERIES_AT_ONCE)
                .map(|first| first..seqlen.min(first + QUERIES_AT_ONCE))
                .collect();
            let columns = 0..20;
            let mut rectangles: Vec<_> =
                rectangles::cut(&mut out, 20, &rows, std::slice::from_ref(&columns)).collect();
            let mut scratch = Scratch::with_blocks(block, &source);
            scratch.pack(&source, 0, &rectangles);
            for rectangle in &mut rectangles {
                Simd::vectorize(simd, Run(scratch.start(&source, 0, 0, rectangle)));
            }
            out
        };
        let narrow = by((6, 16));
        assert_eq!(narrow, by((8, 48)));
        let mut here = vec![f32::NAN; seqlen * 20];
        causal(Kernel::Fused, heads, 0, &q, &k, &v, &mut here);
        assert_eq!(narrow, here);
    }

    /// The same in plain loops: the bits every CPU computes that multiplies and adds in one step.
    #[test]
    fn panels_have_the_bits_of_plain_loops() {
        let heads = Heads {
            num_heads: 2,
            num_key_value_heads: 1,
            head_dim: 20,
        };
        let (past, seqlen) = (37, KEYS_AT_ONCE + 2 * QUERIES_AT_ONCE + 5);
        let (keys, head_dim, width) = (past + seqlen, 20, 40);
        let wave = |count: usize, pace: f32| -> Vec<f32> {
            (0..count).map(|i| 2.0 * (i as f32 * pace).sin()).collect()
        };
        let q = wave(seqlen * width, 0.71);
        let (k, v) = (wave(keys * head_dim, 0.37), wave(keys * head_dim, 0.53));
        let mut out = vec![f32::NAN; seqlen * width];
        causal(Kernel::Fused, heads, past, &q, &k, &v, &mut out);

        let is_one_step = Kernel::Fused.name().ends_with("in one step");
        let plus = |sum: f32, x: f32, w: f32| {
            if is_one_step {
                x.mul_add(w, sum)
            } else {
                x * w + sum
            }
        };
        let scale = 1.0 / (head_dim as f32).sqrt();
        for query in [0, 1, 15, 16, 143, 144, 442, 443, 500, seqlen - 1] {
            for head in 0..2 {
                let q = &q[query * width + head * head_dim..][..head_dim];
                let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0f64);
                let mut context = vec![0.0f32; head_dim];
                let seen: Vec<usize> = (0..past + query + 1).collect();
                for (block, seen) in seen.chunks(KEYS_AT_ONCE).enumerate() {
                    let mut p: Vec<f32> = Vec::new();
                    for &key in seen {
                        let k = &k[key * head_dim..][..head_dim];
                        p.push(k.iter().zip(q).fold(0.0, |sum, (k, q)| plus(sum, *k, *q)));
                    }
                    let most = p.iter().copied().fold(f32::NEG_INFINITY, f32::max) * scale;
                    let now = if most > largest { most } else { largest };
                    let shrink = exp::exp(largest - now);
                    largest = now;
                    for p in &mut p {
                        *p = exp::exp(p.mul_add(scale, -now));
                    }
                    sum *= f64::from(shrink);
                    for some in p.chunks(SHORT) {
                        sum += f64::from(some.iter().sum::<f32>());
                    }
                    for (dim, context) in context.iter_mut().enumerate() {
                        let before = if block > 0 { *context * shrink } else { 0.0 };
                        *context = seen.iter().zip(&p).fold(before, |sum, (key, p)| {
                            plus(sum, v[key * head_dim + dim], *p)
                        });
                    }
                }
                let scale = (1.0 / sum) as f32;
                let got = &out[query * width + head * head_dim..][..head_dim];
                for (got, context) in got.iter().zip(&context) {
                    assert_eq!(*got, context * scale, "query {query}, head {head}");
                }
            }
        }
    }
}
