//! Decoder layers and head with candle's operators, for GPUs.
//!
//! The formulas are in `model/layer.rs` and `model/head.rs`. The dtype is the checkpoint's dtype; products accumulate in f32; norms,
//! softmax and statistics are f32. In f32 the results equal the CPU's results except for rounding. tests/it/on_device.rs checks this with
//! the same operators on the CPU.
//!
//! | file | contents |
//! | --- | --- |
//! | `layer` | a layer's forward and capture pass |
//! | `backward` | a layer's vector-Jacobian product, and the gradients of what is trained |
//! | `gram` | sums of XᵀX of a layer's inputs |
//! | `observing` | column sums and rows of a sample on their way to the host |
//! | `kernels` | operators of our own, with `kernels.cu` for a GPU |
//! | `head` | from hidden states to the log-probability of the next token |
//! | `tiling` | the tiling of the work, and the memory of each tile |

mod backward;
mod gram;
mod head;
mod kernels;
mod layer;
mod observing;
mod tiling;

pub use backward::DeviceTraining;
pub use gram::{DeviceGrams, TakeGram};
pub use head::{DeviceHead, LogSumExpPart};
pub use layer::{DeviceLayer, DeviceTables, squares_of_difference};
pub use observing::{ArrivingValues, SampleSums};
pub use tiling::{CONTEXT, Tiling, TrainedSizes};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::linalg::{StoredDtype, StoredMatrix};

/// A result of candle's.
type CandleResult<T> = candle_core::Result<T>;

/// The candle dtype of a stored dtype.
pub fn candle_dtype(dtype: StoredDtype) -> DType {
    match dtype {
        StoredDtype::F32 => DType::F32,
        StoredDtype::F16 => DType::F16,
        StoredDtype::Bf16 => DType::BF16,
    }
}

/// Copies a matrix `[rows, columns]` onto a device in the dtype it is stored in.
pub type CopyMatrix<'a> = &'a dyn Fn(&StoredMatrix) -> Result<Tensor>;

/// Copies a matrix in the device's default stream, in the dtype it is stored in; see [`CopyMatrix`].
///
/// # Errors
/// Fails when the device fails, mostly for lack of memory.
pub fn copy(matrix: &StoredMatrix, device: &Device) -> Result<Tensor> {
    let shape = [matrix.rows(), matrix.columns()];
    let dtype = candle_dtype(matrix.dtype());
    Ok(Tensor::from_raw_buffer(matrix.as_bytes(), dtype, &shape, device)?)
}

fn upload_vector(values: &[f32], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, values.len(), device)?.to_dtype(dtype)?)
}
