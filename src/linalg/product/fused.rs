//! f32 products for any CPU: blocks of C in registers, one multiply-add per product, as wide as the CPU has it.
//!
//! A block is 8 rows by three registers (4 by three where there are 16 registers): 24 sums under way, three registers of W, the
//! elements of X broadcast from memory. What was widened while it was packed is multiplied without a copy of W in f32. Where
//! the CPU cannot multiply and add in one step it rounds twice and is slow; such CPUs are older than 2013.

use pulp::{Arch, Simd, WithSimd};

use super::super::rectangles::Rectangle;
use super::{Factors, Line, Shape, Strided};

/// Registers of a row of a block.
const WIDE: usize = 3;
/// `inner` is packed in multiples of this, so that blocks of any size are whole lines.
const DEPTH: usize = 16;
/// 512 elements: a block's rows of X are 16 KiB of the first-level cache, and a task's columns of W some hundred KiB of the second.
const SLAB: usize = 512;
/// Columns of a block at the most: three registers of 512 bits.
const MOST_COLUMNS: usize = 48;
/// Rows of a block at the most.
const MOST_ROWS: usize = 8;

/// What a block looks like on this CPU.
pub(super) fn shape() -> Shape {
    struct Ask;
    impl WithSimd for Ask {
        type Output = (usize, usize);
        fn with_simd<S: Simd>(self, _: S) -> (usize, usize) {
            (block_rows::<S>(), WIDE * S::F32_LANES)
        }
    }
    let (rows, columns) = Arch::new().dispatch(Ask);
    Shape {
        rows,
        columns,
        unit: columns,
        depth: DEPTH,
        slab: SLAB,
        row_bytes: size_of::<f32>(),
        column_bytes: size_of::<f32>(),
    }
}

const fn block_rows<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { 8 } else { 4 }
}

/// Packs rows block by block, `[steps, rows of a block]`.
pub(super) fn pack_rows(rows: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
    interleave(rows, count, inner, shape().rows, packed);
}

/// Packs columns block by block, `[steps, columns of a block]`.
pub(super) fn pack_columns(columns: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
    interleave(columns, count, inner, shape().columns, packed);
}

/// Packs rows of a factor, `width` of them at a time.
fn interleave(factor: Strided<'_>, count: usize, inner: usize, width: usize, packed: &mut [Line]) {
    Arch::new().dispatch(Interleave {
        factor,
        count,
        inner,
        width,
        packed: bytemuck::cast_slice_mut(packed),
    });
}

/// The loops of [`interleave`], compiled for the registers the CPU has.
struct Interleave<'a> {
    factor: Strided<'a>,
    count: usize,
    inner: usize,
    width: usize,
    packed: &'a mut [f32],
}

impl WithSimd for Interleave<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match self.width {
            4 => self.of::<4>(),
            8 => self.of::<8>(),
            12 => self.of::<12>(),
            24 => self.of::<24>(),
            48 => self.of::<48>(),
            width => unreachable!("no CPU has blocks of {width}"),
        }
    }
}

impl Interleave<'_> {
    #[inline(always)]
    fn of<const WIDTH: usize>(self) {
        let Self {
            factor,
            count,
            inner,
            packed,
            ..
        } = self;
        let steps = inner.next_multiple_of(DEPTH);
        let blocks = packed.chunks_exact_mut(steps * WIDTH).enumerate();
        for (block, packed) in blocks.take(count.div_ceil(WIDTH)) {
            let first = block * WIDTH;
            let present = (count - first).min(WIDTH);
            if present < WIDTH || inner < steps {
                packed.fill(0.0);
            }
            let packed = packed.as_chunks_mut::<WIDTH>().0;
            if factor.is_transposed {
                for (k, packed) in packed[..inner].iter_mut().enumerate() {
                    let at = k * factor.stride + first;
                    factor.values.widen(at, &mut packed[..present]);
                }
                continue;
            }
            // Some elements of every row at a time, so that what is written stays in the first-level cache.
            let mut wide = [0.0f32; DEPTH];
            for (chunk, packed) in packed.as_chunks_mut::<DEPTH>().0.iter_mut().enumerate() {
                let k = chunk * DEPTH;
                let some = DEPTH.min(inner.saturating_sub(k));
                for row in 0..present {
                    let at = (first + row) * factor.stride + k;
                    if some == DEPTH {
                        factor.values.widen(at, &mut wide);
                    } else {
                        wide = [0.0; DEPTH];
                        factor.values.widen(at, &mut wide[..some]);
                    }
                    for (packed, value) in packed.iter_mut().zip(&wide) {
                        packed[row] = *value;
                    }
                }
            }
        }
    }
}

/// Where a block's sums come from and go to.
pub(super) trait Rows {
    /// A row of the product.
    fn row(&mut self, row: usize) -> &mut [f32];
}

/// Rows some elements apart.
pub(super) struct Slice<'a> {
    pub(super) out: &'a mut [f32],
    pub(super) stride: usize,
}

impl Rows for Slice<'_> {
    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.out[row * self.stride..]
    }
}

impl Rows for Rectangle<'_> {
    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut [f32] {
        Rectangle::row(self, row)
    }
}

/// Writes the product of packed factors to `out`, or adds it.
pub(super) fn multiply(factors: Factors<'_>, out: &mut impl Rows, adds: bool) {
    Arch::new().dispatch(Blocks { factors, out, adds });
}

struct Blocks<'a, R> {
    factors: Factors<'a>,
    out: &'a mut R,
    adds: bool,
}

impl<R: Rows> WithSimd for Blocks<'_, R> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if block_rows::<S>() == 8 {
            self.rows_of::<S, 8>(simd);
        } else {
            self.rows_of::<S, 4>(simd);
        }
    }
}

impl<R: Rows> Blocks<'_, R> {
    #[inline(always)]
    fn rows_of<S: Simd, const ROWS: usize>(self, simd: S) {
        let Factors {
            x,
            w,
            rows,
            columns,
            inner,
        } = self.factors;
        let width = WIDE * S::F32_LANES;
        let steps = inner.next_multiple_of(DEPTH);
        let x = bytemuck::cast_slice::<Line, f32>(x).chunks_exact(steps * ROWS);
        let w = bytemuck::cast_slice::<Line, f32>(w).chunks_exact(steps * width);
        let (row_blocks, column_blocks) = (rows.div_ceil(ROWS), columns.div_ceil(width));
        assert!(
            x.len() >= row_blocks && w.len() >= column_blocks,
            "factors must be as large as their shapes say"
        );
        let mut sums = [0.0f32; MOST_ROWS * MOST_COLUMNS];
        let sums = &mut sums[..ROWS * width];
        for (block, x) in x.enumerate().take(row_blocks) {
            let first_row = block * ROWS;
            let present = (rows - first_row).min(ROWS);
            for (block, w) in w.clone().enumerate().take(column_blocks) {
                let some = block * width..columns.min((block + 1) * width);
                let lines = sums.chunks_exact_mut(width).take(present).enumerate();
                if self.adds {
                    for (row, sums) in lines {
                        let out = self.out.row(first_row + row);
                        sums[..some.len()].copy_from_slice(&out[some.clone()]);
                    }
                } else {
                    sums.fill(0.0);
                }
                add_block::<S, ROWS>(simd, x, w, sums);
                for (row, sums) in sums.chunks_exact(width).take(present).enumerate() {
                    let out = self.out.row(first_row + row);
                    out[some.clone()].copy_from_slice(&sums[..some.len()]);
                }
            }
        }
    }
}

/// sums `[ROWS, 3 registers]` ← sums + x·w, with x `[steps, ROWS]` and w `[steps, 3 registers]`.
#[inline(always)]
fn add_block<S: Simd, const ROWS: usize>(simd: S, x: &[f32], w: &[f32], sums: &mut [f32]) {
    let (w, _) = S::as_simd_f32s(w);
    let (sums, _) = S::as_mut_simd_f32s(sums);
    let mut held = [[simd.splat_f32s(0.0); WIDE]; ROWS];
    let sums = sums.as_chunks_mut::<WIDE>().0;
    for (held, sums) in held.iter_mut().zip(&*sums) {
        *held = *sums;
    }
    for (x, w) in x.as_chunks::<ROWS>().0.iter().zip(w.as_chunks::<WIDE>().0) {
        for (held, x) in held.iter_mut().zip(x) {
            let x = simd.splat_f32s(*x);
            for (held, w) in held.iter_mut().zip(w) {
                *held = simd.mul_add_e_f32s(x, *w, *held);
            }
        }
    }
    for (held, sums) in held.iter().zip(sums) {
        *sums = *held;
    }
}

/// Multiply-adds on registers and nothing else; returns the operations.
pub(super) fn spin() -> usize {
    /// Latency 4 or 5 times 2 units, and few enough for 16 registers.
    const CHAINS: usize = 12;
    // A twentieth of a second: long against starting the threads.
    const ROUNDS: usize = 20_000_000;
    struct Chains;
    impl WithSimd for Chains {
        type Output = usize;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> usize {
            let (x, y) = (
                simd.splat_f32s(std::hint::black_box(0.999)),
                simd.splat_f32s(std::hint::black_box(1e-3)),
            );
            let mut sums = [simd.splat_f32s(0.0); CHAINS];
            for _ in 0..ROUNDS {
                for sum in &mut sums {
                    *sum = simd.mul_add_e_f32s(*sum, x, y);
                }
            }
            std::hint::black_box(sums.map(|sum| simd.reduce_sum_f32s(sum)));
            S::F32_LANES
        }
    }
    2 * CHAINS * Arch::new().dispatch(Chains) * ROUNDS
}

#[cfg(test)]
mod tests {
    use super::super::Values;
    use super::*;

    /// The same product by every width of register this CPU has.
    #[test]
    fn registers_of_any_width_give_the_same_bits() {
        let (rows, columns, inner) = (13, 100, 300);
        let numbers = |count: usize, pace: f32| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * pace).sin()).collect()
        };
        let (x, w) = (numbers(rows * inner, 0.37), numbers(columns * inner, 0.71));
        struct Run<'a>(&'a [f32], &'a [f32], (usize, usize, usize));
        impl WithSimd for Run<'_> {
            type Output = Vec<f32>;
            #[inline(always)]
            fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
                let (rows, columns, inner) = self.2;
                let (high, wide) = (block_rows::<S>(), WIDE * S::F32_LANES);
                let steps = inner.next_multiple_of(DEPTH);
                let pack = |values, count: usize, width: usize| {
                    let elements = count.next_multiple_of(width) * steps;
                    let mut lines = vec![Line::default(); elements / 16];
                    let factor = Strided::rows(Values::F32(values), inner);
                    interleave(factor, count, inner, width, &mut lines);
                    lines
                };
                let (x, w) = (pack(self.0, rows, high), pack(self.1, columns, wide));
                let mut out = vec![f32::NAN; rows * columns];
                let blocks = Blocks {
                    factors: Factors {
                        x: &x,
                        w: &w,
                        rows,
                        columns,
                        inner,
                    },
                    out: &mut Slice {
                        out: &mut out,
                        stride: columns,
                    },
                    adds: false,
                };
                blocks.with_simd(simd);
                out
            }
        }
        let run = || Run(&x, &w, (rows, columns, inner));
        let widest = Arch::new().dispatch(run());
        // Rounding once per product, in order: what every CPU with such an instruction computes.
        for row in 0..rows {
            for column in 0..columns {
                let chain = (0..inner).fold(0.0f32, |sum, k| {
                    x[row * inner + k].mul_add(w[column * inner + k], sum)
                });
                assert_eq!(widest[row * columns + column], chain);
            }
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(simd) = pulp::x86::V3::try_new() {
            assert_eq!(Simd::vectorize(simd, run()), widest);
        }
    }
}
