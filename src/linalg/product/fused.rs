//! f32 products for any CPU: blocks of C in registers, one multiply-add per product, on the widest vectors of the CPU.
//!
//! | registers | a block of C | sums | factors |
//! | --- | --- | --- | --- |
//! | 32 | 8 rows by 3 registers | 24 | 3 of W, 1 with an element of X in all lanes |
//! | 16 | 6 rows by 2 registers | 12 | 2 of W, the same |
//!
//! 4 rows by 3 registers would load less, but need all 16 registers. Compilers then keep a sum in memory, every step waits
//! for the store of the last, and products take twice the time. The loop is unrolled by four steps, because the number of instructions
//! limits two threads that share a core. Packing widens W, so there is no copy of W in f32. A CPU that cannot multiply and add in one
//! step rounds twice and is slow; such CPUs are rare since 2013.

use pulp::{Arch, Simd, WithSimd};

use super::super::rectangles::Rectangle;
use super::interleave::{DEPTH, interleave};
use super::packed::{BlockSizes, Factors, Line, Strided, TASK_ELEMENTS};

/// Unrolled steps along `inner`; packed factors have a multiple of it.
pub const UNROLLED: usize = 4;
/// Elements of the largest block: 8 rows by three registers of 512 bits.
const MOST_ELEMENTS: usize = 8 * 48;

/// The sizes on this CPU.
///
/// Longer slabs load and store C less often, and wider tasks read X less often. With 16 registers, slabs of 2048 steps in place of 1024
/// and tasks with half as many columns more gained 3 to 11 % of the peak. A block's rows of X (48 KiB) then exceed the first-level
/// cache, and a task's columns of W the second, but both are read in order. With 32 registers, neither was tried.
pub(super) fn shape() -> BlockSizes {
    struct BlockSizesHere;
    impl WithSimd for BlockSizesHere {
        type Output = BlockSizes;
        fn with_simd<S: Simd>(self, _: S) -> BlockSizes {
            let (rows, columns) = block::<S>();
            let (slab, task) =
                if has_32::<S>() { (512, TASK_ELEMENTS) } else { (2048, TASK_ELEMENTS / 2 * 3) };
            BlockSizes {
                rows,
                columns,
                unit: columns,
                depth: DEPTH,
                slab,
                task,
                row_bytes: size_of::<f32>(),
                column_bytes: size_of::<f32>(),
            }
        }
    }
    Arch::new().dispatch(BlockSizesHere)
}

/// Rows and columns of a block of C on this CPU.
pub fn block_of_c() -> (usize, usize) {
    let BlockSizes { rows, columns, .. } = shape();
    (rows, columns)
}

/// Returns whether the CPU rounds once per product and sum, not twice.
pub(super) fn in_one_step() -> bool {
    struct RoundsOnce;
    impl WithSimd for RoundsOnce {
        type Output = bool;
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> bool {
            // (1 + ε)·(1 − ε) is 1 − ε², which rounds to 1.
            let [more, less, one] = [1.0 + f32::EPSILON, 1.0 - f32::EPSILON, -1.0]
                .map(|value| simd.splat_f32s(std::hint::black_box(value)));
            simd.reduce_sum_f32s(simd.mul_add_e_f32s(more, less, one)) != 0.0
        }
    }
    Arch::new().dispatch(RoundsOnce)
}

/// Returns whether the CPU has registers for the larger block.
const fn has_32<S: Simd>() -> bool {
    S::REGISTER_COUNT >= 32
}

/// Rows and columns of a block.
const fn block<S: Simd>() -> (usize, usize) {
    let (rows, wide) = if has_32::<S>() { (8, 3) } else { (6, 2) };
    (rows, wide * S::F32_LANES)
}

/// Packs rows block by block, `[steps, rows of a block]`.
pub(super) fn pack_rows(rows: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
    interleave(rows, count, inner, shape().rows, packed);
}

/// Packs columns block by block, `[steps, columns of a block]`.
pub(super) fn pack_columns(columns: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
    interleave(columns, count, inner, shape().columns, packed);
}

/// The source and target of a block's sums.
pub(super) trait OutputRows {
    fn row(&mut self, row: usize) -> &mut [f32];
}

/// Rows of a slice, `stride` elements apart.
pub(super) struct Slice<'a> {
    pub(super) out: &'a mut [f32],
    pub(super) stride: usize,
}

impl OutputRows for Slice<'_> {
    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.out[row * self.stride..]
    }
}

impl OutputRows for Rectangle<'_> {
    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut [f32] {
        Rectangle::row(self, row)
    }
}

/// Work on blocks of C, compiled for the CPU's registers.
pub trait InBlocks {
    /// The result.
    type Output;

    /// Runs with blocks of `ROWS` rows by `WIDE` registers. All called functions must be `#[inline(always)]`.
    fn run<S: Simd, const ROWS: usize, const WIDE: usize>(self, simd: S) -> Self::Output;
}

/// Runs work with the blocks of this CPU.
pub fn in_blocks<W: InBlocks>(work: W) -> W::Output {
    Arch::new().dispatch(Dispatched(work))
}

struct Dispatched<W>(W);

impl<W: InBlocks> WithSimd for Dispatched<W> {
    type Output = W::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> W::Output {
        if has_32::<S>() { self.0.run::<S, 8, 3>(simd) } else { self.0.run::<S, 6, 2>(simd) }
    }
}

/// Writes the product of packed factors to `out`, or adds it.
pub(super) fn multiply(factors: Factors<'_>, out: &mut impl OutputRows, adds: bool) {
    in_blocks(Blocks { factors, out, adds });
}

struct Blocks<'a, R> {
    factors: Factors<'a>,
    out: &'a mut R,
    adds: bool,
}

impl<R: OutputRows> InBlocks for Blocks<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd, const ROWS: usize, const WIDE: usize>(self, simd: S) {
        let Factors { x, w, rows, columns, inner } = self.factors;
        let width = WIDE * S::F32_LANES;
        let steps = inner.next_multiple_of(DEPTH);
        let x = bytemuck::cast_slice::<Line, f32>(x).chunks_exact(steps * ROWS);
        let w = bytemuck::cast_slice::<Line, f32>(w).chunks_exact(steps * width);
        let (row_blocks, column_blocks) = (rows.div_ceil(ROWS), columns.div_ceil(width));
        assert!(
            x.len() >= row_blocks && w.len() >= column_blocks,
            "factors must be as large as their shapes say"
        );
        let mut edge = [0.0f32; MOST_ELEMENTS];
        for (block, x) in x.enumerate().take(row_blocks) {
            let first_row = block * ROWS;
            let present = (rows - first_row).min(ROWS);
            for (block, w) in w.clone().enumerate().take(column_blocks) {
                let some = block * width..columns.min((block + 1) * width);
                if present == ROWS && some.len() == width {
                    let mut sums = [[simd.splat_f32s(0.0); WIDE]; ROWS];
                    if self.adds {
                        for (row, sums) in (first_row..).zip(&mut sums) {
                            let (out, _) = S::as_simd_f32s(&self.out.row(row)[some.clone()]);
                            sums.copy_from_slice(out);
                        }
                    }
                    let sums = plus_block::<S, ROWS, WIDE>(simd, x, w, sums);
                    for (row, sums) in (first_row..).zip(&sums) {
                        let out = &mut self.out.row(row)[some.clone()];
                        S::as_mut_simd_f32s(out).0.copy_from_slice(sums);
                    }
                    continue;
                }
                // A block at the edge of C has fewer rows or columns.
                if self.adds {
                    let lines = edge.chunks_exact_mut(width).take(present);
                    for (row, sums) in (first_row..).zip(lines) {
                        sums[..some.len()].copy_from_slice(&self.out.row(row)[some.clone()]);
                    }
                } else {
                    edge.fill(0.0);
                }
                let (registers, _) = S::as_mut_simd_f32s(&mut edge);
                let sums = &mut registers.as_chunks_mut().0.as_chunks_mut().0[0];
                *sums = plus_block::<S, ROWS, WIDE>(simd, x, w, *sums);
                let lines = edge.chunks_exact(width).take(present);
                for (row, sums) in (first_row..).zip(lines) {
                    self.out.row(row)[some.clone()].copy_from_slice(&sums[..some.len()]);
                }
            }
        }
    }
}

/// sums + x·w, with sums `[ROWS, WIDE registers]`, x `[steps, ROWS]` and w `[steps, WIDE registers]`.
/// `x` and `w` have a multiple of [`UNROLLED`] steps; surplus steps of the longer factor are ignored.
#[inline(always)]
pub fn plus_block<S: Simd, const ROWS: usize, const WIDE: usize>(
    simd: S,
    x: &[f32],
    w: &[f32],
    mut sums: [[S::f32s; WIDE]; ROWS],
) -> [[S::f32s; WIDE]; ROWS] {
    let (w, _) = S::as_simd_f32s(w);
    let x = x.as_chunks::<ROWS>().0.as_chunks::<UNROLLED>().0;
    let w = w.as_chunks::<WIDE>().0.as_chunks::<UNROLLED>().0;
    for (x, w) in x.iter().zip(w) {
        for (x, w) in x.iter().zip(w) {
            for (sums, x) in sums.iter_mut().zip(x) {
                let x = simd.splat_f32s(*x);
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = simd.mul_add_e_f32s(x, *w, *sum);
                }
            }
        }
    }
    sums
}

/// Runs multiply-adds on registers; returns the number of operations.
pub(super) fn spin() -> usize {
    /// Latency 4 or 5 times 2 units, and few enough for 16 registers.
    const CHAINS: usize = 12;
    // A twentieth of a second, long compared with the start of the threads.
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

    /// The same product with every width of registers of this CPU.
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
                let (high, wide) = block::<S>();
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
                    factors: Factors { x: &x, w: &w, rows, columns, inner },
                    out: &mut Slice { out: &mut out, stride: columns },
                    adds: false,
                };
                Dispatched(blocks).with_simd(simd);
                out
            }
        }
        let run = || Run(&x, &w, (rows, columns, inner));
        let widest = Arch::new().dispatch(run());
        // Rounding once per product, in order, as on every CPU with such an instruction.
        for row in 0..rows {
            for column in 0..columns {
                let chain = (0..inner).fold(0.0f32, |sum, k| {
                    let (x, w) = (x[row * inner + k], w[column * inner + k]);
                    if in_one_step() { x.mul_add(w, sum) } else { x * w + sum }
                });
                assert_eq!(widest[row * columns + column], chain);
            }
        }
        #[cfg(target_arch = "x86_64")]
        {
            let with_fma = pulp::x86::V3::try_new();
            assert_eq!(with_fma.is_some(), in_one_step());
            if let Some(simd) = with_fma {
                assert_eq!(Simd::vectorize(simd, run()), widest);
            }
        }
        // Without such an instruction every product is rounded too. Blocks of two columns are the narrowest.
        let narrowest = Simd::vectorize(pulp::Scalar::new(), run());
        for row in 0..rows {
            for column in 0..columns {
                let chain = (0..inner)
                    .fold(0.0f32, |sum, k| x[row * inner + k] * w[column * inner + k] + sum);
                assert_eq!(narrowest[row * columns + column], chain);
            }
        }
    }
}
