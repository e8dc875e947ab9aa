//! Products of bf16 by bf16 with f32 accumulation: C = X·Wᵀ, where the CPU multiplies pairs of bf16 by itself.
//!
//! X `[tokens, inner]` comes as f32 and is rounded to bf16 (nearest, ties to even) while it is packed; W `[columns, inner]` is
//! bf16 as stored; C `[tokens, columns]` is f32. Per output the order of summation depends on `inner` alone, so neither the
//! thread count nor the number of tokens changes a bit.
//!
//! | kernel | instruction | CPUs |
//! | --- | --- | --- |
//! | `amx` | `tdpbf16ps` on 16 × 16 tiles | Intel from Sapphire Rapids on (Linux, which grants the tiles to the process) |
//! | `avx512` | `vdpbf16ps` | AMD from Zen 4 on, Intel from Cooper Lake on |
//!
//! Both read the same packed form: tiles of 16 rows or columns and 32 of `inner`, 1 KiB each, those of one row of tiles behind
//! one another. In a tile of X a token's 32 values are 64 bytes in a row; in a tile of W the values 2p and 2p + 1 of all 16
//! columns are 64 bytes in a row, which is what both instructions multiply. What is missing to whole tiles is zero.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use half::bf16;
use rayon::prelude::*;

/// Rows or columns of a tile.
const TILE: usize = 16;
/// Elements of `inner` in a tile.
const DEPTH: usize = 32;
/// Elements of a tile.
const TILE_ELEMENTS: usize = TILE * DEPTH;
/// Tiles of `inner` that are multiplied before the next columns: 2048 elements, so that a block of X stays in the L2 cache.
const SLAB: usize = 64;
/// Tokens per task, at most.
const TASK_TOKENS: usize = 128;
/// Elements of W packed at once: 16 MiB.
const PACKED_AT_ONCE: usize = 1 << 23;

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Tiles of Intel's Advanced Matrix Extensions.
    Amx,
    /// AVX-512 with `vdpbf16ps`.
    Avx512,
}

impl Kernel {
    /// As a run's protocol calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amx => "bf16 products by AMX tiles",
            Self::Avx512 => "bf16 products by AVX-512",
        }
    }

    /// The kernel that is faster here than f32 products; asked once. `None` where there is none: Intel's CPUs have `vdpbf16ps` at a
    /// third of the rate of f32 (measured on Sapphire Rapids), so without tiles bf16 is widened.
    pub fn best() -> Option<Self> {
        static BEST: OnceLock<Option<Kernel>> = OnceLock::new();
        *BEST.get_or_init(|| {
            let is_worth_it = |kernel: &Self| match kernel {
                Self::Amx => true,
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => avx512::is_fast(),
                #[cfg(not(target_arch = "x86_64"))]
                Self::Avx512 => false,
            };
            Self::all().into_iter().find(is_worth_it)
        })
    }

    /// Multiplies what is in registers for some hundredths of a second, for [`super::peak`]; returns the operations.
    pub(super) fn spin(self) -> usize {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Amx => amx::spin(),
            Self::Avx512 => avx512::spin(),
        }
        #[cfg(not(target_arch = "x86_64"))]
        0
    }

    /// Every kernel that runs here, fastest first.
    pub fn all() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let mut kernels = Vec::new();
            if amx::is_granted() {
                kernels.push(Self::Amx);
            }
            if avx512::is_there() {
                kernels.push(Self::Avx512);
            }
            kernels
        }
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }
}

/// 64 bytes, the unit of both instructions and of a cache line.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u16; DEPTH]);

/// Lines of a tile.
const TILE_LINES: usize = TILE;

/// Packed factors, reused by every product.
#[derive(Debug, Default)]
pub struct Packed {
    activations: Vec<Line>,
    weights: Vec<Line>,
    /// What packing took since this was last asked.
    packing: Duration,
}

impl Packed {
    /// The time packing took since this was last asked.
    pub(super) fn take_time(&mut self) -> Duration {
        std::mem::take(&mut self.packing)
    }
}

/// Bytes of [`Packed`] after these products: tokens, and the weight's (columns, inner).
pub fn packed_bytes(products: impl Iterator<Item = (usize, (usize, usize))>) -> usize {
    let (mut activations, mut weights) = (0, 0);
    for (tokens, (columns, inner)) in products {
        let deep = inner.div_ceil(DEPTH);
        activations = activations.max(tile_pairs(tokens) * deep);
        weights = weights.max(tiles_at_once(columns, deep) * deep);
    }
    (activations + weights) * TILE_ELEMENTS * size_of::<u16>()
}

/// Row tiles of X, an even number.
fn tile_pairs(tokens: usize) -> usize {
    tokens.div_ceil(2 * TILE) * 2
}

/// Column tiles of W that are packed at once: a multiple of both kernels' widths unless that is all.
fn tiles_at_once(columns: usize, deep: usize) -> usize {
    let fitting = PACKED_AT_ONCE / (TILE_ELEMENTS * deep.max(1));
    (fitting / 6 * 6).max(6).min(column_tiles(columns))
}

/// Column tiles of W, an even number.
fn column_tiles(columns: usize) -> usize {
    columns.div_ceil(2 * TILE) * 2
}

/// A weight in packed form, for as many products as there will be.
#[derive(Debug)]
pub struct PackedWeight {
    lines: Vec<Line>,
    columns: usize,
    inner: usize,
}

impl PackedWeight {
    /// Packs a weight `[columns, inner]`, row-major.
    ///
    /// # Panics
    /// When there are not as many elements, or rows of none.
    pub fn of(weight: &[bf16], columns: usize, inner: usize) -> Self {
        assert!(
            inner > 0 && weight.len() == columns * inner,
            "a weight must have the elements of its shape"
        );
        let mut lines = Vec::new();
        pack_weights(weight, inner, inner.div_ceil(DEPTH), &mut lines);
        Self {
            lines,
            columns,
            inner,
        }
    }

    /// What a weight of this shape takes.
    pub fn bytes(columns: usize, inner: usize) -> usize {
        column_tiles(columns) * inner.div_ceil(DEPTH) * TILE_ELEMENTS * size_of::<u16>()
    }

    /// Whether products with some of the columns can begin with this one.
    pub fn begins_at(column: usize) -> bool {
        column.is_multiple_of(2 * TILE)
    }
}

/// W of a product, `[columns, inner]`.
#[derive(Debug, Clone, Copy)]
pub enum Factor<'a> {
    /// As stored, row-major; packed a block at a time while it is multiplied.
    Stored(&'a [bf16]),
    /// So many columns of a packed weight, from the first one on, which [`PackedWeight::begins_at`].
    Packed(&'a PackedWeight, usize, usize),
}

impl Factor<'_> {
    fn columns(&self, inner: usize) -> usize {
        match self {
            Self::Stored(weight) => weight.len() / inner,
            Self::Packed(_, _, columns) => *columns,
        }
    }

    fn has_shape(&self, columns: usize, inner: usize) -> bool {
        match self {
            Self::Stored(weight) => weight.len() == columns * inner,
            Self::Packed(weight, first, columns) => {
                weight.inner == inner
                    && PackedWeight::begins_at(*first)
                    && first + columns <= weight.columns
            }
        }
    }
}

/// Writes x·Wᵀ to `out`.
///
/// # Arguments
/// * `x`: `[tokens, inner]`, row-major
/// * `out`: `[tokens, columns]`, rows `stride` elements apart; its old content is ignored, what is between rows is kept
///
/// # Panics
/// When a slice does not have the size its shape says.
pub fn product(
    kernel: Kernel,
    x: &[f32],
    weight: Factor<'_>,
    inner: usize,
    out: &mut [f32],
    stride: usize,
    packed: &mut Packed,
) {
    assert!(inner > 0, "rows must have elements");
    let (tokens, columns) = (x.len() / inner, weight.columns(inner));
    assert!(
        x.len() == tokens * inner && weight.has_shape(columns, inner),
        "shapes of a product must match"
    );
    if tokens == 0 || columns == 0 {
        return;
    }
    assert!(
        columns <= stride && (tokens - 1) * stride + columns <= out.len(),
        "the result reaches beyond its slice"
    );
    let out = &mut out[..(tokens - 1) * stride + columns];
    let deep = inner.div_ceil(DEPTH);
    let began = Instant::now();
    pack_activations(x, inner, deep, &mut packed.activations);
    packed.packing += began.elapsed();
    let tiles = tiles_at_once(columns, deep);
    // Rows of a task: all threads have some, and few tokens are not padded to many.
    let share = tokens
        .div_ceil(rayon::current_num_threads())
        .div_ceil(2 * TILE)
        * 2
        * TILE;
    let task = share.clamp(2 * TILE, TASK_TOKENS);
    for first in (0..columns).step_by(tiles * TILE) {
        let block = columns.min(first + tiles * TILE) - first;
        let weights: &[Line] = match weight {
            Factor::Stored(weight) => {
                let block = &weight[first * inner..(first + block) * inner];
                let began = Instant::now();
                pack_weights(block, inner, deep, &mut packed.weights);
                packed.packing += began.elapsed();
                &packed.weights
            }
            Factor::Packed(weight, begin, _) => {
                &weight.lines[(begin + first) / TILE * deep * TILE_LINES..]
            }
        };
        let activations = &packed.activations;
        out.par_chunks_mut(task * stride)
            .enumerate()
            .with_max_len(1)
            .for_each(|(index, out)| {
                let rows = out.len().div_ceil(stride);
                let from = index * task / TILE * deep * TILE_LINES;
                let part = Part {
                    activations: &activations[from..from + tile_pairs(rows) * deep * TILE_LINES],
                    weights,
                    deep,
                    rows,
                    columns: block,
                };
                part.multiply(kernel, &mut out[first..], stride);
            });
    }
}

/// Some rows of X by some columns of W.
struct Part<'a> {
    activations: &'a [Line],
    weights: &'a [Line],
    deep: usize,
    rows: usize,
    columns: usize,
}

impl Part<'_> {
    /// Writes the product to `out`, whose rows begin `stride` elements apart.
    fn multiply(&self, kernel: Kernel, out: &mut [f32], stride: usize) {
        #[cfg(target_arch = "x86_64")]
        for slab in (0..self.deep).step_by(SLAB) {
            let depth = slab..self.deep.min(slab + SLAB);
            match kernel {
                Kernel::Amx => amx::multiply(self, depth, out, stride),
                Kernel::Avx512 => avx512::multiply(self, depth, out, stride),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!(
            "no kernel is listed for this CPU, so none is asked for: {kernel:?} {} {stride}",
            out.len()
        );
    }

    /// The tiles `depth` of row tile `tile` of X.
    fn activation_tiles(&self, tile: usize, depth: &std::ops::Range<usize>) -> &[Line] {
        lines(self.activations, self.deep, tile, depth)
    }

    /// The tiles `depth` of column tile `tile` of W.
    fn weight_tiles(&self, tile: usize, depth: &std::ops::Range<usize>) -> &[Line] {
        lines(self.weights, self.deep, tile, depth)
    }
}

fn lines<'a>(
    packed: &'a [Line],
    deep: usize,
    tile: usize,
    depth: &std::ops::Range<usize>,
) -> &'a [Line] {
    let row = tile * deep;
    &packed[(row + depth.start) * TILE_LINES..(row + depth.end) * TILE_LINES]
}

/// Room for this many lines; what is in it is overwritten.
fn resize(lines: &mut Vec<Line>, length: usize) {
    if lines.len() < length {
        // Zeroed by the system, not by us, where it is new.
        *lines = bytemuck::allocation::zeroed_vec(length);
    }
}

/// Rounds `[tokens, inner]` to bf16 and cuts it into tiles.
fn pack_activations(x: &[f32], inner: usize, deep: usize, packed: &mut Vec<Line>) {
    let tokens = x.len() / inner;
    let length = tile_pairs(tokens) * deep * TILE_LINES;
    resize(packed, length);
    packed[..length]
        .par_chunks_mut(deep * TILE_LINES)
        .enumerate()
        .for_each(|(tile, lines)| {
            for row in 0..TILE {
                let token = tile * TILE + row;
                let values = if token < tokens {
                    &x[token * inner..(token + 1) * inner]
                } else {
                    &[]
                };
                let (whole, rest) = values.as_chunks::<DEPTH>();
                for (step, values) in whole.iter().enumerate() {
                    lines[step * TILE_LINES + row].0 = values.map(rounded);
                }
                for step in whole.len()..deep {
                    // The end of a row, or a row that only fills the tile.
                    let rest = if step == whole.len() { rest } else { &[] };
                    let line = &mut lines[step * TILE_LINES + row].0;
                    line.fill(0);
                    line.iter_mut()
                        .zip(rest)
                        .for_each(|(packed, value)| *packed = rounded(*value));
                }
            }
        });
}

/// Interleaves the pairs of `[columns, inner]` column by column and cuts it into tiles.
fn pack_weights(weight: &[bf16], inner: usize, deep: usize, packed: &mut Vec<Line>) {
    let columns = weight.len() / inner;
    let length = column_tiles(columns) * deep * TILE_LINES;
    resize(packed, length);
    packed[..length]
        .par_chunks_mut(deep * TILE_LINES)
        .enumerate()
        .for_each(|(tile, lines)| {
            let columns: [&[bf16]; TILE] = std::array::from_fn(|in_tile| {
                let column = tile * TILE + in_tile;
                if column < columns {
                    &weight[column * inner..(column + 1) * inner]
                } else {
                    &[]
                }
            });
            for (step, lines) in lines.chunks_exact_mut(TILE_LINES).enumerate() {
                let lines: &mut [[u32; TILE]] = bytemuck::cast_slice_mut(lines);
                for (in_tile, values) in columns.iter().enumerate() {
                    let values = &values[values.len().min(step * DEPTH)..];
                    let mut padded = [bf16::ZERO; DEPTH];
                    let values = values.first_chunk::<DEPTH>().unwrap_or_else(|| {
                        // The end of a column, or a column that only fills the tile.
                        padded[..values.len()].copy_from_slice(values);
                        &padded
                    });
                    for (line, pair) in lines.iter_mut().zip(values.as_chunks::<2>().0) {
                        line[in_tile] =
                            u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
                    }
                }
            }
        });
}

/// The bits of the nearest bf16, ties to even; NaN stays NaN, what is too large becomes infinite.
fn rounded(value: f32) -> u16 {
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
