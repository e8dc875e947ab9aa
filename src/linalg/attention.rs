//! Causal attention, computed in blocks of queries: no `[heads, seq, seq]` tensor ever exists.
//!
//! For each head h and query row i: p_ij = exp(s_ij − max_j s_ij) / Σ_j exp(s_ij − max_j s_ij) over keys j ≤ i with
//! s_ij = q_i·k_j / √head_dim, and the context row is Σ_j p_ij v_j (Vaswani et al. 2017, arXiv:1706.03762, eq. 1). A block
//! of queries needs the keys up to its last row only, which halves the work. Everything is f32, as in the reference's
//! eager path, which keeps scores, softmax and products in f32 too.
//!
//! Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): query head h reads key/value head
//! h / (num_heads / num_key_value_heads); no repeated copy is made.

use rayon::prelude::*;

use super::exp;
use super::matmul::{Threads, View, matmul};

/// Queries per block: the score block of 2048 keys is 1 MiB, the L2 cache of one core.
const QUERIES_AT_ONCE: usize = 128;

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
pub fn scratch_bytes(queries: usize, keys: usize, threads: usize) -> usize {
    4 * keys * QUERIES_AT_ONCE.min(queries) * threads
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
pub fn causal(heads: Heads, past: usize, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
    let columns = Columns {
        width: heads.num_heads * heads.head_dim,
        first: 0,
    };
    if q.len() == columns.width {
        return one_query(heads, past, q, k, v, out);
    }
    causal_columns(heads, past, q, k, v, out, columns);
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
pub fn causal_columns(
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
    let queries_per_key = num_heads / num_key_value_heads;
    let scale = 1.0 / (head_dim as f32).sqrt();
    out.par_chunks_mut(QUERIES_AT_ONCE * out_width)
        .enumerate()
        .rev()
        .with_max_len(1)
        .for_each_init(
            || vec![0.0f32; QUERIES_AT_ONCE.min(seqlen) * (past + seqlen)],
            |scores, (block, out)| {
                let first = block * QUERIES_AT_ONCE;
                let queries = out.len() / out_width;
                let keys = past + first + queries;
                for head in 0..num_heads {
                    let key_offset = head / queries_per_key * head_dim;
                    let q = View::strided(
                        &q[first * query_width + head * head_dim..],
                        queries,
                        head_dim,
                        query_width,
                    );
                    let k = View::strided(&k[key_offset..], keys, head_dim, key_width);
                    let v = View::strided(&v[key_offset..], keys, head_dim, key_width);
                    let scores = &mut scores[..queries * keys];
                    matmul(scores, keys, scale, q, k.transposed(), Threads::One);
                    for (query, row) in scores.chunks_exact_mut(keys).enumerate() {
                        softmax_prefix(row, past + first + query + 1);
                    }
                    let scores = View::strided(scores, queries, keys, keys);
                    matmul(
                        &mut out[first_column + head * head_dim..],
                        out_width,
                        1.0,
                        scores,
                        v,
                        Threads::One,
                    );
                }
            },
        );
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
                for row in scores.chunks_exact_mut(keys) {
                    softmax_prefix(row, keys);
                }
                let scores = View::strided(scores, queries, keys, keys);
                matmul(out, head_dim, 1.0, scores, v, Threads::One);
            },
        );
}

/// Softmax over the first `visible` elements of a row; the rest, keys of the future, become zero.
fn softmax_prefix(row: &mut [f32], visible: usize) {
    let (seen, future) = row.split_at_mut(visible);
    let largest = exp::largest(seen);
    let sum = exp::exp_minus(seen, largest);
    let scale = (1.0 / sum) as f32;
    seen.iter_mut().for_each(|value| *value *= scale);
    future.fill(0.0);
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

    #[test]
    fn blocked_attention_equals_the_formula_for_any_length_and_grouping() {
        for (seqlen, num_heads, num_key_value_heads, head_dim) in [
            (1, 1, 1, 4),
            (7, 4, 2, 8),
            (QUERIES_AT_ONCE, 2, 1, 16),
            (QUERIES_AT_ONCE + 1, 3, 3, 8),
            (300, 4, 1, 32),
        ] {
            let heads = Heads {
                num_heads,
                num_key_value_heads,
                head_dim,
            };
            let wave = |count: usize, pace: f32| {
                (0..count)
                    .map(|i| 2.0 * (i as f32 * pace).sin())
                    .collect::<Vec<_>>()
            };
            let q = wave(seqlen * num_heads * head_dim, 0.71);
            let k = wave(seqlen * num_key_value_heads * head_dim, 0.37);
            let v = wave(seqlen * num_key_value_heads * head_dim, 0.53);
            let mut out = vec![f32::NAN; q.len()];
            causal(heads, 0, &q, &k, &v, &mut out);
            let exact = plain(heads, &q, &k, &v);
            // Scores reach 4·√32, so exp amplifies their rounding of 1e-6 by about that much.
            let is_close = |got: &[f32], exact: &[f64], what: &str| {
                for (got, exact) in got.iter().zip(exact) {
                    assert!(
                        (f64::from(*got) - exact).abs() < 1e-5,
                        "{got} {exact} at seqlen {seqlen}, {what}"
                    );
                }
            };
            is_close(&out, &exact, "the whole sequence");
            let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
            for (first, last) in [(0, 1), (seqlen - 1, seqlen), (seqlen / 2, seqlen)] {
                let own = first * query_width..last * query_width;
                let mut part = vec![f32::NAN; own.len()];
                let (k, v) = (&k[..last * key_width], &v[..last * key_width]);
                causal(heads, first, &q[own.clone()], k, v, &mut part);
                is_close(&part, &exact[own], "behind cached keys");
            }
        }
    }
}
