//! Comparison of the panels that blocks of different CPUs give.

use super::super::super::product::Kernel;
use super::super::super::product::Values::F32;
use super::super::super::rectangles;
use super::super::{Causal, Scoring};
use super::*;

/// Compares the blocks of AVX-512 and of narrower registers with this CPU's own blocks.
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
    let heads = Heads { num_heads: 1, num_key_value_heads: 1, head_dim: 20 };
    let seqlen = KEYS_AT_ONCE + 100;
    let wave = |pace: f32| -> Vec<f32> {
        (0..seqlen * 20).map(|i| 2.0 * (i as f32 * pace).sin()).collect()
    };
    let (q, k, v) = (wave(0.71), wave(0.37), wave(0.53));
    let kernel = Kernel::Fused;
    let usual = Scoring::of_width(20);
    let by = |block: (usize, usize), scoring: Scoring| {
        let (q, k, v) = (&q, F32(&k), F32(&v));
        let source = Inputs { kernel, heads, scoring, past: 0, seqlen, keys: seqlen, q, k, v };
        let mut out = vec![f32::NAN; seqlen * 20];
        let rows: Vec<_> = (0..seqlen)
            .step_by(QUERIES_AT_ONCE)
            .map(|first| first..seqlen.min(first + QUERIES_AT_ONCE))
            .collect();
        let columns = 0..20;
        let mut rectangles: Vec<_> =
            rectangles::cut(&mut out, 20, &rows, std::slice::from_ref(&columns)).collect();
        let mut scratch = PanelScratch::with_blocks(block, &source);
        scratch.pack(&source, 0, &rectangles);
        for rectangle in &mut rectangles {
            Simd::vectorize(simd, Run(scratch.start(&source, 0, 0, rectangle)));
        }
        out
    };
    let windows = [1, 20, 48, 90, 300, KEYS_AT_ONCE].map(Some);
    for window in [None].into_iter().chain(windows) {
        for soft_cap in [None, Some(3.0)] {
            let scoring = Scoring { soft_cap, window, ..usual };
            let narrow = by((6, 16), scoring);
            assert_eq!(narrow, by((8, 48), scoring), "{scoring:?}");
            let mut here = vec![f32::NAN; seqlen * 20];
            Causal { kernel, heads, scoring, past: 0, q: &q, k: F32(&k), v: F32(&v) }
                .context(&mut here);
            assert_eq!(narrow, here, "{scoring:?}");
        }
    }
}

/// Compares panels with plain loops, which give the same bits on every CPU that multiplies and adds in one step.
#[test]
fn panels_have_the_bits_of_plain_loops() {
    let heads = Heads { num_heads: 2, num_key_value_heads: 1, head_dim: 20 };
    let (past, seqlen) = (37, KEYS_AT_ONCE + 2 * QUERIES_AT_ONCE + 5);
    let (keys, head_dim, width) = (past + seqlen, 20, 40);
    let wave = |count: usize, pace: f32| -> Vec<f32> {
        (0..count).map(|i| 2.0 * (i as f32 * pace).sin()).collect()
    };
    let q = wave(seqlen * width, 0.71);
    let (k, v) = (wave(keys * head_dim, 0.37), wave(keys * head_dim, 0.53));
    let mut out = vec![f32::NAN; seqlen * width];
    let (kernel, scoring) = (Kernel::Fused, Scoring::of_width(head_dim));
    Causal { kernel, heads, scoring, past, q: &q, k: F32(&k), v: F32(&v) }.context(&mut out);

    let is_one_step = Kernel::Fused.name().ends_with("in one step");
    let plus = |sum: f32, x: f32, w: f32| {
        if is_one_step { x.mul_add(w, sum) } else { x * w + sum }
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
                    *context = seen
                        .iter()
                        .zip(&p)
                        .fold(before, |sum, (key, p)| plus(sum, v[key * head_dim + dim], *p));
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
