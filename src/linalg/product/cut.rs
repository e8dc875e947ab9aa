//! The cut of a product into tasks, and its memory.

use std::ops::Range;

use super::kernel::Kernel;
use super::packed::{BlockSizes, Line};

/// The sizes of products of a common X.
#[derive(Debug, Clone)]
pub struct Product {
    /// The kernel.
    pub kernel: Kernel,
    /// Rows of X.
    pub tokens: usize,
    /// Rows of W of every job.
    pub columns: Vec<usize>,
    /// Columns of each factor.
    pub inner: usize,
    /// W is packed in advance.
    pub is_kept: bool,
    /// C is not stored ([`product_in_parts`](super::product_in_parts)).
    pub is_in_parts: bool,
}

/// The most bytes of [`Packed`](super::Packed) after these products: the largest X, and the scratch of the largest task for every
/// thread. Tasks pass scratch on, and it keeps its largest size.
pub fn packed_bytes(products: &[Product], threads: usize) -> usize {
    let of = |product: &Product| {
        let Product { kernel, tokens, ref columns, inner, is_kept, is_in_parts } = *product;
        let shape = kernel.shape();
        let is_fused = kernel == Kernel::Fused && !is_in_parts;
        let threads_of_cut = if is_in_parts { 1 } else { threads };
        let cut = TaskCut::of(shape, tokens, columns, threads_of_cut, is_kept);
        let slab = inner.min(shape.slab);
        let (high, wide) = (cut.highest(), cut.widest());
        let x = shape.packed_rows(tokens, if is_fused { slab } else { inner });
        let w = shape.packed_columns(wide, slab);
        let w = if is_kept { 0 } else { w };
        let sums = if is_fused { 0 } else { high * wide };
        let tasks = cut.row_parts * cut.column_parts.iter().sum::<usize>();
        (x, tasks.min(threads), w, sums)
    };
    let most = products.iter().map(of).fold((0, 0, 0, 0), |most, this| {
        (most.0.max(this.0), most.1.max(this.1), most.2.max(this.2), most.3.max(this.3))
    });
    let (x, tasks, w, sums) = most;
    (x + tasks * w) * size_of::<Line>() + tasks * sums * size_of::<f32>()
}

/// Rows and columns of rectangles in which a product `[rows, columns]` is computed where it is not stored.
pub fn parts_of_product(kernel: Kernel, rows: usize, columns: usize) -> [usize; 2] {
    let cut = TaskCut::of(kernel.shape(), rows, &[columns], 1, false);
    [cut.row_parts, cut.column_parts[0]]
}

/// The most rows of a task. A kernel that packs W while it multiplies packs it once per task.
const TASK_ROWS: usize = 2048;
/// The most rows of a task with packed W; wide tasks read X less often.
const TASK_ROWS_KEPT: usize = 1024;
/// The least tasks per thread, if there are enough blocks. With more tasks, threads are idle for a shorter time at the end.
const TASKS_PER_THREAD: usize = 4;

/// The cut of C into rectangles.
pub(super) struct TaskCut {
    shape: BlockSizes,
    tokens: usize,
    pub(super) row_parts: usize,
    columns: Vec<usize>,
    pub(super) column_parts: Vec<usize>,
}

impl TaskCut {
    pub(super) fn of(
        shape: BlockSizes,
        tokens: usize,
        columns: &[usize],
        threads: usize,
        is_kept: bool,
    ) -> Self {
        let most_rows = if is_kept { TASK_ROWS_KEPT } else { TASK_ROWS };
        let row_blocks = tokens.div_ceil(shape.rows);
        let mut row_parts = tokens.div_ceil(most_rows).clamp(1, row_blocks.max(1));
        let rows = tokens.div_ceil(row_parts.max(1)).max(1);
        let most_columns = (shape.task / rows / shape.columns).max(1) * shape.columns;
        // With few tokens, a task has the columns whose packed slab of W fits the cache.
        let most_columns = most_columns.min(MOST_COLUMNS / shape.columns * shape.columns);
        let mut column_parts: Vec<usize> =
            columns.iter().map(|columns| columns.div_ceil(most_columns).max(1)).collect();
        let wanted = if threads == 1 { 1 } else { TASKS_PER_THREAD * threads };
        while row_parts * column_parts.iter().sum::<usize>() < wanted {
            let mut grows = false;
            for (parts, columns) in column_parts.iter_mut().zip(columns) {
                // A task has at least two blocks of columns, which share the reads of X.
                if 2 * *parts * 2 * shape.columns <= *columns {
                    *parts *= 2;
                    grows = true;
                }
            }
            if !grows {
                if 2 * row_parts > row_blocks || tokens / row_parts < 2 * LEAST_TASK_ROWS {
                    break;
                }
                row_parts *= 2;
            }
        }
        // Every thread gets the same number of tasks: with 15 tasks, one of two threads would be idle during the last task.
        if !row_parts.is_multiple_of(threads) {
            for (parts, columns) in column_parts.iter_mut().zip(columns) {
                let even = parts.next_multiple_of(threads);
                if even <= columns.div_ceil(shape.columns) {
                    *parts = even;
                }
            }
        }
        Self { shape, tokens, row_parts, columns: columns.to_vec(), column_parts }
    }

    /// The rows of a part, in whole blocks.
    pub(super) fn rows(&self, part: usize) -> Range<usize> {
        even(self.tokens, self.shape.rows, part, self.row_parts)
    }

    /// The columns of a part of a job, in whole blocks.
    pub(super) fn columns(&self, job: usize, part: usize) -> Range<usize> {
        even(self.columns[job], self.shape.columns, part, self.column_parts[job])
    }

    pub(super) fn highest(&self) -> usize {
        longest(self.tokens, self.shape.rows, self.row_parts)
    }

    pub(super) fn widest(&self) -> usize {
        let jobs = self.columns.iter().zip(&self.column_parts);
        jobs.map(|(&columns, &parts)| longest(columns, self.shape.columns, parts))
            .max()
            .unwrap_or(0)
    }
}

/// The most columns of a task.
const MOST_COLUMNS: usize = 288;
/// The least rows of a task that is cut.
const LEAST_TASK_ROWS: usize = 64;

/// The length of the longest part, without a loop over all parts, of which there may be a hundred thousand.
fn longest(total: usize, block: usize, parts: usize) -> usize {
    let blocks = total.div_ceil(block);
    let (each, more) = (blocks / parts, blocks % parts);
    // `more` parts, including the last part, have an additional block. The last part may end within a block.
    let last = even(total, block, parts - 1, parts).len();
    let others = match (parts, more) {
        (1, _) => 0,
        (_, 0 | 1) => each * block,
        _ => (each + 1) * block,
    };
    last.max(others)
}

/// A part of `0..total`, cut between blocks.
fn even(total: usize, block: usize, part: usize, parts: usize) -> Range<usize> {
    let blocks = total.div_ceil(block);
    let edge = |part: usize| total.min(part * blocks / parts * block);
    edge(part)..edge(part + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_part_is_the_longest_of_all() {
        for total in [1usize, 5, 6, 7, 12, 13, 64, 100, 1000] {
            for block in [1, 6, 8] {
                for parts in 1..=total.div_ceil(block) {
                    let all = (0..parts).map(|part| even(total, block, part, parts).len());
                    assert_eq!(
                        Some(longest(total, block, parts)),
                        all.max(),
                        "{total} by {block} in {parts}"
                    );
                }
            }
        }
        assert_eq!(longest(0, 8, 1), 0);
    }

    #[test]
    fn threads_have_as_many_tasks_each() {
        let shape = Kernel::Fused.shape();
        for threads in [1, 2, 3, 4, 8, 16] {
            for columns in [[2048, 256], [5632, 5632], [11008, 4096]] {
                let cut = TaskCut::of(shape, 2048, &columns, threads, false);
                for (job, parts) in cut.column_parts.iter().enumerate() {
                    let tasks = cut.row_parts * parts;
                    let blocks = columns[job] / shape.columns;
                    assert!(
                        tasks.is_multiple_of(threads) || blocks < threads,
                        "{columns:?}: {tasks} tasks for {threads} threads"
                    );
                    assert_eq!(cut.columns(job, parts - 1).end, columns[job]);
                }
            }
        }
    }
}
