//! The weight of a linear: in memory, with or without its zeros, or at rest in a file from which some rows at a time are read.
//!
//! A pruned weight at rest needs memory only for its mask, a bit per element. Rows are read as stored, and the masked elements are
//! set to zero. So a run that writes no file computes with the pruned weight too.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use rayon::prelude::*;
use serde::Serialize;

use super::buffer_pool::grow;
use super::compact::CompactMatrix;
use super::one_token::{self, Input, InputForm};
use super::product::{Kernel, Packed, RestoredWeight, RowBuffer, Values};
use super::profile::Watch;
use super::stored::{StoredDtype, StoredMatrix};
use crate::bytes::ByteSize;

/// A source of a stored matrix's rows.
pub trait RowSource: Send + Sync {
    /// Fills `bytes` with the stored bytes of whole rows, beginning with `first_row`.
    ///
    /// # Errors
    /// Fails when the rows cannot be read, and names the tensor.
    fn read_rows(&self, first_row: usize, bytes: &mut [u8]) -> Result<()>;
}

/// A matrix `[rows, columns]` that stays in its source.
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

/// Arithmetic of products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Products {
    /// f32 products of widened weights.
    #[default]
    F32,
    /// f32 products as sums of bf16 products ([`Kernel::Split`]).
    Split,
    /// bf16 products with sums in f32; activations are rounded to bf16. Weights that are not bf16 have f32 products.
    Bf16(Kernel),
    /// The same for weights of any dtype, which are rounded to bf16 while they are packed.
    AllBf16(Kernel),
}

impl Products {
    /// The kernel for weights of this dtype.
    pub fn kernel(self, dtype: StoredDtype) -> Kernel {
        match (self, dtype) {
            (Self::Bf16(kernel), StoredDtype::Bf16) | (Self::AllBf16(kernel), _) => kernel,
            (Self::Split, dtype) => Kernel::split(dtype),
            (Self::F32 | Self::Bf16(_), _) => Kernel::Fused,
        }
    }

    /// The kernel for gradients of a weight of this dtype: it multiplies activations as exactly as a weight of this dtype.
    pub fn of_gradients(self, dtype: StoredDtype) -> Kernel {
        match (self, dtype) {
            (Self::Bf16(_), StoredDtype::F32 | StoredDtype::F16) => Kernel::Fused,
            _ => self.of_activations(),
        }
    }

    /// The kernel for products of activations.
    pub fn of_activations(self) -> Kernel {
        match self {
            Self::F32 => Kernel::Fused,
            Self::Split => Kernel::split(StoredDtype::F32),
            Self::Bf16(kernel) | Self::AllBf16(kernel) => kernel,
        }
    }

    /// Returns whether activations are rounded to bf16.
    pub fn are_bf16(self) -> bool {
        matches!(self, Self::Bf16(_) | Self::AllBf16(_))
    }
}

/// Activations of products with 8-bit codes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CodedActivations {
    /// 8-bit codes with a scale for 128 columns: fastest
    #[default]
    Int8,
    /// f32: exact
    F32,
}

/// Arithmetic of products, the profiler, and scratch memory that grows with the first product.
#[derive(Debug, Default)]
pub struct ProductContext {
    /// The arithmetic.
    pub products: Products,
    /// True if a reused weight stays packed from its first product on. The kernel must be able to keep it. A packed weight takes as
    /// many bytes as the weight, or up to twice as many.
    pub keeps_packed: bool,
    /// The activations that 8-bit codes are multiplied with in products of one token.
    pub activations: CodedActivations,
    /// The profiler.
    pub watch: Watch,
    /// The input of products of one token.
    pub(super) input: Input,
    /// Rows of a matrix at rest, as read.
    pub(super) read: RowBuffer,
    /// Packed factors of a product.
    pub(super) packed: Packed,
}

impl ProductContext {
    /// A context with empty buffers, for products in f32.
    pub fn new() -> Self {
        Self::default()
    }

    /// The kernel for products of many tokens with this weight. 8-bit codes are an approximation already, so in bf16 arithmetic they are
    /// rounded to bf16 like activations, also where f32 weights keep f32 products.
    pub fn kernel(&self, weight: &Weight) -> Kernel {
        match weight {
            Weight::Compact(matrix) if matrix.form().is_coded() && self.products.are_bf16() => {
                self.products.of_activations()
            }
            _ => self.products.kernel(weight.dtype()),
        }
    }
}

/// Bytes of a task that only reads, and words that it reads at once.
const READ_BYTES: usize = 1 << 17;
const READ_WORDS: usize = 32;

/// Elements per task that sets zeros.
const CHUNK: usize = 1 << 14;

impl MatrixAtRest {
    /// Creates a matrix of this shape with the rows of `source`.
    pub fn new(
        source: Arc<dyn RowSource>,
        dtype: StoredDtype,
        rows: usize,
        columns: usize,
    ) -> Self {
        Self { source, dtype, rows, columns, pruned: None }
    }

    /// Returns the same matrix with +0 wherever `pruned` has a 1.
    ///
    /// # Arguments
    /// * `pruned`: a bit per element, row-major without padding between rows, least significant bit first
    ///
    /// # Panics
    /// Panics when `pruned` does not have a bit per element, rounded up to bytes.
    #[must_use]
    pub fn without(self, pruned: Vec<u8>) -> Self {
        assert_eq!(
            pruned.len(),
            (self.rows * self.columns).div_ceil(8),
            "a mask has a bit for every weight"
        );
        Self { pruned: Some(pruned.into()), ..self }
    }

    /// Reads some rows in their stored dtype, with zeros for pruned elements.
    ///
    /// # Errors
    /// Fails when the rows cannot be read, and when there is too little memory.
    pub fn read(&self, rows: Range<usize>) -> Result<StoredMatrix> {
        let mut matrix = StoredMatrix::zeros(self.dtype, rows.len(), self.columns)?;
        self.source.read_rows(rows.start, matrix.as_bytes_mut())?;
        if let Some(pruned) = &self.pruned {
            let first = rows.start * self.columns;
            matrix.zero_where(|row, column| is_set(pruned, first + row * self.columns + column));
        }
        Ok(matrix)
    }

    /// Reads some rows into `read` in their stored dtype, with zeros for pruned elements.
    pub(super) fn read_values<'r>(
        &self,
        rows: Range<usize>,
        read: &'r mut RowBuffer,
    ) -> Result<Values<'r>> {
        let length = rows.len() * self.columns;
        if self.dtype == StoredDtype::F32 {
            let values = grow(&mut read.whole, length);
            self.source.read_rows(rows.start, bytemuck::cast_slice_mut(values))?;
            self.unmask(rows.start, values);
            return Ok(Values::F32(values));
        }
        let values = grow(&mut read.half, length);
        self.source.read_rows(rows.start, bytemuck::cast_slice_mut(values))?;
        self.unmask(rows.start, values);
        Ok(if self.dtype == StoredDtype::Bf16 {
            Values::Bf16(bytemuck::cast_slice(values))
        } else {
            Values::F16(bytemuck::cast_slice(values))
        })
    }

    /// Writes +0 to the pruned elements of rows that begin with `first_row`.
    fn unmask<T: Default + Send>(&self, first_row: usize, values: &mut [T]) {
        let Some(pruned) = &self.pruned else {
            return;
        };
        let first = first_row * self.columns;
        values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
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
    /// In memory without its zeros.
    Compact(CompactMatrix),
    /// In its source. Every product reads some rows at a time.
    AtRest(MatrixAtRest),
}

impl Weight {
    /// Output features.
    pub fn rows(&self) -> usize {
        match self {
            Self::Held(matrix) => matrix.rows(),
            Self::Compact(matrix) => matrix.rows(),
            Self::AtRest(matrix) => matrix.rows,
        }
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        match self {
            Self::Held(matrix) => matrix.columns(),
            Self::Compact(matrix) => matrix.columns(),
            Self::AtRest(matrix) => matrix.columns,
        }
    }

    /// The element type of products of many tokens.
    pub fn dtype(&self) -> StoredDtype {
        match self {
            Self::Held(matrix) => matrix.dtype(),
            Self::Compact(matrix) => matrix.dtype(),
            Self::AtRest(matrix) => matrix.dtype,
        }
    }

    /// The memory that a product of one token reads; none of a matrix at rest.
    pub fn bytes_held(&self) -> ByteSize {
        match self {
            Self::Held(matrix) => ByteSize::of(matrix.elements(), matrix.dtype().bytes()),
            Self::Compact(matrix) => matrix.bytes_held(),
            Self::AtRest(_) => ByteSize::ZERO,
        }
    }

    /// Reads all bytes of a matrix in memory on all threads, without arithmetic: a limit of the speed of products of one token.
    /// Returns the bits of all words together, so that no read is left out.
    pub fn read_through(&self) -> u64 {
        let of_bytes = |bytes: &[u8]| {
            let chunks = bytes.par_chunks(READ_BYTES).map(|chunk| {
                let mut bits = [0u64; READ_WORDS];
                for words in chunk.as_chunks::<{ 8 * READ_WORDS }>().0 {
                    for (bits, word) in bits.iter_mut().zip(words.as_chunks::<8>().0) {
                        *bits |= u64::from_ne_bytes(*word);
                    }
                }
                bits.iter().fold(0, |all, bits| all | bits)
            });
            chunks.reduce(|| 0, |a, b| a | b)
        };
        match self {
            Self::Held(matrix) => of_bytes(matrix.as_bytes()),
            Self::Compact(matrix) => matrix.arrays().map(of_bytes).fold(0, |a, b| a | b),
            Self::AtRest(_) => 0,
        }
    }

    /// The matrix, if it is in memory with its zeros.
    pub fn held(&self) -> Option<&StoredMatrix> {
        match self {
            Self::Held(matrix) => Some(matrix),
            Self::Compact(_) | Self::AtRest(_) => None,
        }
    }

    /// The matrix, if it is in memory with its zeros, for a change.
    pub fn held_mut(&mut self) -> Option<&mut StoredMatrix> {
        match self {
            Self::Held(matrix) => Some(matrix),
            Self::Compact(_) | Self::AtRest(_) => None,
        }
    }

    /// Reads a matrix at rest into memory. Returns the matrix at rest, so that the caller can restore it; `None` if it was in memory.
    ///
    /// # Errors
    /// Fails when the matrix cannot be read, and when there is too little memory.
    pub fn hold(&mut self) -> Result<Option<MatrixAtRest>> {
        let Self::AtRest(matrix) = self else {
            return Ok(None);
        };
        let matrix = matrix.clone();
        *self = Self::Held(matrix.read(0..matrix.rows)?);
        Ok(Some(matrix))
    }

    /// Some rows that are not in memory as stored, in `read`: read from their source, or expanded. `None` for a weight in memory as stored.
    pub(super) fn restored<'r>(
        &self,
        rows: Range<usize>,
        read: &'r mut RowBuffer,
    ) -> Result<Option<Values<'r>>> {
        Ok(match self {
            Self::Held(_) => None,
            Self::Compact(matrix) => Some(matrix.restore(rows, 0..matrix.columns(), read)),
            Self::AtRest(matrix) => Some(matrix.read_values(rows, read)?),
        })
    }

    /// The form in which the product of one token takes its input. `None` for a weight at rest.
    pub(super) fn one_token_form(&self, context: &ProductContext) -> Option<InputForm> {
        let rounds = context.products.are_bf16();
        match self {
            Self::Held(matrix) => Some(one_token::form_of(matrix.dtype(), rounds)),
            Self::Compact(matrix) if matrix.form().is_coded() => Some(match context.activations {
                CodedActivations::F32 => InputForm::Wide,
                CodedActivations::Int8 => InputForm::Codes,
            }),
            Self::Compact(matrix) => Some(one_token::form_of(matrix.dtype(), rounds)),
            Self::AtRest(_) => None,
        }
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
    fn rows_at_rest_are_the_stored_rows_with_zeros_for_pruned_elements() {
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let mut held = matrix(dtype);
            let is_pruned = |row: usize, column: usize| (row * 13 + column) % 3 == 1;
            let mut bits = vec![0u8; (40 * 13usize).div_ceil(8)];
            for bit in (0..40 * 13).filter(|bit| is_pruned(bit / 13, bit % 13)) {
                bits[bit / 8] |= 1 << (bit % 8);
            }
            let mut weight = Weight::AtRest(at_rest(&held).without(bits));
            held.zero_where(is_pruned);
            let Weight::AtRest(rest) = &weight else {
                unreachable!("made so above");
            };
            // The buffers hold larger, older content, which must not show.
            let mut read = RowBuffer { whole: vec![9.0; 1000], half: vec![9; 1000] };
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
    fn a_failed_read_names_the_tensor() {
        let short = MatrixAtRest::new(
            Arc::new(InMemory(matrix(StoredDtype::Bf16))),
            StoredDtype::Bf16,
            50,
            13,
        );
        let error = short.read_values(35..45, &mut RowBuffer::default()).err().unwrap();
        assert!(error.to_string().contains("`w`"));
        assert!(Weight::AtRest(short).hold().is_err());
    }
}
