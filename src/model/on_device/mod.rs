//! Decoder layers and head with candle's operators, for GPUs.
//!
//! The formulas are in `model/layer.rs` and `model/head.rs`. The dtype is the checkpoint's dtype; products accumulate in f32; norms,
//! softmax and statistics are f32. In f32 the results equal the CPU's results except for rounding. tests/it/on_device.rs checks this with
//! the same operators on the CPU.
//!
//! | file | contents |
//! | --- | --- |
//! | `operators` | candle's operators and the count of their work |
//! | `layer` | a layer: its weights on the device, its forward and capture pass |
//! | `attention`, `mlp` | the attention block, the MLP |
//! | `tables` | rotary tables, and rotations |
//! | `backward`, `attention_backward`, `head_backward` | vector-Jacobian products of a layer, of its attention, and of the head |
//! | `training` | the gradients of what is trained |
//! | `gram` | sums of XᵀX of a layer's inputs |
//! | `observing` | column sums and rows of a sample on their way to the host |
//! | `kernels` | operators of our own, with `kernels.cu` for a GPU |
//! | `head` | from hidden states to the log-probability of the next token |
//! | `tiling` | the tiling of the work, and the memory of each tile |

mod attention;
mod attention_backward;
mod backward;
mod gram;
mod head;
mod head_backward;
mod kernels;
mod layer;
mod mlp;
mod observing;
mod operators;
mod tables;
mod tiling;
mod training;

pub use gram::{DeviceGrams, GramSums, TakeGram};
pub use head::{DeviceHead, LogSumExpPart};
pub use layer::{DeviceLayer, squares_of_difference};
pub use observing::{ArrivingValues, SampleSums};
pub use operators::{count_work, take_work, to_device, to_host, wait};
pub use tables::DeviceTables;
pub use tiling::{CONTEXT, Tiling, TrainedSizes};
pub use training::DeviceTraining;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use crate::linalg::{StoredDtype, StoredMatrix};
use crate::model::norms::NormWeight;

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
    Ok(operators::upload_stored(matrix.as_bytes(), (dtype, shape), device)?)
}

fn upload_vector(values: &[f32], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(operators::cast(&operators::upload(values, values.len(), device)?, dtype)?)
}

/// Copies the factor of a norm onto a device. A factor 1 + w stays f32: it has more digits than w.
fn upload_factor(norm: &NormWeight, dtype: DType, device: &Device) -> Result<Tensor> {
    let dtype = if norm.adds_one() { DType::F32 } else { dtype };
    upload_vector(norm.factor(), dtype, device)
}
