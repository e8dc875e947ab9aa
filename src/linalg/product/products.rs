//! Products of a common X on all threads: C is cut into rectangles, one per task, and X is packed once.
//!
//! A forward pass multiplies by rows of W. A backward pass multiplies by its columns, and reads X by columns; only packing differs.

use std::ops::Range;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::super::buffer_pool::BufferPool;
use super::super::rectangles::{self, Rectangle, assert_holds};
use super::cut::TaskCut;
use super::packed::{BlockSizes, Factor, Factors, Line, PackedWeight, Strided, Values, resize};
use super::{Kernel, fused};

/// A product of the common X.
#[derive(Debug)]
pub struct ProductJob<'a> {
    /// W.
    pub weight: Factor<'a>,
    /// Rows of W.
    pub columns: usize,
    /// `[tokens, columns]`, rows `stride` elements apart. Elements between rows are kept.
    pub out: &'a mut [f32],
    /// Elements from row to row of `out`.
    pub stride: usize,
    /// True if the product is added to the old content of `out`, which is ignored otherwise.
    pub adds: bool,
}

/// Packed factors and sums, reused by every product.
#[derive(Debug, Default)]
pub struct Packed {
    x: Vec<Line>,
    scratch: BufferPool<TaskScratch>,
    /// The time of packing X since the last [`Packed::take_time`].
    packing: Duration,
}

/// The scratch of a task.
#[derive(Debug, Default)]
struct TaskScratch {
    w: Vec<Line>,
    sums: Vec<f32>,
}

impl Packed {
    /// Returns the time of packing X since the last call; packing inside tasks is not included.
    pub(in super::super) fn take_time(&mut self) -> Duration {
        std::mem::take(&mut self.packing)
    }

    #[cfg(test)]
    pub(super) fn bytes(self) -> usize {
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
    adds: bool,
}

/// The factor that all jobs share.
#[derive(Clone, Copy)]
struct Activations<'a> {
    /// `[tokens, inner]`
    values: Strided<'a>,
    tokens: usize,
    inner: usize,
}

/// Writes x·Wᵀ of every job; x is packed once for all.
///
/// # Arguments
/// * `x`: `[tokens, inner]`, row-major
///
/// # Panics
/// Panics when a slice does not have the size of its shape.
pub fn products(
    kernel: Kernel,
    x: &[f32],
    inner: usize,
    jobs: &mut [ProductJob<'_>],
    packed: &mut Packed,
) {
    assert!(
        inner > 0 && x.len().is_multiple_of(inner),
        "x must be [tokens, inner]"
    );
    let rows = Strided::rows(Values::F32(x), inner);
    products_of(kernel, rows, (x.len() / inner, inner), jobs, packed);
}

/// [`products`] of an x in any layout, `[tokens, inner]`, such as a matrix `[inner, tokens]` that is read by columns.
///
/// # Panics
/// Panics when a slice does not have the size of its shape, when `inner` is 0, and when x is not f32.
pub fn products_of(
    kernel: Kernel,
    x: Strided<'_>,
    (tokens, inner): (usize, usize),
    jobs: &mut [ProductJob<'_>],
    packed: &mut Packed,
) {
    assert!(
        inner > 0 && x.holds(tokens, inner) && matches!(x.values, Values::F32(_)),
        "x must be [tokens, inner], f32"
    );
    let x = Activations {
        values: x,
        tokens,
        inner,
    };
    if x.tokens == 0 {
        return;
    }
    for job in &*jobs {
        check(kernel, job, x);
    }
    let mut tasks = cut_into_tasks(kernel.shape(), x.tokens, jobs);
    match kernel {
        Kernel::Fused => multiply_by_slabs(x, &mut tasks, packed),
        Kernel::Split(_) | Kernel::Amx | Kernel::Avx512 => {
            multiply_in_scratch(kernel, x, &mut tasks, packed);
        }
    }
}

/// Panics unless the slices of a job have the sizes of its shapes.
fn check(kernel: Kernel, job: &ProductJob<'_>, x: Activations<'_>) {
    let fits = match job.weight {
        Factor::Stored(weight) => Some(weight.len()) == job.columns.checked_mul(x.inner),
        Factor::Strided(weight) => weight.holds(job.columns, x.inner),
        Factor::Packed(weight, first) => {
            weight.kernel == kernel
                && weight.inner == x.inner
                && first
                    .checked_add(job.columns)
                    .is_some_and(|end| end <= weight.columns)
                && PackedWeight::begins_at(kernel, first)
        }
    };
    assert!(fits, "shapes of a product must match");
    assert!(
        job.columns <= job.stride,
        "rows of the result must not overlap"
    );
    assert_holds(job.out.len(), x.tokens, job.columns, job.stride);
}

fn cut_into_tasks<'t>(
    shape: BlockSizes,
    tokens: usize,
    jobs: &'t mut [ProductJob<'_>],
) -> Vec<Task<'t>> {
    let is_kept = jobs
        .iter()
        .all(|job| matches!(job.weight, Factor::Packed(..)));
    let columns: Vec<usize> = jobs.iter().map(|job| job.columns).collect();
    let threads = rayon::current_num_threads();
    let cut = TaskCut::of(shape, tokens, &columns, threads, is_kept);
    let row_ranges: Vec<_> = (0..cut.row_parts).map(|part| cut.rows(part)).collect();
    let mut tasks = Vec::new();
    for (index, job) in jobs.iter_mut().enumerate() {
        let column_ranges: Vec<_> = (0..cut.column_parts[index])
            .map(|part| cut.columns(index, part))
            .collect();
        let (weight, adds) = (job.weight, job.adds);
        let rectangles = rectangles::cut(job.out, job.stride, &row_ranges, &column_ranges);
        tasks.extend(rectangles.map(|out| Task { weight, out, adds }));
    }
    tasks.retain(|task| !task.out.rows().is_empty() && !task.out.columns().is_empty());
    tasks
}

/// Packs X slab by slab; each task packs its part of W and adds to C.
fn multiply_by_slabs(x: Activations<'_>, tasks: &mut [Task<'_>], packed: &mut Packed) {
    let (kernel, shape) = (Kernel::Fused, Kernel::Fused.shape());
    let Packed {
        x: lines,
        scratch,
        packing,
    } = packed;
    for slab in shape.slabs(x.inner) {
        let lines = resize(lines, shape.packed_rows(x.tokens, slab.len()));
        *packing += pack_slab(kernel, x, slab.clone(), lines);
        tasks.par_iter_mut().with_max_len(1).for_each(|task| {
            scratch.lend(TaskScratch::default, |scratch| {
                let (rows, columns) = (task.out.rows(), task.out.columns());
                let packed_x = &lines[shape.packed_rows(rows.start, slab.len())..];
                let w = pack_part(kernel, task, x.inner, slab.clone(), &mut scratch.w);
                let factors = Factors {
                    x: packed_x,
                    w,
                    rows: rows.len(),
                    columns: columns.len(),
                    inner: slab.len(),
                };
                let adds = task.adds || slab.start > 0;
                fused::multiply(factors, &mut task.out, adds);
            });
        });
    }
}

/// Packs all of X; each task sums all slabs in scratch, and copies the sums to C.
fn multiply_in_scratch(
    kernel: Kernel,
    x: Activations<'_>,
    tasks: &mut [Task<'_>],
    packed: &mut Packed,
) {
    let (shape, tokens) = (kernel.shape(), x.tokens);
    let Packed {
        x: lines,
        scratch,
        packing,
    } = packed;
    let lines = resize(lines, shape.packed_rows(tokens, x.inner));
    let mut rest = &mut *lines;
    for slab in shape.slabs(x.inner) {
        let (packed, behind) = rest.split_at_mut(shape.packed_rows(tokens, slab.len()));
        rest = behind;
        *packing += pack_slab(kernel, x, slab, packed);
    }
    tasks.par_iter_mut().with_max_len(1).for_each(|task| {
        scratch.lend(TaskScratch::default, |scratch| {
            let TaskScratch { w, sums } = scratch;
            let (first_row, first_column) = (task.out.rows().start, task.out.columns().start);
            let (rows, columns) = (task.out.rows().len(), task.out.columns().len());
            let sums = super::super::weight::grow(sums, rows * columns);
            for slab in shape.slabs(x.inner) {
                let packed_x = &lines[shape.packed_rows(tokens, slab.start)..]
                    [shape.packed_rows(first_row, slab.len())..];
                let w = match task.weight {
                    Factor::Stored(_) | Factor::Strided(_) => {
                        pack_part(kernel, task, x.inner, slab.clone(), w)
                    }
                    Factor::Packed(weight, first) => {
                        &weight.lines[shape.packed_columns(weight.columns, slab.start)..]
                            [shape.packed_columns(first + first_column, slab.len())..]
                    }
                };
                let factors = Factors {
                    x: packed_x,
                    w,
                    rows,
                    columns,
                    inner: slab.len(),
                };
                kernel.multiply(factors, sums, columns, slab.start > 0);
            }
            for (row, sums) in sums.chunks_exact(columns).enumerate() {
                let out = task.out.row(row);
                if task.adds {
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                } else {
                    out.copy_from_slice(sums);
                }
            }
        });
    });
}

/// Packs a slab of X on all threads; returns the time.
fn pack_slab(
    kernel: Kernel,
    x: Activations<'_>,
    slab: Range<usize>,
    lines: &mut [Line],
) -> Duration {
    let began = Instant::now();
    let shape = kernel.shape();
    // A matrix that is read by columns is read in longer pieces.
    let rows = shape.rows * if x.values.is_transposed { 4 } else { 1 };
    lines
        .par_chunks_mut(shape.packed_rows(rows, slab.len()))
        .enumerate()
        .for_each(|(block, lines)| {
            let first = block * rows;
            let count = rows.min(x.tokens - first);
            kernel.pack_rows(x.values.at(first, slab.start), count, slab.len(), lines);
        });
    began.elapsed()
}

fn pack_part<'l>(
    kernel: Kernel,
    task: &Task<'_>,
    inner: usize,
    slab: Range<usize>,
    lines: &'l mut Vec<Line>,
) -> &'l [Line] {
    let weight = match task.weight {
        Factor::Stored(weight) => Strided::rows(weight, inner),
        Factor::Strided(weight) => weight,
        Factor::Packed(..) => unreachable!("a packed weight is not packed again"),
    };
    let columns = task.out.columns();
    let lines = resize(lines, kernel.column_lines(columns.len(), slab.len()));
    let weight = weight.at(columns.start, slab.start);
    kernel.pack_columns(weight, columns.len(), slab.len(), lines);
    lines
}
