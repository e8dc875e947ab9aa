//! Decoder layers and head as operators of candle's, on whatever device it has: what a GPU computes.
//!
//! The formulas are those of `layer.rs` and `head.rs`; the dtype is the checkpoint's, products accumulate in f32, norms, softmax
//! and statistics are f32. Where both compute in f32 they agree but for rounding, which tests/it/on_device.rs holds on the CPU, where
//! candle has the same operators.
//!
//! | file | story |
//! | --- | --- |
//! | `layer` | a layer's forward and capture pass |
//! | `head` | from hidden states to the log-probability of the next token |
//! | `cut` | how the work is cut up, and what each piece of it holds |

mod cut;
mod head;
mod layer;

pub use cut::{CONTEXT, Cut};
pub use head::{DeviceHead, LogSumExpPart};
pub use layer::{DeviceLayer, DeviceTables};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::linalg::{StoredDtype, StoredMatrix};

/// candle's name of a stored dtype.
pub fn candle_dtype(dtype: StoredDtype) -> DType {
    match dtype {
        StoredDtype::F32 => DType::F32,
        StoredDtype::F16 => DType::F16,
        StoredDtype::Bf16 => DType::BF16,
    }
}

/// Copies a matrix `[rows, columns]` onto a device in the dtype it is stored in.
pub type CopyMatrix<'a> = &'a dyn Fn(&StoredMatrix) -> Result<Tensor>;

/// [`CopyMatrix`] in the device's own order of work.
///
/// # Errors
/// Fails when the device has no memory for it.
pub fn copy(matrix: &StoredMatrix, device: &Device) -> Result<Tensor> {
    let shape = [matrix.rows(), matrix.columns()];
    let dtype = candle_dtype(matrix.dtype());
    Ok(Tensor::from_raw_buffer(
        matrix.as_bytes(),
        dtype,
        &shape,
        device,
    )?)
}

/// Copies a vector onto a device.
fn upload_vector(values: &[f32], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, values.len(), device)?.to_dtype(dtype)?)
}
