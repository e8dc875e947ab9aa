//! Decoder layers and head with candle's operators, for GPUs.
//!
//! The formulas are in `model/layer.rs` and `model/head.rs`. The dtype is the checkpoint's dtype; products accumulate in f32; norms,
//! softmax and statistics are f32. In f32 the results equal the CPU's results except for rounding. tests/it/on_device.rs checks this with
//! the same operators on the CPU.
//!
//! | file | contents |
//! | --- | --- |
//! | `layer` | a layer: its weights on the device, its forward and capture pass |
//! | `attention` | the attention block, forwards and backwards |
//! | `mlp` | the MLP, forwards and backwards |
//! | `tables` | rotary tables, and rotations |
//! | `backward` | a layer's vector-Jacobian product |
//! | `training` | the gradients of what is trained |
//! | `gram` | sums of XᵀX of a layer's inputs |
//! | `observing` | column sums and rows of a sample on their way to the host |
//! | `kernels` | operators of our own, with `kernels.cu` for a GPU |
//! | `head` | from hidden states to the log-probability of the next token |
//! | `tiling` | the tiling of the work, and the memory of each tile |

mod attention;
mod backward;
mod gram;
mod head;
mod kernels;
mod layer;
mod mlp;
mod observing;
mod tables;
mod tiling;
mod training;

pub use gram::{DeviceGrams, GramSums, TakeGram};
pub use head::{DeviceHead, LogSumExpPart};
pub use layer::{DeviceLayer, squares_of_difference};
pub use observing::{ArrivingValues, SampleSums};
pub use tables::DeviceTables;
pub use tiling::{CONTEXT, Tiling, TrainedSizes};
pub use training::DeviceTraining;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::ops;

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
    Ok(Tensor::from_raw_buffer(matrix.as_bytes(), dtype, &shape, device)?)
}

fn upload_vector(values: &[f32], dtype: DType, device: &Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, values.len(), device)?.to_dtype(dtype)?)
}

/// Elements of a norm in f32 at once.
const NORMED_AT_ONCE: usize = 1 << 20;

/// Copies the factor of a norm onto a device. A factor 1 + w stays f32: it has more digits than w.
fn upload_factor(norm: &NormWeight, dtype: DType, device: &Device) -> Result<Tensor> {
    let dtype = if norm.adds_one() { DType::F32 } else { dtype };
    upload_vector(norm.factor(), dtype, device)
}

/// x / √(mean(x²) + ε) ∘ factor over rows `[rows, columns]` in one piece, which are rounded once.
fn rms_norm(x: &Tensor, factor: &Tensor, epsilon: f32) -> Result<Tensor> {
    if factor.dtype() == x.dtype() {
        return Ok(ops::rms_norm(x, factor, epsilon)?);
    }
    let (rows, columns) = x.dims2()?;
    let out = Tensor::zeros((rows, columns), x.dtype(), x.device())?;
    let at_once = (NORMED_AT_ONCE / columns.max(1)).max(1);
    for first in (0..rows).step_by(at_once) {
        let wide = x.narrow(0, first, at_once.min(rows - first))?.to_dtype(DType::F32)?;
        let normed = ops::rms_norm(&wide, factor, epsilon)?;
        out.slice_set(&normed.to_dtype(x.dtype())?, 0, first)?;
    }
    Ok(out)
}

/// c·tanh(x / c)
fn bounded(x: Tensor, c: f32) -> CandleResult<Tensor> {
    let c = f64::from(c);
    (x / c)?.tanh()? * c
}

/// The gradient through [`bounded`] from its value y, dy ∘ (1 − (y / c)²). Each step frees its input.
fn bounded_backward(y: Tensor, dy: Tensor, c: f32) -> CandleResult<Tensor> {
    let square = y.sqr()?;
    drop(y);
    let slope = square.affine(-1.0 / f64::from(c).powi(2), 1.0)?;
    drop(square);
    dy * slope
}
