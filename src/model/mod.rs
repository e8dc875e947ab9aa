//! What a Llama is: its configuration, its tensors, and the arithmetic of one decoder layer.
//!
//! A layer is loaded, run and dropped by itself; nothing here ever holds a model. [`family`] is the one table to add a
//! model family to.

pub mod config;
pub mod embedding;
pub mod family;
pub mod footprint;
pub mod head;
pub mod layer;
pub mod observe;
pub mod rotary;

pub use config::{LlamaConfig, RopeScaling};
pub use embedding::Embedding;
pub use head::Head;
pub use layer::{DecoderLayer, LayerContext, Projection};
pub use observe::{Observation, Observer};
pub use rotary::Rotary;

use anyhow::Result;

use crate::checkpoint::{TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::{StoredDtype, StoredMatrix};

/// The dtype a checkpoint stores a tensor in, where it is one we compute with.
///
/// # Errors
/// Fails for anything but f32, f16 and bf16, naming the tensor.
pub fn stored_dtype(entry: &TensorEntry) -> Result<StoredDtype> {
    match entry.dtype {
        safetensors::Dtype::F32 => Ok(StoredDtype::F32),
        safetensors::Dtype::F16 => Ok(StoredDtype::F16),
        safetensors::Dtype::BF16 => Ok(StoredDtype::Bf16),
        other => Err(
            Failure::new(format!("tensor `{}` is stored as {other:?}", entry.name))
                .detail("weights of f32, f16 or bf16 can be pruned")
                .hint("use the unquantised checkpoint of this model")
                .into(),
        ),
    }
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

/// Reads a vector (a norm's weight, a bias) widened to f32.
pub(crate) fn read_vector(
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
