//! Attention by f32 multiply-adds. The scores of a panel of queries, as wide as a block of C, are stored key by key. So softmax runs
//! along the lanes of registers, one query per lane, and its result is the packed factor of the product with the values.
//!
//! S ᵀ = K·Qᵀ, P ᵀ = e^(scale·Sᵀ − largest), context ᵀ = Vᵀ·Pᵀ, for a block of keys at a time; the rows of K and Vᵀ are broadcast. Future
//! keys are computed only where they share a block of C with past keys: the last few keys of each panel. With a window, a panel begins
//! at most 47 keys before the window of its first query. Blocks of keys begin at the same keys on every CPU, the sums of every query are
//! its own, and hidden keys add zeros. So all CPUs give the same bits.

use std::ops::Range;

use pulp::Simd;

use super::super::exp;
use super::super::product::{
    InBlocks, Line, Strided, UNROLLED, Values, block_of_c, in_blocks, interleave, plus_block,
};
use super::super::rectangles::Rectangle;
use super::scheme::{Heads, Inputs, Scheme, Scoring, queries_of};

/// Queries per block, which share the keys and values in the second-level cache. A multiple of the widths of all panels.
const QUERIES_AT_ONCE: usize = 144;
/// Keys per block: 30 KiB of scores in panels of 16. A multiple of the heights of all blocks.
const KEYS_AT_ONCE: usize = 480;
/// Keys whose exponentials are added in f32; the sums of such groups are added in f64.
const SHORT: usize = 16;
/// A multiple of the heights of all blocks and of [`SHORT`]: scores are whole lines, and a panel may begin there.
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
    keys: Range<usize>,
    k: Vec<Line>,
    v: Vec<Line>,
    q: Vec<Line>,
    scores: Vec<Line>,
    context: Vec<Line>,
    running: Vec<PanelSums>,
}

impl PanelScratch {
    fn with_blocks(block: (usize, usize), source: &Inputs<'_>) -> Self {
        let keys = source.keys_of(0..source.seqlen, KEYS_AT_ONCE).len();
        let lengths = PanelLengths::of(block, source.heads.head_dim, source.seqlen, keys);
        let lines = bytemuck::allocation::zeroed_vec;
        Self {
            block,
            keys: 0..0,
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
            position: source.past + rows.start,
            scoring: source.scoring,
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
        let keys = source.keys_of(queries_of(rectangles), KEYS_AT_ONCE);
        let column = key_head * head_dim;
        let k = Strided::rows(source.k, width).at(keys.start, column);
        interleave(k, keys.len(), head_dim, self.block.0, &mut self.k);
        let v = Strided::transposed(source.v, width).at(column, keys.start);
        interleave(v, head_dim, keys.len(), self.block.0, &mut self.v);
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
    /// The position of the first query.
    position: usize,
    scoring: Scoring,
    out: &'a mut Rectangle<'o>,
    /// The first column of this head in `out`.
    column: usize,
}

impl InBlocks for Block<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const ROWS: usize, const WIDE: usize>(self, simd: S) {
        let Self { scratch, head_dim, queries, position, scoring, out, column } = self;
        let width = WIDE * S::F32_LANES;
        let floats = bytemuck::cast_slice::<Line, f32>;
        let (k, v, q) = (floats(&scratch.k), floats(&scratch.v), floats(&scratch.q));
        let scores = bytemuck::cast_slice_mut::<Line, f32>(&mut scratch.scores);
        let context = bytemuck::cast_slice_mut::<Line, f32>(&mut scratch.context);
        let (steps, key_steps) =
            (head_dim.next_multiple_of(LINE), scratch.keys.len().next_multiple_of(LINE));
        let in_context = head_dim.next_multiple_of(ROWS) * width;
        let first_block = scoring.first_key(position) / KEYS_AT_ONCE * KEYS_AT_ONCE;
        for first in (first_block..position + queries).step_by(KEYS_AT_ONCE) {
            let panels = q
                .chunks_exact(steps * width)
                .zip(context.chunks_exact_mut(in_context))
                .zip(&mut scratch.running);
            for (panel, ((q, context), running)) in panels.enumerate() {
                let before = panel * width;
                if before >= queries {
                    break;
                }
                let position = position + before;
                let oldest = scoring.first_key(position) / STEP * STEP;
                let end = position + width.min(queries - before);
                let keys = first.max(oldest)..end.min(first + KEYS_AT_ONCE);
                if keys.is_empty() {
                    continue;
                }
                let at = keys.start - scratch.keys.start;
                // Scores.
                let blocks = k[at * steps..].chunks_exact(steps * ROWS);
                let results = scores.chunks_exact_mut(ROWS * width);
                for (k, scores) in blocks.zip(results).take(keys.len().div_ceil(ROWS)) {
                    let nothing = [[simd.splat_f32s(0.0); WIDE]; ROWS];
                    let sums = plus_block::<S, ROWS, WIDE>(simd, k, q, nothing);
                    let (scores, _) = S::as_mut_simd_f32s(scores);
                    scores.copy_from_slice(sums.as_flattened());
                }
                // Probabilities, in place of the scores.
                let padded = keys.len().next_multiple_of(UNROLLED);
                let scale = scoring.cap(&mut scores[..keys.len() * width]);
                let (rows, _) = S::as_mut_simd_f32s(&mut scores[..padded * width]);
                let (rows, beyond) = rows.as_chunks_mut::<WIDE>().0.split_at_mut(keys.len());
                beyond.as_flattened_mut().fill(simd.splat_f32s(0.0));
                let band = Band::of(scoring, position, keys.start);
                let shrinks = soften(simd, rows, band, scale, running);
                // The context so far.
                let blocks = v.chunks_exact(key_steps * ROWS);
                for (v, context) in blocks.zip(context.chunks_exact_mut(ROWS * width)) {
                    let (context, _) = S::as_mut_simd_f32s(context);
                    let (rows, _) = context.as_chunks_mut::<WIDE>();
                    let mut sums = [[simd.splat_f32s(0.0); WIDE]; ROWS];
                    if keys.start > oldest {
                        for (sums, before) in sums.iter_mut().zip(&*rows) {
                            for ((sum, before), shrink) in sums.iter_mut().zip(before).zip(shrinks)
                            {
                                *sum = simd.mul_f32s(*before, shrink);
                            }
                        }
                    }
                    let v = &v[at * ROWS..][..padded * ROWS];
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

/// The keys that a panel's queries see: the query of lane l sees the key of row r if r + begin ≤ l < r + end.
#[derive(Clone, Copy)]
struct Band {
    begin: i64,
    end: i64,
}

/// The number of each lane.
const LANE_NUMBERS: [f32; WIDEST] = {
    let mut numbers = [0.0; WIDEST];
    let mut lane = 0;
    while lane < WIDEST {
        numbers[lane] = lane as f32;
        lane += 1;
    }
    numbers
};

impl Band {
    /// The band of queries from a position on, with rows of keys from `first_key` on.
    fn of(scoring: Scoring, position: usize, first_key: usize) -> Self {
        /// More keys than any sequence has.
        const ALL: usize = 1 << 40;
        let begin = first_key as i64 - position as i64;
        Self { begin, end: begin + scoring.window.unwrap_or(ALL).clamp(1, ALL) as i64 }
    }

    /// The first of the `rows` that all of `width` lanes see, and the first row after them.
    fn common(self, width: usize, rows: usize) -> (usize, usize) {
        let end = (1 - self.begin).clamp(0, rows as i64);
        ((width as i64 - self.end).clamp(0, end) as usize, end as usize)
    }

    /// Replaces the scores of a row by `filler` in lanes that do not see its key.
    #[inline(always)]
    fn hide<S: Simd, const WIDE: usize>(
        self,
        simd: S,
        row: usize,
        filler: S::f32s,
        scores: &mut [S::f32s; WIDE],
    ) {
        let begin = simd.splat_f32s((row as i64 + self.begin) as f32);
        let end = simd.splat_f32s((row as i64 + self.end) as f32);
        for (score, lane) in scores.iter_mut().zip(S::as_simd_f32s(&LANE_NUMBERS).0) {
            *score = simd.select_f32s(simd.less_than_f32s(*lane, begin), filler, *score);
            *score = simd.select_f32s(simd.less_than_f32s(*lane, end), *score, filler);
        }
    }
}

/// scores ← e^(scale·score − largest), 0 for hidden keys. Returns the factor for earlier sums, since the largest score may have changed.
/// `scores` has a row for each key and a lane for each query.
#[inline(always)]
fn soften<S: Simd, const WIDE: usize>(
    simd: S,
    scores: &mut [[S::f32s; WIDE]],
    band: Band,
    scale: f32,
    running: &mut PanelSums,
) -> [S::f32s; WIDE] {
    let width = WIDE * S::F32_LANES;
    let (all_from, all_see) = band.common(width, scores.len());
    let (zero, lowest) = (simd.splat_f32s(0.0), simd.splat_f32s(f32::NEG_INFINITY));
    for row in (0..all_from).chain(all_see..scores.len()) {
        band.hide(simd, row, lowest, &mut scores[row]);
    }
    let mut largest = [[lowest; WIDE]; CHAINS];
    let (chunks, rest) = scores.as_chunks::<CHAINS>();
    for chunk in chunks {
        for (largest, scores) in largest.iter_mut().zip(chunk) {
            larger_of(simd, largest, scores);
        }
    }
    let [mut most, others @ ..] = largest;
    for scores in others.iter().chain(rest) {
        larger_of(simd, &mut most, scores);
    }
    let wide_scale = simd.splat_f32s(scale);
    let (offsets, shrinks) = rescale(simd, most, wide_scale, running);
    let mut narrow = [0.0; WIDEST];
    for (chunk, scores) in scores.chunks_mut(SHORT).enumerate() {
        let first = chunk * SHORT;
        // A chunk that begins before the window of a query has no rows in pairs.
        let common = if first < all_from { 0 } else { all_see.saturating_sub(first) };
        let common = common.min(scores.len());
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
            band.hide(simd, row, zero, scores);
            for (sum, score) in sums.iter_mut().zip(scores) {
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
        // A query that has seen no key has nothing to scale, and −∞ − −∞ is not a number.
        let has_seen = simd.less_than_f32s(lowest, now);
        *shrink = simd.select_f32s(has_seen, simd.sub_f32s(*before, now), simd.splat_f32s(0.0));
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
