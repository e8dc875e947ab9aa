//! A block of queries of a head: scores, probabilities, and the gradients that follow from them.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::super::super::exp;
use super::super::super::product::{Factors, Kernel, Line, Strided, Values};
use super::super::super::rectangles::Rectangle;
use super::super::scheme::{Heads, Scoring};
use super::inputs::{BackwardInputs, KEYS, QUERIES, key_blocks, keys_of};

/// Lines of packed factors, of the largest blocks.
pub(super) struct PackedLengths {
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) blocks: usize,
    /// Keys of the blocks that a block of queries sees at most.
    pub(super) seen: usize,
    /// The same with a cap, otherwise 0.
    pub(super) slopes: usize,
    /// Queries, or the gradient of contexts, `[queries, head_dim]`.
    rows: usize,
    /// The same by columns, `[head_dim, queries]`.
    columns: usize,
    /// Keys, or values, `[keys, head_dim]`.
    key_columns: usize,
    /// Keys by columns, `[head_dim, keys]`.
    key_turned: usize,
    /// Gradients of scores, `[queries, keys]`.
    scores: usize,
    /// These or probabilities by columns, `[keys, queries]`.
    scores_turned: usize,
}

impl PackedLengths {
    pub(super) fn of(kernel: Kernel, head_dim: usize, seqlen: usize, scoring: Scoring) -> Self {
        let (queries, keys) = (QUERIES.min(seqlen), KEYS.min(seqlen));
        let seen = (0..seqlen)
            .step_by(QUERIES)
            .map(|first| keys_of(scoring, &(first..seqlen.min(first + QUERIES)), seqlen).len());
        let seen = seen.max().unwrap_or(0);
        let along = |lines: &dyn Fn(usize) -> usize| -> usize {
            slabs(kernel, head_dim).map(|slab| lines(slab.len())).sum()
        };
        Self {
            queries,
            keys,
            blocks: seqlen.div_ceil(KEYS),
            seen,
            slopes: scoring.soft_cap.map_or(0, |_| seen),
            rows: along(&|inner| kernel.row_lines(queries, inner)),
            columns: kernel.column_lines(head_dim, queries),
            key_columns: along(&|inner| kernel.column_lines(keys, inner)),
            key_turned: kernel.column_lines(head_dim, keys),
            scores: kernel.row_lines(queries, keys),
            scores_turned: kernel.row_lines(keys, queries),
        }
    }

    pub(super) fn query_lines(&self) -> usize {
        2 * (self.rows + self.columns) + self.scores.max(self.scores_turned)
    }

    pub(super) fn key_lines(&self) -> usize {
        2 * self.key_columns + self.key_turned
    }
}

fn slabs(kernel: Kernel, inner: usize) -> impl Iterator<Item = Range<usize>> {
    let slab = kernel.slab();
    (0..inner).step_by(slab).map(move |first| first..inner.min(first + slab))
}

/// The scratch of a thread.
pub(super) struct GradientScratch {
    lengths: PackedLengths,
    /// `[queries, seen]`: scores, then probabilities, of a block of queries and all keys it sees.
    pub(super) probabilities: Vec<f32>,
    /// `[queries, seen]` with a cap: the derivatives of capped scores, 0 for hidden keys.
    pub(super) slopes: Vec<f32>,
    /// `[queries, keys]`: gradients of the probabilities, then of the scores, of a block of keys.
    pub(super) gradients: Vec<f32>,
    /// `[queries, head_dim]`
    pub(super) dq: Vec<f32>,
    /// dc_i·c_i of each query.
    pub(super) shared: Vec<f32>,
    pub(super) q: Vec<Line>,
    pub(super) q_turned: Vec<Line>,
    pub(super) dc: Vec<Line>,
    pub(super) dc_turned: Vec<Line>,
    pub(super) k: Vec<Line>,
    pub(super) k_turned: Vec<Line>,
    pub(super) v: Vec<Line>,
    pub(super) scores: Vec<Line>,
}

impl GradientScratch {
    pub(super) fn new(source: &BackwardInputs<'_>) -> Self {
        let (head_dim, scoring) = (source.heads.head_dim, source.inputs.scoring);
        let lengths = PackedLengths::of(source.kernel, head_dim, source.seqlen, scoring);
        let lines = bytemuck::allocation::zeroed_vec;
        Self {
            probabilities: vec![0.0; lengths.queries * lengths.seen],
            slopes: vec![0.0; lengths.queries * lengths.slopes],
            gradients: vec![0.0; lengths.queries * lengths.keys],
            dq: vec![0.0; lengths.queries * head_dim],
            shared: vec![0.0; lengths.queries],
            q: lines(lengths.rows),
            q_turned: lines(lengths.columns),
            dc: lines(lengths.rows),
            dc_turned: lines(lengths.columns),
            k: lines(lengths.blocks * lengths.key_columns),
            k_turned: lines(lengths.blocks * lengths.key_turned),
            v: lines(lengths.blocks * lengths.key_columns),
            scores: lines(lengths.scores.max(lengths.scores_turned)),
            lengths,
        }
    }

    /// Packs the keys and values of a query head.
    pub(super) fn pack_keys(&mut self, source: &BackwardInputs<'_>, head: usize) {
        let Heads { num_heads, num_key_value_heads, head_dim } = source.heads;
        let (kernel, width) = (source.kernel, num_key_value_heads * head_dim);
        let column = head / (num_heads / num_key_value_heads) * head_dim;
        for (block, keys) in key_blocks(0..source.seqlen).enumerate() {
            for (values, lines) in [(source.inputs.k, &mut self.k), (source.inputs.v, &mut self.v)]
            {
                let factor = Strided::rows(Values::F32(values), width).at(keys.start, column);
                let mut lines = &mut lines[block * self.lengths.key_columns..];
                for slab in slabs(kernel, head_dim) {
                    let length = kernel.column_lines(keys.len(), slab.len());
                    let (now, behind) = lines.split_at_mut(length);
                    kernel.pack_columns(factor.at(0, slab.start), keys.len(), slab.len(), now);
                    lines = behind;
                }
            }
            let turned = Strided::transposed(Values::F32(source.inputs.k), width);
            let lines = &mut self.k_turned[block * self.lengths.key_turned..];
            let lines = &mut lines[..kernel.column_lines(head_dim, keys.len())];
            kernel.pack_columns(turned.at(column, keys.start), head_dim, keys.len(), lines);
        }
    }

    /// Packs a block of queries, and of the gradients of contexts.
    fn pack_queries(&mut self, source: &BackwardInputs<'_>, head: usize, rows: &Range<usize>) {
        let (kernel, head_dim) = (source.kernel, source.heads.head_dim);
        for (values, lines, turned) in [
            (source.inputs.q, &mut self.q, &mut self.q_turned),
            (source.inputs.context_gradient, &mut self.dc, &mut self.dc_turned),
        ] {
            let factor = source.of_query(values, head, rows.start);
            let mut lines = &mut lines[..];
            for slab in slabs(kernel, head_dim) {
                let (now, behind) = lines.split_at_mut(kernel.row_lines(rows.len(), slab.len()));
                kernel.pack_rows(factor.at(0, slab.start), rows.len(), slab.len(), now);
                lines = behind;
            }
            let factor = source.of_query_turned(values, head, rows.start);
            let turned = &mut turned[..kernel.column_lines(head_dim, rows.len())];
            kernel.pack_columns(factor, head_dim, rows.len(), turned);
        }
    }

    /// Computes dq of a block of queries, and adds its share of dk and dv of the head.
    pub(super) fn block(
        &mut self,
        source: &BackwardInputs<'_>,
        head: usize,
        dk: &mut [f32],
        dv: &mut [f32],
        out: &mut Rectangle<'_>,
    ) {
        let (kernel, head_dim) = (source.kernel, source.heads.head_dim);
        let (rows, scoring) = (out.rows(), source.inputs.scoring);
        let (queries, all) = (rows.len(), source.keys_of(&rows));
        let seen = all.len();
        self.pack_queries(source, head, &rows);
        self.soften(source, &rows);
        self.add_contexts(source, head, &rows);
        for keys in key_blocks(all.clone()) {
            let (block, at) = (keys.start / KEYS, keys.start - all.start);
            let some = keys.len().min(rows.end - keys.start);
            let gradients = &mut self.gradients[..queries * keys.len()];
            let v = &self.v[block * self.lengths.key_columns..];
            let product =
                SlabFactors { x: &self.dc, w: v, queries, keys: keys.len(), some, head_dim };
            product.multiply(kernel, gradients, keys.len());
            let of_keys = keys.start * head_dim..(keys.start + some) * head_dim;
            let probabilities = Values::F32(&self.probabilities);
            let turned = Strided::transposed(probabilities, seen).at(at, 0);
            let turned_lines = kernel.row_lines(some, queries);
            kernel.pack_rows(turned, some, queries, &mut self.scores[..turned_lines]);
            let product = factors(&self.scores, &self.dc_turned, (some, head_dim), queries);
            kernel.multiply(product, &mut dv[of_keys.clone()], head_dim, true);
            Arch::new().dispatch(ScoreGradients {
                probabilities: &self.probabilities[at..],
                slopes: scoring.soft_cap.map(|_| &self.slopes[at..]),
                seen,
                gradients,
                keys: keys.len(),
                some,
                shared: &self.shared[..queries],
                scale: scoring.scale,
            });
            let straight = Strided::rows(Values::F32(gradients), keys.len());
            let lines = &mut self.scores[..kernel.row_lines(queries, keys.len())];
            kernel.pack_rows(straight, queries, keys.len(), lines);
            let k = &self.k_turned[block * self.lengths.key_turned..];
            let product = factors(&self.scores, k, (queries, head_dim), keys.len());
            kernel.multiply(product, &mut self.dq, head_dim, at > 0);
            let turned = Strided::transposed(Values::F32(gradients), keys.len());
            kernel.pack_rows(turned, some, queries, &mut self.scores[..turned_lines]);
            let product = factors(&self.scores, &self.q_turned, (some, head_dim), queries);
            kernel.multiply(product, &mut dk[of_keys], head_dim, true);
        }
        for (row, dq) in self.dq.chunks_exact(head_dim).take(queries).enumerate() {
            out.row(row).copy_from_slice(dq);
        }
    }

    /// Computes the probabilities of a block of queries, and the slopes of a cap.
    fn soften(&mut self, source: &BackwardInputs<'_>, rows: &Range<usize>) {
        let (kernel, head_dim) = (source.kernel, source.heads.head_dim);
        let (queries, all) = (rows.len(), source.keys_of(rows));
        let seen = all.len();
        let probabilities = &mut self.probabilities[..queries * seen];
        for keys in key_blocks(all.clone()) {
            let some = keys.len().min(rows.end - keys.start);
            let k = &self.k[keys.start / KEYS * self.lengths.key_columns..];
            let out = &mut probabilities[keys.start - all.start..];
            let product =
                SlabFactors { x: &self.q, w: k, queries, keys: keys.len(), some, head_dim };
            product.multiply(kernel, out, seen);
        }
        Arch::new().dispatch(ScoreSoftmax {
            scores: probabilities,
            slopes: &mut self.slopes,
            keys: all,
            position: rows.start,
            scoring: source.inputs.scoring,
        });
    }

    /// dc_i·c_i of a block of queries.
    fn add_contexts(&mut self, source: &BackwardInputs<'_>, head: usize, rows: &Range<usize>) {
        let Heads { num_heads, head_dim, .. } = source.heads;
        let width = num_heads * head_dim;
        for (shared, row) in self.shared.iter_mut().zip(rows.clone()) {
            let of = |values: &'_ [f32], at: usize| {
                f64::from(values[row * width + head * head_dim + at])
            };
            let terms = (0..head_dim)
                .map(|at| of(source.inputs.context, at) * of(source.inputs.context_gradient, at));
            *shared = terms.sum::<f64>() as f32;
        }
    }
}

fn factors<'a>(
    x: &'a [Line],
    w: &'a [Line],
    (rows, columns): (usize, usize),
    inner: usize,
) -> Factors<'a> {
    Factors { x, w, rows, columns, inner }
}

/// Factors that are packed slab by slab along `head_dim`.
struct SlabFactors<'a> {
    /// `[queries, head_dim]`
    x: &'a [Line],
    /// `[keys, head_dim]`
    w: &'a [Line],
    queries: usize,
    keys: usize,
    /// The first keys, which take part in the product.
    some: usize,
    head_dim: usize,
}

impl SlabFactors<'_> {
    /// Writes x·wᵀ, `[queries, some]`, rows `stride` apart.
    fn multiply(self, kernel: Kernel, out: &mut [f32], stride: usize) {
        let Self { mut x, mut w, queries, keys, some, head_dim } = self;
        for slab in slabs(kernel, head_dim) {
            let product = factors(x, w, (queries, some), slab.len());
            kernel.multiply(product, out, stride, slab.start > 0);
            x = &x[kernel.row_lines(queries, slab.len())..];
            w = &w[kernel.column_lines(keys, slab.len())..];
        }
    }
}

/// The softmax of rows of scores, compiled for the CPU's registers.
struct ScoreSoftmax<'a> {
    /// `[queries, keys]`
    scores: &'a mut [f32],
    /// `[queries, keys]`, written with a cap.
    slopes: &'a mut [f32],
    keys: Range<usize>,
    /// The position of the first query.
    position: usize,
    scoring: Scoring,
}

impl WithSimd for ScoreSoftmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { scores, slopes, keys, position, scoring } = self;
        for (query, scores) in scores.chunks_exact_mut(keys.len()).enumerate() {
            let places = scoring.visible(position + query, &keys);
            scores[..places.start].fill(0.0);
            scores[places.end..].fill(0.0);
            let visible = &mut scores[places.clone()];
            let scale = scoring.cap(visible);
            if let Some(cap) = scoring.soft_cap {
                let slopes = &mut slopes[query * keys.len()..][..keys.len()];
                slopes.fill(0.0);
                for (slope, score) in slopes[places].iter_mut().zip(&*visible) {
                    let ratio = score / cap;
                    *slope = 1.0 - ratio * ratio;
                }
            }
            let largest = exp::largest_of(simd, visible) * scale;
            let sum = exp::exp_minus(simd, visible, scale, largest);
            let factor = (1.0 / sum) as f32;
            for value in visible {
                *value *= factor;
            }
        }
    }
}

/// gradients ← probabilities ∘ (gradients − shared)·scale ∘ slopes of the first `some` keys, and 0 for later keys, which no query sees.
struct ScoreGradients<'a> {
    /// `[queries, keys]`, rows `seen` elements apart.
    probabilities: &'a [f32],
    /// Like the probabilities; 1 if absent.
    slopes: Option<&'a [f32]>,
    seen: usize,
    /// `[queries, keys]`
    gradients: &'a mut [f32],
    keys: usize,
    some: usize,
    /// `[queries]`
    shared: &'a [f32],
    scale: f32,
}

impl WithSimd for ScoreGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let rows = self.gradients.chunks_exact_mut(self.keys);
        let rows = rows.zip(self.probabilities.chunks(self.seen)).zip(self.shared);
        for (query, ((gradients, probabilities), shared)) in rows.enumerate() {
            let (visible, future) = gradients.split_at_mut(self.some);
            for (gradient, probability) in visible.iter_mut().zip(probabilities) {
                *gradient = probability * (*gradient - shared) * self.scale;
            }
            if let Some(slopes) = self.slopes {
                let slopes = &slopes[query * self.seen..];
                visible.iter_mut().zip(slopes).for_each(|(gradient, slope)| *gradient *= slope);
            }
            future.fill(0.0);
        }
    }
}
