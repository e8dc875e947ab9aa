//! Causal attention, computed in blocks of queries and keys: no `[heads, seq, seq]` tensor ever exists.
//!
//! For each head h and query row i: p_ij = exp(s_ij − max_j s_ij) / Σ_j exp(s_ij − max_j s_ij) over keys j ≤ i with
//! s_ij = q_i·k_j / √head_dim, and the context row is Σ_j p_ij v_j (Vaswani et al. 2017, arXiv:1706.03762, eq. 1). A block
//! of queries takes the keys up to its last row, a block at a time, so that scores, keys and values stay in a core's cache; what
//! it summed relative to the largest score so far is scaled down where a later block has a larger one (Milakov and
//! Gimelshein 2018, arXiv:1805.02867, algorithm 3). Scores, softmax and sums are f32, as in the reference's eager path; with a
//! bf16 kernel queries, keys, values and exp(s_ij − max) are rounded to bf16 for the two products.
//!
//! Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): query head h reads key/value head
//! h / (num_heads / num_key_value_heads); no repeated copy is made.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::exp;
use super::matmul::{Threads, View, matmul};
use super::product::{Factors, Kernel, Line, Strided, Values};
use super::rectangles::{self, Rectangle};

/// Queries per block.
const QUERIES_AT_ONCE: usize = 128;
/// Keys per block: 256 KiB of scores, a quarter of a second-level cache, half of it at most.
const KEYS_AT_ONCE: usize = 512;
/// Tasks per thread, at least, where there are as many blocks of queries.
const TASKS_PER_THREAD: usize = 2;

/// Keys that a task of a single query sees at least, all its heads together.
const KEYS_PER_TASK: usize = 256;

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
    /// Floating-point operations of scores and context where `tokens` follow `past` others: 4·head_dim for every pair of a query
    /// and a key it sees, in every query head.
    pub fn operations(&self, past: usize, tokens: usize) -> usize {
        let pairs = tokens * past + tokens * (tokens + 1) / 2;
        4 * self.head_dim * self.num_heads * pairs
    }
}

/// Bytes of scratch [`causal`] holds while it works on `queries` tokens that see `keys` at the end, with `threads` threads.
pub fn scratch_bytes(
    kernel: Kernel,
    head_dim: usize,
    queries: usize,
    keys: usize,
    threads: usize,
) -> usize {
    let queries = QUERIES_AT_ONCE.min(queries);
    let lines = Lengths::of(kernel, head_dim, queries, keys);
    threads * lines.bytes(queries, head_dim)
}

/// Causal self-attention of one sequence, or of the tokens that follow `past` cached ones; writes the context of every head
/// side by side.
///
/// # Arguments
/// * `past`: tokens before the first query, 0 for a whole sequence
/// * `q`: `[seqlen, num_heads * head_dim]`, rotary positions applied
/// * `k`, `v`: `[past + seqlen, num_key_value_heads * head_dim]`
/// * `out`: `[seqlen, num_heads * head_dim]`
///
/// # Panics
/// When a slice does not have the size its shape says.
pub fn causal(
    kernel: Kernel,
    heads: Heads,
    past: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &mut [f32],
) {
    let columns = Columns {
        width: heads.num_heads * heads.head_dim,
        first: 0,
    };
    if q.len() == columns.width {
        return one_query(heads, past, q, k, v, out);
    }
    causal_columns(kernel, heads, past, q, k, v, out, columns);
}

/// Where the context of some heads goes in that of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Columns of the context of all heads.
    pub width: usize,
    /// Where the first head's context goes.
    pub first: usize,
}

/// [`causal`] for some of a layer's heads: their context goes into some columns of the context of all.
///
/// # Arguments
/// * `heads`: those that are computed
/// * `out`: `[seqlen, columns.width]`
///
/// # Panics
/// When a slice does not have the size its shape says.
#[expect(
    clippy::too_many_arguments,
    reason = "a kernel, three factors, a result, and where in it"
)]
pub fn causal_columns(
    kernel: Kernel,
    heads: Heads,
    past: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &mut [f32],
    columns: Columns,
) {
    let Columns {
        width: out_width,
        first: first_column,
    } = columns;
    let Heads {
        num_heads,
        num_key_value_heads,
        head_dim,
    } = heads;
    let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
    let seqlen = q.len() / query_width.max(1);
    assert_eq!(
        q.len(),
        seqlen * query_width,
        "q must be [seqlen, num_heads * head_dim]"
    );
    assert!(
        out.len() == seqlen * out_width && first_column + query_width <= out_width,
        "out must be [seqlen, out_width], and the heads' columns inside"
    );
    assert_eq!(
        k.len(),
        (past + seqlen) * key_width,
        "k must be [past + seqlen, num_key_value_heads * head_dim]"
    );
    assert_eq!(
        v.len(),
        k.len(),
        "v must be [past + seqlen, num_key_value_heads * head_dim]"
    );
    if seqlen == 0 {
        return;
    }
    let keys = past + seqlen;
    let queries_per_key = num_heads / num_key_value_heads;
    let group_width = queries_per_key * head_dim;
    let blocks: Vec<_> = (0..seqlen)
        .step_by(QUERIES_AT_ONCE)
        .map(|first| first..seqlen.min(first + QUERIES_AT_ONCE))
        .collect();
    let groups: Vec<_> = (0..num_key_value_heads)
        .map(|head| first_column + head * group_width..first_column + (head + 1) * group_width)
        .collect();
    // A task packs the keys and values of a head once, so it has all queries of the head unless threads would wait.
    let wanted = TASKS_PER_THREAD * rayon::current_num_threads();
    let parts = wanted.div_ceil(num_key_value_heads).min(blocks.len());
    let mut tasks: Vec<(usize, Vec<Rectangle<'_>>)> = (0..num_key_value_heads * parts)
        .map(|task| (task / parts, Vec::new()))
        .collect();
    for (index, rectangle) in rectangles::cut(out, out_width, &blocks, &groups).enumerate() {
        let (head, block) = (index / blocks.len(), index % blocks.len());
        // Later blocks see more keys, so tasks take them in turn.
        tasks[head * parts + block % parts].1.push(rectangle);
    }
    let idle = Mutex::new(Vec::<Scratch>::new());
    let idle = || idle.lock().unwrap_or_else(PoisonError::into_inner);
    let source = Source {
        kernel,
        heads,
        past,
        keys,
        q,
        k,
        v,
    };
    tasks
        .into_par_iter()
        .with_max_len(1)
        .for_each(|(key_head, rectangles)| {
            let lent = idle().pop();
            let mut scratch = lent.unwrap_or_else(|| Scratch::new(kernel, head_dim, seqlen, keys));
            source.pack(key_head, &rectangles, &mut scratch);
            for mut rectangle in rectangles {
                for query_head in 0..queries_per_key {
                    source.block(key_head, query_head, &mut rectangle, &mut scratch);
                }
            }
            idle().push(scratch);
        });
}

/// Lines of packed factors.
struct Lengths {
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

impl Lengths {
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
            + queries * size_of::<Running>()
    }
}

/// The slabs of an inner size.
fn slabs(kernel: Kernel, inner: usize) -> impl Iterator<Item = Range<usize>> {
    let slab = kernel.slab();
    (0..inner)
        .step_by(slab)
        .map(move |first| first..inner.min(first + slab))
}

/// What a query has seen so far.
#[derive(Debug, Clone, Copy)]
struct Running {
    /// The largest score.
    largest: f32,
    /// Σ e^(score − largest).
    sum: f64,
}

/// What a thread works on.
struct Scratch {
    q: Vec<Line>,
    k: Vec<Line>,
    v: Vec<Line>,
    p: Vec<Line>,
    scores: Vec<f32>,
    context: Vec<f32>,
    running: Vec<Running>,
}

impl Scratch {
    fn new(kernel: Kernel, head_dim: usize, seqlen: usize, keys: usize) -> Self {
        let queries = QUERIES_AT_ONCE.min(seqlen);
        let lengths = Lengths::of(kernel, head_dim, queries, keys);
        let lines = bytemuck::allocation::zeroed_vec;
        let nothing = Running {
            largest: f32::NEG_INFINITY,
            sum: 0.0,
        };
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
}

/// What all tasks read.
struct Source<'a> {
    kernel: Kernel,
    heads: Heads,
    past: usize,
    keys: usize,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
}

impl Source<'_> {
    /// The blocks of the first `keys` keys.
    fn key_blocks(&self, keys: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let all = self.keys;
        (0..keys)
            .step_by(KEYS_AT_ONCE)
            .map(move |first| first..all.min(first + KEYS_AT_ONCE))
    }

    /// Packs what the last of the blocks of queries sees of a head's keys and values.
    fn pack(&self, key_head: usize, rectangles: &[Rectangle<'_>], scratch: &mut Scratch) {
        let Heads {
            num_key_value_heads,
            head_dim,
            ..
        } = self.heads;
        let width = num_key_value_heads * head_dim;
        let last = rectangles.last().map_or(0, |block| block.rows().end);
        let lengths = Lengths::of(self.kernel, head_dim, 0, self.keys);
        let factor = |values| Strided::rows(Values::F32(values), width).at(0, key_head * head_dim);
        for (block, keys) in self.key_blocks(self.past + last).enumerate() {
            let k = factor(self.k).at(keys.start, 0);
            let mut packed = &mut scratch.k[block * lengths.k..][..lengths.k];
            for slab in slabs(self.kernel, head_dim) {
                let lines = self.kernel.column_lines(keys.len(), slab.len());
                let (now, behind) = packed.split_at_mut(lines);
                packed = behind;
                self.kernel
                    .pack_columns(k.at(0, slab.start), keys.len(), slab.len(), now);
            }
            let v =
                Strided::transposed(Values::F32(self.v), width).at(key_head * head_dim, keys.start);
            let packed = &mut scratch.v[block * lengths.v..][..lengths.v];
            self.kernel.pack_columns(v, head_dim, keys.len(), packed);
        }
    }

    /// One head's context of a block of queries.
    fn block(
        &self,
        key_head: usize,
        query_head: usize,
        out: &mut Rectangle<'_>,
        scratch: &mut Scratch,
    ) {
        let Heads {
            num_heads,
            num_key_value_heads,
            head_dim,
        } = self.heads;
        let (kernel, rows) = (self.kernel, out.rows());
        let queries = rows.len();
        let lengths = Lengths::of(kernel, head_dim, queries, self.keys);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let head = key_head * (num_heads / num_key_value_heads) + query_head;
        let q = Strided::rows(Values::F32(self.q), num_heads * head_dim)
            .at(rows.start, head * head_dim);
        let mut packed = &mut scratch.q[..];
        for slab in slabs(kernel, head_dim) {
            let (now, behind) = packed.split_at_mut(kernel.row_lines(queries, slab.len()));
            packed = behind;
            kernel.pack_rows(q.at(0, slab.start), queries, slab.len(), now);
        }
        let context = &mut scratch.context[..queries * head_dim];
        let running = &mut scratch.running[..queries];
        running.fill(Running {
            largest: f32::NEG_INFINITY,
            sum: 0.0,
        });
        let seen = self.past + rows.end;
        for (block, keys) in self.key_blocks(seen).enumerate() {
            // No query sees the last keys of the last block, but values are packed with them.
            let some = keys.len().min(seen - keys.start);
            let scores = &mut scratch.scores[..queries * keys.len()];
            let (mut q, mut k) = (&scratch.q[..], &scratch.k[block * lengths.k..]);
            for slab in slabs(kernel, head_dim) {
                let factors = Factors {
                    x: q,
                    w: k,
                    rows: queries,
                    columns: some,
                    inner: slab.len(),
                };
                kernel.multiply(factors, scores, keys.len(), slab.start > 0);
                q = &q[kernel.row_lines(queries, slab.len())..];
                k = &k[kernel.column_lines(keys.len(), slab.len())..];
            }
            Arch::new().dispatch(Soften {
                scores,
                keys: keys.clone(),
                scale,
                first_seen: self.past + rows.start + 1,
                running,
                context: (block > 0).then_some((&mut *context, head_dim)),
            });
            let probabilities = Strided::rows(Values::F32(scores), keys.len());
            let p = &mut scratch.p[..kernel.row_lines(queries, keys.len())];
            kernel.pack_rows(probabilities, queries, keys.len(), p);
            let factors = Factors {
                x: p,
                w: &scratch.v[block * lengths.v..],
                rows: queries,
                columns: head_dim,
                inner: keys.len(),
            };
            kernel.multiply(factors, context, head_dim, block > 0);
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

/// What a block of scores becomes, compiled for the registers the CPU has.
struct Soften<'a> {
    /// `[queries, keys]`.
    scores: &'a mut [f32],
    keys: Range<usize>,
    scale: f32,
    /// Keys the first query sees, of all.
    first_seen: usize,
    running: &'a mut [Running],
    /// What was summed over earlier keys, and its width.
    context: Option<(&'a mut [f32], usize)>,
}

impl WithSimd for Soften<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            scores,
            keys,
            scale,
            first_seen,
            running,
            mut context,
        } = self;
        let lines = scores.chunks_exact_mut(keys.len()).zip(running);
        for (query, (scores, running)) in lines.enumerate() {
            let visible = (first_seen + query).saturating_sub(keys.start);
            let shrinks = soften(simd, scores, visible.min(keys.len()), scale, running);
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

/// scores ← e^(scale·score − largest) over the first `visible` of them, the rest, keys of the future, become zero; returns what
/// everything summed before must be multiplied with, now that the largest score is another.
#[inline(always)]
fn soften<S: Simd>(
    simd: S,
    scores: &mut [f32],
    visible: usize,
    scale: f32,
    running: &mut Running,
) -> f32 {
    let (seen, future) = scores.split_at_mut(visible);
    future.fill(0.0);
    if seen.is_empty() {
        return 1.0;
    }
    let before = running.largest;
    running.largest = before.max(exp::largest_of(simd, seen) * scale);
    let shrinks = if before == f32::NEG_INFINITY {
        0.0
    } else {
        exp::exp(before - running.largest)
    };
    let sum = exp::exp_minus(simd, seen, scale, running.largest);
    running.sum = running.sum * f64::from(shrinks) + sum;
    shrinks
}

/// The last token's attention: the query heads that share a key head are one product.
fn one_query(heads: Heads, past: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
    let Heads {
        num_heads,
        num_key_value_heads,
        head_dim,
    } = heads;
    let key_width = num_key_value_heads * head_dim;
    let keys = past + 1;
    assert!(
        k.len() == keys * key_width && v.len() == k.len() && out.len() == q.len(),
        "k and v must be [past + 1, num_key_value_heads * head_dim], out as q"
    );
    let queries = num_heads / num_key_value_heads;
    let scale = 1.0 / (head_dim as f32).sqrt();
    out.par_chunks_mut(queries * head_dim)
        .zip(q.par_chunks(queries * head_dim))
        .enumerate()
        // A task of few keys is not worth handing out.
        .with_min_len((KEYS_PER_TASK / keys.max(1)).max(1))
        .for_each_init(
            || vec![0.0f32; queries * keys],
            |scores, (key_head, (out, q))| {
                let q = View::strided(q, queries, head_dim, head_dim);
                let k = View::strided(&k[key_head * head_dim..], keys, head_dim, key_width);
                let v = View::strided(&v[key_head * head_dim..], keys, head_dim, key_width);
                matmul(scores, keys, scale, q, k.transposed(), Threads::One);
                Arch::new().dispatch(Softmax { scores, keys });
                let scores = View::strided(scores, queries, keys, keys);
                matmul(out, head_dim, 1.0, scores, v, Threads::One);
            },
        );
}

/// Softmax over all of each row.
struct Softmax<'a> {
    scores: &'a mut [f32],
    keys: usize,
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for row in self.scores.chunks_exact_mut(self.keys) {
            let largest = exp::largest_of(simd, row);
            let sum = exp::exp_minus(simd, row, 1.0, largest);
            let scale = (1.0 / sum) as f32;
            row.iter_mut().for_each(|value| *value *= scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Straight from the formula, in f64.
    fn plain(heads: Heads, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
        let Heads {
            num_heads,
            num_key_value_heads,
            head_dim,
        } = heads;
        let (qw, kw) = (num_heads * head_dim, num_key_value_heads * head_dim);
        let seqlen = q.len() / qw;
        let mut out = vec![0.0; q.len()];
        for h in 0..num_heads {
            let kh = h / (num_heads / num_key_value_heads);
            for i in 0..seqlen {
                let scores: Vec<f64> = (0..=i)
                    .map(|j| {
                        let dot: f64 = (0..head_dim)
                            .map(|d| {
                                f64::from(q[i * qw + h * head_dim + d])
                                    * f64::from(k[j * kw + kh * head_dim + d])
                            })
                            .sum();
                        dot / (head_dim as f64).sqrt()
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                for (j, s) in scores.iter().enumerate() {
                    for d in 0..head_dim {
                        out[i * qw + h * head_dim + d] +=
                            (s - largest).exp() / sum * f64::from(v[j * kw + kh * head_dim + d]);
                    }
                }
            }
        }
        out
    }

    /// Queries, keys and values between -2 and 2.
    fn waves(heads: Heads, seqlen: usize) -> [Vec<f32>; 3] {
        let wave = |heads_of: usize, pace: f32| -> Vec<f32> {
            (0..seqlen * heads_of * heads.head_dim)
                .map(|i| 2.0 * (i as f32 * pace).sin())
                .collect()
        };
        let keys = heads.num_key_value_heads;
        [
            wave(heads.num_heads, 0.71),
            wave(keys, 0.37),
            wave(keys, 0.53),
        ]
    }

    #[test]
    fn blocked_attention_equals_the_formula_for_any_length_and_grouping() {
        for (seqlen, num_heads, num_key_value_heads, head_dim) in [
            (1, 1, 1, 4),
            (7, 4, 2, 8),
            (QUERIES_AT_ONCE, 2, 1, 16),
            (QUERIES_AT_ONCE + 1, 3, 3, 8),
            (300, 4, 1, 32),
            (KEYS_AT_ONCE + 200, 2, 1, 48),
            (9, 1, 1, 1100),
        ] {
            let heads = Heads {
                num_heads,
                num_key_value_heads,
                head_dim,
            };
            let [q, k, v] = waves(heads, seqlen);
            let exact = plain(heads, &q, &k, &v);
            let [rounded_q, rounded_k, rounded_v] = [&q, &k, &v].map(|values| -> Vec<f32> {
                let rounded = values.iter().map(|&value| half::bf16::from_f32(value));
                rounded.map(half::bf16::to_f32).collect()
            });
            let of_rounded = plain(heads, &rounded_q, &rounded_k, &rounded_v);
            // Scores reach 4·√32, so exp amplifies their rounding of 1e-6 by about that much.
            let is_close = |got: &[f32], exact: &[f64], what: &str| {
                for (got, exact) in got.iter().zip(exact) {
                    assert!(
                        (f64::from(*got) - exact).abs() < 1e-5,
                        "{got} {exact} at seqlen {seqlen}, {what}"
                    );
                }
            };
            // Keys and values are f32, which fewer parts do not hold.
            let is_whole = |kernel: &Kernel| !matches!(kernel, Kernel::Split(..3));
            for kernel in Kernel::all().into_iter().filter(is_whole) {
                let mut out = vec![f32::NAN; q.len()];
                causal(kernel, heads, 0, &q, &k, &v, &mut out);
                if !kernel.is_bf16() {
                    is_close(&out, &exact, "the whole sequence");
                }
                // From rounded inputs, what is left is the rounding of probabilities, 2⁻⁹ of each, and values are up to 2.
                let allowed = 2.0 / 512.0 + 1e-4;
                let exact = if kernel.is_bf16() {
                    &of_rounded
                } else {
                    &exact
                };
                for (got, exact) in out.iter().zip(exact) {
                    assert!(
                        (f64::from(*got) - exact).abs() < allowed,
                        "{kernel:?}: {got} {exact}"
                    );
                }
            }
            let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
            for (first, last) in [(0, 1), (seqlen - 1, seqlen), (seqlen / 2, seqlen)] {
                let own = first * query_width..last * query_width;
                let mut part = vec![f32::NAN; own.len()];
                let (k, v) = (&k[..last * key_width], &v[..last * key_width]);
                causal(
                    Kernel::Fused,
                    heads,
                    first,
                    &q[own.clone()],
                    k,
                    v,
                    &mut part,
                );
                is_close(&part, &exact[own], "behind cached keys");
            }
        }
    }

    #[test]
    fn neither_threads_nor_groups_of_heads_change_a_bit() {
        let (seqlen, num_heads, num_key_value_heads, head_dim) = (700, 6, 3, 40);
        let heads = Heads {
            num_heads,
            num_key_value_heads,
            head_dim,
        };
        let [q, k, v] = waves(heads, seqlen);
        for kernel in Kernel::all() {
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap();
                let mut out = vec![0.0; q.len()];
                pool.install(|| causal(kernel, heads, 0, &q, &k, &v, &mut out));
                out
            };
            let one = run(1);
            assert!(one == run(2) && one == run(7), "{kernel:?}");
        }
    }
}
