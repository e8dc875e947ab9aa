//! Loops over the kept values of rows, on one thread: values as stored, and 8-bit codes.
//!
//! A row's values are read in order. The bits of a word of its mask say how many values belong to 64 columns.

#![expect(unsafe_code, reason = "windows of values without a check for each")]

use half::f16;

use super::super::compact::{Codes, CompactPart};
use super::super::int8::wide_scale;
use super::ahead::{LINE, ask_for, rows_together};
use super::input::{Input, InputGroup};
use super::vectors::{CODES, CodeFactors, Step, Vectors};

/// Bytes between the values that are multiplied and the values that are asked for.
const VALUES_AHEAD: usize = 4 << 10;
/// The same for masks, which are read 8 to 32 times as slowly.
const MASKS_AHEAD: usize = 512;
/// Words of a mask in a line.
const WORDS: usize = LINE / size_of::<u64>();
/// Blocks of codes whose scales are widened together.
const SCALES: usize = 8;

/// Rows of a part of a compact matrix, from the row `first` of the part on.
#[derive(Clone, Copy)]
pub(super) struct PartRows<'a> {
    pub part: &'a CompactPart,
    pub first: usize,
}

/// Kept values, by as many rows at once as dense rows where activations are f32. Activations in bf16 leave room in the first-level cache,
/// and a single row is read faster.
#[inline(always)]
pub(super) fn kept<V: Step<E, X>, E, X>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    values: &[E],
    x: &[InputGroup<X>],
    out: &mut [f32],
) {
    let rows = match size_of::<X>() {
        4 => rows_together(x, V::ROWS),
        _ => 1,
    };
    let whole = out.len() / rows * rows;
    let (out, last_out) = out.split_at_mut(whole);
    let of = PartRows { part, first };
    match rows {
        4 => kept_rows::<V, E, X, 4>(v, of, values, x, out),
        2 => kept_rows::<V, E, X, 2>(v, of, values, x, out),
        _ => kept_rows::<V, E, X, 1>(v, of, values, x, out),
    }
    if !last_out.is_empty() {
        let of = PartRows { part, first: first + whole };
        kept_rows::<V, E, X, 1>(v, of, values, x, last_out);
    }
}

/// [`kept`] for a multiple of `N` rows.
#[inline(always)]
fn kept_rows<V: Step<E, X>, E, X, const N: usize>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    values: &[E],
    x: &[InputGroup<X>],
    out: &mut [f32],
) {
    let (lines, rest) = x.as_chunks::<WORDS>();
    for (number, out) in out.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        let first = first + number * N;
        let mut sums = [v.zero(); N];
        let mut values: [RowValues<'_, E>; N] =
            std::array::from_fn(|row| RowValues::of(part, first + row, values));
        let masks: [(&[[u64; WORDS]], &[u64]); N] =
            std::array::from_fn(|row| part.mask(first + row).as_chunks());
        for (mask, last) in masks {
            let is_same = mask.len() == lines.len() && last.len() == rest.len();
            assert!(is_same, "the input has another form");
        }
        for (line, x) in lines.iter().enumerate() {
            masks.iter().for_each(|(mask, _)| ask_for(&mask[line], MASKS_AHEAD));
            for (word, x) in x.iter().enumerate() {
                for row in 0..N {
                    let kept = masks[row].0[line][word];
                    sums[row] = v.kept(sums[row], values[row].pass(&[kept]), kept, &x.0);
                }
            }
        }
        for (word, x) in rest.iter().enumerate() {
            for row in 0..N {
                let kept = masks[row].1[word];
                sums[row] = v.kept(sums[row], values[row].pass(&[kept]), kept, &x.0);
            }
        }
        for (y, sums) in out.iter_mut().zip(sums) {
            *y = v.total(sums);
        }
    }
}

/// The kept values of a row, from the first value that is not multiplied yet on.
struct RowValues<'a, E> {
    values: &'a [E],
    at: usize,
}

impl<'a, E> RowValues<'a, E> {
    /// # Panics
    /// Panics when `values` ends before the window behind the row.
    #[inline(always)]
    fn of(part: &CompactPart, row: usize, values: &'a [E]) -> Self {
        assert!(part.start(row + 1) + CODES <= values.len(), "a window of unused values");
        Self { values, at: part.start(row) }
    }

    /// Moves behind the values of some words of the row's mask, and returns a window of values that begins with them. Asks for a later line.
    #[inline(always)]
    fn pass<const N: usize>(&mut self, kept: &[u64]) -> &'a [E; N] {
        const { assert!(N <= CODES) };
        let at = self.at;
        self.at += kept.iter().map(|kept| kept.count_ones() as usize).sum::<usize>();
        // SAFETY: words of the row's mask have as many bits as the row has values (`CompactPart` checks it), so `at` is at most the end of the
        // row, and CODES values follow that end.
        let window = unsafe { &*self.values.as_ptr().add(at).cast::<[E; N]>() };
        (0..size_of_val(window))
            .step_by(2 * LINE)
            .for_each(|line| ask_for(window, VALUES_AHEAD + line));
        window
    }
}

/// Products of 8-bit codes with activations in f32. With `ALL` the masks are constant, so that nothing is expanded; behind the last column
/// the activations are zeros.
#[inline(always)]
pub(super) fn codes_by_floats<V: Step<i8, f32>, const ALL: bool>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    codes: &Codes,
    x: &[InputGroup<f32>],
    out: &mut [f32],
) {
    for (y, row) in out.iter_mut().zip(first..) {
        let mut values = RowValues::of(part, row, &codes.values);
        let mut sums = v.zero();
        let blocks = part.mask(row).chunks(2).zip(x.chunks(2));
        for ((kept, x), scale) in blocks.zip(codes.scales_of(row)) {
            let mut block = v.zero();
            for (kept, x) in kept.iter().zip(x) {
                let kept = if ALL { u64::MAX } else { *kept };
                block = v.kept(block, values.pass(&[kept]), kept, &x.0);
            }
            sums = v.plus_scaled(sums, block, wide_scale(*scale));
        }
        *y = v.total(sums);
    }
}

/// Products of 8-bit codes with activations as 8-bit codes. `ALL` as for [`codes_by_floats`].
#[inline(always)]
pub(super) fn codes_by_codes<V: Vectors, const ALL: bool>(
    v: V,
    PartRows { part, first }: PartRows<'_>,
    codes: &Codes,
    input: &Input,
    out: &mut [f32],
) {
    let (x, x_scales) = input.codes();
    for (y, row) in out.iter_mut().zip(first..) {
        let mut values = RowValues::of(part, row, &codes.values);
        let mut sums = v.zero();
        let (blocks, odd) = part.mask(row).as_chunks::<2>();
        let scales = codes.scales_of(row);
        assert_eq!(x.len(), scales.len(), "the input has another form");
        for first in (0..x.len()).step_by(SCALES) {
            let scales = products_of_scales(&scales[first..], &x_scales[first..]);
            let pairs = &blocks[first.min(blocks.len())..];
            (0..size_of::<[[u64; 2]; SCALES]>())
                .step_by(LINE)
                .for_each(|line| ask_for(pairs, MASKS_AHEAD + line));
            for ((kept, x), scale) in pairs.iter().zip(&x[first..]).zip(&scales) {
                let kept = if ALL { &[u64::MAX; 2] } else { kept };
                let factors = CodeFactors { codes: values.pass(kept), x, scale: *scale };
                sums = v.plus_codes(sums, *kept, factors);
            }
            if let (Some(kept), true) = (odd.first(), first + SCALES >= x.len()) {
                let kept = [if ALL { u64::MAX } else { *kept }, 0];
                let (x, scale) = (&x[x.len() - 1], scales[x.len() - 1 - first]);
                sums =
                    v.plus_codes(sums, kept, CodeFactors { codes: values.pass(&kept), x, scale });
            }
        }
        *y = v.total(sums);
    }
}

/// The products of the scales of weights and activations, of [`SCALES`] blocks at most.
#[inline(always)]
fn products_of_scales(weights: &[f16], x: &[f32]) -> [f32; SCALES] {
    let mut products = [0.0; SCALES];
    match (weights.first_chunk::<SCALES>(), x.first_chunk::<SCALES>()) {
        // Of fixed length, so that all scales are widened at once.
        (Some(weights), Some(x)) => {
            products = std::array::from_fn(|at| wide_scale(weights[at]) * x[at]);
        }
        _ => {
            for ((product, weights), x) in products.iter_mut().zip(weights).zip(x) {
                *product = wide_scale(*weights) * x;
            }
        }
    }
    products
}
