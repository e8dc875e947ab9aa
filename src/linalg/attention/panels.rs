//! Attention by f32 multiply-adds. The scores of a panel of queries, as wide as a block of C, are stored key by key. So softmax runs
//! along the lanes of registers, one query per lane, and its result is the packed factor of the product with the values.
//!
//! S ᵀ = K·Qᵀ, P ᵀ = e^(scale·Sᵀ − largest), context ᵀ = Vᵀ·Pᵀ, for a block of keys at a time; the rows of K and Vᵀ are broadcast. Future
//! keys are computed only where they share a block of C with past keys: the last few keys of each panel. Blocks of keys have the same
//! length on every CPU, and the sums of every query are its own. So all CPUs give the same bits.

use std::ops::Range;

use pulp::Simd;

use super::super::exp;
use super::super::product::{
    InBlocks, Line, Strided, UNROLLED, Values, block_of_c, in_blocks, interleave, plus_block,
};
use super::super::rectangles::Rectangle;
use super::scheme::{Heads, Inputs, Scheme};

/// Queries per block, which share the keys and values in the second-level cache. A multiple of the widths of all panels.
const QUERIES_AT_ONCE: usize = 144;
/// Keys per block: 30 KiB of scores in panels of 16. A multiple of the heights of all blocks.
const KEYS_AT_ONCE: usize = 480;
/// Keys whose exponentials are added in f32; the sums of such groups are added in f64.
const SHORT: usize = 16;
/// A multiple of the heights of all blocks, so that scores are whole lines.
const STEP: usize = 48;
/// The widest panel: three registers of 512 bits.
const WIDEST: usize = 48;
/// Rows whose largest scores are found side by side.
const CHAINS: usize = 4;
/// f32 in a line.
const LINE: usize = size_of::<Line>() / size_of::<f32>();

pub(super) fn scratch_bytes(head_dim: usize, queries: usize, keys: usize) -> usize {
    let lengths = PanelLengths::of(block_of_c(), head_dim, queries, keys);
    (lengths.k + lengths.v + lengths.q + lengths.scores + lengths.context) * size_of::<Line>()
        + lengths.panels * size_of::<PanelSums>()
}

/// Lines of packed factors and results.
struct PanelLengths {
    k: usize,
    v: usize,
    q: usize,
    scores: usize,
    context: usize,
    panels: usize,
}

impl PanelLengths {
    /// The lines for blocks of C of the given rows and columns.
    fn of((rows, columns): (usize, usize), head_dim: usize, queries: usize, keys: usize) -> Self {
        let panels = QUERIES_AT_ONCE.min(queries).div_ceil(columns);
        let (high, steps) = (head_dim.next_multiple_of(rows), head_dim.next_multiple_of(LINE));
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

/// The softmax of a panel's queries over the keys so far.
#[derive(Debug, Clone, Copy)]
struct PanelSums {
    /// The largest scaled score of each query.
    largest: [f32; WIDEST],
    /// Σ e^(score − largest).
    sums: [f64; WIDEST],
}

impl PanelSums {
    const NOTHING: Self = Self { largest: [f32::NEG_INFINITY; WIDEST], sums: [0.0; WIDEST] };
}

pub(super) struct PanelScratch {
    /// Rows and columns of a block of C.
    block: (usize, usize),
    /// Keys that are packed.
    keys: usize,
    k: Vec<Line>,
    v: Vec<Line>,
    q: Vec<Line>,
    scores: Vec<Line>,
    context: Vec<Line>,
    running: Vec<PanelSums>,
}

impl PanelScratch {
    fn with_blocks(block: (usize, usize), source: &Inputs<'_>) -> Self {
        let lengths = PanelLengths::of(block, source.heads.head_dim, source.seqlen, source.keys);
        let lines = bytemuck::allocation::zeroed_vec;
        Self {
            block,
            keys: 0,
            k: lines(lengths.k),
            v: lines(lengths.v),
            q: lines(lengths.q),
            scores: lines(lengths.scores),
            context: lines(lengths.context),
            running: vec![PanelSums::NOTHING; lengths.panels],
        }
    }

    /// Packs the queries of a block, and returns the work on them.
    fn start<'a, 'o>(
        &'a mut self,
        source: &Inputs<'_>,
        key_head: usize,
        query_head: usize,
        out: &'a mut Rectangle<'o>,
    ) -> Block<'a, 'o> {
        let Heads { num_heads, num_key_value_heads, head_dim } = source.heads;
        let head = key_head * (num_heads / num_key_value_heads) + query_head;
        let rows = out.rows();
        let q = Strided::rows(Values::F32(source.q), num_heads * head_dim)
            .at(rows.start, head * head_dim);
        interleave(q, rows.len(), head_dim, self.block.1, &mut self.q);
        self.running.fill(PanelSums::NOTHING);
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

impl Scheme for PanelScratch {
    const QUERIES_AT_ONCE: usize = QUERIES_AT_ONCE;

    fn new(source: &Inputs<'_>) -> Self {
        Self::with_blocks(block_of_c(), source)
    }

    fn pack(&mut self, source: &Inputs<'_>, key_head: usize, rectangles: &[Rectangle<'_>]) {
        let Heads { num_key_value_heads, head_dim, .. } = source.heads;
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
        source: &Inputs<'_>,
        key_head: usize,
        query_head: usize,
        out: &mut Rectangle<'_>,
    ) {
        in_blocks(self.start(source, key_head, query_head, out));
    }
}

/// A head's context of a block of queries.
struct Block<'a, 'o> {
    scratch: &'a mut PanelScratch,
    head_dim: usize,
    queries: usize,
    /// Keys visible to the first query.
    first_seen: usize,
    scale: f32,
    out: &'a mut Rectangle<'o>,
    /// The first column of this head in `out`.
    column: usize,
}

impl InBlocks for Block<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const ROWS: usize, const WIDE: usize>(self, simd: S) {
        let Self { scratch, head_dim, queries, first_seen, scale, out, column } = self;
        let width = WIDE * S::F32_LANES;
        let floats = bytemuck::cast_slice::<Line, f32>;
        let (k, v, q) = (floats(&scratch.k), floats(&scratch.v), floats(&scratch.q));
        let scores = bytemuck::cast_slice_mut::<Line, f32>(&mut scratch.scores);
        let context = bytemuck::cast_slice_mut::<Line, f32>(&mut scratch.context);
        let (steps, key_steps) =
            (head_dim.next_multiple_of(LINE), scratch.keys.next_multiple_of(LINE));
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
                // Probabilities, in place of the scores.
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

/// scores ← e^(scale·score − largest), 0 for future keys and in the rows after the last key. Returns the factor for earlier sums, since
/// the largest score may have changed.
/// `scores` has a row for each key and a lane for each query. The first query sees `first_seen` keys, and every later query sees one key
/// more than the query before it.
#[inline(always)]
fn soften<S: Simd, const WIDE: usize>(
    simd: S,
    scores: &mut [[S::f32s; WIDE]],
    keys: Range<usize>,
    first_seen: usize,
    scale: f32,
    running: &mut PanelSums,
) -> [S::f32s; WIDE] {
    // Rows of keys that every query sees.
    let all_see = first_seen.saturating_sub(keys.start).min(keys.len());
    let (zero, lowest) = (simd.splat_f32s(0.0), simd.splat_f32s(f32::NEG_INFINITY));
    let (scores, beyond) = scores.split_at_mut(keys.len());
    beyond.as_flattened_mut().fill(zero);
    // Lanes from `row + sees` on see the key of `row`.
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
    let (offsets, shrinks) = rescale(simd, most, wide_scale, running);
    let (width, mut narrow) = (WIDE * S::F32_LANES, [0.0; WIDEST]);
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

/// Updates the largest scores of a panel with `most`, the largest scores of a block, and scales the panel's sums. Returns the offsets
/// for the block's exponentials, and the factor of earlier sums.
#[inline(always)]
fn rescale<S: Simd, const WIDE: usize>(
    simd: S,
    most: [S::f32s; WIDE],
    scale: S::f32s,
    running: &mut PanelSums,
) -> ([S::f32s; WIDE], [S::f32s; WIDE]) {
    let lowest = simd.splat_f32s(f32::NEG_INFINITY);
    let (before, _) = S::as_mut_simd_f32s(&mut running.largest);
    let mut offsets = [lowest; WIDE];
    let mut shrinks = [lowest; WIDE];
    for (((before, most), offset), shrink) in
        before.iter_mut().zip(most).zip(&mut offsets).zip(&mut shrinks)
    {
        let most = simd.mul_f32s(most, scale);
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
    (offsets, shrinks)
}

/// Keeps the larger value of each pair, and the old value if the new value is a NaN.
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
mod tests;
