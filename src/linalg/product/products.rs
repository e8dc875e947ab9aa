//! Products of a common X on all threads: C is cut into rectangles, one per task, and X is packed once.
//!
//! A forward pass multiplies by rows of W. A backward pass multiplies by its columns, and reads X by columns; only packing differs.

use std::ops::Range;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::super::buffer_pool::BufferPool;
use super::super::rectangles::{self, Rectangle, assert_holds};
use super::cut::TaskCut;
use super::fused;
use super::kernel::Kernel;
use super::packed::{BlockSizes, Factors, Line, Strided, Values, resize};
use super::packed_weight::{Factor, PackedWeight, RowBuffer};

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
    w: WeightScratch,
    sums: Vec<f32>,
}

/// Packed columns of W, and the rows they are packed from where W has another form.
#[derive(Debug, Default)]
struct WeightScratch {
    lines: Vec<Line>,
    rows: RowBuffer,
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
            .map(|scratch| scratch.w.lines.len() * size_of::<Line>() + scratch.sums.len() * 4);
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

/// Factors of a product in any layout, before they are packed as [`Factors`].
#[derive(Debug, Clone, Copy)]
pub struct StridedFactors<'a> {
    /// X, `[tokens, inner]`.
    pub x: Strided<'a>,
    /// W, `[columns, inner]`.
    pub weight: Strided<'a>,
    /// Rows of X.
    pub tokens: usize,
    /// Rows of W, columns of the product.
    pub columns: usize,
    /// Elements of a row of each factor.
    pub inner: usize,
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
    assert!(inner > 0 && x.len().is_multiple_of(inner), "x must be [tokens, inner]");
    let rows = Strided::rows(Values::F32(x), inner);
    kernel.products_of(rows, (x.len() / inner, inner), jobs, packed);
}

impl Kernel {
    /// [`products`] of an x in any layout, `[tokens, inner]`, such as a matrix `[inner, tokens]` that is read by columns.
    ///
    /// # Panics
    /// Panics when a slice does not have the size of its shape, when `inner` is 0, and when x is not f32.
    pub fn products_of(
        self,
        x: Strided<'_>,
        (tokens, inner): (usize, usize),
        jobs: &mut [ProductJob<'_>],
        packed: &mut Packed,
    ) {
        let kernel = self;
        assert!(
            inner > 0 && x.holds(tokens, inner) && matches!(x.values, Values::F32(_)),
            "x must be [tokens, inner], f32"
        );
        let x = Activations { values: x, tokens, inner };
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
}

/// Panics unless the slices of a job have the sizes of its shapes.
fn check(kernel: Kernel, job: &ProductJob<'_>, x: Activations<'_>) {
    let fits = match job.weight {
        Factor::Stored(weight) => Some(weight.len()) == job.columns.checked_mul(x.inner),
        Factor::Strided(weight) => weight.holds(job.columns, x.inner),
        Factor::Packed(weight, first) => {
            weight.kernel == kernel
                && weight.inner == x.inner
                && first.checked_add(job.columns).is_some_and(|end| end <= weight.columns)
                && PackedWeight::begins_at(kernel, first)
        }
        Factor::Restored(weight, first) => {
            let [columns, inner] = weight.shape();
            inner == x.inner && first.checked_add(job.columns).is_some_and(|end| end <= columns)
        }
    };
    assert!(fits, "shapes of a product must match");
    assert!(job.columns <= job.stride, "rows of the result must not overlap");
    assert_holds(job.out.len(), x.tokens, job.columns, job.stride);
}

fn cut_into_tasks<'t>(
    shape: BlockSizes,
    tokens: usize,
    jobs: &'t mut [ProductJob<'_>],
) -> Vec<Task<'t>> {
    let is_kept = jobs.iter().all(|job| matches!(job.weight, Factor::Packed(..)));
    let columns: Vec<usize> = jobs.iter().map(|job| job.columns).collect();
    let threads = rayon::current_num_threads();
    let cut = TaskCut::of(shape, tokens, &columns, threads, is_kept);
    let row_ranges: Vec<_> = (0..cut.row_parts).map(|part| cut.rows(part)).collect();
    let mut tasks = Vec::new();
    for (index, job) in jobs.iter_mut().enumerate() {
        let column_ranges: Vec<_> =
            (0..cut.column_parts[index]).map(|part| cut.columns(index, part)).collect();
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
    let Packed { x: lines, scratch, packing } = packed;
    for slab in shape.slabs(x.inner) {
        let lines = resize(lines, shape.packed_rows(x.tokens, slab.len()));
        *packing += pack_slab(kernel, x, slab.clone(), lines);
        tasks.par_iter_mut().with_max_len(1).for_each(|task| {
            scratch.lend(TaskScratch::default, |scratch| {
                let (rows, columns) = (task.out.rows(), task.out.columns());
                let packed_x = &lines[shape.packed_rows(rows.start, slab.len())..];
                let part = (x.inner, slab.clone());
                let w = kernel.pack_part(task.weight, columns.clone(), part, &mut scratch.w);
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
    let (lines, scratch) = packed.pack_all(kernel, x);
    tasks.par_iter_mut().with_max_len(1).for_each(|task| {
        scratch.lend(TaskScratch::default, |scratch| {
            let area = [task.out.rows(), task.out.columns()];
            let columns = area[1].len();
            let sums = scratch.sums_of(kernel, (x, lines), task.weight, area);
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

/// Computes x·Wᵀ in rectangles, and gives each to `take` in place of storing the product. Returns what `take` returns, in order: all
/// rectangles of the first rows, then all of the next rows. The rectangles do not depend on the number of threads.
///
/// # Arguments
/// * `take`: gets rows, columns and content of a rectangle, row-major
///
/// # Panics
/// Panics when a slice does not have the size of its shape, when `inner` is 0, and when x is not f32.
pub fn product_in_parts<R: Send>(
    kernel: Kernel,
    factors: StridedFactors<'_>,
    packed: &mut Packed,
    take: impl Fn([Range<usize>; 2], &mut [f32]) -> R + Sync,
) -> Vec<R> {
    let StridedFactors { x, weight, tokens, columns, inner } = factors;
    assert!(
        inner > 0 && x.holds(tokens, inner) && matches!(x.values, Values::F32(_)),
        "x must be [tokens, inner], f32"
    );
    assert!(weight.holds(columns, inner), "shapes of a product must match");
    let cut = TaskCut::of(kernel.shape(), tokens, &[columns], 1, false);
    let rows = (0..cut.row_parts).map(|part| cut.rows(part));
    let areas = rows.flat_map(|rows| {
        let columns = (0..cut.column_parts[0]).map(|part| cut.columns(0, part));
        columns.map(move |columns| [rows.clone(), columns])
    });
    let areas: Vec<_> = areas.filter(|area| area.iter().all(|range| !range.is_empty())).collect();
    let x = Activations { values: x, tokens, inner };
    let (lines, scratch) = packed.pack_all(kernel, x);
    let part = |area: [Range<usize>; 2]| {
        scratch.lend(TaskScratch::default, |scratch| {
            let weight = Factor::Strided(weight);
            let sums = scratch.sums_of(kernel, (x, lines), weight, area.clone());
            take(area, sums)
        })
    };
    areas.into_par_iter().with_max_len(1).map(part).collect()
}

impl Packed {
    /// Packs all slabs of X.
    fn pack_all(
        &mut self,
        kernel: Kernel,
        x: Activations<'_>,
    ) -> (&[Line], &BufferPool<TaskScratch>) {
        let shape = kernel.shape();
        let lines = resize(&mut self.x, shape.packed_rows(x.tokens, x.inner));
        let mut rest = &mut *lines;
        for slab in shape.slabs(x.inner) {
            let (packed, behind) = rest.split_at_mut(shape.packed_rows(x.tokens, slab.len()));
            rest = behind;
            self.packing += pack_slab(kernel, x, slab, packed);
        }
        (lines, &self.scratch)
    }
}

impl TaskScratch {
    /// Computes a rectangle of x·Wᵀ from packed rows of X, and packs its columns of W on the way.
    fn sums_of(
        &mut self,
        kernel: Kernel,
        (x, lines): (Activations<'_>, &[Line]),
        weight: Factor<'_>,
        [rows, columns]: [Range<usize>; 2],
    ) -> &mut [f32] {
        let shape = kernel.shape();
        let sums = super::super::buffer_pool::grow(&mut self.sums, rows.len() * columns.len());
        for slab in shape.slabs(x.inner) {
            let x_lines = &lines[shape.packed_rows(x.tokens, slab.start)..]
                [shape.packed_rows(rows.start, slab.len())..];
            let w = match weight {
                Factor::Stored(_) | Factor::Strided(_) | Factor::Restored(..) => {
                    let part = (x.inner, slab.clone());
                    kernel.pack_part(weight, columns.clone(), part, &mut self.w)
                }
                Factor::Packed(weight, first) => {
                    &weight.lines[shape.packed_columns(weight.columns, slab.start)..]
                        [shape.packed_columns(first + columns.start, slab.len())..]
                }
            };
            let factors = Factors {
                x: x_lines,
                w,
                rows: rows.len(),
                columns: columns.len(),
                inner: slab.len(),
            };
            kernel.multiply(factors, sums, columns.len(), slab.start > 0);
        }
        sums
    }
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
    lines.par_chunks_mut(shape.packed_rows(rows, slab.len())).enumerate().for_each(
        |(block, lines)| {
            let first = block * rows;
            let count = rows.min(x.tokens - first);
            kernel.pack_rows(x.values.at(first, slab.start), count, slab.len(), lines);
        },
    );
    began.elapsed()
}

impl Kernel {
    /// Packs a part of W.
    fn pack_part<'l>(
        self,
        weight: Factor<'_>,
        columns: Range<usize>,
        (inner, slab): (usize, Range<usize>),
        WeightScratch { lines, rows }: &'l mut WeightScratch,
    ) -> &'l [Line] {
        let lines = resize(lines, self.column_lines(columns.len(), slab.len()));
        let mut pack = |weight: Strided<'_>| {
            let weight = weight.at(columns.start, slab.start);
            self.pack_columns(weight, columns.len(), slab.len(), lines);
        };
        match weight {
            Factor::Stored(weight) => pack(Strided::rows(weight, inner)),
            Factor::Strided(weight) => pack(weight),
            Factor::Restored(weight, first) => {
                // So few columns that they stay in a cache between being restored and being packed.
                let BlockSizes { unit, .. } = self.shape();
                let units = lines.chunks_mut(self.column_lines(unit, slab.len()));
                for (start, lines) in columns.clone().step_by(unit).zip(units) {
                    let some = start..columns.end.min(start + unit);
                    let of_weight = first + some.start..first + some.end;
                    let values = weight.restore(of_weight, slab.clone(), rows);
                    let values = Strided::rows(values, slab.len());
                    self.pack_columns(values, some.len(), slab.len(), lines);
                }
            }
            Factor::Packed(..) => unreachable!("a packed weight is not packed again"),
        }
        lines
    }
}
