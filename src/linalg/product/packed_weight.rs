//! W of a product, in the forms that are packed: as stored, restored from a smaller form, and packed once for many products.

use std::fmt::Debug;
use std::ops::Range;

use rayon::prelude::*;

use super::kernel::Kernel;
use super::packed::{Line, Strided, Values, resize};

/// A weight packed once for many products.
#[derive(Debug)]
pub struct PackedWeight {
    pub(super) lines: Vec<Line>,
    pub(super) kernel: Kernel,
    pub(super) columns: usize,
    pub(super) inner: usize,
}

impl PackedWeight {
    /// Packs a weight `[columns, inner]`, row-major.
    ///
    /// # Panics
    /// Panics when the elements do not fill the shape, when rows are empty, and for a kernel that does not use packed weights.
    pub fn of(kernel: Kernel, weight: Values<'_>, columns: usize, inner: usize) -> Self {
        assert!(
            inner > 0 && weight.len() == columns * inner,
            "a weight must have the elements of its shape"
        );
        assert!(kernel.keeps(), "{kernel:?} packs while it multiplies");
        let shape = kernel.shape();
        let mut lines = Vec::new();
        resize(&mut lines, shape.packed_columns(columns, inner));
        let weight = Strided::rows(weight, inner);
        let mut rest = &mut lines[..];
        for slab in shape.slabs(inner) {
            let (packed, behind) = rest.split_at_mut(shape.packed_columns(columns, slab.len()));
            rest = behind;
            packed
                .par_chunks_mut(shape.packed_columns(shape.unit, slab.len()))
                .enumerate()
                .for_each(|(unit, packed)| {
                    let first = unit * shape.unit;
                    let count = shape.unit.min(columns - first);
                    kernel.pack_columns(weight.at(first, slab.start), count, slab.len(), packed);
                });
        }
        Self { lines, kernel, columns, inner }
    }

    /// Bytes of a packed weight of this shape.
    pub fn bytes(kernel: Kernel, columns: usize, inner: usize) -> usize {
        let shape = kernel.shape();
        shape.packed_columns(columns, inner) * size_of::<Line>()
    }

    /// Returns whether a product with some of the columns can begin at `column`.
    pub fn begins_at(kernel: Kernel, column: usize) -> bool {
        column.is_multiple_of(kernel.shape().unit)
    }
}

/// W of a product.
#[derive(Debug, Clone, Copy)]
pub enum Factor<'a> {
    /// `[columns, inner]` as stored, row-major; packed while it is multiplied.
    Stored(Values<'a>),
    /// `[columns, inner]` in any layout, such as the transpose of a matrix `[inner, columns]`; packed while it is multiplied.
    Strided(Strided<'a>),
    /// Columns of a packed weight from a first column on, at which a product may begin ([`PackedWeight::begins_at`]).
    Packed(&'a PackedWeight, usize),
    /// Columns of a weight in a smaller form, from a first column on; restored a few at a time while it is packed.
    Restored(&'a dyn RestoredWeight, usize),
}

/// A weight `[columns, inner]` in a form that takes less memory.
pub trait RestoredWeight: Debug + Sync {
    /// `[columns, inner]`
    fn shape(&self) -> [usize; 2];

    /// Restores a part of some columns, which becomes the content of the buffer.
    ///
    /// # Arguments
    /// * `inner`: begins at a multiple of 128
    ///
    /// # Panics
    /// Panics when the weight does not have the part.
    fn restore<'b>(
        &self,
        columns: Range<usize>,
        inner: Range<usize>,
        buffer: &'b mut RowBuffer,
    ) -> Values<'b>;
}

/// Memory for some rows of a weight, a buffer per element width.
#[derive(Debug, Default)]
pub struct RowBuffer {
    /// f32
    pub whole: Vec<f32>,
    /// The bits of f16 and bf16.
    pub half: Vec<u16>,
}
