//! Rows of a matrix as a bit mask and the kept elements, on stored bytes.
//!
//! A mask has one bit per column, the lowest bit of a byte first; 1 means kept. Each row begins on a byte, and the bits after the last column
//! are 0. Kept elements follow each other by ascending column. An element is kept if any of its bits is set, so −0 and the bits of a NaN
//! survive. Elements have 1, 2 or 4 bytes; their value does not matter here.

use pulp::{Arch, Simd, WithSimd};

use super::eight::{self, Move, Moving};
use super::expand::expand;

/// Columns of a word of a mask.
pub const WORD: usize = 64;

/// Columns of a byte of a mask.
const EIGHT: usize = 8;

/// Returns the bytes of the mask of a row.
pub fn mask_bytes(columns: usize) -> usize {
    columns.div_ceil(EIGHT)
}

/// Returns the set bits of a mask.
pub fn kept(mask: &[u8]) -> usize {
    // Without the CPU's instruction for it, a count takes a dozen instructions.
    Arch::new().dispatch(CountBits(mask))
}

struct CountBits<'a>(&'a [u8]);

impl WithSimd for CountBits<'_> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        set_bits(self.0)
    }
}

/// [`kept`] with the instructions of the caller.
#[inline(always)]
pub(super) fn set_bits(mask: &[u8]) -> usize {
    let (words, rest) = mask.as_chunks::<8>();
    let words: u32 = words.iter().map(|&word| u64::from_le_bytes(word).count_ones()).sum();
    let rest: u32 = rest.iter().map(|byte| byte.count_ones()).sum();
    (words + rest) as usize
}

/// Returns whether no bit after the last column is set.
///
/// # Arguments
/// * `mask`: of a row, [`mask_bytes`] bytes
pub fn padding_is_clear(mask: &[u8], columns: usize) -> bool {
    match (mask.last(), columns % EIGHT) {
        (Some(last), used @ 1..) => last >> used == 0,
        _ => true,
    }
}

/// Returns whether each four columns have exactly two kept ones. `columns` is a multiple of 4.
pub fn has_two_of_four(mask: &[u8], columns: usize) -> bool {
    let groups = columns / 4;
    let group =
        |at: usize| mask.get(at / 2).is_some_and(|byte| nibble(*byte, at).count_ones() == 2);
    (0..groups).all(group)
}

/// The four bits of group `at` in its byte.
fn nibble(byte: u8, at: usize) -> u8 {
    byte >> (4 * (at % 2)) & 0xf
}

/// Marks further columns as kept, the lowest first, until each four columns have two. `columns` is a multiple of 4.
pub fn fill_two_of_four(mask: &mut [u8], columns: usize) {
    for at in 0..columns / 4 {
        let Some(byte) = mask.get_mut(at / 2) else {
            return;
        };
        let mut group = nibble(*byte, at);
        while group.count_ones() < 2 {
            // The lowest clear bit.
            group |= group + 1;
        }
        *byte |= group << (4 * (at % 2));
    }
}

/// Counts of elements of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptCounts {
    /// Elements with a set bit.
    pub kept: u64,
    /// The most kept elements of four consecutive elements that begin at a multiple of 4.
    pub most_of_four: usize,
}

impl KeptCounts {
    /// The counts of no elements.
    pub const NONE: Self = Self { kept: 0, most_of_four: 0 };

    /// The counts of two parts together.
    #[must_use]
    pub fn and(self, more: Self) -> Self {
        Self { kept: self.kept + more.kept, most_of_four: self.most_of_four.max(more.most_of_four) }
    }
}

/// Counts the kept elements of stored bytes, which begin at an element whose index is a multiple of 4.
///
/// # Arguments
/// * `element_bytes`: 1, 2 or 4
pub fn count(element_bytes: usize, bytes: &[u8]) -> KeptCounts {
    match element_bytes {
        4 => Arch::new().dispatch(CountKept::<4>(bytes)),
        2 => Arch::new().dispatch(CountKept::<2>(bytes)),
        _ => Arch::new().dispatch(CountKept::<1>(bytes)),
    }
}

struct CountKept<'a, const N: usize>(&'a [u8]);

impl<const N: usize> WithSimd for CountKept<'_, N> {
    type Output = KeptCounts;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> KeptCounts {
        let mut counts = KeptCounts::NONE;
        for group in self.0.as_chunks::<N>().0.chunks(4) {
            let kept = group.iter().map(|&element| usize::from(element != [0; N])).sum::<usize>();
            counts.kept += kept as u64;
            counts.most_of_four = counts.most_of_four.max(kept);
        }
        counts
    }
}

/// Marks the kept elements of a row.
///
/// # Arguments
/// * `element_bytes`: 1, 2 or 4
/// * `mask`: [`mask_bytes`] bytes, replaced
pub fn mark(element_bytes: usize, row: &[u8], mask: &mut [u8]) {
    match element_bytes {
        4 => Arch::new().dispatch(MarkKept::<4>(row, mask)),
        2 => Arch::new().dispatch(MarkKept::<2>(row, mask)),
        _ => Arch::new().dispatch(MarkKept::<1>(row, mask)),
    }
}

struct MarkKept<'a, const N: usize>(&'a [u8], &'a mut [u8]);

impl<const N: usize> WithSimd for MarkKept<'_, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (eight, byte) in self.0.chunks(EIGHT * N).zip(self.1) {
            let elements = eight.as_chunks::<N>().0.iter().enumerate();
            *byte = elements
                .map(|(at, &element)| u8::from(element != [0; N]) << at)
                .fold(0, |bits, bit| bits | bit);
        }
    }
}

/// Appends the elements of a row whose bits are set to `values`.
///
/// # Arguments
/// * `element_bytes`: 1, 2 or 4
pub fn gather(element_bytes: usize, row: &[u8], mask: &[u8], values: &mut Vec<u8>) {
    match element_bytes {
        4 => eight::dispatch(Gather::<4> { row, mask, values }),
        2 => eight::dispatch(Gather::<2> { row, mask, values }),
        _ => eight::dispatch(Gather::<1> { row, mask, values }),
    }
}

/// For each byte of a mask: its kept columns in order, then zeros.
static KEPT: [[u8; EIGHT]; 256] = kept_columns();

const fn kept_columns() -> [[u8; EIGHT]; 256] {
    let mut columns = [[0; EIGHT]; 256];
    let mut bits = 0;
    while bits < 256 {
        let (mut column, mut at) = (0, 0);
        while column < EIGHT {
            if bits >> column & 1 == 1 {
                columns[bits][at] = column as u8;
                at += 1;
            }
            column += 1;
        }
        bits += 1;
    }
    columns
}

struct Gather<'a, const N: usize> {
    row: &'a [u8],
    mask: &'a [u8],
    values: &'a mut Vec<u8>,
}

impl<const N: usize> Moving for Gather<'_, N> {
    #[inline(always)]
    fn with<M: Move>(self, by: M) {
        let Self { row, mask, values } = self;
        let mut at = values.len();
        // Eight elements are written for each byte of the mask, and the next byte's overwrite those that are not kept: no branch depends
        // on the mask.
        values.resize(at + row.len() + EIGHT * N, 0);
        let (eights, rest) = row.as_chunks::<N>().0.as_chunks::<EIGHT>();
        for (eight, &bits) in eights.iter().zip(mask) {
            at += gather_eight(by, eight, bits, &mut values[at..]);
        }
        if let (false, Some(&bits)) = (rest.is_empty(), mask.get(eights.len())) {
            at += gather_eight(by, &padded(rest), bits, &mut values[at..]);
        }
        values.truncate(at);
    }
}

/// Writes the kept elements of eight and further bytes, and returns the bytes of the kept elements.
#[inline(always)]
fn gather_eight<const N: usize>(
    by: impl Move,
    elements: &[[u8; N]; EIGHT],
    bits: u8,
    out: &mut [u8],
) -> usize {
    let kept = by.eight(elements, &KEPT[usize::from(bits)]);
    out[..EIGHT * N].copy_from_slice(kept.as_flattened());
    N * bits.count_ones() as usize
}

/// Restores a row: elements whose bits are set come from `values` in order, all others are 0.
///
/// # Arguments
/// * `element_bytes`: 1, 2 or 4
/// * `values`: one element per set bit; missing elements become 0
/// * `row`: the bytes of the row, replaced
pub fn scatter(element_bytes: usize, values: &[u8], mask: &[u8], row: &mut [u8]) {
    let is_done = match element_bytes {
        2 => expand::<2>(values, mask, row),
        1 => expand::<1>(values, mask, row),
        _ => false,
    };
    if !is_done {
        scatter_by_eight(element_bytes, values, mask, row);
    }
}

/// [`scatter`] for every CPU.
pub(super) fn scatter_by_eight(element_bytes: usize, values: &[u8], mask: &[u8], row: &mut [u8]) {
    match element_bytes {
        4 => eight::dispatch(Scatter::<4> { values, mask, row }),
        2 => eight::dispatch(Scatter::<2> { values, mask, row }),
        _ => eight::dispatch(Scatter::<1> { values, mask, row }),
    }
}

/// For each byte of a mask and each of its columns: the number of kept columns before, or [`eight::NONE`] for a column that is not kept.
pub(super) static PLACES: [[u8; EIGHT]; 256] = places();

const fn places() -> [[u8; EIGHT]; 256] {
    let mut places = [[eight::NONE; EIGHT]; 256];
    let mut bits = 0;
    while bits < 256 {
        let (mut column, mut before) = (0, 0);
        while column < EIGHT {
            if bits >> column & 1 == 1 {
                places[bits][column] = before;
                before += 1;
            }
            column += 1;
        }
        bits += 1;
    }
    places
}

struct Scatter<'a, const N: usize> {
    values: &'a [u8],
    mask: &'a [u8],
    row: &'a mut [u8],
}

impl<const N: usize> Moving for Scatter<'_, N> {
    #[inline(always)]
    fn with<M: Move>(self, by: M) {
        let mut values = self.values.as_chunks::<N>().0;
        let (eights, rest) = self.row.as_chunks_mut::<N>().0.as_chunks_mut::<EIGHT>();
        let last = self.mask.get(eights.len());
        for (eight, &bits) in eights.iter_mut().zip(self.mask) {
            *eight = scatter_eight(by, &mut values, bits);
        }
        if let (false, Some(&bits)) = (rest.is_empty(), last) {
            rest.copy_from_slice(&scatter_eight(by, &mut values, bits)[..rest.len()]);
        }
    }
}

/// Takes the values of eight columns, and returns the columns.
#[inline(always)]
fn scatter_eight<const N: usize>(
    by: impl Move,
    values: &mut &[[u8; N]],
    bits: u8,
) -> [[u8; N]; EIGHT] {
    let places = &PLACES[usize::from(bits)];
    let elements = match values.first_chunk::<EIGHT>() {
        Some(next) => by.eight(next, places),
        None => by.eight(&padded(values), places),
    };
    *values = values.get(bits.count_ones() as usize..).unwrap_or(&[]);
    elements
}

/// Fewer than eight elements, and zeros after them.
fn padded<const N: usize>(elements: &[[u8; N]]) -> [[u8; N]; EIGHT] {
    let mut eight = [[0; N]; EIGHT];
    eight[..elements.len()].copy_from_slice(elements);
    eight
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(element_bytes: usize, columns: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut row = vec![0; element_bytes * columns];
        for element in row.chunks_mut(element_bytes) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(seed | 1);
            if state >> 62 != 0 {
                // Only the last byte is set in some elements: the sign of −0.
                element[element_bytes - 1] = (state >> 40) as u8 | 1;
                element[0] |= (state >> 33) as u8;
            }
        }
        row
    }

    #[test]
    fn rows_of_any_width_come_back() {
        for element_bytes in [1, 2, 4] {
            for columns in [0, 1, 7, 8, 9, 63, 64, 65, 130, 257] {
                let row = row(element_bytes, columns, columns as u64 + 3);
                let mut mask = vec![0xff; mask_bytes(columns)];
                mark(element_bytes, &row, &mut mask);
                assert!(padding_is_clear(&mask, columns));
                let mut values = vec![9];
                gather(element_bytes, &row, &mask, &mut values);
                assert_eq!(values.len(), 1 + element_bytes * kept(&mask));
                assert_eq!(count(element_bytes, &row).kept as usize, kept(&mask));
                let mut back = vec![7; row.len()];
                scatter(element_bytes, &values[1..], &mask, &mut back);
                assert_eq!(back, row, "{element_bytes} {columns}");
            }
        }
    }

    #[test]
    fn bits_begin_at_the_lowest() {
        // Columns 0, 3 and 9 are kept; column 3 is −0 in f16.
        let mut row = [0u8; 20];
        (row[0], row[7], row[18]) = (1, 0x80, 5);
        let mut mask = [0; 2];
        mark(2, &row, &mut mask);
        assert_eq!(mask, [0b1001, 0b10]);
        let mut values = Vec::new();
        gather(2, &row, &mask, &mut values);
        assert_eq!(values, [1, 0, 0, 0x80, 5, 0]);
        assert!(!padding_is_clear(&[0, 0b100], 10) && padding_is_clear(&[0xff], 8));
    }

    #[test]
    fn groups_of_four_get_their_lowest_zeros() {
        // Groups: none, column 0, column 3, columns 1 and 2, three columns (left alone).
        let mut mask = [0b0001_0000, 0b0110_1000, 0b0000_0111];
        fill_two_of_four(&mut mask, 20);
        assert_eq!(mask, [0b0011_0011, 0b0110_1001, 0b0000_0111]);
        assert!(has_two_of_four(&mask, 16) && !has_two_of_four(&mask, 20));
        assert!(!has_two_of_four(&mask[..1], 16));
    }

    #[test]
    fn the_most_of_four_is_counted() {
        let elements: Vec<u8> = [1u16, 0, 0, 2, 0, 3, 4, 5, 0].map(u16::to_le_bytes).concat();
        assert_eq!(count(2, &elements), KeptCounts { kept: 5, most_of_four: 3 });
        assert_eq!(count(2, &elements[..8]).most_of_four, 2);
    }

    #[test]
    fn too_few_values_are_zeros() {
        let mut back = [9; 16];
        scatter(2, &[1, 1], &[0b1001], &mut back);
        assert_eq!(back, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}
