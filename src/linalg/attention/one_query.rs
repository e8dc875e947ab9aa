//! Attention of one token, for text generation: a row of scores per head, without blocks. Only keys in the window are read.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::super::exp;
use super::super::matmul::{Threads, View, matmul};
use super::scheme::{Causal, Heads, Scoring};

/// The least keys of a task, over all its heads.
const KEYS_PER_TASK: usize = 256;

/// Computes the attention of the last token. The query heads that share a key head form one product.
pub(super) fn one_query(source: Causal<'_>, out: &mut [f32]) {
    let Causal { heads, scoring, past, q, k, v, .. } = source;
    let Heads { num_heads, num_key_value_heads, head_dim } = heads;
    let key_width = num_key_value_heads * head_dim;
    assert!(
        k.len() == (past + 1) * key_width && v.len() == k.len() && out.len() == q.len(),
        "k and v must be [past + 1, num_key_value_heads * head_dim], out as q"
    );
    let first = scoring.first_key(past);
    let (keys, first) = (past + 1 - first, first * key_width);
    let queries = num_heads / num_key_value_heads;
    out.par_chunks_mut(queries * head_dim)
        .zip(q.par_chunks(queries * head_dim))
        .enumerate()
        // Tasks with few keys cost more to distribute than to compute.
        .with_min_len((KEYS_PER_TASK / keys.max(1)).max(1))
        .for_each_init(
            || vec![0.0f32; queries * keys],
            |scores, (key_head, (out, q))| {
                let q = View::strided(q, queries, head_dim, head_dim);
                let k = View::strided(&k[first + key_head * head_dim..], keys, head_dim, key_width);
                let v = View::strided(&v[first + key_head * head_dim..], keys, head_dim, key_width);
                matmul(scores, keys, scoring.scale, q, k.transposed(), Threads::One);
                Arch::new().dispatch(Softmax { scores, keys, scoring });
                let scores = View::strided(scores, queries, keys, keys);
                matmul(out, head_dim, 1.0, scores, v, Threads::One);
            },
        );
}

/// Replaces each row of scaled scores by its softmax.
struct Softmax<'a> {
    scores: &'a mut [f32],
    keys: usize,
    scoring: Scoring,
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        Scoring { scale: 1.0, ..self.scoring }.cap(self.scores);
        for row in self.scores.chunks_exact_mut(self.keys) {
            let largest = exp::largest_of(simd, row);
            let sum = exp::exp_minus(simd, row, 1.0, largest);
            let scale = (1.0 / sum) as f32;
            row.iter_mut().for_each(|value| *value *= scale);
        }
    }
}
