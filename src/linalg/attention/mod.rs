//! Causal attention in blocks of queries and keys, without a `[heads, seq, seq]` tensor.
//!
//! For each head h and query row i: p_ij = exp(s_ij − max_j s_ij) / Σ_j exp(s_ij − max_j s_ij) over keys j ≤ i with
//! s_ij = q_i·k_j / √head_dim, and the context row is Σ_j p_ij v_j (Vaswani et al. 2017, arXiv:1706.03762, eq. 1). A block
//! of queries takes the keys up to its last row block by block, so that scores, keys and values stay in a core's cache. Sums are
//! relative to the largest score so far; they are scaled down when a later block has a larger score (Milakov and Gimelshein 2018,
//! arXiv:1805.02867, algorithm 3). Scores, softmax and sums are f32, as in the reference's eager path. A bf16 kernel rounds queries,
//! keys, values and exp(s_ij − max) to bf16 for the two products.
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
//! | `one_query` | attention of one token, for text generation: a row of scores per head, without blocks |
//! | `scheme` | heads, a sequence, and the interface of `blocks` and `panels` |
//! | `panels` | attention by f32 multiply-adds |
//!
//! Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): query head h reads key/value head
//! h / (num_heads / num_key_value_heads), without a repeated copy.

pub mod backward;
mod blocks;
mod one_query;
mod panels;
mod scheme;

use rayon::prelude::*;

use super::buffer_pool::BufferPool;
use super::product::Kernel;
use super::rectangles::{self, Rectangle};
pub use scheme::{Causal, Heads};
use scheme::{Inputs, Scheme};

/// The least tasks per thread, if there are enough blocks of queries.
const TASKS_PER_THREAD: usize = 2;

/// Bytes of scratch of [`Causal`] for `queries` tokens, of which the last sees `keys`, with `threads` threads.
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
        let Self { kernel, heads, past, q, k, v } = self;
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
        let source = Inputs { kernel, heads, past, seqlen, keys: past + seqlen, q, k, v };
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
    use super::*;

    /// Straight from the formula, in f64.
    fn plain(heads: Heads, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
        let Heads { num_heads, num_key_value_heads, head_dim } = heads;
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
                Causal { kernel, heads, past: 0, q: &q, k: &k, v: &v }.context(&mut out);
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
                past: 0,
                seqlen,
                keys: seqlen,
                q: &q,
                k: &k,
                v: &v,
            };
            let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
            let all = Columns { width: query_width, first: 0 };
            let mut out = vec![f32::NAN; q.len()];
            share::<blocks::BlockScratch>(&source, &mut out, all);
            is_close(&out, &exact, "by blocks");
            for (first, last) in [(0, 1), (seqlen - 1, seqlen), (seqlen / 2, seqlen)] {
                let own = first * query_width..last * query_width;
                let mut part = vec![f32::NAN; own.len()];
                let (k, v) = (&k[..last * key_width], &v[..last * key_width]);
                Causal { kernel: Kernel::Fused, heads, past: first, q: &q[own.clone()], k, v }
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
        for kernel in Kernel::all() {
            let run = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut out = vec![0.0; q.len()];
                pool.install(|| {
                    Causal { kernel, heads, past: 0, q: &q, k: &k, v: &v }.context(&mut out)
                });
                out
            };
            let one = run(1);
            assert!(one == run(2) && one == run(7), "{kernel:?}");
        }
    }
}
