//! C = X·Wᵀ with f32 sums: the products the program spends its time on.
//!
//! X `[tokens, inner]` is f32, W `[columns, inner]` is in its stored dtype and never copied as a whole, C `[tokens, columns]` is f32.
//!
//! | kernel | factors | instruction | CPUs |
//! | --- | --- | --- | --- |
//! | `Fused` | f32, weights widened while they are packed | fused multiply-add, as wide as the CPU has it | any |
//! | `Split` | f32, as sums of bf16 parts | `tdpbf16ps` on 16 × 16 tiles | Intel from Sapphire Rapids on (and Linux, which grants tiles) |
//! | `Amx` | bf16 | the same | the same |
//! | `Avx512` | bf16 | `vdpbf16ps` | AMD from Zen 4 on, Intel from Cooper Lake on |
//!
//! `Split` takes a number x apart: x₀ is the bf16 next to it, x₁ the one next to x − x₀, x₂ the one next to what is left, and
//! x = x₀ + x₁ + x₂ in all 24 bits of its significand. So x·w = Σ xᵢ·wⱼ, each of which f32 holds exactly; those with i + j > 2
//! are left out, 2⁻²³ of the product at most. A weight that is stored in bf16 is its own first part, one in f16 has two: 3, 5 or 6
//! products of bf16 make one of f32 (Henry, Tang and Heinecke 2019, arXiv:1904.06376, who have the bounds).
//!
//! Every output is one chain of sums along `inner`, from its first element to its last (the bf16 instructions add two products at
//! a time, `Split` the parts of 32 products in turn): neither the number of threads, nor that of tokens, nor how a product is cut
//! up changes a bit, and `Fused` gives the same bits on every CPU that multiplies and adds in one step.
//!
//! A product is cut three times: into rectangles of C, one per task; along `inner` into slabs, so that what a core works on
//! stays in its second-level cache; and into the blocks of C that fit the registers. Factors are packed in the order blocks
//! read them, slab by slab ([`Kernel::pack_rows`], [`Kernel::pack_columns`]): rows of a matrix whose length is a power of two
//! would otherwise fall on the same few lines of the cache. `Fused` packs all factors slab by slab while it multiplies. The others
//! pack X as a whole, sum in scratch (their products are so fast that C would not come and go from memory in time), and
//! take weights packed once for many products ([`PackedWeight`]).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cut;
mod fused;
mod interleave;
mod packed;
#[cfg(test)]
mod tests;
mod tiles;

use std::ops::Range;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::lent::Lent;
use super::rectangles::{self, Rectangle};
use super::stored::StoredDtype;
use cut::Cut;
use packed::{Shape, resize};

pub use cut::{Product, packed_bytes};
pub use fused::{InBlocks, UNROLLED, block_of_c, in_blocks, plus_block};
pub(super) use interleave::interleave;
pub use packed::{Factor, Factors, Line, PackedWeight, Strided, Values};

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// f32, multiplied and added in one step.
    Fused,
    /// f32 as sums of bf16: three for an element of X, so many for one of W ([`Kernel::split`]); tiles as [`Kernel::Amx`].
    Split(u8),
    /// bf16, tiles of Intel's Advanced Matrix Extensions.
    Amx,
    /// bf16, AVX-512 with `vdpbf16ps`.
    Avx512,
}

impl Kernel {
    /// As a run's protocol calls it; what gives other bits for the same weights has another name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fused if fused::in_one_step() => "f32 products, multiplied and added in one step",
            Self::Fused => "f32 products, multiplied and added in two steps",
            Self::Split(_) => "f32 products, as sums of bf16 products by AMX tiles",
            Self::Amx => "bf16 products by AMX tiles",
            Self::Avx512 => "bf16 products by AVX-512",
        }
    }

    /// Whether factors are rounded to bf16.
    pub fn is_bf16(self) -> bool {
        matches!(self, Self::Amx | Self::Avx512)
    }

    /// The bf16 products of parts that a product is a sum of; 1 for a kernel that does not split.
    pub fn terms(self) -> usize {
        match self {
            Self::Fused | Self::Amx | Self::Avx512 => 1,
            Self::Split(1) => 3,
            Self::Split(2) => 5,
            Self::Split(_) => 6,
        }
    }

    /// Whether it multiplies weights that were packed before ([`PackedWeight`]).
    pub fn keeps(self) -> bool {
        self != Self::Fused
    }

    /// The kernel that splits weights of a dtype into as many parts as hold every bit of them; where there are tiles.
    pub fn split(dtype: StoredDtype) -> Self {
        Self::Split(match dtype {
            StoredDtype::Bf16 => 1,
            StoredDtype::F16 => 2,
            StoredDtype::F32 => 3,
        })
    }

    /// Whether [`Kernel::Split`] can be had here.
    pub fn has_split() -> bool {
        static HAS: OnceLock<bool> = OnceLock::new();
        *HAS.get_or_init(|| Self::all().contains(&Self::Split(1)))
    }

    /// The bf16 kernel that is faster here than f32 products; asked once. `None` where there is none: Intel's CPUs have
    /// `vdpbf16ps` at a third of the rate of f32 (measured on Sapphire Rapids), so without tiles bf16 is widened.
    pub fn best_bf16() -> Option<Self> {
        static BEST: OnceLock<Option<Kernel>> = OnceLock::new();
        *BEST.get_or_init(|| {
            let is_worth_it = |kernel: &Self| match kernel {
                Self::Fused | Self::Split(_) => false,
                Self::Amx => true,
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => avx512::is_fast(),
                #[cfg(not(target_arch = "x86_64"))]
                Self::Avx512 => false,
            };
            Self::all().into_iter().find(is_worth_it)
        })
    }

    /// Every kernel that runs here, fastest first.
    pub fn all() -> Vec<Self> {
        let mut kernels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if amx::is_granted() {
                kernels.extend([Self::Amx, Self::Split(1), Self::Split(2), Self::Split(3)]);
            }
            if avx512::is_there() {
                kernels.push(Self::Avx512);
            }
        }
        kernels.push(Self::Fused);
        kernels
    }

    /// Multiplies what is in registers for some hundredths of a second, for [`super::peak`]; returns the operations.
    pub(super) fn spin(self) -> usize {
        match self {
            Self::Fused => fused::spin(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Split(_) => amx::spin(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::spin(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Split(_) | Self::Amx | Self::Avx512 => 0,
        }
    }

    fn shape(self) -> Shape {
        match self {
            Self::Fused => fused::shape(),
            Self::Split(parts) => tiles::split(parts.into()),
            Self::Amx => Shape {
                columns: 2 * tiles::TILE,
                unit: 2 * tiles::TILE,
                ..tiles::SHAPE
            },
            Self::Avx512 => tiles::SHAPE,
        }
    }

    /// Lines that rows of X take when they are packed, of at most a slab of `inner`.
    ///
    /// Lines of a slab of any rows follow those of the rows before, where these are whole blocks.
    pub fn row_lines(self, rows: usize, inner: usize) -> usize {
        self.shape().packed_rows(rows, inner)
    }

    /// Lines that columns of W take when they are packed, of at most a slab of `inner`.
    pub fn column_lines(self, columns: usize, inner: usize) -> usize {
        self.shape().packed_columns(columns, inner)
    }

    /// Elements of `inner` that are multiplied at once.
    pub fn slab(self) -> usize {
        self.shape().slab
    }

    /// Packs some rows of a factor, at most a slab of `inner`; what is missing to whole blocks is zero.
    ///
    /// # Arguments
    /// * `rows`: f32, `[rows, inner]`
    /// * `packed`: [`Kernel::row_lines`] of them
    pub fn pack_rows(self, rows: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
        match self {
            Self::Fused => fused::pack_rows(rows, count, inner, packed),
            Self::Split(_) => tiles::pack_rows::<{ tiles::ROW_PARTS }>(rows, count, inner, packed),
            Self::Amx | Self::Avx512 => tiles::pack_rows::<1>(rows, count, inner, packed),
        }
    }

    /// Packs some columns of a product, which are the rows of W, at most a slab of `inner`; what is missing to whole units is zero.
    ///
    /// # Arguments
    /// * `packed`: [`Kernel::column_lines`] of them
    pub fn pack_columns(
        self,
        columns: Strided<'_>,
        count: usize,
        inner: usize,
        packed: &mut [Line],
    ) {
        match self {
            Self::Fused => fused::pack_columns(columns, count, inner, packed),
            Self::Avx512 => tiles::pack_columns::<1>(columns, count, inner, 1, packed),
            Self::Amx | Self::Split(1) => {
                tiles::pack_columns::<1>(columns, count, inner, 2, packed);
            }
            Self::Split(2) => tiles::pack_columns::<2>(columns, count, inner, 2, packed),
            Self::Split(_) => tiles::pack_columns::<3>(columns, count, inner, 2, packed),
        }
    }

    /// Multiplies packed factors of at most a slab, on this thread.
    ///
    /// # Arguments
    /// * `out`: `[rows, columns]`, rows `stride` elements apart
    /// * `adds`: whether the product is added to what is in `out`
    ///
    /// # Panics
    /// When the factors are not as large as their shapes say, or `out` too small.
    pub fn multiply(self, factors: Factors<'_>, out: &mut [f32], stride: usize, adds: bool) {
        assert!(
            factors.columns <= stride
                && factors.rows > 0
                && (factors.rows - 1) * stride + factors.columns <= out.len(),
            "the result reaches beyond its slice"
        );
        match self {
            Self::Fused => fused::multiply(factors, &mut fused::Slice { out, stride }, adds),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => amx::multiply(amx::Sums::Whole, factors, out, stride, adds),
            #[cfg(target_arch = "x86_64")]
            Self::Split(parts) => {
                amx::multiply(amx::Sums::Split(parts), factors, out, stride, adds);
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::multiply(factors, out, stride, adds),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Split(_) | Self::Amx | Self::Avx512 => {
                unreachable!("no such kernel is listed for this CPU, so none is asked for")
            }
        }
    }
}

/// One of the products of a common X.
#[derive(Debug)]
pub struct Job<'a> {
    /// W.
    pub weight: Factor<'a>,
    /// Rows of W.
    pub columns: usize,
    /// `[tokens, columns]`, rows `stride` elements apart; its old content is ignored, what is between rows is kept.
    pub out: &'a mut [f32],
    /// From row to row of `out`.
    pub stride: usize,
}

/// Packed factors and sums under way, reused by every product.
#[derive(Debug, Default)]
pub struct Packed {
    x: Vec<Line>,
    scratch: Lent<Scratch>,
    /// What packing X took since this was last asked.
    packing: Duration,
}

/// What a task works on.
#[derive(Debug, Default)]
struct Scratch {
    w: Vec<Line>,
    sums: Vec<f32>,
}

impl Packed {
    /// The time packing took since this was last asked; what tasks pack while they multiply is not part of it.
    pub(super) fn take_time(&mut self) -> Duration {
        std::mem::take(&mut self.packing)
    }

    #[cfg(test)]
    fn bytes(self) -> usize {
        let scratch = self.scratch.into_inner();
        let scratch = scratch
            .iter()
            .map(|scratch| scratch.w.len() * size_of::<Line>() + scratch.sums.len() * 4);
        self.x.len() * size_of::<Line>() + scratch.sum::<usize>()
    }
}

/// A rectangle of the result of a job.
struct Task<'a> {
    weight: Factor<'a>,
    out: Rectangle<'a>,
}

/// Writes x·Wᵀ of every job, x being packed once for all.
///
/// # Arguments
/// * `x`: `[tokens, inner]`, row-major
///
/// # Panics
/// When a slice does not have the size its shape says.
pub fn products(
    kernel: Kernel,
    x: &[f32],
    inner: usize,
    jobs: &mut [Job<'_>],
    packed: &mut Packed,
) {
    assert!(
        inner > 0 && x.len().is_multiple_of(inner),
        "x must be [tokens, inner]"
    );
    let tokens = x.len() / inner;
    if tokens == 0 {
        return;
    }
    let shape = kernel.shape();
    let is_kept = jobs
        .iter()
        .all(|job| matches!(job.weight, Factor::Packed(..)));
    for job in &*jobs {
        let fits = match job.weight {
            Factor::Stored(weight) => weight.len() == job.columns * inner,
            Factor::Packed(weight, first) => {
                weight.kernel == kernel
                    && weight.inner == inner
                    && first + job.columns <= weight.columns
                    && first.is_multiple_of(shape.unit)
            }
        };
        assert!(fits, "shapes of a product must match");
        assert!(
            job.columns <= job.stride && (tokens - 1) * job.stride + job.columns <= job.out.len(),
            "the result reaches beyond its slice"
        );
    }
    let columns: Vec<usize> = jobs.iter().map(|job| job.columns).collect();
    let threads = rayon::current_num_threads();
    let cut = Cut::of(shape, tokens, &columns, threads, is_kept);
    let row_ranges: Vec<_> = (0..cut.row_parts).map(|part| cut.rows(part)).collect();
    let mut tasks = Vec::new();
    for (index, job) in jobs.iter_mut().enumerate() {
        let column_ranges: Vec<_> = (0..cut.column_parts[index])
            .map(|part| cut.columns(index, part))
            .collect();
        let weight = job.weight;
        let rectangles = rectangles::cut(job.out, job.stride, &row_ranges, &column_ranges);
        tasks.extend(rectangles.map(|out| Task { weight, out }));
    }
    tasks.retain(|task| !task.out.rows().is_empty() && !task.out.columns().is_empty());
    let x = Strided::rows(Values::F32(x), inner);
    let Packed {
        x: lines,
        scratch,
        packing,
    } = packed;
    match kernel {
        Kernel::Fused => {
            for slab in shape.slabs(inner) {
                let lines = resize(lines, shape.packed_rows(tokens, slab.len()));
                *packing += pack_slab(kernel, x, tokens, slab.clone(), lines);
                tasks.par_iter_mut().with_max_len(1).for_each(|task| {
                    scratch.lend(Scratch::default, |scratch| {
                        let (rows, columns) = (task.out.rows(), task.out.columns());
                        let x = &lines[shape.packed_rows(rows.start, slab.len())..];
                        let w = pack_part(kernel, task, inner, slab.clone(), &mut scratch.w);
                        let factors = Factors {
                            x,
                            w,
                            rows: rows.len(),
                            columns: columns.len(),
                            inner: slab.len(),
                        };
                        fused::multiply(factors, &mut task.out, slab.start > 0);
                    });
                });
            }
        }
        Kernel::Split(_) | Kernel::Amx | Kernel::Avx512 => {
            let lines = resize(lines, shape.packed_rows(tokens, inner));
            let mut rest = &mut *lines;
            for slab in shape.slabs(inner) {
                let (packed, behind) = rest.split_at_mut(shape.packed_rows(tokens, slab.len()));
                rest = behind;
                *packing += pack_slab(kernel, x, tokens, slab, packed);
            }
            tasks.par_iter_mut().with_max_len(1).for_each(|task| {
                scratch.lend(Scratch::default, |scratch| {
                    let Scratch { w, sums } = scratch;
                    let (first_row, first_column) =
                        (task.out.rows().start, task.out.columns().start);
                    let (rows, columns) = (task.out.rows().len(), task.out.columns().len());
                    let sums = super::weight::grow(sums, rows * columns);
                    for slab in shape.slabs(inner) {
                        let x = &lines[shape.packed_rows(tokens, slab.start)..]
                            [shape.packed_rows(first_row, slab.len())..];
                        let w = match task.weight {
                            Factor::Stored(_) => pack_part(kernel, task, inner, slab.clone(), w),
                            Factor::Packed(weight, first) => {
                                &weight.lines[shape.packed_columns(weight.columns, slab.start)..]
                                    [shape.packed_columns(first + first_column, slab.len())..]
                            }
                        };
                        let factors = Factors {
                            x,
                            w,
                            rows,
                            columns,
                            inner: slab.len(),
                        };
                        kernel.multiply(factors, sums, columns, slab.start > 0);
                    }
                    for (row, sums) in sums.chunks_exact(columns).enumerate() {
                        task.out.row(row).copy_from_slice(sums);
                    }
                });
            });
        }
    }
}

/// Packs a slab of X on all threads; returns how long it took.
fn pack_slab(
    kernel: Kernel,
    x: Strided<'_>,
    tokens: usize,
    slab: Range<usize>,
    lines: &mut [Line],
) -> Duration {
    let began = Instant::now();
    let shape = kernel.shape();
    lines
        .par_chunks_mut(shape.packed_rows(shape.rows, slab.len()))
        .enumerate()
        .for_each(|(block, lines)| {
            let first = block * shape.rows;
            let count = shape.rows.min(tokens - first);
            kernel.pack_rows(x.at(first, slab.start), count, slab.len(), lines);
        });
    began.elapsed()
}

/// Packs a task's columns of a slab of a stored weight.
fn pack_part<'l>(
    kernel: Kernel,
    task: &Task<'_>,
    inner: usize,
    slab: Range<usize>,
    lines: &'l mut Vec<Line>,
) -> &'l [Line] {
    let Factor::Stored(weight) = task.weight else {
        unreachable!("`Fused` keeps no weight packed, and the others ask for stored ones only");
    };
    let columns = task.out.columns();
    let lines = resize(lines, kernel.column_lines(columns.len(), slab.len()));
    let weight = Strided::rows(weight, inner).at(columns.start, slab.start);
    kernel.pack_columns(weight, columns.len(), slab.len(), lines);
    lines
}
