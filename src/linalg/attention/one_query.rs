//! Attention of one token, for text generation: each cached key and value is read once, in the order of memory. So the cache limits the
//! speed.
//!
//! ```text
//! m = max_j s_j,  l = Σ_j e^(s_j − m),  c = Σ_j e^(s_j − m)·v_j            over the keys j of a piece of positions, for every head
//! context = Σ_p e^(m_p − M)·c_p / Σ_p e^(m_p − M)·l_p,  M = max_p m_p      over the pieces p, in their order
//! ```
//!
//! (Pieces: Dao et al. 2023, "Flash-Decoding"; sums relative to a maximum: Milakov and Gimelshein 2018, arXiv:1805.02867.) A piece is a
//! task with all heads, since the heads of a token are neighbours in memory. The pieces depend on the number of keys and on the width of
//! the queries alone, so the number of threads changes no bit. l is summed in f64, everything else in f32. Only keys in the window are
//! read.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::super::exp;
use super::super::one_token::StoredWeight;
use super::super::parts::parts;
use super::super::product::Values;
use super::cached_rows::{self, CachedRows, LANES};
use super::scheme::{Causal, Heads, Scoring};

/// Multiply-adds of the scores of a piece, at least: some ten microseconds, long compared with the cost of scheduling.
const PRODUCTS_OF_A_PIECE: usize = 1 << 17;
/// Pieces at most, so that putting them together takes little time.
const PIECES: usize = 64;

/// The softmax of a head over the keys of a piece.
#[derive(Debug, Clone, Copy)]
struct PieceSums {
    largest: f32,
    /// Σ e^(score − largest).
    sum: f64,
}

/// Computes the attention of the last token. Keys and values are widened in registers.
pub(super) fn one_query(source: Causal<'_>, out: &mut [f32]) {
    match (source.k, source.v) {
        (Values::F32(k), Values::F32(v)) => of_values(source, k, v, out),
        (Values::F16(k), Values::F16(v)) => of_values(source, k, v, out),
        (Values::Bf16(k), Values::Bf16(v)) => of_values(source, k, v, out),
        _ => panic!("keys and values share a dtype"),
    }
}

fn of_values<E: StoredWeight>(source: Causal<'_>, k: &[E], v: &[E], out: &mut [f32]) {
    let Causal { heads, scoring, past, q, .. } = source;
    let Heads { num_heads, num_key_value_heads, head_dim } = heads;
    let key_width = num_key_value_heads * head_dim;
    assert!(
        k.len() == (past + 1) * key_width && v.len() == k.len() && out.len() == q.len(),
        "k and v must be [past + 1, num_key_value_heads * head_dim], out as q"
    );
    let first = scoring.first_key(past);
    let padded = head_dim.next_multiple_of(LANES);
    let mut queries = vec![0.0; num_heads * padded];
    for (padded, q) in queries.chunks_exact_mut(padded).zip(q.chunks_exact(head_dim)) {
        padded[..head_dim].copy_from_slice(q);
    }
    let pieces = pieces_of(past + 1 - first, q.len());
    let mut contexts = vec![0.0; pieces.len() * queries.len()];
    let mut sums = vec![PieceSums { largest: 0.0, sum: 0.0 }; pieces.len() * num_heads];
    let tasks = contexts.chunks_exact_mut(queries.len()).zip(sums.chunks_exact_mut(num_heads));
    let tasks: Vec<_> = tasks.zip(pieces).collect();
    let run = |((context, sums), piece): ((&mut [f32], &mut [PieceSums]), Range<usize>)| {
        let rows = (first + piece.start) * key_width..(first + piece.end) * key_width;
        let (k, v) = (&k[rows.clone()], &v[rows]);
        Arch::new().dispatch(Piece { heads, scoring, queries: &queries, k, v, context, sums });
    };
    match tasks.len() {
        1 => tasks.into_iter().for_each(run),
        _ => tasks.into_par_iter().with_max_len(1).for_each(run),
    }
    Arch::new().dispatch(Together { padded, contexts: &contexts, sums: &sums, head_dim, out });
}

/// The pieces of some keys.
fn pieces_of(keys: usize, query_width: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let at_least = (PRODUCTS_OF_A_PIECE / query_width).max(1);
    parts(keys, at_least.max(keys.div_ceil(PIECES)), at_least)
}

/// All heads over the keys of a piece.
struct Piece<'a, E> {
    heads: Heads,
    scoring: Scoring,
    /// `[num_heads, head_dim]`, each filled up to whole lanes.
    queries: &'a [f32],
    /// `[keys, num_key_value_heads * head_dim]`.
    k: &'a [E],
    v: &'a [E],
    /// Zeros, in the shape of the queries; becomes c.
    context: &'a mut [f32],
    /// For every head.
    sums: &'a mut [PieceSums],
}

impl<E: StoredWeight> WithSimd for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { heads, scoring, queries, k, v, context, sums } = self;
        let keys = k.len() / (heads.num_key_value_heads * heads.head_dim);
        let mut scores = vec![0.0; heads.num_heads * keys];
        cached_rows::scores(simd, CachedRows { heads, keys, rows: k }, queries, &mut scores);
        for (scores, sums) in scores.chunks_exact_mut(keys).zip(sums) {
            let scale = scoring.cap(scores);
            let largest = exp::largest_of(simd, scores) * scale;
            *sums = PieceSums { largest, sum: exp::exp_minus(simd, scores, scale, largest) };
        }
        cached_rows::add_weighted(simd, CachedRows { heads, keys, rows: v }, &scores, context);
    }
}

/// The context of all pieces.
struct Together<'a> {
    /// Elements of a head in `contexts`.
    padded: usize,
    /// `[pieces, num_heads, padded]`.
    contexts: &'a [f32],
    /// `[pieces, num_heads]`.
    sums: &'a [PieceSums],
    head_dim: usize,
    /// `[num_heads, head_dim]`.
    out: &'a mut [f32],
}

impl WithSimd for Together<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { padded, contexts, sums, head_dim, out } = self;
        let num_heads = out.len() / head_dim;
        for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let sums = sums.iter().skip(head).step_by(num_heads);
            let largest = sums.clone().map(|piece| piece.largest);
            let largest = largest.fold(f32::NEG_INFINITY, f32::max);
            let contexts = contexts.chunks_exact(padded).skip(head).step_by(num_heads);
            let mut total = 0.0;
            out.fill(0.0);
            for (piece, context) in sums.zip(contexts) {
                let shrinks = exp::exp(piece.largest - largest);
                total += f64::from(shrinks) * piece.sum;
                for (out, value) in out.iter_mut().zip(context) {
                    *out += shrinks * value;
                }
            }
            let scale = (1.0 / total) as f32;
            out.iter_mut().for_each(|out| *out *= scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::product::Kernel;
    use super::super::Columns;
    use super::super::tests::{plain_query, waves};
    use super::*;
    use Values::F32;
    use half::bf16;

    /// Key heads that all queries share, or few queries share, of widths with and without whole lanes.
    fn shapes() -> [Heads; 4] {
        let heads = |num_heads, num_key_value_heads, head_dim| Heads {
            num_heads,
            num_key_value_heads,
            head_dim,
        };
        [heads(32, 4, 64), heads(32, 32, 128), heads(3, 1, 1100), heads(14, 2, 72)]
    }

    fn with_threads(threads: usize, source: Causal<'_>) -> Vec<f32> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut out = vec![f32::NAN; source.q.len()];
        pool.install(|| one_query(source, &mut out));
        out
    }

    #[test]
    fn pieces_give_the_formula_and_the_same_bits_with_any_number_of_threads() {
        let kernel = Kernel::Fused;
        for heads in shapes() {
            let width = heads.num_heads * heads.head_dim;
            let usual = Scoring::of_width(heads.head_dim);
            let other = Scoring { soft_cap: Some(3.0), window: Some(333), ..usual };
            for (keys, scoring) in [(1, usual), (130, usual), (701, usual), (701, other)] {
                let [mut q, k, v] = waves(heads, keys);
                let q = q.split_off((keys - 1) * width);
                let source = Causal {
                    kernel,
                    heads,
                    scoring,
                    past: keys - 1,
                    q: &q,
                    k: F32(&k),
                    v: F32(&v),
                };
                let one = with_threads(1, source);
                assert!(one == with_threads(2, source) && one == with_threads(5, source));
                let exact = plain_query(heads, scoring, keys - 1, [&q, &k, &v]);
                for (got, exact) in one.iter().zip(&exact) {
                    // Scores reach 4·√1100, so exp amplifies their rounding of 1e-6 by about that much.
                    let apart = (f64::from(*got) - exact).abs();
                    assert!(apart < 3e-5, "{heads:?} {keys} {scoring:?}: {got} {exact}");
                }
            }
        }
    }

    #[test]
    fn bf16_keys_and_values_give_the_bits_of_their_numbers_in_f32() {
        let kernel = Kernel::Fused;
        for heads in shapes() {
            let keys = 300;
            let [mut q, k, v] = waves(heads, keys);
            let q = q.split_off((keys - 1) * heads.num_heads * heads.head_dim);
            let narrow = [&k, &v].map(|x| x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>());
            let wide = narrow.each_ref().map(|x| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
            let scoring = Scoring::of_width(heads.head_dim);
            let of = |k, v| {
                let source = Causal { kernel, heads, scoring, past: keys - 1, q: &q, k, v };
                let mut blocks = vec![f32::NAN; q.len()];
                let columns = Columns { width: q.len(), first: 0 };
                source.context_columns(&mut blocks, columns);
                [with_threads(2, source), blocks]
            };
            let rounded = of(Values::Bf16(&narrow[0]), Values::Bf16(&narrow[1]));
            assert!(rounded == of(F32(&wide[0]), F32(&wide[1])), "{heads:?}");
            // Rounding changes keys and values, of up to 2, by 2⁻⁹ of themselves, and so a score by δ, which changes a probability by
            // less than e^2δ − 1.
            let largest = q.chunks(heads.head_dim).map(|q| q.iter().map(|q| q.abs()).sum::<f32>());
            let delta = 2.0 / 512.0 * scoring.scale * largest.fold(0.0, f32::max);
            let bound = 2.0 * ((2.0 * delta).exp() - 1.0) + 2.0 / 512.0 + 1e-5;
            let exact = of(F32(&k), F32(&v));
            for (rounded, exact) in rounded.concat().iter().zip(exact.concat().iter()) {
                assert!((rounded - exact).abs() < bound, "{heads:?}: {rounded} {exact}");
            }
        }
    }

    #[test]
    fn a_large_score_in_any_piece_outweighs_the_others() {
        let heads = Heads { num_heads: 16, num_key_value_heads: 16, head_dim: 128 };
        let (keys, width) = (640, 16 * 128);
        assert!(pieces_of(keys, width).len() > 4);
        for largest in [0, 300, 639] {
            let q = vec![1.0; width];
            let of_key = |key: usize| if key == largest { 100.0 } else { -100.0 };
            let k: Vec<f32> = (0..keys * width).map(|at| of_key(at / width)).collect();
            let v: Vec<f32> = (0..keys * width).map(|at| (at / width + 1) as f32).collect();
            let scoring = Scoring::of_width(128);
            let source = Causal {
                kernel: Kernel::Fused,
                heads,
                scoring,
                past: keys - 1,
                q: &q,
                k: F32(&k),
                v: F32(&v),
            };
            assert_eq!(with_threads(2, source), vec![largest as f32 + 1.0; width]);
        }
    }

    #[test]
    fn pieces_cover_all_keys_and_are_not_short() {
        for width in [1, 2048, 4096, 1 << 20] {
            for keys in [1, 31, 32, 63, 64, 127, 128, 2048, 8192, 100_000] {
                let pieces: Vec<_> = pieces_of(keys, width).collect();
                assert!((1..=PIECES).contains(&pieces.len()));
                assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert_eq!((pieces[0].start, pieces[pieces.len() - 1].end), (0, keys));
                let short = pieces.iter().filter(|piece| piece.len() * width < 1 << 17);
                assert!(pieces.len() == 1 || short.count() == 0, "{keys} keys of {width}");
            }
        }
    }

    #[test]
    fn registers_of_any_width_give_the_same_bits() {
        for heads in shapes() {
            let keys = 37;
            let [mut q, k, v] = waves(heads, keys);
            let padded = heads.head_dim.next_multiple_of(LANES);
            let mut queries = vec![0.0; heads.num_heads * padded];
            let last = q.split_off((keys - 1) * heads.num_heads * heads.head_dim);
            for (padded, q) in queries.chunks_mut(padded).zip(last.chunks(heads.head_dim)) {
                padded[..heads.head_dim].copy_from_slice(q);
            }
            let by = |run: &dyn Fn(Piece<'_, f32>)| {
                let mut context = vec![0.0; queries.len()];
                let mut sums = vec![PieceSums { largest: 0.0, sum: 0.0 }; heads.num_heads];
                let scoring = Scoring::of_width(heads.head_dim);
                let (context_of, sums_of) = (&mut context, &mut sums);
                run(Piece {
                    heads,
                    scoring,
                    queries: &queries,
                    k: &k,
                    v: &v,
                    context: context_of,
                    sums: sums_of,
                });
                context
            };
            let own = by(&|piece| Arch::new().dispatch(piece));
            // Without an instruction that rounds once, products differ in the last digits.
            let scalar = by(&|piece| piece.with_simd(pulp::Scalar));
            let largest = own.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            let apart = own.iter().zip(&scalar).map(|(own, scalar)| (own - scalar).abs());
            assert!(apart.fold(0.0, f32::max) < 1e-5 * largest.max(1.0), "{heads:?}");
            #[cfg(target_arch = "x86_64")]
            if let Some(simd) = pulp::x86::V3::try_new() {
                assert!(own == by(&|piece| Simd::vectorize(simd, piece)), "{heads:?}");
            }
        }
    }
}
