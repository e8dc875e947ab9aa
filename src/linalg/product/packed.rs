//! Packed factors: cache lines in the order in which blocks read them.

use std::ops::Range;

use half::{bf16, f16};

use super::super::rectangles::extent;

/// 64 bytes: a cache line, and the unit of the bf16 instructions.
#[derive(Debug, Clone, Copy, Default, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub struct Line(pub(super) [u16; 32]);

/// Rows or columns of a tile of the bf16 kernels.
pub(super) const TILE: usize = 16;
/// Elements of `inner` in a tile.
pub(super) const TILE_DEPTH: usize = 32;
/// Lines of a tile.
pub(super) const TILE_LINES: usize = TILE;

/// Elements of C in a task: a little more than a MiB, so that a second-level cache of 2 MiB has nearly as much for the factors.
pub(super) const TASK_ELEMENTS: usize = 288 << 10;

/// The sizes in which a kernel cuts its factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockSizes {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Columns that are packed together; divides `columns`.
    pub(super) unit: usize,
    /// `inner` is packed in multiples of this.
    pub(super) depth: usize,
    /// Elements of `inner` in a slab.
    pub(super) slab: usize,
    /// The most elements of C in a task.
    pub(super) task: usize,
    /// Bytes of a packed element of X.
    pub(super) row_bytes: usize,
    /// Bytes of a packed element of W.
    pub(super) column_bytes: usize,
}

impl BlockSizes {
    /// Lines of a number of elements of X, in whole blocks.
    pub(super) fn row_lines(&self, elements: usize) -> usize {
        elements * self.row_bytes / size_of::<Line>()
    }

    /// Lines of a number of elements of W, in whole units.
    pub(super) fn column_lines(&self, elements: usize) -> usize {
        elements * self.column_bytes / size_of::<Line>()
    }

    pub(super) fn padded_rows(&self, rows: usize) -> usize {
        rows.next_multiple_of(self.rows)
    }

    pub(super) fn padded_columns(&self, columns: usize) -> usize {
        columns.next_multiple_of(self.unit)
    }

    /// The slabs of `inner`, in order.
    pub(super) fn slabs(&self, inner: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let slab = self.slab;
        (0..inner).step_by(slab).map(move |first| first..inner.min(first + slab))
    }

    /// `inner` with its padding.
    pub(super) fn steps(&self, inner: usize) -> usize {
        inner.next_multiple_of(self.depth)
    }

    /// Lines of some rows of X, rounded up to whole blocks.
    pub(super) fn packed_rows(&self, rows: usize, inner: usize) -> usize {
        self.row_lines(self.padded_rows(rows) * self.steps(inner))
    }

    /// Lines of some rows of W, rounded up to whole units.
    pub(super) fn packed_columns(&self, columns: usize, inner: usize) -> usize {
        self.column_lines(self.padded_columns(columns) * self.steps(inner))
    }
}

/// Packed factors of at most a slab.
#[derive(Debug, Clone, Copy)]
pub struct Factors<'a> {
    /// X, by [`super::Kernel::pack_rows`].
    pub x: &'a [Line],
    /// W, by [`super::Kernel::pack_columns`].
    pub w: &'a [Line],
    /// Rows of X.
    pub rows: usize,
    /// Rows of W, columns of the product.
    pub columns: usize,
    /// Elements of a row of each factor.
    pub inner: usize,
}

/// Elements in their stored dtype.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl<'a> Values<'a> {
    pub(in super::super) fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    pub(super) fn from(self, first: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[first..]),
            Self::F16(values) => Self::F16(&values[first..]),
            Self::Bf16(values) => Self::Bf16(&values[first..]),
        }
    }

    /// Widens `out.len()` elements from `first` on.
    #[inline(always)]
    pub(super) fn widen(&self, first: usize, out: &mut [f32]) {
        let range = first..first + out.len();
        match self {
            Self::F32(values) => out.copy_from_slice(&values[range]),
            Self::F16(values) => {
                half::slice::HalfFloatSliceExt::convert_to_f32_slice(&values[range], out);
            }
            Self::Bf16(values) => {
                for (out, value) in out.iter_mut().zip(&values[range]) {
                    *out = f32::from_bits(u32::from(value.to_bits()) << 16);
                }
            }
        }
    }
}

/// A factor of a product, by rows or by columns.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    pub(super) values: Values<'a>,
    pub(super) stride: usize,
    pub(super) is_transposed: bool,
}

impl<'a> Strided<'a> {
    /// A matrix `[rows, inner]` whose rows begin `stride` elements apart.
    pub fn rows(values: Values<'a>, stride: usize) -> Self {
        Self { values, stride, is_transposed: false }
    }

    /// A matrix `[inner, rows]` whose rows begin `stride` elements apart.
    pub fn transposed(values: Values<'a>, stride: usize) -> Self {
        Self { values, stride, is_transposed: true }
    }

    /// Returns whether the slice has all elements of `rows` rows of `inner` elements.
    pub(super) fn holds(&self, rows: usize, inner: usize) -> bool {
        let (outer, along) = if self.is_transposed { (inner, rows) } else { (rows, inner) };
        along <= self.stride
            && extent(outer, along, self.stride, 1).is_some_and(|all| all <= self.values.len())
    }

    /// The part from a row and an element of `inner` on.
    #[must_use]
    pub fn at(self, row: usize, inner: usize) -> Self {
        let first =
            if self.is_transposed { inner * self.stride + row } else { row * self.stride + inner };
        Self { values: self.values.from(first), ..self }
    }
}

/// Lends lines with unspecified content.
pub(in super::super) fn resize(lines: &mut Vec<Line>, length: usize) -> &mut [Line] {
    if lines.len() < length {
        // The old lines are freed first. The system zeroes new lines.
        *lines = Vec::new();
        *lines = bytemuck::allocation::zeroed_vec(length);
    }
    &mut lines[..length]
}
