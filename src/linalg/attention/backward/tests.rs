//! Gradients of attention against the formulas in f64.

use super::super::super::product::Values;
use super::super::{Causal, Scoring};
use super::inputs::KEYS;
use super::*;

/// The least norm of a gradient's element that a difference is compared with.
const LEAST: f64 = 0.1;

/// dq, dk and dv straight from the formulas.
fn plain(heads: Heads, scoring: Scoring, [q, k, v, dc]: [&[f32]; 4]) -> [Vec<f64>; 3] {
    let Heads { num_heads, num_key_value_heads, head_dim } = heads;
    let (qw, kw) = (num_heads * head_dim, num_key_value_heads * head_dim);
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|values| vec![0.0; values.len()]);
    let (scale, cap) = (f64::from(scoring.scale), scoring.soft_cap.map(f64::from));
    for h in 0..num_heads {
        let kh = h / (num_heads / num_key_value_heads);
        for i in 0..q.len() / qw {
            let at_q = i * qw + h * head_dim;
            let at_k = |j: usize| j * kw + kh * head_dim;
            let dot = |x: &[f32], at: usize, y: &[f32], other: usize| -> f64 {
                (0..head_dim).map(|d| f64::from(x[at + d]) * f64::from(y[other + d])).sum()
            };
            let score = |j: usize| {
                let score = dot(q, at_q, k, at_k(j)) * scale;
                let capped = cap.map_or(score, |cap| cap * (score / cap).tanh());
                let is_visible = scoring.window.is_none_or(|window| j + window > i);
                if is_visible { capped } else { f64::NEG_INFINITY }
            };
            let scores: Vec<f64> = (0..=i).map(score).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
            let dp: Vec<f64> = (0..=i).map(|j| dot(dc, at_q, v, at_k(j))).collect();
            let shared: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for j in 0..=i {
                let slope = match cap {
                    Some(cap) if p[j] > 0.0 => 1.0 - (scores[j] / cap).powi(2),
                    _ => 1.0,
                };
                let ds = p[j] * (dp[j] - shared) * slope * scale;
                for d in 0..head_dim {
                    dv[at_k(j) + d] += p[j] * f64::from(dc[at_q + d]);
                    dk[at_k(j) + d] += ds * f64::from(q[at_q + d]);
                    dq[at_q + d] += ds * f64::from(k[at_k(j) + d]);
                }
            }
        }
    }
    [dq, dk, dv]
}

fn waves(heads: Heads, seqlen: usize) -> [Vec<f32>; 4] {
    let wave = |heads_of: usize, pace: f32| -> Vec<f32> {
        (0..seqlen * heads_of * heads.head_dim).map(|i| 2.0 * (i as f32 * pace).sin()).collect()
    };
    let (queries, keys) = (heads.num_heads, heads.num_key_value_heads);
    [wave(queries, 0.71), wave(keys, 0.37), wave(keys, 0.53), wave(queries, 0.29)]
}

fn run(
    kernel: Kernel,
    heads: Heads,
    scoring: Scoring,
    [q, k, v, dc]: [&[f32]; 4],
) -> [Vec<f32>; 3] {
    let mut context = vec![f32::NAN; q.len()];
    Causal { kernel, heads, scoring, past: 0, q, k: Values::F32(k), v: Values::F32(v) }
        .context(&mut context);
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|values| vec![f32::NAN; values.len()]);
    let seqlen = q.len() / (heads.num_heads * heads.head_dim);
    let mut partial = vec![f32::NAN; partial_elements(heads, seqlen)];
    let inputs = AttentionInputs { scoring, q, k, v, context: &context, context_gradient: dc };
    let out = AttentionGradients { q: &mut dq, k: &mut dk, v: &mut dv };
    causal_backward(kernel, heads, inputs, out, &mut partial);
    [dq, dk, dv]
}

/// The norm of the difference over the norm. With a window of one key, gradients of scores are 0; elements of other gradients are about 1.
fn apart(got: &[f32], exact: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = got.iter().zip(exact);
    norm(&mut pairs.map(|(got, exact)| f64::from(*got) - exact))
        / norm(&mut exact.iter().copied()).max(LEAST * (exact.len() as f64).sqrt())
}

#[test]
fn gradients_are_those_of_the_formulas_for_any_length_and_grouping() {
    for (seqlen, num_heads, num_key_value_heads, head_dim) in [
        (2, 1, 1, 4),
        (7, 4, 2, 8),
        (QUERIES, 2, 1, 16),
        (QUERIES + 1, 3, 3, 10),
        (KEYS + 3, 4, 1, 32),
        (KEYS + QUERIES + 60, 2, 1, 48),
        (9, 1, 1, 1100),
    ] {
        let heads = Heads { num_heads, num_key_value_heads, head_dim };
        let waves = waves(heads, seqlen);
        assert_follows_the_formulas(heads, Scoring::of_width(head_dim), &waves);
    }
}

/// Compares all kernels with the formulas.
fn assert_follows_the_formulas(heads: Heads, scoring: Scoring, waves: &[Vec<f32>; 4]) {
    let inputs = waves.each_ref().map(Vec::as_slice);
    let exact = plain(heads, scoring, inputs);
    let is_whole = |kernel: &Kernel| !matches!(kernel, Kernel::Split(..3));
    for kernel in Kernel::all().into_iter().filter(is_whole) {
        // bf16 rounds factors by up to 2⁻⁹ and scores of up to 4·√head_dim with them. Measured: at most 0.9 % and 2e-6.
        let allowed = if kernel.is_bf16() { 0.05 } else { 2e-5 };
        let got = run(kernel, heads, scoring, inputs);
        for (name, (got, exact)) in ["q", "k", "v"].iter().zip(got.iter().zip(&exact)) {
            let apart = apart(got, exact);
            assert!(
                apart <= allowed,
                "d{name} of {} elements, {heads:?}, {scoring:?}, {kernel:?}: {apart:e}",
                got.len()
            );
        }
    }
}

#[test]
fn gradients_of_windows_and_caps_are_those_of_the_formulas() {
    let heads = Heads { num_heads: 2, num_key_value_heads: 1, head_dim: 16 };
    let waves = waves(heads, 2 * KEYS + 60);
    let windows = [1, 3, 48, QUERIES - 1, QUERIES, QUERIES + 1, KEYS - 1, KEYS, KEYS + 1, 5000];
    let of = |soft_cap, window| Scoring { scale: 0.2, soft_cap, window };
    let mut scorings: Vec<_> = windows.iter().map(|window| of(None, Some(*window))).collect();
    scorings.extend([of(Some(4.0), None), of(Some(50.0), None)]);
    scorings.extend([of(Some(4.0), Some(1)), of(Some(4.0), Some(100)), of(Some(50.0), Some(KEYS))]);
    for scoring in scorings {
        assert_follows_the_formulas(heads, scoring, &waves);
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let heads = Heads { num_heads: 6, num_key_value_heads: 3, head_dim: 24 };
    let waves = waves(heads, 700);
    let usual = Scoring::of_width(24);
    let other = Scoring { soft_cap: Some(5.0), window: Some(50), ..usual };
    let kernels = Kernel::all().into_iter();
    for (kernel, scoring) in kernels.flat_map(|kernel| [(kernel, usual), (kernel, other)]) {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let inputs = waves.each_ref().map(Vec::as_slice);
            pool.build().unwrap().install(|| run(kernel, heads, scoring, inputs))
        };
        assert!(on(1) == on(8), "{kernel:?}, {scoring:?}");
    }
}

#[test]
fn scratch_is_as_large_as_its_formula() {
    let scoring = |soft_cap, window| Scoring { soft_cap, window, ..Scoring::of_width(1) };
    for (seqlen, head_dim, scoring) in [
        (100, 16, scoring(None, None)),
        (700, 64, scoring(Some(4.0), None)),
        (1500, 128, scoring(None, Some(48))),
        (1500, 128, scoring(Some(4.0), Some(600))),
    ] {
        for kernel in Kernel::all() {
            let heads = Heads { num_heads: 1, num_key_value_heads: 1, head_dim };
            let [q, k, v, dc] = waves(heads, seqlen);
            let source = BackwardInputs {
                kernel,
                heads,
                seqlen,
                inputs: AttentionInputs {
                    scoring,
                    q: &q,
                    k: &k,
                    v: &v,
                    context: &q,
                    context_gradient: &dc,
                },
            };
            let scratch = GradientScratch::new(&source);
            let lines = [
                &scratch.q,
                &scratch.q_turned,
                &scratch.dc,
                &scratch.dc_turned,
                &scratch.k,
                &scratch.k_turned,
                &scratch.v,
                &scratch.scores,
            ];
            let lines: usize = lines.iter().map(|lines| lines.len()).sum();
            let floats = [
                &scratch.probabilities,
                &scratch.slopes,
                &scratch.gradients,
                &scratch.dq,
                &scratch.shared,
            ];
            let floats: usize = floats.iter().map(|floats| floats.len()).sum();
            assert_eq!(
                backward_scratch_bytes(kernel, head_dim, seqlen, scoring, 3),
                3 * (lines * size_of::<Line>() + floats * 4)
            );
        }
    }
}
