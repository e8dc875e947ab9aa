//! Causal attention in blocks of queries and keys, without a `[heads, seq, seq]` tensor.
//!
//! For each head h and query at position i, over the keys j ≤ i and, in a layer with a window of w tokens, j > i − w:
//!
//! ```text
//! s_ij = a·q_i·k_j, and with a soft cap s_ij ← cap·tanh(s_ij / cap)       (`Scoring`; the usual scale a is 1 / √head_dim)
//! p_ij = exp(s_ij − max_j s_ij) / Σ_j exp(s_ij − max_j s_ij)
//! context_i = Σ_j p_ij v_j
//! ```
//!
//! (Vaswani et al. 2017, arXiv:1706.03762, eq. 1; windows: Beltagy et al. 2020, arXiv:2004.05150; caps: Gemma Team 2024,
//! arXiv:2408.00118; the order is the order of transformers' eager attention.) A block of queries takes its visible keys block by block,
//! so that scores, keys and values stay in a core's cache. Blocks of keys before the window of all its queries are neither packed nor
//! computed, so a window costs O(seqlen·window).
//!
//! Sums are relative to the largest score so far; they are scaled down when a later block has a larger score (Milakov and Gimelshein
//! 2018, arXiv:1805.02867, algorithm 3). Scores, softmax and sums are f32, as in the reference's eager path. A bf16 kernel rounds
//! queries, keys, values and exp(s_ij − max) to bf16 for the two products.
//!
//! | kernel | scores of | softmax | unused results |
//! | --- | --- | --- | --- |
//! | `Fused` (`panels`) | as many queries as a block of C is wide, transposed | down the register lanes | the last few keys of each panel |
//! | `Split`, `Amx`, `Avx512` (`blocks`) | 128 queries | row by row, then packed again | half of the last 128 keys, values of up to 512 |
//!
//! | file | content |
//! | --- | --- |
//! | `backward` | gradients of causal attention, from the gradient of a loss with respect to its contexts |
//! | `blocks` | attention by products of packed factors, for kernels that round or split them |
//! | `cached_rows` | products of one token's queries with cached keys, and sums of cached values, on one thread |
//! | `one_query` | attention of one token, for text generation: pieces of positions, put together in their order |
//! | `scheme` | heads, a sequence, and the interface of `blocks` and `panels` |
//! | `panels` | attention by f32 multiply-adds |
//!
//! Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): query head h reads key/value head
//! h / (num_heads / num_key_value_heads), without a repeated copy.

pub mod backward;
mod blocks;
mod cached_rows;
mod one_query;
mod panels;
mod scheme;

use rayon::prelude::*;

use super::buffer_pool::BufferPool;
use super::product::Kernel;
use super::rectangles::{self, Rectangle};
pub use scheme::{Causal, Heads, Scoring};
use scheme::{Inputs, Scheme};

/// The least tasks per thread, if there are enough blocks of queries.
const TASKS_PER_THREAD: usize = 2;

/// Bytes of scratch of [`Causal`] for `queries` tokens, of which the last follows `keys` - 1 tokens, with `threads` threads. A window may
/// need less.
pub fn scratch_bytes(
    kernel: Kernel,
    head_dim: usize,
    queries: usize,
    keys: usize,
    threads: usize,
) -> usize {
    threads
        * match kernel {
            Kernel::Fused => panels::scratch_bytes(head_dim, queries, keys),
            _ => blocks::scratch_bytes(kernel, head_dim, queries, keys),
        }
}

/// The columns of some heads in the context of all heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Columns of the context of all heads.
    pub width: usize,
    /// The column of the first head's context.
    pub first: usize,
}

impl Causal<'_> {
    /// Computes the contexts of all heads side by side, `out` `[seqlen, num_heads * head_dim]`.
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn context(self, out: &mut [f32]) {
        let columns = Columns { width: self.heads.num_heads * self.heads.head_dim, first: 0 };
        match self.q.len() == columns.width {
            true => one_query::one_query(self, out),
            false => self.context_columns(out, columns),
        }
    }

    /// Computes [`Causal::context`] for some heads, and writes their columns in the context of all heads, `out` `[seqlen, columns.width]`.
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape.
    pub fn context_columns(self, out: &mut [f32], columns: Columns) {
        let Self { kernel, heads, scoring, past, q, k, v } = self;
        let Heads { num_heads, num_key_value_heads, head_dim } = heads;
        let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
        let seqlen = q.len() / query_width.max(1);
        assert_eq!(q.len(), seqlen * query_width, "q must be [seqlen, num_heads * head_dim]");
        assert!(
            out.len() == seqlen * columns.width && columns.first + query_width <= columns.width,
            "out must be [seqlen, width], and the heads' columns inside"
        );
        assert_eq!(
            k.len(),
            (past + seqlen) * key_width,
            "k must be [past + seqlen, num_key_value_heads * head_dim]"
        );
        assert_eq!(v.len(), k.len(), "v must be [past + seqlen, num_key_value_heads * head_dim]");
        if seqlen == 0 {
            return;
        }
        let source = Inputs { kernel, heads, scoring, past, seqlen, keys: past + seqlen, q, k, v };
        match kernel {
            Kernel::Fused => share::<panels::PanelScratch>(&source, out, columns),
            _ => share::<blocks::BlockScratch>(&source, out, columns),
        }
    }
}

/// Distributes heads and blocks of queries over threads.
fn share<S: Scheme>(source: &Inputs<'_>, out: &mut [f32], columns: Columns) {
    let Heads { num_heads, num_key_value_heads, head_dim } = source.heads;
    let queries_per_key = num_heads / num_key_value_heads;
    let group_width = queries_per_key * head_dim;
    let blocks: Vec<_> = (0..source.seqlen)
        .step_by(S::QUERIES_AT_ONCE)
        .map(|first| first..source.seqlen.min(first + S::QUERIES_AT_ONCE))
        .collect();
    let groups: Vec<_> = (0..num_key_value_heads)
        .map(|head| columns.first + head * group_width..columns.first + (head + 1) * group_width)
        .collect();
    // A task packs the keys and values of a head once. So it gets all queries of the head, unless threads would be idle.
    let wanted = TASKS_PER_THREAD * rayon::current_num_threads();
    let parts = wanted.div_ceil(num_key_value_heads).min(blocks.len());
    let mut tasks: Vec<(usize, Vec<Rectangle<'_>>)> =
        (0..num_key_value_heads * parts).map(|task| (task / parts, Vec::new())).collect();
    for (index, rectangle) in rectangles::cut(out, columns.width, &blocks, &groups).enumerate() {
        let (head, block) = (index / blocks.len(), index % blocks.len());
        // Later blocks see more keys, so the tasks take blocks in turn.
        tasks[head * parts + block % parts].1.push(rectangle);
    }
    let scratch = BufferPool::<S>::new();
    tasks.into_par_iter().with_max_len(1).for_each(|(key_head, rectangles)| {
        scratch.lend(
            || S::new(source),
            |scratch| {
                scratch.pack(source, key_head, &rectangles);
                for mut rectangle in rectangles {
                    for query_head in 0..queries_per_key {
                        scratch.block(source, key_head, query_head, &mut rectangle);
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::super::product::Values::F32;
    use super::*;

    /// Straight from the formula, in f64.
    fn plain(heads: Heads, scoring: Scoring, [q, k, v]: [&[f32]; 3]) -> Vec<f64> {
        let queries = q.chunks(heads.num_heads * heads.head_dim).enumerate();
        queries.flat_map(|(i, q)| plain_query(heads, scoring, i, [q, k, v])).collect()
    }

    /// The context of the query at position `i`.
    pub(super) fn plain_query(
        heads: Heads,
        scoring: Scoring,
        i: usize,
        [q, k, v]: [&[f32]; 3],
    ) -> Vec<f64> {
        let Heads { num_heads, num_key_value_heads, head_dim } = heads;
        let kw = num_key_value_heads * head_dim;
        let mut out = vec![0.0; q.len()];
        for h in 0..num_heads {
            let kh = h / (num_heads / num_key_value_heads);
            let visible = (0..=i).filter(|j| scoring.window.is_none_or(|window| j + window > i));
            let scores: Vec<(usize, f64)> = visible
                .map(|j| {
                    let dot: f64 = (0..head_dim)
                        .map(|d| {
                            f64::from(q[h * head_dim + d])
                                * f64::from(k[j * kw + kh * head_dim + d])
                        })
                        .sum();
                    let score = dot * f64::from(scoring.scale);
                    let cap = scoring.soft_cap.map(f64::from);
                    (j, cap.map_or(score, |cap| cap * (score / cap).tanh()))
                })
                .collect();
            let largest = scores.iter().map(|(_, s)| *s).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|(_, s)| (s - largest).exp()).sum();
            for &(j, s) in &scores {
                for d in 0..head_dim {
                    out[h * head_dim + d] +=
                        (s - largest).exp() / sum * f64::from(v[j * kw + kh * head_dim + d]);
                }
            }
        }
        out
    }

    /// Cases of windows and caps: at and around the lengths of blocks, and longer than the sequence.
    fn scorings() -> Vec<Scoring> {
        let windows = [1, 3, 48, 127, 128, 129, 479, 480, 481, 511, 512, 513, 5000];
        let of = |soft_cap, window| Scoring { scale: 0.2, soft_cap, window };
        let mut all: Vec<_> = windows.iter().map(|window| of(None, Some(*window))).collect();
        all.extend([of(None, None), of(Some(4.0), None), of(Some(50.0), None)]);
        all.extend([of(Some(4.0), Some(1)), of(Some(4.0), Some(100)), of(Some(50.0), Some(512))]);
        all
    }

    #[test]
    fn windows_and_caps_follow_the_formula_with_every_kernel() {
        let heads = Heads { num_heads: 2, num_key_value_heads: 1, head_dim: 16 };
        let (seqlen, width) = (1100, 32);
        let waves = waves(heads, seqlen).map(|values| -> Vec<f32> {
            // Numbers that bf16 holds, so that all kernels have one formula.
            values.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect()
        });
        let [q, k, v] = waves.each_ref().map(Vec::as_slice);
        for scoring in scorings() {
            let exact = plain(heads, scoring, [q, k, v]);
            let check = |got: &[f32], first: usize, allowed: f64, what: &str| {
                for (at, (got, exact)) in got.iter().zip(&exact[first * width..]).enumerate() {
                    let (apart, query) = ((f64::from(*got) - exact).abs(), first + at / width);
                    assert!(apart < allowed, "{scoring:?}, {what}, query {query}: {got} {exact}");
                }
            };
            for kernel in Kernel::all() {
                let allowed = if kernel.is_bf16() { 2.0 / 512.0 + 1e-4 } else { 1e-5 };
                for (first, last) in [(0, seqlen), (0, 1), (700, 990), (1023, 1100), (999, 1000)] {
                    let q = &q[first * width..last * width];
                    let [k, v] = [k, v].map(|values| F32(&values[..last * 16]));
                    let mut out = vec![f32::NAN; q.len()];
                    let source = Causal { kernel, heads, scoring, past: first, q, k, v };
                    source.context(&mut out);
                    check(&out, first, allowed, &format!("{kernel:?} of {first}..{last}"));
                    if last - first == 1 {
                        // The context of one token, by blocks.
                        out.fill(f32::NAN);
                        source.context_columns(&mut out, Columns { width, first: 0 });
                        check(&out, first, allowed, &format!("{kernel:?} by blocks of {first}"));
                    }
                }
            }
            let kernel = Kernel::Fused;
            let (k, v) = (F32(k), F32(v));
            let source = Inputs { kernel, heads, scoring, past: 0, seqlen, keys: seqlen, q, k, v };
            let mut out = vec![f32::NAN; q.len()];
            share::<blocks::BlockScratch>(&source, &mut out, Columns { width, first: 0 });
            check(&out, 0, 1e-5, "by blocks");
        }
    }

    #[test]
    fn a_window_over_a_long_sequence_is_the_attention_of_its_last_keys() {
        let heads = Heads { num_heads: 1, num_key_value_heads: 1, head_dim: 8 };
        let (seqlen, window) = (6000, 70);
        let [mut q, k, v] = waves(heads, seqlen);
        // Scores of some hundreds: sums of blocks differ by many powers of e.
        q.iter_mut().for_each(|q| *q *= 50.0);
        let scoring = Scoring { window: Some(window), ..Scoring::of_width(8) };
        for kernel in Kernel::all() {
            let mut out = vec![f32::NAN; q.len()];
            Causal { kernel, heads, scoring, past: 0, q: &q, k: F32(&k), v: F32(&v) }
                .context(&mut out);
            assert!(out.iter().all(|value| value.is_finite()), "{kernel:?}");
            let last = (seqlen - window) * 8..seqlen * 8;
            let [q, k, v] = [&q, &k, &v].map(|values| &values[last.clone()]);
            let mut alone = vec![f32::NAN; q.len()];
            let scoring = Scoring::of_width(8);
            let (k, v) = (F32(k), F32(v));
            Causal { kernel, heads, scoring, past: 0, q, k, v }.context(&mut alone);
            for (got, alone) in out[(seqlen - 1) * 8..].iter().zip(&alone[(window - 1) * 8..]) {
                assert!((got - alone).abs() < 1e-2, "{kernel:?}: {got} {alone}");
            }
        }
    }

    #[test]
    fn operations_count_visible_keys() {
        let heads = Heads { num_heads: 1, num_key_value_heads: 1, head_dim: 1 };
        for window in [None, Some(1), Some(3), Some(6), Some(7), Some(100)] {
            let scoring = Scoring { window, ..Scoring::of_width(1) };
            for (past, tokens) in [(0, 1), (0, 6), (2, 5), (5, 1), (6, 4), (200, 9)] {
                let visible = |position: usize| (position + 1).min(window.unwrap_or(usize::MAX));
                let pairs: usize = (past..past + tokens).map(visible).sum();
                assert_eq!(heads.operations(scoring, past, tokens), 4 * pairs, "{window:?} {past}");
            }
        }
    }

    /// Queries, keys and values between -2 and 2.
    pub(super) fn waves(heads: Heads, seqlen: usize) -> [Vec<f32>; 3] {
        let wave = |heads_of: usize, pace: f32| -> Vec<f32> {
            (0..seqlen * heads_of * heads.head_dim).map(|i| 2.0 * (i as f32 * pace).sin()).collect()
        };
        let keys = heads.num_key_value_heads;
        [wave(heads.num_heads, 0.71), wave(keys, 0.37), wave(keys, 0.53)]
    }

    #[test]
    fn blocked_attention_equals_the_formula_for_any_length_and_grouping() {
        for (seqlen, num_heads, num_key_value_heads, head_dim) in [
            (1, 1, 1, 4),
            (7, 4, 2, 8),
            (blocks::BlockScratch::QUERIES_AT_ONCE, 2, 1, 16),
            (blocks::BlockScratch::QUERIES_AT_ONCE + 1, 3, 3, 8),
            (panels::PanelScratch::QUERIES_AT_ONCE, 2, 1, 20),
            (300, 4, 1, 32),
            (700, 2, 1, 48),
            (9, 1, 1, 1100),
        ] {
            let heads = Heads { num_heads, num_key_value_heads, head_dim };
            let scoring = Scoring::of_width(head_dim);
            let [q, k, v] = waves(heads, seqlen);
            let exact = plain(heads, scoring, [&q, &k, &v]);
            let [rounded_q, rounded_k, rounded_v] = [&q, &k, &v].map(|values| -> Vec<f32> {
                let rounded = values.iter().map(|&value| half::bf16::from_f32(value));
                rounded.map(half::bf16::to_f32).collect()
            });
            let of_rounded = plain(heads, scoring, [&rounded_q, &rounded_k, &rounded_v]);
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
                Causal { kernel, heads, scoring, past: 0, q: &q, k: F32(&k), v: F32(&v) }
                    .context(&mut out);
                if !kernel.is_bf16() {
                    is_close(&out, &exact, "the whole sequence");
                }
                // From rounded inputs, what is left is the rounding of probabilities, 2⁻⁹ of each, and values are up to 2.
                let allowed = 2.0 / 512.0 + 1e-4;
                let exact = if kernel.is_bf16() { &of_rounded } else { &exact };
                for (got, exact) in out.iter().zip(exact) {
                    assert!((f64::from(*got) - exact).abs() < allowed, "{kernel:?}: {got} {exact}");
                }
            }
            // Blocks of packed factors by a kernel that every CPU has.
            let source = Inputs {
                kernel: Kernel::Fused,
                heads,
                scoring,
                past: 0,
                seqlen,
                keys: seqlen,
                q: &q,
                k: F32(&k),
                v: F32(&v),
            };
            let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
            let all = Columns { width: query_width, first: 0 };
            let mut out = vec![f32::NAN; q.len()];
            share::<blocks::BlockScratch>(&source, &mut out, all);
            is_close(&out, &exact, "by blocks");
            for (first, last) in [(0, 1), (seqlen - 1, seqlen), (seqlen / 2, seqlen)] {
                let own = first * query_width..last * query_width;
                let mut part = vec![f32::NAN; own.len()];
                let (k, v) = (F32(&k[..last * key_width]), F32(&v[..last * key_width]));
                let q = &q[own.clone()];
                Causal { kernel: Kernel::Fused, heads, scoring, past: first, q, k, v }
                    .context(&mut part);
                is_close(&part, &exact[own], "behind cached keys");
            }
        }
    }

    #[test]
    fn neither_threads_nor_groups_of_heads_change_a_bit() {
        let (seqlen, num_heads, num_key_value_heads, head_dim) = (700, 6, 3, 40);
        let heads = Heads { num_heads, num_key_value_heads, head_dim };
        let [q, k, v] = waves(heads, seqlen);
        let usual = Scoring::of_width(head_dim);
        let other = Scoring { soft_cap: Some(5.0), window: Some(200), ..usual };
        let kernels = Kernel::all().into_iter();
        for (kernel, scoring) in kernels.flat_map(|kernel| [(kernel, usual), (kernel, other)]) {
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut out = vec![0.0; q.len()];
                pool.install(|| {
                    Causal { kernel, heads, scoring, past: 0, q: &q, k: F32(&k), v: F32(&v) }
                        .context(&mut out)
                });
                out
            };
            let one = run(1);
            assert!(one == run(2) && one == run(7), "{kernel:?}, {scoring:?}");
            // The last two heads of keys alone.
            let mut some = vec![0.0; q.len()];
            let part = |values: &[f32], first: usize, width: usize| -> Vec<f32> {
                values.chunks_exact(width).flat_map(|row| &row[first..]).copied().collect()
            };
            let (q, k, v) = (part(&q, 80, 240), part(&k, 40, 120), part(&v, 40, 120));
            let heads = Heads { num_heads: 4, num_key_value_heads: 2, head_dim };
            Causal { kernel, heads, scoring, past: 0, q: &q, k: F32(&k), v: F32(&v) }
                .context_columns(&mut some, Columns { width: 240, first: 80 });
            assert!(part(&one, 80, 240) == part(&some, 80, 240), "{kernel:?}, {scoring:?}");
        }
    }
}
