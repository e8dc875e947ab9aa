//! `vdpbf16ps`: 16 outputs of two products each per instruction.
//!
//! Eight rows by three column tiles at a time: 24 accumulators, three registers of weights, the activations broadcast from
//! memory. The instruction treats subnormal numbers as zero, and so does the rounding instruction ([`round_row`]).

#![expect(unsafe_code, reason = "intrinsics on memory of checked length")]

use super::packed::{Factors, Line, TILE, TILE_DEPTH as DEPTH, TILE_LINES};
use std::arch::x86_64::{
    __m256i, __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_castsi512_si256, _mm512_cmpeq_epi16_mask, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh,
    _mm512_cvtph_ps, _mm512_dpbf16_ps, _mm512_extracti64x4_epi64, _mm512_loadu_ps,
    _mm512_permutexvar_epi16, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_slli_epi32, _mm512_storeu_ps, _mm512_sub_ps,
};
use std::mem::transmute;

use half::f16;

/// Rows of a block: half a tile.
const ROWS: usize = 8;
/// The most column tiles of a block.
const WIDE: usize = 3;

/// Returns whether the CPU has the instruction.
pub(super) fn is_there() -> bool {
    std::is_x86_feature_detected!("avx512f") && std::is_x86_feature_detected!("avx512bf16")
}

/// Returns whether the CPU has instructions to round to bf16 and to find values that are not finite.
pub(super) fn can_round() -> bool {
    is_there() && std::is_x86_feature_detected!("avx512bw")
}

/// Rounds or splits whole steps of a row of X: a line in the tile of each part. If a number to split is not finite, or rounds to
/// infinity, `slow` packs the row again, step by step; it gets the position of the line in its tiles.
///
/// # Panics
/// Panics when `in_tile` is not in a tile.
pub(super) fn round_row<const PARTS: usize>(
    values: &[[f32; DEPTH]],
    in_tile: usize,
    lines: &mut [Line],
    slow: impl Fn(&[f32; DEPTH], usize, &mut [Line]),
) {
    assert!(can_round() && in_tile < TILE_LINES);
    // SAFETY: the features were just detected.
    let special = unsafe { round_steps::<PARTS>(values, in_tile, lines) };
    if special {
        let steps = lines.chunks_exact_mut(PARTS * TILE_LINES);
        for (values, lines) in values.iter().zip(steps) {
            slow(values, in_tile, lines);
        }
    }
}

/// The loop of [`round_row`]; returns whether `slow` must pack the row.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_steps<const PARTS: usize>(
    values: &[[f32; DEPTH]],
    in_tile: usize,
    lines: &mut [Line],
) -> bool {
    let mut special = 0;
    let steps = lines.chunks_exact_mut(PARTS * TILE_LINES);
    for (values, lines) in values.iter().zip(steps) {
        let (low, high) = values.split_at(TILE);
        // SAFETY: either half is 16 elements.
        let wide = unsafe { [_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr())] };
        let (parts, specials) = parts_of::<PARTS>(wide);
        special |= specials;
        for (part, bits) in parts.into_iter().enumerate() {
            // SAFETY: both are 64 bytes without invalid values.
            lines[part * TILE_LINES + in_tile].0 =
                unsafe { transmute::<__m512i, [u16; DEPTH]>(bits) };
        }
    }
    special != 0
}

/// The bits of the parts of 32 numbers, and a bit for each number whose first part is not finite, where numbers are split.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn parts_of<const PARTS: usize>(mut rest: [__m512; 2]) -> ([__m512i; PARTS], u32) {
    let exponent = _mm512_set1_epi16(0x7f80);
    let mut special = 0;
    let mut parts = [_mm512_setzero_si512(); PARTS];
    for (part, taken) in parts.iter_mut().enumerate() {
        // SAFETY: both are 64 bytes without invalid values.
        let bits: __m512i = unsafe { transmute(_mm512_cvtne2ps_pbh(rest[1], rest[0])) };
        *taken = bits;
        if PARTS > 1 && part == 0 {
            special = _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
        }
        if part + 1 < PARTS {
            rest[0] = _mm512_sub_ps(rest[0], widened(_mm512_castsi512_si256(bits)));
            rest[1] = _mm512_sub_ps(rest[1], widened(_mm512_extracti64x4_epi64::<1>(bits)));
        }
    }
    (parts, special)
}

/// Elements that are widened to f32, 16 at a time.
pub(super) trait Widened: Copy {
    /// # Safety
    /// The CPU has AVX-512, and 16 elements can be read.
    unsafe fn sixteen(at: *const Self) -> __m512;
}

impl Widened for f32 {
    #[inline(always)]
    unsafe fn sixteen(at: *const Self) -> __m512 {
        // SAFETY: as the function's own.
        unsafe { _mm512_loadu_ps(at) }
    }
}

impl Widened for f16 {
    #[inline(always)]
    unsafe fn sixteen(at: *const Self) -> __m512 {
        // SAFETY: as the function's own.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }
}

/// Rounds or splits a tile of a matrix that is read by rows: 16 pairs of elements for each of 16 rows and each part. Returns false if a
/// number to split is not finite, or rounds to infinity: then the tile is not complete.
///
/// # Arguments
/// * `values`: [`TILE`] rows of [`DEPTH`] elements, `stride` apart
///
/// # Panics
/// Panics when a slice is shorter than its shape.
pub(super) fn round_tile<E: Widened, const PARTS: usize>(
    values: &[E],
    stride: usize,
    parts: &mut [[[u32; TILE]; TILE]; PARTS],
) -> bool {
    assert!(can_round());
    // SAFETY: the features were just detected.
    unsafe { round_rows(values, stride, parts) }
}

/// The loop of [`round_tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_rows<E: Widened, const PARTS: usize>(
    values: &[E],
    stride: usize,
    parts: &mut [[[u32; TILE]; TILE]; PARTS],
) -> bool {
    let mut special = 0;
    for row in 0..TILE {
        let (low, high) = values[row * stride..][..DEPTH].split_at(TILE);
        // SAFETY: either half is 16 elements.
        let wide = unsafe { [E::sixteen(low.as_ptr()), E::sixteen(high.as_ptr())] };
        let (taken, specials) = parts_of::<PARTS>(wide);
        special |= specials;
        for (part, bits) in parts.iter_mut().zip(taken) {
            // SAFETY: both are 64 bytes without invalid values.
            part[row] = unsafe { transmute::<__m512i, [u32; TILE]>(bits) };
        }
    }
    special == 0
}

/// Rounds or splits a tile of a matrix that is read by columns: pairs of elements (k, column), (k + 1, column) for even k, a line of 16
/// columns per pair and part. Returns false if a number to split is not finite, or rounds to infinity: then the tile is not complete.
///
/// # Arguments
/// * `values`: [`DEPTH`] rows of [`TILE`] elements, `stride` apart
/// * `lines`: [`TILE_LINES`] for each part
///
/// # Panics
/// Panics when a slice is shorter than its shape.
pub(super) fn round_pairs<E: Widened, const PARTS: usize>(
    values: &[E],
    stride: usize,
    lines: &mut [[u32; TILE]],
) -> bool {
    assert!(can_round() && lines.len() == PARTS * TILE_LINES);
    // SAFETY: the features were just detected.
    unsafe { round_lines::<E, PARTS>(values, stride, lines) }
}

/// Positions of the words of two halves, a word of each half in turn.
const IN_TURN: [u16; DEPTH] = {
    let mut words = [0; DEPTH];
    let mut pair = 0;
    while pair < TILE {
        words[2 * pair] = pair as u16;
        words[2 * pair + 1] = (TILE + pair) as u16;
        pair += 1;
    }
    words
};

/// The loop of [`round_pairs`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_lines<E: Widened, const PARTS: usize>(
    values: &[E],
    stride: usize,
    lines: &mut [[u32; TILE]],
) -> bool {
    // SAFETY: both are 64 bytes without invalid values.
    let in_turn: __m512i = unsafe { transmute(IN_TURN) };
    let mut special = 0;
    for pair in 0..TILE_LINES {
        let even = &values[2 * pair * stride..][..TILE];
        let odd = &values[(2 * pair + 1) * stride..][..TILE];
        // SAFETY: both rows have 16 elements.
        let wide = unsafe { [E::sixteen(even.as_ptr()), E::sixteen(odd.as_ptr())] };
        let (parts, specials) = parts_of::<PARTS>(wide);
        special |= specials;
        for (part, bits) in parts.into_iter().enumerate() {
            // SAFETY: both are 64 bytes without invalid values.
            lines[part * TILE_LINES + pair] = unsafe {
                transmute::<__m512i, [u32; TILE]>(_mm512_permutexvar_epi16(in_turn, bits))
            };
        }
    }
    special == 0
}

/// Widens bf16 to f32.
#[target_feature(enable = "avx512f")]
fn widened(bits: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

/// Returns whether the instruction does twice the work of an f32 instruction in the same time, as on AMD's CPUs.
pub(super) fn is_fast() -> bool {
    let leaf = std::arch::x86_64::__cpuid_count(0, 0);
    let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    is_there() && vendor.as_flattened() == b"AuthenticAMD"
}

/// Runs the instruction on 24 accumulators in turn; returns the number of operations.
pub(super) fn spin() -> usize {
    const ROUNDS: usize = 5_000_000;
    assert!(is_there(), "the kernel is listed where the CPU has it");
    // SAFETY: the features were just detected.
    unsafe { chains(ROUNDS) };
    ROUNDS * ROWS * WIDE * 2 * 32
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn chains(rounds: usize) {
    let pair = _mm512_set1_epi32(std::hint::black_box(0x3f80_3f80));
    // SAFETY: both are 64 bytes without invalid values.
    let factor: __m512bh = unsafe { transmute::<__m512i, __m512bh>(pair) };
    let mut sums = [_mm512_setzero_ps(); ROWS * WIDE];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, factor, factor);
        }
    }
    std::hint::black_box(sums);
}

/// Writes the product of packed factors to `out`, or adds it.
pub(super) fn multiply(factors: Factors<'_>, out: &mut [f32], stride: usize, adds: bool) {
    assert!(is_there(), "the kernel is listed where the CPU has it");
    let tiles = factors.columns.div_ceil(TILE);
    for first in (0..tiles).step_by(WIDE) {
        match tiles - first {
            1 => columns::<1>(factors, first, out, stride, adds),
            2 => columns::<2>(factors, first, out, stride, adds),
            _ => columns::<WIDE>(factors, first, out, stride, adds),
        }
    }
}

/// Computes all rows by `N` column tiles from `first` on.
fn columns<const N: usize>(
    factors: Factors<'_>,
    first: usize,
    out: &mut [f32],
    stride: usize,
    adds: bool,
) {
    let steps = factors.inner.div_ceil(DEPTH);
    let tile = steps * TILE_LINES;
    let weights: [&[Line]; N] =
        std::array::from_fn(|index| &factors.w[(first + index) * tile..][..tile]);
    let width = (factors.columns - first * TILE).min(N * TILE);
    for row in (0..factors.rows).step_by(ROWS) {
        let x = &factors.x[row / TILE * tile..][..tile];
        let rows = (factors.rows - row).min(ROWS);
        let target = &mut out[row * stride + first * TILE..];
        let mut sums = [[[0.0f32; TILE]; N]; ROWS];
        if adds {
            for (line, sums) in sums.iter_mut().enumerate().take(rows) {
                sums.as_flattened_mut()[..width].copy_from_slice(&target[line * stride..][..width]);
            }
        }
        // SAFETY: the CPU has the instruction, each factor holds `steps` tiles, both checked above, and `row` is the beginning or
        // the middle of a tile.
        unsafe { block(&x[row % TILE..], &weights, steps, &mut sums) };
        for (line, sums) in sums.iter().enumerate().take(rows) {
            target[line * stride..][..width].copy_from_slice(&sums.as_flattened()[..width]);
        }
    }
}

/// Computes 8 × 16·N outputs over `steps` tiles.
///
/// # Safety
/// The CPU has AVX-512 with bf16. Each of `weights` holds `steps` tiles; `activations` holds `steps` tiles less at most the first
/// half of the first tile.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block<const N: usize>(
    activations: &[Line],
    weights: &[&[Line]; N],
    steps: usize,
    sums: &mut [[[f32; TILE]; N]; ROWS],
) {
    // SAFETY: addresses stay inside the factors: the last reads are line `(steps - 1) * 16 + 15` of a weight and pair 15 of
    // line `(steps - 1) * 16 + 7` of the activations, which the caller promises to be there. `__m512bh` is 64 bytes of any bits.
    unsafe {
        let mut held = [[_mm512_setzero_ps(); N]; ROWS];
        for (held, sums) in held.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
            *held = _mm512_loadu_ps(sums.as_ptr());
        }
        let x = activations.as_ptr().cast::<i32>();
        for step in 0..steps {
            for pair in 0..TILE {
                let line = step * TILE_LINES + pair;
                let w: [__m512bh; N] = std::array::from_fn(|tile| {
                    transmute(weights[tile].as_ptr().add(line).cast::<__m512i>().read())
                });
                for (row, held) in held.iter_mut().enumerate() {
                    let pairs = x.add((step * TILE_LINES + row) * TILE + pair).read();
                    let pairs: __m512bh = transmute(_mm512_set1_epi32(pairs));
                    for (held, &w) in held.iter_mut().zip(&w) {
                        *held = _mm512_dpbf16_ps(*held, pairs, w);
                    }
                }
            }
        }
        for (held, sums) in held.as_flattened().iter().zip(sums.as_flattened_mut()) {
            _mm512_storeu_ps(sums.as_mut_ptr(), *held);
        }
    }
}
