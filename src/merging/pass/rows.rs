//! [`SourceRows`]: rows of a tensor of an input model, in f32, read when they are needed.

use std::ops::Range;

use anyhow::Result;

use crate::adapter::TensorChange;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::linalg::StoredDtype;
use crate::linalg::convert::{narrow, widen};
use crate::model::stored_dtype;

/// The rows of a tensor of an input model. Vectors have one row.
pub trait SourceRows: Send + Sync {
    /// Fills `values` with some rows in f32, `[rows, columns]`. Stored bytes are read into `bytes`, which is scratch memory.
    ///
    /// # Errors
    /// Fails when the rows cannot be read.
    fn read(&self, rows: Range<usize>, values: &mut [f32], bytes: &mut Vec<u8>) -> Result<()>;

    /// Fills `values` as [`SourceRows::read`] does, but before the factors of an adapter are added: the zeros of these rows are the
    /// model's own. Returns false, and reads nothing, if the source itself adds no factors.
    ///
    /// # Errors
    /// Fails when the rows cannot be read.
    fn read_before_factors(
        &self,
        _rows: Range<usize>,
        _values: &mut [f32],
        _bytes: &mut Vec<u8>,
    ) -> Result<bool> {
        Ok(false)
    }
}

/// The input models of a merge.
pub trait MergeSources: Sync {
    /// Opens the tensor `tensor` of model number `model`.
    ///
    /// # Errors
    /// Fails when the tensor is missing or its parts cannot be read.
    fn open(&self, model: usize, tensor: &str) -> Result<Box<dyn SourceRows + '_>>;
}

/// Rows as a checkpoint stores them.
pub struct StoredRows<'a> {
    source: &'a dyn WeightSource,
    entry: &'a TensorEntry,
    dtype: StoredDtype,
    /// The dtype that elements are rounded to when they are read.
    rounds_to: Option<StoredDtype>,
    columns: usize,
}

impl<'a> StoredRows<'a> {
    /// The rows of a tensor, rounded to `rounds_to` if the recipe names a dtype.
    ///
    /// # Errors
    /// Fails for tensors that are not f32, f16 or bf16.
    pub fn new(
        source: &'a dyn WeightSource,
        entry: &'a TensorEntry,
        rounds_to: Option<StoredDtype>,
    ) -> Result<Self> {
        let dtype = stored_dtype(entry)?;
        Ok(Self {
            source,
            entry,
            dtype,
            // Every f32 is itself, and so is a number in its own dtype.
            rounds_to: rounds_to.filter(|of| ![dtype, StoredDtype::F32].contains(of)),
            columns: entry.shape.last().copied().unwrap_or(1),
        })
    }
}

impl SourceRows for StoredRows<'_> {
    fn read(&self, rows: Range<usize>, values: &mut [f32], bytes: &mut Vec<u8>) -> Result<()> {
        let row_bytes = self.columns * self.dtype.bytes();
        bytes.resize(values.len() * self.dtype.bytes(), 0);
        let start = (rows.start * row_bytes) as u64;
        self.source.read(self.entry, start, bytes)?;
        widen(self.dtype, bytes, values);
        if let Some(dtype) = self.rounds_to {
            narrow(dtype, values, bytes);
            widen(dtype, bytes, values);
        }
        Ok(())
    }
}

/// Rows that an adapter replaces whole: zeros until then.
pub struct ReplacedRows;

impl SourceRows for ReplacedRows {
    fn read(&self, _rows: Range<usize>, values: &mut [f32], _bytes: &mut Vec<u8>) -> Result<()> {
        values.fill(0.0);
        Ok(())
    }
}

/// Rows of a base with an adapter's change.
pub struct AdaptedRows<'a> {
    /// The base's rows.
    pub base: Box<dyn SourceRows + 'a>,
    /// The change of this tensor.
    pub change: TensorChange,
}

impl SourceRows for AdaptedRows<'_> {
    fn read(&self, rows: Range<usize>, values: &mut [f32], bytes: &mut Vec<u8>) -> Result<()> {
        self.base.read(rows.clone(), values, bytes)?;
        self.change.apply(rows, values)
    }

    fn read_before_factors(
        &self,
        rows: Range<usize>,
        values: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> Result<bool> {
        self.base.read(rows.clone(), values, bytes)?;
        self.change.replace(rows, values)?;
        Ok(true)
    }
}
