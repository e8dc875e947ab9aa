//! Products of one token's queries with cached keys, and sums of cached values, on one thread.
//!
//! The rows of a few tokens are multiplied together, in the order of memory, and a few query heads share the registers of a key head's
//! row. A row is widened to f32 in registers. Lanes are added half by half, so registers of 8 and of 16 lanes give the same bits.

use pulp::Simd;

use super::super::exp::registers;
use super::super::one_token::{LINE, StoredWeight, ask_for};
use super::scheme::Heads;

/// Bytes between the rows that are multiplied and the rows that are asked for.
const AHEAD: usize = 4 << 10;

/// Elements of a head that are multiplied together.
pub(super) const LANES: usize = 16;

/// Keys or values of a layer, token by token.
#[derive(Clone, Copy)]
pub(super) struct CachedRows<'a, E> {
    pub heads: Heads,
    pub keys: usize,
    /// `[keys, num_key_value_heads * head_dim]`.
    pub rows: &'a [E],
}

/// scores = queries·keysᵀ, without a scale.
///
/// # Arguments
/// * `queries`: `[num_heads, head_dim]`, each filled with zeros up to whole lanes
/// * `scores`: `[num_heads, keys]`
#[inline(always)]
pub(super) fn scores<S: Simd, E: StoredWeight>(
    simd: S,
    keys: CachedRows<'_, E>,
    queries: &[f32],
    scores: &mut [f32],
) {
    in_blocks(simd, keys, Scores { queries, scores, keys: keys.keys });
}

/// context += weights·values.
///
/// # Arguments
/// * `weights`: `[num_heads, keys]`
/// * `context`: `[num_heads, head_dim]`, each filled up to whole lanes
#[inline(always)]
pub(super) fn add_weighted<S: Simd, E: StoredWeight>(
    simd: S,
    values: CachedRows<'_, E>,
    weights: &[f32],
    context: &mut [f32],
) {
    in_blocks(simd, values, WeightedSums { weights, context, keys: values.keys });
}

/// `R` rows of a key head, of which the first has this number, and `Q` query heads of it from `head` on.
#[derive(Clone, Copy)]
struct HeadRows<'a, E, const R: usize, const Q: usize> {
    rows: [&'a [E]; R],
    first: usize,
    head: usize,
}

/// Work on rows and query heads, in `N` registers for the lanes.
trait RowWork {
    fn run<S: Simd, E: StoredWeight, const N: usize, const R: usize, const Q: usize>(
        &mut self,
        simd: S,
        rows: HeadRows<'_, E, R, Q>,
    );
}

/// Runs work with as many rows and query heads at a time as the CPU has registers for.
#[inline(always)]
fn in_blocks<S: Simd, E: StoredWeight, W: RowWork>(simd: S, rows: CachedRows<'_, E>, mut work: W) {
    match S::F32_LANES {
        16 => blocks::<S, E, W, 1, 4, 4>(simd, rows, &mut work),
        8 => blocks::<S, E, W, 2, 2, 2>(simd, rows, &mut work),
        4 => blocks::<S, E, W, 4, 2, 2>(simd, rows, &mut work),
        _ => blocks::<S, E, W, LANES, 1, 1>(simd, rows, &mut work),
    }
}

#[inline(always)]
fn blocks<S: Simd, E: StoredWeight, W: RowWork, const N: usize, const R: usize, const Q: usize>(
    simd: S,
    rows: CachedRows<'_, E>,
    work: &mut W,
) {
    let whole = rows.keys / R * R;
    for first in (0..whole).step_by(R) {
        heads::<S, E, W, N, R, Q>(simd, rows, first, work);
    }
    for first in whole..rows.keys {
        heads::<S, E, W, N, 1, Q>(simd, rows, first, work);
    }
}

#[inline(always)]
fn heads<S: Simd, E: StoredWeight, W: RowWork, const N: usize, const R: usize, const Q: usize>(
    simd: S,
    CachedRows { heads, rows, .. }: CachedRows<'_, E>,
    first: usize,
    work: &mut W,
) {
    let Heads { num_heads, num_key_value_heads, head_dim } = heads;
    let (width, queries) = (num_key_value_heads * head_dim, num_heads / num_key_value_heads);
    for key_head in 0..num_key_value_heads {
        let mut of_head: [&[E]; R] = [&[]; R];
        for (row, of_head) in of_head.iter_mut().enumerate() {
            *of_head = &rows[(first + row) * width + key_head * head_dim..][..head_dim];
            // Short rows of a few tokens share a page, in which the CPU's prefetcher follows too few streams: without this, 4 key heads
            // of 64 take 1.4 times as long.
            of_head.chunks(LINE / size_of::<E>()).for_each(|line| ask_for(line, AHEAD));
        }
        let (own, end) = (key_head * queries, (key_head + 1) * queries);
        let whole = own + queries / Q * Q;
        for head in (own..whole).step_by(Q) {
            work.run::<S, E, N, R, Q>(simd, HeadRows { rows: of_head, first, head });
        }
        for head in whole..end {
            work.run::<S, E, N, R, 1>(simd, HeadRows { rows: of_head, first, head });
        }
    }
}

/// Some lanes of a row in registers, with zeros after its end.
#[inline(always)]
fn widened<S: Simd, E: StoredWeight, const N: usize>(
    simd: S,
    row: &[E],
    at: usize,
) -> [S::f32s; N] {
    let mut lanes = [0.0; LANES];
    match row[at..].first_chunk::<LANES>() {
        Some(chunk) => {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane = value.wide();
            }
            registers(simd, &lanes)
        }
        None => {
            for (lane, value) in lanes.iter_mut().zip(&row[at..]) {
                *lane = value.wide();
            }
            registers(simd, &lanes)
        }
    }
}

/// Some lanes of several rows.
#[inline(always)]
fn all_widened<S: Simd, E: StoredWeight, const N: usize, const R: usize>(
    simd: S,
    rows: [&[E]; R],
    at: usize,
) -> [[S::f32s; N]; R] {
    let mut all = [[simd.splat_f32s(0.0); N]; R];
    for (lanes, row) in all.iter_mut().zip(rows) {
        *lanes = widened(simd, row, at);
    }
    all
}

/// The sum of all lanes, half by half.
#[inline(always)]
fn total<S: Simd, const N: usize>(simd: S, mut sums: [S::f32s; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for at in 0..half {
            sums[at] = simd.add_f32s(sums[at], sums[at + half]);
        }
        half /= 2;
    }
    simd.reduce_sum_f32s(sums[0])
}

struct Scores<'a> {
    queries: &'a [f32],
    scores: &'a mut [f32],
    keys: usize,
}

impl RowWork for Scores<'_> {
    #[inline(always)]
    fn run<S: Simd, E: StoredWeight, const N: usize, const R: usize, const Q: usize>(
        &mut self,
        simd: S,
        HeadRows { rows, first, head }: HeadRows<'_, E, R, Q>,
    ) {
        let padded = rows[0].len().next_multiple_of(LANES);
        let queries = &self.queries[head * padded..(head + Q) * padded];
        let mut sums = [[[simd.splat_f32s(0.0); N]; R]; Q];
        for at in (0..padded).step_by(LANES) {
            let keys = all_widened::<S, E, N, R>(simd, rows, at);
            for (query, sums) in sums.iter_mut().enumerate() {
                let query = widened::<S, f32, N>(simd, queries, query * padded + at);
                for (sums, key) in sums.iter_mut().zip(&keys) {
                    for ((sum, key), query) in sums.iter_mut().zip(key).zip(query) {
                        *sum = simd.mul_add_e_f32s(*key, query, *sum);
                    }
                }
            }
        }
        for (query, sums) in sums.into_iter().enumerate() {
            let scores = &mut self.scores[(head + query) * self.keys + first..][..R];
            for (score, sums) in scores.iter_mut().zip(sums) {
                *score = total(simd, sums);
            }
        }
    }
}

struct WeightedSums<'a> {
    weights: &'a [f32],
    context: &'a mut [f32],
    keys: usize,
}

impl RowWork for WeightedSums<'_> {
    #[inline(always)]
    fn run<S: Simd, E: StoredWeight, const N: usize, const R: usize, const Q: usize>(
        &mut self,
        simd: S,
        HeadRows { rows, first, head }: HeadRows<'_, E, R, Q>,
    ) {
        let padded = rows[0].len().next_multiple_of(LANES);
        let context = &mut self.context[head * padded..(head + Q) * padded];
        let mut weights = [[simd.splat_f32s(0.0); R]; Q];
        for (query, weights) in weights.iter_mut().enumerate() {
            let of_query = &self.weights[(head + query) * self.keys + first..][..R];
            for (wide, weight) in weights.iter_mut().zip(of_query) {
                *wide = simd.splat_f32s(*weight);
            }
        }
        for at in (0..padded).step_by(LANES) {
            let values = all_widened::<S, E, N, R>(simd, rows, at);
            for (query, weights) in weights.iter().enumerate() {
                let context = &mut context[query * padded + at..][..LANES];
                for (lane, sum) in S::as_mut_simd_f32s(context).0.iter_mut().enumerate() {
                    for (value, weight) in values.iter().zip(weights) {
                        *sum = simd.mul_add_e_f32s(value[lane], *weight, *sum);
                    }
                }
            }
        }
    }
}
