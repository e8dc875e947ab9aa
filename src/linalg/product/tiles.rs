//! Packing for the bf16 kernels: tiles of 16 rows or columns by 32 elements of `inner`, 1 KiB each. Within a slab, the tiles of a
//! row of tiles are consecutive; for split numbers, each step has the tiles of all parts.
//!
//! In a tile of X, the 32 values of a row are 64 bytes. In a tile of W, the values 2p and 2p + 1 of all 16 columns are 64 bytes. Both
//! instructions multiply these forms. f32 is rounded to the nearest bf16, ties to even. Zeros fill up whole tiles.

use half::bf16;
use pulp::{Arch, Simd, WithSimd};

use super::interleave::Exchange;
use super::packed::{
    BlockSizes, Line, Strided, TASK_ELEMENTS, TILE, TILE_DEPTH as DEPTH, TILE_LINES, Values,
};

/// Blocks of two row tiles by three column tiles; a slab of a block of X is 64 KiB. AMX has slabs of half the size.
pub(super) const SHAPE: BlockSizes = BlockSizes {
    rows: 2 * TILE,
    columns: 3 * TILE,
    unit: TILE,
    depth: DEPTH,
    slab: 1024,
    task: TASK_ELEMENTS,
    row_bytes: size_of::<bf16>(),
    column_bytes: size_of::<bf16>(),
};

/// Parts of a split element of X: three significands of 8 bits hold the 24 bits of an f32.
pub(super) const ROW_PARTS: usize = 3;

/// Blocks of two by two tiles, with X in [`ROW_PARTS`] parts and W in `parts`; a slab of a block of X is 96 KiB.
pub(super) const fn split(parts: usize) -> BlockSizes {
    BlockSizes {
        columns: 2 * TILE,
        unit: 2 * TILE,
        slab: 512,
        row_bytes: ROW_PARTS * size_of::<bf16>(),
        column_bytes: parts * size_of::<bf16>(),
        ..SHAPE
    }
}

/// Packs rows of X.
pub(super) fn pack_rows<const PARTS: usize>(
    rows: Strided<'_>,
    count: usize,
    inner: usize,
    packed: &mut [Line],
) {
    let Values::F32(values) = rows.values else {
        unreachable!("activations are f32");
    };
    let pack = PackRows::<PARTS> {
        values,
        stride: rows.stride,
        is_transposed: rows.is_transposed,
        count,
        inner,
        packed,
    };
    #[cfg(target_arch = "x86_64")]
    if super::avx512::can_round() && !rows.is_transposed {
        pack.run::<true>();
        return;
    }
    Arch::new().dispatch(pack);
}

/// The loops of [`pack_rows`], compiled for the CPU's registers.
struct PackRows<'a, const PARTS: usize> {
    values: &'a [f32],
    stride: usize,
    is_transposed: bool,
    count: usize,
    inner: usize,
    packed: &'a mut [Line],
}

impl<const PARTS: usize> WithSimd for PackRows<'_, PARTS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.run::<false>();
    }
}

impl<const PARTS: usize> PackRows<'_, PARTS> {
    /// Packs all rows. With `ROUNDS`, the CPU rounds in one instruction.
    #[inline(always)]
    fn run<const ROUNDS: bool>(self) {
        if self.is_transposed {
            return self.run_turned();
        }
        let tiles = self.count.div_ceil(SHAPE.rows) * SHAPE.rows / TILE;
        let lines = self.packed.chunks_exact_mut(tile_lines::<PARTS>(self.inner));
        for (tile, lines) in lines.enumerate().take(tiles) {
            for in_tile in 0..TILE {
                let row = tile * TILE + in_tile;
                let values = if row < self.count {
                    &self.values[row * self.stride..][..self.inner]
                } else {
                    &[]
                };
                let (whole, rest) = values.as_chunks::<DEPTH>();
                let (now, behind) = lines.split_at_mut(whole.len() * PARTS * TILE_LINES);
                split_row::<PARTS, ROUNDS>(whole, in_tile, now);
                // The end of a row, or a row of padding.
                let mut rest = rest;
                for lines in behind.chunks_exact_mut(PARTS * TILE_LINES) {
                    let mut values = [0.0; DEPTH];
                    values[..rest.len()].copy_from_slice(rest);
                    split_row::<PARTS, ROUNDS>(&[values], in_tile, lines);
                    rest = &[];
                }
            }
        }
    }

    /// Packs all rows of a matrix `[inner, count]`, as columns are packed; then each tile is turned. All tiles of a step are packed before
    /// the next step, so a row of the matrix is read as a whole.
    #[inline(always)]
    fn run_turned(self) {
        let tiles = self.count.div_ceil(SHAPE.rows) * SHAPE.rows / TILE;
        let tile_lines = tile_lines::<PARTS>(self.inner);
        let columns = Strided::transposed(Values::F32(self.values), self.stride);
        for k in (0..self.inner).step_by(DEPTH) {
            let tiles = self.packed.chunks_exact_mut(tile_lines).take(tiles);
            for (tile, lines) in tiles.enumerate() {
                let lines = &mut lines[k / DEPTH * PARTS * TILE_LINES..][..PARTS * TILE_LINES];
                let first = tile * TILE;
                let present = self.count.saturating_sub(first).min(TILE);
                if present == 0 {
                    lines.fill(Line::default());
                    continue;
                }
                let some = DEPTH.min(self.inner - k);
                let mut turned = [[[0; TILE]; TILE_LINES]; PARTS];
                let pairs = turned.as_flattened_mut();
                pack_transposed::<PARTS>(columns.at(first, k), present, some, pairs);
                let lines: &mut [[u32; TILE]] = bytemuck::cast_slice_mut(lines);
                for (pairs, lines) in turned.iter().zip(lines.chunks_exact_mut(TILE_LINES)) {
                    turn(pairs, lines);
                }
            }
        }
    }
}

/// Transposes a tile of words.
#[inline(always)]
fn turn(tile: &[[u32; TILE]; TILE], out: &mut [[u32; TILE]]) {
    if let Some(exchange) = Exchange::here() {
        exchange.turned(tile, out);
        return;
    }
    for (column, out) in out.iter_mut().enumerate() {
        for (word, row) in out.iter_mut().zip(tile) {
            *word = row[column];
        }
    }
}

/// Packs whole steps of a row.
#[inline(always)]
fn split_row<const PARTS: usize, const ROUNDS: bool>(
    values: &[[f32; DEPTH]],
    in_tile: usize,
    lines: &mut [Line],
) {
    #[cfg(target_arch = "x86_64")]
    if ROUNDS {
        return super::avx512::round_row::<PARTS>(values, in_tile, lines, split_line::<PARTS>);
    }
    let steps = lines.chunks_exact_mut(PARTS * TILE_LINES);
    for (values, lines) in values.iter().zip(steps) {
        split_line::<PARTS>(values, in_tile, lines);
    }
}

/// Packs a step of a row: a line in the tile of each part.
#[inline(always)]
fn split_line<const PARTS: usize>(values: &[f32; DEPTH], in_tile: usize, lines: &mut [Line]) {
    let mut rest = *values;
    for part in 0..PARTS {
        let line = &mut lines[part * TILE_LINES + in_tile];
        for (packed, value) in line.0.iter_mut().zip(&mut rest) {
            *packed = take_part::<PARTS>(value);
        }
    }
}

/// Returns the bits of the bf16 nearest to a number, and replaces the number by the difference. With one part it is [`rounded`]. A split
/// number does not become infinite by rounding; the difference of an infinity or NaN is 0.
#[inline(always)]
pub(super) fn take_part<const PARTS: usize>(value: &mut f32) -> u16 {
    const EXPONENT: u32 = 0x7f80_0000;
    let nearest = rounded(*value);
    if PARTS == 1 {
        return nearest;
    }
    let bits = value.to_bits();
    let is_finite = bits & EXPONENT != EXPONENT;
    let overflows = is_finite && (u32::from(nearest) << 16) & EXPONENT == EXPONENT;
    let taken = if overflows { (bits >> 16) as u16 } else { nearest };
    let left = *value - f32::from_bits(u32::from(taken) << 16);
    *value = if is_finite { left } else { 0.0 };
    taken
}

/// Packs columns of a product, in multiples of `tiles` column tiles.
pub(super) fn pack_columns<const PARTS: usize>(
    columns: Strided<'_>,
    count: usize,
    inner: usize,
    tiles: usize,
    packed: &mut [Line],
) {
    Arch::new().dispatch(PackColumns::<PARTS> {
        columns,
        count,
        inner,
        tiles: count.div_ceil(tiles * TILE) * tiles,
        packed,
    });
}

/// The loops of [`pack_columns`], compiled for the CPU's registers.
struct PackColumns<'a, const PARTS: usize> {
    columns: Strided<'a>,
    count: usize,
    inner: usize,
    tiles: usize,
    packed: &'a mut [Line],
}

impl<const PARTS: usize> WithSimd for PackColumns<'_, PARTS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { columns, inner, tiles, packed, .. } = self;
        let steps = inner.div_ceil(DEPTH);
        let count = steps * tiles;
        for at in 0..count {
            // Rows of the stored matrix are read as a whole.
            let (tile, step) = match columns.is_transposed {
                true => (at % tiles, at / tiles),
                false => (at / steps, at % steps),
            };
            let lines = &mut packed[(tile * steps + step) * PARTS * TILE_LINES..];
            let lines = &mut lines[..PARTS * TILE_LINES];
            let (first, k) = (tile * TILE, step * DEPTH);
            let present = self.count.saturating_sub(first).min(TILE);
            let some = DEPTH.min(inner - k);
            if present == 0 {
                // A tile of padding.
                lines.fill(Line::default());
                continue;
            }
            let lines: &mut [[u32; TILE]] = bytemuck::cast_slice_mut(lines);
            if columns.is_transposed {
                pack_transposed::<PARTS>(columns.at(first, k), present, some, lines);
            } else {
                pack_straight::<PARTS>(columns.at(first, k), present, some, lines);
            }
        }
    }
}

/// Packs a step of columns stored row by row: the tiles of all parts.
#[inline(always)]
fn pack_straight<const PARTS: usize>(
    columns: Strided<'_>,
    present: usize,
    some: usize,
    lines: &mut [[u32; TILE]],
) {
    if let (Values::Bf16(values), 1, TILE, DEPTH) = (columns.values, PARTS, present, some) {
        let mut rows = [[0u32; TILE]; TILE];
        for (row, pairs) in rows.iter_mut().enumerate() {
            let row: [bf16; DEPTH] = of_length(&values[row * columns.stride..]);
            *pairs = bytemuck::cast(row);
        }
        turn(&rows, lines);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if (present, some) == (TILE, DEPTH) && super::avx512::can_round() {
        let mut parts = [[[0u32; TILE]; TILE]; PARTS];
        let is_complete = match columns.values {
            Values::F32(values) => super::avx512::round_tile(values, columns.stride, &mut parts),
            Values::F16(values) => super::avx512::round_tile(values, columns.stride, &mut parts),
            Values::Bf16(_) => false,
        };
        if is_complete {
            for (part, lines) in parts.iter().zip(lines.chunks_exact_mut(TILE_LINES)) {
                turn(part, lines);
            }
            return;
        }
    }
    if present < TILE {
        lines.iter_mut().for_each(|line| line.fill(0));
    }
    let mut bits = [[0u16; DEPTH]; PARTS];
    for column in 0..present {
        bits_of(columns.values, column * columns.stride, some, &mut bits);
        for (lines, bits) in lines.chunks_exact_mut(TILE_LINES).zip(&bits) {
            for (line, pair) in lines.iter_mut().zip(bits.as_chunks::<2>().0) {
                line[column] = u32::from(pair[0]) | u32::from(pair[1]) << 16;
            }
        }
    }
}

/// Packs a step of columns stored side by side: the tiles of all parts.
#[inline(always)]
fn pack_transposed<const PARTS: usize>(
    columns: Strided<'_>,
    present: usize,
    some: usize,
    lines: &mut [[u32; TILE]],
) {
    let is_whole = (present, some) == (TILE, DEPTH);
    match columns.values {
        #[cfg(target_arch = "x86_64")]
        Values::F32(values)
            if is_whole
                && super::avx512::can_round()
                && super::avx512::round_pairs::<_, PARTS>(values, columns.stride, lines) => {}
        #[cfg(target_arch = "x86_64")]
        Values::F16(values)
            if is_whole
                && super::avx512::can_round()
                && super::avx512::round_pairs::<_, PARTS>(values, columns.stride, lines) => {}
        Values::Bf16(values) if is_whole && PARTS == 1 => {
            for (pair, line) in lines.iter_mut().enumerate() {
                let even: [bf16; TILE] = of_length(&values[2 * pair * columns.stride..]);
                let odd: [bf16; TILE] = of_length(&values[(2 * pair + 1) * columns.stride..]);
                for ((packed, even), odd) in line.iter_mut().zip(&even).zip(&odd) {
                    *packed = u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16;
                }
            }
        }
        _ => {
            for pair in 0..TILE_LINES {
                let mut bits = [[[0u16; TILE]; PARTS]; 2];
                for (k, bits) in (2 * pair..some).zip(&mut bits) {
                    bits_of(columns.values, k * columns.stride, present, bits);
                }
                for part in 0..PARTS {
                    let line = &mut lines[part * TILE_LINES + pair];
                    for ((packed, even), odd) in
                        line.iter_mut().zip(bits[0][part]).zip(bits[1][part])
                    {
                        *packed = u32::from(even) | u32::from(odd) << 16;
                    }
                }
            }
        }
    }
}

/// The first elements of a slice. The compiler knows the length of this copy.
#[inline(always)]
fn of_length<T: Copy, const LENGTH: usize>(values: &[T]) -> [T; LENGTH] {
    let (first, _) = values.as_chunks::<LENGTH>();
    first[0]
}

/// Writes the bits of the parts of `some` elements; later elements of `bits` stay unchanged.
#[inline(always)]
fn bits_of<const PARTS: usize, const WIDTH: usize>(
    values: Values<'_>,
    first: usize,
    some: usize,
    bits: &mut [[u16; WIDTH]; PARTS],
) {
    if let (Values::Bf16(values), [bits]) = (values, &mut bits[..]) {
        bits[..some].copy_from_slice(bytemuck::cast_slice(&values[first..first + some]));
        return;
    }
    let mut wide = [0.0f32; WIDTH];
    match values {
        // The compiler knows the length of this copy.
        Values::F32(values) if some == WIDTH => wide.copy_from_slice(&values[first..first + WIDTH]),
        _ => values.widen(first, &mut wide[..some]),
    }
    for bits in bits {
        for (bits, value) in bits[..some].iter_mut().zip(&mut wide) {
            *bits = take_part::<PARTS>(value);
        }
    }
}

/// Lines of a row of tiles in a slab.
pub(super) fn tile_lines<const PARTS: usize>(inner: usize) -> usize {
    inner.div_ceil(DEPTH) * PARTS * TILE_LINES
}

/// The bits of the nearest bf16, ties to even. NaN stays NaN, and a number that is too large becomes infinite.
#[inline(always)]
pub(super) fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN whose payload is all in the lower half would round to infinity.
    let quiet = (bits >> 16) | 0x40;
    if value.is_nan() { quiet as u16 } else { nearest as u16 }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    /// Both packed forms of a matrix by columns, and of the same matrix turned, by rows.
    fn both<const PARTS: usize>(
        values: [Values<'_>; 2],
        [rows, inner]: [usize; 2],
    ) -> [Vec<Line>; 2] {
        let lines = || {
            vec![
                Line([0xffff; 32]);
                rows.next_multiple_of(SHAPE.rows) / TILE * tile_lines::<PARTS>(inner)
            ]
        };
        let layouts = [Strided::transposed(values[0], rows), Strided::rows(values[1], inner)];
        layouts.map(|layout| {
            let mut packed = lines();
            pack_columns::<PARTS>(layout, rows, inner, 2, &mut packed);
            if matches!(layout.values, Values::F32(_)) {
                let mut more = lines();
                pack_rows::<PARTS>(layout, rows, inner, &mut more);
                packed.append(&mut more);
            }
            packed
        })
    }

    #[test]
    fn a_matrix_read_by_columns_is_packed_as_its_transposed() {
        for [rows, inner] in [[1, 1], [16, 32], [37, 70], [64, 96], [130, 45]] {
            let mut turned: Vec<f32> =
                (0..rows * inner).map(|at| (at as f32 * 0.37).sin() * 3.0).collect();
            // Numbers that cannot be split, in some tiles only.
            for (at, special) in [(3, f32::INFINITY), (700, f32::NAN), (1500, f32::MAX)] {
                turned.get_mut(at).into_iter().for_each(|value| *value = special);
            }
            let at = |column: usize, k: usize| turned[column * inner + k];
            let straight: Vec<f32> = (0..rows * inner).map(|i| at(i % rows, i / rows)).collect();
            let f32s = [Values::F32(&straight), Values::F32(&turned)];
            let narrow = |values: &[f32]| -> Vec<bf16> {
                values.iter().map(|&value| bf16::from_f32(value)).collect()
            };
            let halves = [narrow(&straight), narrow(&turned)];
            let halves = [Values::Bf16(&halves[0]), Values::Bf16(&halves[1])];
            let half_precision = [&straight, &turned].map(|values| -> Vec<f16> {
                values.iter().map(|&value| f16::from_f32(value)).collect()
            });
            let f16s = [Values::F16(&half_precision[0]), Values::F16(&half_precision[1])];
            for [columns, rows] in [
                both::<1>(f32s, [rows, inner]),
                both::<3>(f32s, [rows, inner]),
                both::<1>(halves, [rows, inner]),
                both::<2>(halves, [rows, inner]),
                both::<1>(f16s, [rows, inner]),
                both::<2>(f16s, [rows, inner]),
            ] {
                assert!(columns.iter().zip(&rows).all(|(column, row)| column.0 == row.0));
            }
        }
    }
}
