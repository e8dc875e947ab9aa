//! [`Stored`]: a tensor of an adapter's file, widened to f32 when it is read.

use std::ops::Range;
use std::sync::Arc;

use anyhow::Result;

use crate::checkpoint::{Checkpoint, TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::select::first_not_finite;
use crate::linalg::{StoredDtype, StoredMatrix};

/// Bytes of each tensor that are compared at once.
const COMPARED: usize = 1 << 18;

/// A tensor of an open file.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    file: Arc<Checkpoint>,
    pub(super) entry: TensorEntry,
    dtype: StoredDtype,
}

impl Stored {
    /// # Errors
    /// Fails when its elements are not f32, f16 or bf16.
    pub(super) fn new(file: &Arc<Checkpoint>, entry: &TensorEntry) -> Result<Self, Failure> {
        Ok(Self {
            file: Arc::clone(file),
            entry: entry.clone(),
            dtype: stored_dtype(entry)
                .map_err(|failure| failure.detail(format!("it is in `{}`", file.file_of(entry))))?,
        })
    }

    /// Its key in the file.
    pub(super) fn key(&self) -> &str {
        &self.entry.name
    }

    /// Returns its dimensions if there are two.
    pub(super) fn matrix(&self) -> Option<(usize, usize)> {
        match self.entry.shape[..] {
            [rows, columns] => Some((rows, columns)),
            _ => None,
        }
    }

    /// Reads all elements.
    ///
    /// # Errors
    /// Fails when the file cannot be read, and for an element that is not finite.
    pub(super) fn read(&self) -> Result<Vec<f32>> {
        let count = self.entry.elements();
        let mut values = vec![0.0; count];
        self.read_rows(0..1, count, &mut values)?;
        Ok(values)
    }

    /// Reads some of its bytes, as they are stored.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub(super) fn read_bytes(&self, start: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read(&self.entry, start, bytes)
    }

    /// Returns whether two tensors have the same dtype, shape and bytes.
    ///
    /// # Errors
    /// Fails when a file cannot be read.
    pub(super) fn has_bytes_of(&self, other: &Self) -> Result<bool> {
        if self.dtype != other.dtype || self.entry.shape != other.entry.shape {
            return Ok(false);
        }
        let mut buffers = [vec![0; COMPARED], vec![0; COMPARED]];
        for start in (0..self.entry.bytes).step_by(COMPARED) {
            let length = (self.entry.bytes - start).min(COMPARED as u64) as usize;
            for (stored, buffer) in [self, other].into_iter().zip(&mut buffers) {
                stored.read_bytes(start, &mut buffer[..length])?;
            }
            if buffers[0][..length] != buffers[1][..length] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads some rows of `columns` elements.
    ///
    /// # Errors
    /// Fails when the file cannot be read, and for an element that is not finite.
    pub(super) fn read_rows(
        &self,
        rows: Range<usize>,
        columns: usize,
        values: &mut [f32],
    ) -> Result<()> {
        read_rows(&*self.file, &self.entry, rows, columns, values)?;
        let Some(at) = first_not_finite(values) else {
            return Ok(());
        };
        Err(Failure::new(format!("the adapter's tensor `{}` is broken", self.key()))
            .detail(format!(
                "an element is {}; it is in `{}`",
                values[at],
                self.file.file_of(&self.entry)
            ))
            .hint("download the adapter again, or use an earlier state of its training")
            .into())
    }
}

/// Reads rows of `columns` elements of a tensor, in f32.
pub(super) fn read_rows(
    source: &dyn WeightSource,
    entry: &TensorEntry,
    rows: Range<usize>,
    columns: usize,
    values: &mut [f32],
) -> Result<()> {
    let dtype = stored_dtype(entry)?;
    let start = rows.start as u64 * columns as u64 * dtype.bytes() as u64;
    if dtype == StoredDtype::F32 {
        return source.read(entry, start, bytemuck::cast_slice_mut(values));
    }
    let mut stored = StoredMatrix::zeros(dtype, rows.len(), columns)?;
    source.read(entry, start, stored.as_bytes_mut())?;
    stored.widen_rows(0, values);
    Ok(())
}

/// The dtype of a tensor's elements.
pub(super) fn stored_dtype(entry: &TensorEntry) -> Result<StoredDtype, Failure> {
    StoredDtype::of_file(entry.dtype).ok_or_else(|| {
        Failure::new(format!("tensor `{}` has elements of {}", entry.name, entry.dtype))
            .detail("f32, f16 and bf16 can be merged")
    })
}
