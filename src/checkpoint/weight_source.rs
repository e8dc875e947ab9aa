//! [`WeightSource`]: tensors by name and their bytes by range, from a checkpoint or from a view of it.

use std::ops::Range;

use safetensors::Dtype;

use super::header::TensorEntry;
use super::missing::missing;
use crate::failure::Failure;

/// Some rows of a matrix that is stored without its zeros.
#[derive(Debug, Clone, Copy)]
pub struct KeptRows<'a> {
    /// A bit per column, 1 = kept, the lowest bit first. Every row begins on a byte.
    pub mask: &'a [u8],
    /// The index of each row's first value, and their number at the end.
    pub offsets: &'a [usize],
    /// The bytes of the values, in the dtype of the matrix, or 8-bit codes.
    pub values: &'a [u8],
    /// The f16 scales of 8-bit codes; empty for other values.
    pub scales: &'a [u8],
}

/// A source of weights: tensors by name, their bytes by range.
pub trait WeightSource: Send + Sync {
    /// The position of the tensor `name`; `None` if the source does not have it.
    fn entry(&self, name: &str) -> Option<&TensorEntry>;

    /// Fills `buffer` with the stored bytes of `entry`, from byte `start` of its data. May be called from many threads.
    ///
    /// # Errors
    /// Fails when the range leaves the tensor, or the file cannot be read or became shorter.
    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> anyhow::Result<()>;

    /// Hands `take` the parts of some rows of a matrix that is stored without its zeros. Returns false where it is stored with them, or
    /// where its values are of the other kind.
    ///
    /// # Arguments
    /// * `is_coded`: asks for 8-bit codes, else for values in the dtype of the matrix
    ///
    /// # Errors
    /// Fails when the rows leave the matrix, cannot be read, or are broken.
    fn kept_rows(
        &self,
        entry: &TensorEntry,
        rows: Range<usize>,
        is_coded: bool,
        take: &mut dyn FnMut(KeptRows<'_>),
    ) -> anyhow::Result<bool> {
        let _ = (entry, rows, is_coded, take);
        Ok(false)
    }

    /// The name of the source in errors.
    fn place(&self) -> String {
        "checkpoint".into()
    }

    /// The name of the file of `entry` in errors.
    fn file_of(&self, entry: &TensorEntry) -> String {
        format!("shard {}", entry.shard)
    }

    /// Returns the tensor `name`, which must have this `shape` and be stored as f32, f16 or bf16.
    ///
    /// # Errors
    /// Fails when the tensor is missing, and when its shape or dtype is wrong; the message then names the expected and the found value.
    fn require(&self, name: &str, shape: &[usize]) -> anyhow::Result<&TensorEntry> {
        let Some(entry) = self.entry(name) else {
            let has = |name: &str| self.entry(name).is_some();
            return Err(missing(&self.place(), &has, name, shape).into());
        };
        if entry.shape != shape {
            return Err(Failure::new(format!(
                "tensor `{name}` in `{}` has the wrong shape",
                self.file_of(entry)
            ))
            .detail(format!("expected {shape:?} by config.json, found {:?}", entry.shape))
            .hint("check that config.json and the weights belong together, or download them again")
            .into());
        }
        if !matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(Failure::new(format!(
                "tensor `{name}` in `{}` has an unsupported dtype",
                self.file_of(entry)
            ))
            .detail(format!("expected F32, F16 or BF16, found {}", entry.dtype))
            .hint("use the unquantised checkpoint")
            .into());
        }
        Ok(entry)
    }
}
