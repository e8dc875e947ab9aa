//! Gram matrices G = XᵀX of rows that arrive in parts, in f32.
//!
//! ```text
//! block = Σ XᵀX over the slabs of a block, in order        a slab has 512 rows, the last slab of a block fewer
//! G = ((block 0 + block 1) + block 2) + …
//! ```
//!
//! X is `[tokens, width]`, G `[width, width]`. The caller ends blocks. Neither the parts in which the rows of a block arrive nor the threads
//! change a bit, and a block may be computed elsewhere. Only the upper triangle is computed and kept, in panels of rows that reach from the
//! diagonal to the last column. The kernel multiplies in f32 (it splits f32 into bf16 where the CPU has tiles, else it multiplies and
//! adds), or in bf16 where the layer computes in bf16.

use std::ops::Range;

use rayon::prelude::*;

use super::product::{Factors, Kernel, Line, Strided, Values};
use super::stored::StoredDtype;
use super::weight::Products;
use crate::bytes::ByteSize;

/// Rows of X that enter the sums at once: a slab of the kernels.
pub const TOKENS: usize = 512;

/// Sums that a task adds to G at the end of a block.
const SUMS_AT_ONCE: usize = 1 << 16;

/// Rows of a panel: whole blocks of rows and whole units of columns of every kernel.
pub const PANEL: usize = 192;

/// G of the blocks that have ended.
#[derive(Debug)]
pub struct GramMatrix {
    width: usize,
    /// Panels of the upper triangle, in order: rows from a multiple of [`PANEL`] on, columns from the same number on.
    sums: Vec<f32>,
    /// The same of the current block; its memory is made with the first rows, and used for all blocks.
    block: Vec<f32>,
    /// The current block has sums. Else `block` has old values.
    has_sums: bool,
    /// Rows that have not entered the sums of the block, `[rows, width]`.
    waiting: Vec<f32>,
    kernel: Kernel,
}

/// The kernel of f32 products of this CPU.
pub fn f32_kernel() -> Kernel {
    match Kernel::has_split() {
        true => Kernel::split(StoredDtype::F32),
        false => Kernel::Fused,
    }
}

/// The kernel of Gram matrices of activations. bf16 arithmetic rounds activations before it multiplies them, so G comes from the rounded
/// rows, like the products of the layer.
pub fn kernel_of(products: Products) -> Kernel {
    match products {
        Products::Bf16(kernel) | Products::AllBf16(kernel) => kernel,
        Products::F32 | Products::Split => f32_kernel(),
    }
}

/// The rows of each panel.
fn panels(width: usize) -> impl Iterator<Item = Range<usize>> {
    let firsts = (0..width).step_by(PANEL);
    firsts.map(move |first| first..width.min(first + PANEL))
}

/// Elements of the panels of a matrix.
fn panel_elements(width: usize) -> usize {
    panels(width).map(|rows| rows.len() * (width - rows.start)).sum()
}

impl GramMatrix {
    /// G of no rows, for activations of this arithmetic.
    pub fn new(width: usize, products: Products) -> Self {
        Self {
            width,
            sums: vec![0.0; panel_elements(width)],
            block: Vec::new(),
            has_sums: false,
            waiting: Vec::new(),
            kernel: kernel_of(products),
        }
    }

    /// Bytes of the sums, and of [`TOKENS`] rows.
    pub fn bytes(width: usize) -> ByteSize {
        ByteSize::of(panel_elements(width) + TOKENS * width, size_of::<f32>())
    }

    /// Bytes beside these while rows arrive: the sums of a block.
    pub fn collecting_bytes(width: usize) -> ByteSize {
        ByteSize::of(panel_elements(width), size_of::<f32>())
    }

    /// Bytes beside these while rows enter the sums of a block, packed as both factors.
    pub fn adding_bytes(width: usize, products: Products) -> ByteSize {
        let (blocks, units) = packed_lines(kernel_of(products), width);
        ByteSize::of(blocks + units, size_of::<Line>())
    }

    /// Bytes of the whole matrix.
    pub fn square_bytes(width: usize) -> ByteSize {
        ByteSize::of(width.saturating_mul(width), size_of::<f32>())
    }

    /// Rows and columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Adds rows `[rows, width]` of X to the current block.
    pub fn add_rows(&mut self, mut rows: &[f32]) {
        let (mut packed, full) = (None, TOKENS * self.width);
        while !rows.is_empty() {
            let (now, later) = rows.split_at((full - self.waiting.len()).min(rows.len()));
            rows = later;
            let mut waiting = std::mem::take(&mut self.waiting);
            // Rows that suffice are not copied.
            if now.len() < full {
                waiting.reserve_exact(full - waiting.len());
                waiting.extend_from_slice(now);
            }
            let all = if now.len() < full { &waiting } else { now };
            if all.len() == full {
                let new = || PackedRows::new(self.kernel, self.width, TOKENS);
                self.fold(all, packed.get_or_insert_with(new));
                waiting.clear();
            }
            self.waiting = waiting;
        }
    }

    /// Adds some rows of the upper triangle of a Gram matrix from elsewhere to G, beside the current block. `sums` is
    /// `[rows, width - first]`: the rows and the columns from `first` on, a multiple of [`PANEL`].
    pub fn add_upper(&mut self, first: usize, sums: &[f32]) {
        let (columns, mut start) = (self.width - first, 0);
        for rows in panels(self.width) {
            let own = self.width - rows.start;
            if rows.start >= first {
                // Columns before a panel's own are below the diagonal.
                let theirs = sums.par_chunks_exact(columns);
                let theirs = theirs.skip(rows.start - first).take(rows.len());
                let ours = self.sums[start..][..rows.len() * own].par_chunks_exact_mut(own);
                ours.zip(theirs).for_each(|(ours, theirs)| {
                    let theirs = &theirs[rows.start - first..];
                    ours.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
                });
            }
            start += rows.len() * own;
        }
    }

    /// Adds the waiting rows to the sums of the block.
    fn end_rows(&mut self) {
        if !self.waiting.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            let tokens = waiting.len() / self.width;
            let mut packed = PackedRows::new(self.kernel, self.width, tokens);
            self.fold(&waiting, &mut packed);
        }
    }

    /// The sums of the upper triangle so far, panel by panel. Parts of them may be added up elsewhere.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }

    /// The sums to write a part of, as [`GramMatrix::sums`].
    pub fn sums_mut(&mut self) -> &mut [f32] {
        &mut self.sums
    }

    /// Ends the current block without adding it to G. `take` gets its sums, in the order of [`GramMatrix::sums`].
    pub fn take_block<T>(&mut self, take: impl FnOnce(&[f32], &mut [f32]) -> T) -> T {
        self.end_rows();
        let block = if std::mem::take(&mut self.has_sums) { &self.block[..] } else { &[] };
        take(block, &mut self.sums)
    }

    /// Ends the current block, if it has rows: adds its sums to G.
    pub fn end_block(&mut self) {
        self.end_rows();
        if std::mem::take(&mut self.has_sums) {
            let sums = self.sums.par_chunks_mut(SUMS_AT_ONCE);
            sums.zip(self.block.par_chunks(SUMS_AT_ONCE)).for_each(|(sums, block)| {
                sums.iter_mut().zip(block).for_each(|(sum, more)| *sum += more);
            });
        }
    }

    /// Ends the current block, and frees the memory of blocks.
    pub fn finish(&mut self) {
        self.end_block();
        self.block = Vec::new();
        self.waiting = Vec::new();
    }

    /// G_jj, `[width]`. Call [`GramMatrix::finish`] before.
    pub fn diagonal(&self) -> Vec<f32> {
        let mut diagonal = Vec::with_capacity(self.width);
        let mut sums = &self.sums[..];
        for rows in panels(self.width) {
            let columns = self.width - rows.start;
            diagonal.extend((0..rows.len()).map(|row| sums[row * (columns + 1)]));
            sums = &sums[rows.len() * columns..];
        }
        diagonal
    }

    /// G as a whole, `[width, width]`. Call [`GramMatrix::finish`] before.
    pub fn square(&self) -> Vec<f32> {
        let width = self.width;
        let mut square = vec![0.0; width * width];
        let panels: Vec<_> = panels(width).collect();
        let mut sums = &self.sums[..];
        let mut starts = Vec::with_capacity(panels.len());
        for rows in &panels {
            let (panel, rest) = sums.split_at(rows.len() * (width - rows.start));
            starts.push(panel);
            sums = rest;
        }
        square.par_chunks_mut(PANEL * width).enumerate().for_each(|(below, out)| {
            let own = &panels[below];
            for (at, out) in out.chunks_exact_mut(width).enumerate() {
                // Columns left of the diagonal come from the panels above, by their columns.
                for (rows, sums) in panels.iter().zip(&starts).take(below) {
                    let column = own.start + at - rows.start;
                    let column = sums.iter().skip(column).step_by(width - rows.start);
                    for (out, sum) in out[rows.clone()].iter_mut().zip(column) {
                        *out = *sum;
                    }
                }
                let columns = width - own.start;
                out[own.start..].copy_from_slice(&starts[below][at * columns..][..columns]);
                // The kernel need not give (i, j) and (j, i) the same bits: the upper triangle counts.
                for left in 0..at {
                    out[own.start + left] = starts[below][left * columns + at];
                }
            }
        });
        square
    }

    /// Reorders rows and columns by `order[new] = old`, with a copy of the sums. Call [`GramMatrix::finish`] before.
    pub fn permute(&mut self, order: &[usize]) {
        let width = self.width;
        let old = std::mem::take(&mut self.sums);
        // The first sum of every panel.
        let mut starts = Vec::new();
        let mut start = 0;
        for rows in panels(width) {
            starts.push(start);
            start += rows.len() * (width - rows.start);
        }
        let at = |row: usize, column: usize| {
            let (row, column) = (row.min(column), row.max(column));
            let first = row / PANEL * PANEL;
            old[starts[row / PANEL] + (row - first) * (width - first) + column - first]
        };
        let mut sums = vec![0.0; old.len()];
        let mut rest = &mut sums[..];
        for rows in panels(width) {
            let columns = width - rows.start;
            let (own, others) = rest.split_at_mut(rows.len() * columns);
            rest = others;
            let first = rows.start;
            let lines = own.par_chunks_mut(columns).enumerate();
            lines.for_each(|(line, sums)| {
                for (sum, &column) in sums.iter_mut().zip(&order[first..]) {
                    *sum = at(order[first + line], column);
                }
            });
        }
        self.sums = sums;
    }

    /// Adds as many rows to the sums of the block as `packed` has room for.
    fn fold(&mut self, rows: &[f32], packed: &mut PackedRows) {
        let (kernel, width, tokens) = (self.kernel, self.width, packed.tokens);
        if self.block.is_empty() {
            self.block = vec![0.0; self.sums.len()];
        }
        let adds = std::mem::replace(&mut self.has_sums, true);
        packed.fill(kernel, rows, width);
        let PackedRows { x, w, lines, .. } = &*packed;
        let [row_lines, column_lines] = *lines;
        let mut tasks = Vec::new();
        let mut sums = &mut self.block[..];
        for (panel, rows) in panels(width).enumerate() {
            let (own, rest) = sums.split_at_mut(rows.len() * (width - rows.start));
            sums = rest;
            tasks.push((panel, rows, own));
        }
        tasks.into_par_iter().with_max_len(1).for_each(|(panel, rows, sums)| {
            let stride = width - rows.start;
            // Squares, whose factors stay in the second-level cache.
            for (at, columns) in panels(width).enumerate().skip(panel) {
                let factors = Factors {
                    x: &x[panel * row_lines..],
                    w: &w[at * column_lines..],
                    rows: rows.len(),
                    columns: columns.len(),
                    inner: tokens,
                };
                let sums = &mut sums[columns.start - rows.start..];
                kernel.multiply(factors, sums, stride, adds);
            }
        });
    }
}

/// Some rows of X in the forms in which the kernel reads them. A call for many rows reuses the memory, which the system would otherwise
/// zero each time.
struct PackedRows {
    tokens: usize,
    /// By panel, as the left and as the right factor.
    x: Vec<Line>,
    w: Vec<Line>,
    /// Lines of a panel in both.
    lines: [usize; 2],
}

impl PackedRows {
    /// Memory for this many rows `[tokens, width]`.
    fn new(kernel: Kernel, width: usize, tokens: usize) -> Self {
        let lines = [kernel.row_lines(PANEL, tokens), kernel.column_lines(PANEL, tokens)];
        let [x, w] = lines.map(|lines| {
            let all = lines * width.div_ceil(PANEL);
            bytemuck::allocation::zeroed_vec(all)
        });
        Self { tokens, x, w, lines }
    }

    /// Packs rows `[tokens, width]`.
    fn fill(&mut self, kernel: Kernel, rows: &[f32], width: usize) {
        let tokens = self.tokens;
        // The kernel sums along the columns of X.
        let factor = Strided::transposed(Values::F32(rows), width);
        let panels = |packed: &mut [Line], lines: usize, pack: Pack<'_>| {
            let packed = packed.par_chunks_mut(lines.max(1)).enumerate();
            packed.for_each(|(panel, lines)| {
                let first = panel * PANEL;
                pack(factor.at(first, 0), PANEL.min(width - first), lines);
            });
        };
        panels(&mut self.x, self.lines[0], &|rows, count, lines| {
            let lines = &mut lines[..kernel.row_lines(count, tokens)];
            kernel.pack_rows(rows, count, tokens, lines);
        });
        panels(&mut self.w, self.lines[1], &|columns, count, lines| {
            let lines = &mut lines[..kernel.column_lines(count, tokens)];
            kernel.pack_columns(columns, count, tokens, lines);
        });
    }
}

/// Packs this many rows or columns of a factor into lines.
type Pack<'p> = &'p (dyn Fn(Strided<'_>, usize, &mut [Line]) + Sync);

/// Lines of both packed forms of [`TOKENS`] rows.
fn packed_lines(kernel: Kernel, width: usize) -> (usize, usize) {
    let padded = width.next_multiple_of(PANEL);
    (kernel.row_lines(padded, TOKENS), kernel.column_lines(padded, TOKENS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize, width: usize) -> Vec<f32> {
        (0..count * width).map(|at| ((at * 7919 % 1013) as f32 - 500.0) / 300.0).collect()
    }

    fn gram(rows: &[f32], width: usize, part: usize, products: Products) -> GramMatrix {
        let mut gram = GramMatrix::new(width, products);
        rows.chunks(part * width).for_each(|part| gram.add_rows(part));
        gram.finish();
        gram
    }

    #[test]
    fn a_permuted_matrix_has_the_sums_of_the_permuted_columns() {
        for width in [1, 37, 450] {
            let before = gram(&rows(40, width), width, 40, Products::F32);
            let order: Vec<usize> = (0..width).map(|at| (at * 7 + 3) % width).collect();
            let mut after = gram(&rows(40, width), width, 40, Products::F32);
            after.permute(&order);
            let (before, after) = (before.square(), after.square());
            for i in 0..width {
                for j in 0..width {
                    let old = before[order[i] * width + order[j]];
                    assert_eq!(after[i * width + j], old, "{width} {i} {j}");
                }
            }
        }
    }

    #[test]
    fn g_is_the_sum_of_its_blocks_in_order() {
        let width = 250;
        let x = rows(1900, width);
        let cuts = [0, 40, 40, 700, 1900];
        let blocks: Vec<_> =
            cuts.windows(2).map(|cut| &x[cut[0] * width..cut[1] * width]).collect();
        let mut whole = GramMatrix::new(width, Products::F32);
        let mut expected = vec![0.0f32; width * width];
        for block in blocks {
            block.chunks(7 * width).for_each(|rows| whole.add_rows(rows));
            whole.end_block();
            let square = gram(block, width, 512, Products::F32).square();
            expected.iter_mut().zip(square).for_each(|(sum, more)| *sum += more);
        }
        whole.finish();
        assert!(whole.square() == expected);
        assert!(whole.block.is_empty() && whole.waiting.is_empty());
        assert!(gram(&x, width, 512, Products::F32).square() != expected, "a single block");
    }

    #[test]
    fn sums_are_those_of_a_plain_loop() {
        for (tokens, width) in [(3, 1), (700, 37), (513, 192), (40, 300), (1100, 450)] {
            let x = rows(tokens, width);
            let gram = gram(&x, width, 91, Products::F32);
            let square = gram.square();
            for i in 0..width {
                for j in 0..width {
                    let exact: f64 = x
                        .chunks_exact(width)
                        .map(|row| f64::from(row[i]) * f64::from(row[j]))
                        .sum();
                    let sum = f64::from(square[i * width + j]);
                    assert!(
                        (sum - exact).abs() < 1e-3 * (1.0 + exact.abs()),
                        "{tokens} {width} {i} {j}: {sum} {exact}"
                    );
                    assert_eq!(square[i * width + j], square[j * width + i]);
                }
                assert_eq!(gram.diagonal()[i], square[i * width + i]);
            }
        }
    }

    #[test]
    fn bf16_arithmetic_rounds_the_rows() {
        let Some(kernel) = Kernel::best_bf16() else {
            return;
        };
        let x = rows(700, 250);
        let rounded: Vec<f32> = x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
        let (own, exact) = (
            gram(&x, 250, 91, Products::Bf16(kernel)).square(),
            gram(&rounded, 250, 91, Products::F32).square(),
        );
        assert!(
            own.iter()
                .zip(&exact)
                .all(|(own, exact)| { (own - exact).abs() < 1e-4 * (1.0 + exact.abs()) })
        );
        assert_ne!(own, gram(&x, 250, 91, Products::F32).square());
    }

    #[test]
    fn upper_rows_of_another_matrix_are_added() {
        // Panels of 384 rows, as a second machine might hold them, over panels of 192.
        for width in [5, 192, 500] {
            let (ours, theirs) = (rows(30, width), rows(70, width));
            let other = gram(&theirs, width, 70, Products::F32).square();
            let mut sum = gram(&ours, width, 30, Products::F32);
            let before = sum.square();
            for first in (0..width).step_by(2 * PANEL) {
                let upper = (first..width.min(first + 2 * PANEL))
                    .flat_map(|row| other[row * width + first..(row + 1) * width].to_vec());
                sum.add_upper(first, &upper.collect::<Vec<_>>());
            }
            let after = sum.square();
            for (at, after) in after.iter().enumerate() {
                assert_eq!(*after, before[at] + other[at], "{width} {at}");
            }
        }
    }

    #[test]
    fn neither_parts_nor_threads_change_a_bit() {
        let x = rows(1300, 250);
        let one = gram(&x, 250, 1300, Products::F32).square();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build();
        let parts = pool.unwrap().install(|| gram(&x, 250, 7, Products::F32).square());
        assert!(one == parts);
    }
}
