//! Tensors of a checkpoint as vectors and matrices.

use std::sync::Arc;

use anyhow::Result;

use crate::checkpoint::{KeptRows, TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::{
    CompactMatrix, CompactPart, KeptForm, MatrixAtRest, RowSource, StoredDtype, StoredMatrix,
};

/// The dtype of a stored tensor.
///
/// # Errors
/// Fails for all dtypes but f32, f16 and bf16, and names the tensor.
pub fn stored_dtype(entry: &TensorEntry) -> Result<StoredDtype> {
    let refusal = || {
        Failure::new(format!("tensor `{}` is stored as {:?}", entry.name, entry.dtype))
            .detail("weights of f32, f16 or bf16 can be pruned")
            .hint("use the unquantised checkpoint of this model")
    };
    Ok(StoredDtype::of_file(entry.dtype).ok_or_else(refusal)?)
}

/// Reads a `[rows, columns]` weight in its stored dtype.
pub(crate) fn read_matrix(
    source: &dyn WeightSource,
    name: &str,
    rows: usize,
    columns: usize,
) -> Result<StoredMatrix> {
    let entry = source.require(name, &[rows, columns])?;
    let mut matrix = StoredMatrix::zeros(stored_dtype(entry)?, rows, columns)?;
    source.read(entry, 0, matrix.as_bytes_mut())?;
    Ok(matrix)
}

/// Reads a `[rows, columns]` weight in compact form, some rows at a time.
pub(super) fn read_compact(
    source: &dyn WeightSource,
    name: &str,
    [rows, columns]: [usize; 2],
    form: KeptForm,
) -> Result<CompactMatrix> {
    let entry = source.require(name, &[rows, columns])?;
    let dtype = stored_dtype(entry)?;
    let row_bytes = columns * dtype.bytes();
    CompactMatrix::of_parts(rows, columns, form, |rows| {
        // A packed checkpoint may have the rows in this form.
        let mut part = None;
        if form != KeptForm::AllCodes {
            source.kept_rows(entry, rows.clone(), form == KeptForm::Codes, &mut |stored| {
                let KeptRows { mask, offsets, values, scales } = stored;
                let shape = [rows.len(), columns];
                part = Some(CompactPart::of_kept(shape, form, mask, offsets, [values, scales]));
            })?;
        }
        if let Some(part) = part {
            return part;
        }
        let mut dense = StoredMatrix::zeros(dtype, rows.len(), columns)?;
        source.read(entry, (rows.start * row_bytes) as u64, dense.as_bytes_mut())?;
        CompactPart::of(&dense, form)
    })
}

struct TensorRows {
    source: Arc<dyn WeightSource>,
    entry: TensorEntry,
    row_bytes: u64,
}

impl RowSource for TensorRows {
    fn read_rows(&self, first_row: usize, bytes: &mut [u8]) -> Result<()> {
        self.source.read(&self.entry, first_row as u64 * self.row_bytes, bytes)
    }
}

/// Opens a `[rows, columns]` weight that stays in the checkpoint until a product reads it.
pub(super) fn matrix_at_rest(
    source: &Arc<dyn WeightSource>,
    name: &str,
    rows: usize,
    columns: usize,
) -> Result<MatrixAtRest> {
    let entry = source.require(name, &[rows, columns])?.clone();
    let dtype = stored_dtype(&entry)?;
    let tensor = TensorRows {
        source: Arc::clone(source),
        entry,
        row_bytes: (columns * dtype.bytes()) as u64,
    };
    Ok(MatrixAtRest::new(Arc::new(tensor), dtype, rows, columns))
}

/// Reads a vector (a norm's weight, a bias) widened to f32.
pub(super) fn read_vector(
    source: &dyn WeightSource,
    name: &str,
    length: usize,
) -> Result<Vec<f32>> {
    let entry = source.require(name, &[length])?;
    let mut stored = StoredMatrix::zeros(stored_dtype(entry)?, 1, length)?;
    source.read(entry, 0, stored.as_bytes_mut())?;
    let mut wide = vec![0.0; length];
    stored.widen_rows(0, &mut wide);
    Ok(wide)
}
