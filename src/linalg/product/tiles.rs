//! The packed form of both bf16 kernels: tiles of 16 rows or columns and 32 of `inner`, 1 KiB each, those of one row of tiles and
//! one slab behind one another.
//!
//! In a tile of X a row's 32 values are 64 bytes; in a tile of W the values 2p and 2p + 1 of all 16 columns are 64 bytes, which is
//! what both instructions multiply. f32 is rounded to the nearest bf16, ties to even. What is missing to whole tiles is zero.

use half::bf16;
use pulp::{Arch, Simd, WithSimd};

use super::{Line, Shape, Strided, Values};

/// Rows or columns of a tile.
pub(super) const TILE: usize = 16;
/// Elements of `inner` in a tile.
pub(super) const DEPTH: usize = 32;
/// Lines of a tile.
pub(super) const TILE_LINES: usize = TILE;

/// Blocks of two row tiles by three column tiles; a slab of a block of X is 64 KiB.
pub(super) const SHAPE: Shape = Shape {
    rows: 2 * TILE,
    columns: 3 * TILE,
    unit: TILE,
    depth: DEPTH,
    slab: 1024,
    bytes: size_of::<bf16>(),
};

/// Packs rows of X.
pub(super) fn pack_rows(rows: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
    assert!(!rows.is_transposed, "X comes row by row");
    let Values::F32(values) = rows.values else {
        unreachable!("activations are f32");
    };
    Arch::new().dispatch(PackRows {
        values,
        stride: rows.stride,
        count,
        inner,
        packed,
    });
}

/// The loops of [`pack_rows`], compiled for the registers the CPU has.
struct PackRows<'a> {
    values: &'a [f32],
    stride: usize,
    count: usize,
    inner: usize,
    packed: &'a mut [Line],
}

impl WithSimd for PackRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let tiles = self.count.div_ceil(SHAPE.rows) * SHAPE.rows / TILE;
        let lines = self.packed.chunks_exact_mut(tile_lines(self.inner));
        for (tile, lines) in lines.enumerate().take(tiles) {
            for in_tile in 0..TILE {
                let row = tile * TILE + in_tile;
                let values = if row < self.count {
                    &self.values[row * self.stride..][..self.inner]
                } else {
                    &[]
                };
                let (whole, rest) = values.as_chunks::<DEPTH>();
                let mut lines = lines[in_tile..].iter_mut().step_by(TILE_LINES);
                for (values, line) in whole.iter().zip(lines.by_ref()) {
                    for (packed, value) in line.0.iter_mut().zip(values) {
                        *packed = rounded(*value);
                    }
                }
                // The end of a row, or a row that only fills the tile.
                let mut rest = rest;
                for line in lines {
                    line.0 = [0; DEPTH];
                    for (packed, value) in line.0.iter_mut().zip(rest) {
                        *packed = rounded(*value);
                    }
                    rest = &[];
                }
            }
        }
    }
}

/// Packs columns of a product, `tiles` column tiles at least.
pub(super) fn pack_columns(
    columns: Strided<'_>,
    count: usize,
    inner: usize,
    tiles: usize,
    packed: &mut [Line],
) {
    Arch::new().dispatch(PackColumns {
        columns,
        count,
        inner,
        tiles: count.div_ceil(tiles * TILE) * tiles,
        packed,
    });
}

/// The loops of [`pack_columns`], compiled for the registers the CPU has.
struct PackColumns<'a> {
    columns: Strided<'a>,
    count: usize,
    inner: usize,
    tiles: usize,
    packed: &'a mut [Line],
}

impl WithSimd for PackColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            columns,
            count,
            inner,
            tiles,
            packed,
        } = self;
        let lines = packed.chunks_exact_mut(tile_lines(inner)).take(tiles);
        for (tile, lines) in lines.enumerate() {
            let first = tile * TILE;
            let present = count.saturating_sub(first).min(TILE);
            if present == 0 {
                // A tile that only fills a pair.
                lines.fill(Line::default());
                continue;
            }
            for (step, lines) in lines.chunks_exact_mut(TILE_LINES).enumerate() {
                let k = step * DEPTH;
                let some = DEPTH.min(inner - k);
                let lines: &mut [[u32; TILE]] = bytemuck::cast_slice_mut(lines);
                if columns.is_transposed {
                    pack_transposed(columns.at(first, k), present, some, lines);
                } else {
                    pack_straight(columns.at(first, k), present, some, lines);
                }
            }
        }
    }
}

/// A tile of columns that lie row by row.
#[inline(always)]
fn pack_straight(columns: Strided<'_>, present: usize, some: usize, lines: &mut [[u32; TILE]]) {
    if present < TILE {
        lines.iter_mut().for_each(|line| line.fill(0));
    }
    let mut bits = [0u16; DEPTH];
    for column in 0..present {
        bits_of(columns.values, column * columns.stride, &mut bits[..some]);
        for (line, pair) in lines.iter_mut().zip(bits.as_chunks::<2>().0) {
            line[column] = u32::from(pair[0]) | u32::from(pair[1]) << 16;
        }
    }
}

/// A tile of columns that lie side by side.
#[inline(always)]
fn pack_transposed(columns: Strided<'_>, present: usize, some: usize, lines: &mut [[u32; TILE]]) {
    for (pair, line) in lines.iter_mut().enumerate() {
        let mut bits = [[0u16; TILE]; 2];
        for (k, bits) in (2 * pair..some).zip(&mut bits) {
            bits_of(columns.values, k * columns.stride, &mut bits[..present]);
        }
        for ((packed, even), odd) in line.iter_mut().zip(bits[0]).zip(bits[1]) {
            *packed = u32::from(even) | u32::from(odd) << 16;
        }
    }
}

/// The bits of some elements as bf16.
#[inline(always)]
fn bits_of(values: Values<'_>, first: usize, bits: &mut [u16]) {
    let range = first..first + bits.len();
    match values {
        Values::Bf16(values) => bits.copy_from_slice(bytemuck::cast_slice(&values[range])),
        Values::F32(values) => {
            for (bits, value) in bits.iter_mut().zip(&values[range]) {
                *bits = rounded(*value);
            }
        }
        Values::F16(values) => {
            for (bits, value) in bits.iter_mut().zip(&values[range]) {
                *bits = rounded(value.to_f32());
            }
        }
    }
}

/// Lines of a row of tiles in a slab.
pub(super) fn tile_lines(inner: usize) -> usize {
    inner.div_ceil(DEPTH) * TILE_LINES
}

/// The bits of the nearest bf16, ties to even; NaN stays NaN, what is too large becomes infinite.
#[inline(always)]
pub(super) fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN whose payload is all in the lower half would round to infinity.
    let quiet = (bits >> 16) | 0x40;
    if value.is_nan() {
        quiet as u16
    } else {
        nearest as u16
    }
}
