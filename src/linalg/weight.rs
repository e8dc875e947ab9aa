//! Where a linear's weight is: in memory, or at rest where it can be read again a few rows at a time.
//!
//! A weight at rest costs nothing but its mask, one bit per element, once it is pruned: rows are read as they were stored
//! and lose what the mask says, so that a run that writes nothing, and has no file with the zeros, computes with them too.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use rayon::prelude::*;

use super::product::{Kernel, Packed, Values};
use super::profile::Watch;
use super::stored::{StoredDtype, StoredMatrix};

/// Rows of a stored matrix, wherever they lie.
pub trait RowSource: Send + Sync {
    /// Fills `bytes` with the stored bytes of whole rows, beginning with `first_row`.
    ///
    /// # Errors
    /// Fails when the rows cannot be read, naming the tensor.
    fn read_rows(&self, first_row: usize, bytes: &mut [u8]) -> Result<()>;
}

/// A matrix `[rows, columns]` that is read when it is needed.
#[derive(Clone)]
pub struct MatrixAtRest {
    source: Arc<dyn RowSource>,
    dtype: StoredDtype,
    rows: usize,
    columns: usize,
    /// 1 = pruned, row-major without padding between rows, least significant bit first.
    pruned: Option<Arc<[u8]>>,
}

impl fmt::Debug for MatrixAtRest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MatrixAtRest")
            .field("dtype", &self.dtype)
            .field("rows", &self.rows)
            .field("columns", &self.columns)
            .field("is_pruned", &self.pruned.is_some())
            .finish_non_exhaustive()
    }
}

/// How products are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Products {
    /// In f32, weights widened.
    #[default]
    F32,
    /// In f32, as sums of bf16 products ([`Kernel::Split`]).
    Split,
    /// By a bf16 kernel, sums in f32: activations are rounded to bf16. Products with weights of other dtypes are made in f32.
    Bf16(Kernel),
}

impl Products {
    /// What multiplies weights of this dtype.
    pub fn kernel(self, dtype: StoredDtype) -> Kernel {
        match (self, dtype) {
            (Self::Bf16(kernel), StoredDtype::Bf16) => kernel,
            (Self::Split, dtype) => Kernel::split(dtype),
            (Self::F32 | Self::Bf16(_), _) => Kernel::Fused,
        }
    }

    /// What multiplies activations with one another.
    pub fn of_activations(self) -> Kernel {
        match self {
            Self::F32 => Kernel::Fused,
            Self::Split => Kernel::split(StoredDtype::F32),
            Self::Bf16(kernel) => kernel,
        }
    }
}

/// Arithmetic of products, the profiler, and scratch memory that grows with the first product.
#[derive(Debug, Default)]
pub struct ProductContext {
    /// The arithmetic.
    pub products: Products,
    /// Whether a reused weight stays packed from its first product on, if the kernel can keep it. A packed weight costs one to two
    /// times the bytes of the weight.
    pub keeps_packed: bool,
    /// The profiler.
    pub watch: Watch,
    /// Rows of a matrix at rest, as read.
    pub(super) read: RowBuffer,
    /// Packed factors of a product.
    pub(super) packed: Packed,
}

/// Rows of a matrix at rest, in a buffer per element width.
#[derive(Debug, Default)]
pub(super) struct RowBuffer {
    whole: Vec<f32>,
    half: Vec<u16>,
}

impl ProductContext {
    /// A context with empty buffers, for products in f32.
    pub fn new() -> Self {
        Self::default()
    }

    /// The kernel for weights of this dtype.
    pub fn kernel(&self, dtype: StoredDtype) -> Kernel {
        self.products.kernel(dtype)
    }
}

/// The first `length` elements of a buffer, of unspecified content. Never two buffers at once: the old one goes first.
pub(super) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, length: usize) -> &mut [T] {
    if buffer.len() < length {
        *buffer = Vec::new();
        *buffer = vec![T::default(); length];
    }
    &mut buffer[..length]
}

/// Elements one task unmasks or widens.
const CHUNK: usize = 1 << 14;

impl MatrixAtRest {
    /// A matrix of this shape whose rows `source` has.
    pub fn new(
        source: Arc<dyn RowSource>,
        dtype: StoredDtype,
        rows: usize,
        columns: usize,
    ) -> Self {
        Self {
            source,
            dtype,
            rows,
            columns,
            pruned: None,
        }
    }

    /// The same matrix with +0 wherever `pruned` has a 1.
    ///
    /// # Arguments
    /// * `pruned`: one bit per element, row-major without padding between rows, least significant bit first
    ///
    /// # Panics
    /// When there are not as many bits as elements, rounded up to bytes.
    #[must_use]
    pub fn without(self, pruned: Vec<u8>) -> Self {
        assert_eq!(
            pruned.len(),
            (self.rows * self.columns).div_ceil(8),
            "a mask has a bit for every weight"
        );
        Self {
            pruned: Some(pruned.into()),
            ..self
        }
    }

    /// Reads some rows as they are stored, less what is pruned.
    ///
    /// # Errors
    /// Fails when they cannot be read or memory cannot be had.
    pub fn read(&self, rows: Range<usize>) -> Result<StoredMatrix> {
        let mut matrix = StoredMatrix::zeros(self.dtype, rows.len(), self.columns)?;
        self.source.read_rows(rows.start, matrix.as_bytes_mut())?;
        if let Some(pruned) = &self.pruned {
            let first = rows.start * self.columns;
            matrix.zero_where(|row, column| is_set(pruned, first + row * self.columns + column));
        }
        Ok(matrix)
    }

    /// Reads some rows as they are stored, less what is pruned, into `read`.
    pub(super) fn read_values<'r>(
        &self,
        rows: Range<usize>,
        read: &'r mut RowBuffer,
    ) -> Result<Values<'r>> {
        let length = rows.len() * self.columns;
        if self.dtype == StoredDtype::F32 {
            let values = grow(&mut read.whole, length);
            self.source
                .read_rows(rows.start, bytemuck::cast_slice_mut(values))?;
            self.unmask(rows.start, values);
            return Ok(Values::F32(values));
        }
        let values = grow(&mut read.half, length);
        self.source
            .read_rows(rows.start, bytemuck::cast_slice_mut(values))?;
        self.unmask(rows.start, values);
        Ok(if self.dtype == StoredDtype::Bf16 {
            Values::Bf16(bytemuck::cast_slice(values))
        } else {
            Values::F16(bytemuck::cast_slice(values))
        })
    }

    /// Puts +0 where weights are pruned, in rows that begin with `first_row`.
    fn unmask<T: Default + Send>(&self, first_row: usize, values: &mut [T]) {
        let Some(pruned) = &self.pruned else {
            return;
        };
        let first = first_row * self.columns;
        values
            .par_chunks_mut(CHUNK)
            .enumerate()
            .for_each(|(chunk, values)| {
                for (place, value) in values.iter_mut().enumerate() {
                    if is_set(pruned, first + chunk * CHUNK + place) {
                        *value = T::default();
                    }
                }
            });
    }
}

fn is_set(bits: &[u8], bit: usize) -> bool {
    bits[bit / 8] >> (bit % 8) & 1 == 1
}

/// The weight of a linear, `[out_features, in_features]`.
#[derive(Debug, Clone)]
pub enum Weight {
    /// In memory.
    Held(StoredMatrix),
    /// Read at every product, some rows at a time.
    AtRest(MatrixAtRest),
}

impl Weight {
    /// Output features.
    pub fn rows(&self) -> usize {
        match self {
            Self::Held(matrix) => matrix.rows(),
            Self::AtRest(matrix) => matrix.rows,
        }
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        match self {
            Self::Held(matrix) => matrix.columns(),
            Self::AtRest(matrix) => matrix.columns,
        }
    }

    /// The element type.
    pub fn dtype(&self) -> StoredDtype {
        match self {
            Self::Held(matrix) => matrix.dtype(),
            Self::AtRest(matrix) => matrix.dtype,
        }
    }

    /// The matrix, where it is in memory.
    pub fn held(&self) -> Option<&StoredMatrix> {
        match self {
            Self::Held(matrix) => Some(matrix),
            Self::AtRest(_) => None,
        }
    }

    /// The matrix, to be changed, where it is in memory.
    pub fn held_mut(&mut self) -> Option<&mut StoredMatrix> {
        match self {
            Self::Held(matrix) => Some(matrix),
            Self::AtRest(_) => None,
        }
    }

    /// Takes the matrix into memory where it is at rest, and gives back what it was there, to put it back to.
    ///
    /// # Errors
    /// Fails when it cannot be read or memory cannot be had.
    pub fn hold(&mut self) -> Result<Option<MatrixAtRest>> {
        let Self::AtRest(matrix) = self else {
            return Ok(None);
        };
        let matrix = matrix.clone();
        *self = Self::Held(matrix.read(0..matrix.rows)?);
        Ok(Some(matrix))
    }
}

impl From<StoredMatrix> for Weight {
    fn from(matrix: StoredMatrix) -> Self {
        Self::Held(matrix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct InMemory(StoredMatrix);

    impl RowSource for InMemory {
        fn read_rows(&self, first_row: usize, bytes: &mut [u8]) -> Result<()> {
            let start = first_row * self.0.columns() * self.0.dtype().bytes();
            let stored = self.0.as_bytes().get(start..start + bytes.len());
            bytes.copy_from_slice(stored.ok_or_else(|| anyhow::anyhow!("`w` is shorter"))?);
            Ok(())
        }
    }

    fn matrix(dtype: StoredDtype) -> StoredMatrix {
        let values: Vec<f32> = (0..40 * 13).map(|i| (i as f32 * 0.7).sin()).collect();
        StoredMatrix::from_f32(dtype, 40, 13, &values)
    }

    fn at_rest(matrix: &StoredMatrix) -> MatrixAtRest {
        let source = Arc::new(InMemory(matrix.clone()));
        MatrixAtRest::new(source, matrix.dtype(), matrix.rows(), matrix.columns())
    }

    #[test]
    fn rows_at_rest_are_the_stored_ones_less_what_is_pruned() {
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let mut held = matrix(dtype);
            let goes = |row: usize, column: usize| (row * 13 + column) % 3 == 1;
            let mut bits = vec![0u8; (40 * 13usize).div_ceil(8)];
            for bit in (0..40 * 13).filter(|bit| goes(bit / 13, bit % 13)) {
                bits[bit / 8] |= 1 << (bit % 8);
            }
            let mut weight = Weight::AtRest(at_rest(&held).without(bits));
            held.zero_where(goes);
            let Weight::AtRest(rest) = &weight else {
                unreachable!("made so above");
            };
            // What was read was larger before, so that stale content would show.
            let mut read = RowBuffer {
                whole: vec![9.0; 1000],
                half: vec![9; 1000],
            };
            let bytes: Vec<u8> = match rest.read_values(7..18, &mut read).unwrap() {
                Values::F32(values) => bytemuck::cast_slice::<_, u8>(values).to_vec(),
                Values::F16(values) => bytemuck::cast_slice::<_, u8>(values).to_vec(),
                Values::Bf16(values) => bytemuck::cast_slice::<_, u8>(values).to_vec(),
            };
            let row = 13 * dtype.bytes();
            assert_eq!(bytes, held.as_bytes()[7 * row..18 * row]);
            let rest = weight.hold().unwrap();
            assert_eq!(weight.held(), Some(&held), "{dtype:?}");
            assert!(rest.is_some() && weight.hold().unwrap().is_none());
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error_that_names_the_tensor() {
        let short = MatrixAtRest::new(
            Arc::new(InMemory(matrix(StoredDtype::Bf16))),
            StoredDtype::Bf16,
            50,
            13,
        );
        let error = short
            .read_values(35..45, &mut RowBuffer::default())
            .err()
            .unwrap();
        assert!(error.to_string().contains("`w`"));
        assert!(Weight::AtRest(short).hold().is_err());
    }
}
