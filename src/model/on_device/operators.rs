//! Operators of candle's in the passes of a layer and of the head on a device, and the work they cause.
//!
//! | work | caused by |
//! | --- | --- |
//! | launches | every operator that computes: one, [`bounded`] three, a copy of parts into a whole one per part |
//! | uploads | values of the host |
//! | downloads, waits | values for the host, which waits for all work before them |
//!
//! Views cost nothing and stand where they are used. Passes use no other operators of candle's (`tests/it/on_device/work.rs`), so their work
//! is known without a GPU. Trainings use candle's autograd and are not counted.

use std::cell::Cell;

use anyhow::Result;
use candle_core::{D, DType, Device, Result as CandleResult, Shape, Tensor, WithDType};
use candle_nn::ops;

use crate::bytes::ByteSize;
use crate::run::fallback::DeviceWork;

/// Elements of a norm in f32 at once.
pub(super) const NORMED_AT_ONCE: usize = 1 << 20;

thread_local! {
    /// The work that this thread has given to devices.
    static WORK: Cell<DeviceWork> = Cell::default();
}

/// Counts work.
pub fn count_work(more: DeviceWork) {
    let mut work = WORK.get();
    work += more;
    WORK.set(work);
}

/// The work that this thread has given to devices since the last call.
pub fn take_work() -> DeviceWork {
    WORK.take()
}

/// Counts kernels.
pub(super) fn launched(count: usize) {
    count_work(DeviceWork { launches: count as u64, ..DeviceWork::default() });
}

fn bytes_of(tensor: &Tensor) -> ByteSize {
    ByteSize::of(tensor.elem_count(), tensor.dtype().size_in_bytes())
}

/// Counts values that leave the host.
fn uploaded(tensor: Tensor) -> Tensor {
    count_work(DeviceWork { uploaded: bytes_of(&tensor), ..DeviceWork::default() });
    tensor
}

/// Counts values that are sent to the host by a copy of its own, without a wait.
pub(super) fn sent(tensor: &Tensor) {
    count_work(DeviceWork { downloaded: bytes_of(tensor), ..DeviceWork::default() });
}

/// Copies stored values onto a device.
pub(super) fn upload_stored(
    bytes: &[u8],
    (dtype, shape): (DType, [usize; 2]),
    device: &Device,
) -> CandleResult<Tensor> {
    Ok(uploaded(Tensor::from_raw_buffer(bytes, dtype, &shape, device)?))
}

/// Copies values onto a device.
pub(super) fn upload<T: WithDType>(
    values: &[T],
    shape: impl Into<Shape>,
    device: &Device,
) -> CandleResult<Tensor> {
    Ok(uploaded(Tensor::from_slice(values, shape.into(), device)?))
}

/// A tensor on a device, in the dtype of the arithmetic.
pub fn to_device(tensor: &Tensor, dtype: DType, device: &Device) -> CandleResult<Tensor> {
    if tensor.device().same_device(device) {
        return cast(tensor, dtype);
    }
    cast(&uploaded(tensor.to_device(device)?), dtype)
}

/// A tensor on the host, after the work of its device.
pub fn to_host(tensor: &Tensor) -> CandleResult<Tensor> {
    sent(tensor);
    count_work(DeviceWork { waits: 1, ..DeviceWork::default() });
    tensor.to_device(&Device::Cpu)
}

/// Values on the host, in order.
pub(super) fn download<T: WithDType>(tensor: &Tensor) -> CandleResult<Vec<T>> {
    to_host(tensor)?.to_dtype(T::DTYPE)?.flatten_all()?.to_vec1()
}

/// Waits for a device.
pub fn wait(device: &Device) -> CandleResult<()> {
    count_work(DeviceWork { waits: 1, ..DeviceWork::default() });
    device.synchronize()
}

pub(super) fn zeros(shape: impl Into<Shape>, like: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    Tensor::zeros(shape.into(), like.dtype(), like.device())
}

pub(super) fn cast(x: &Tensor, dtype: DType) -> CandleResult<Tensor> {
    launched(usize::from(x.dtype() != dtype));
    x.to_dtype(dtype)
}

pub(super) fn contiguous(x: &Tensor) -> CandleResult<Tensor> {
    launched(usize::from(!x.is_contiguous()));
    x.contiguous()
}

/// A copy in memory of its own.
pub(super) fn copy(x: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.force_contiguous()
}

/// Tensors one after the other along their first dimension or their second.
pub(super) fn cat(parts: &[Tensor], dim: usize) -> CandleResult<Tensor> {
    launched(parts.len());
    Tensor::cat(parts, dim)
}

/// x·y of matrices, or of each pair of matrices.
pub(super) fn matmul(x: &Tensor, y: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.matmul(y)
}

pub(super) fn plus(x: &Tensor, y: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x + y
}

pub(super) fn minus(x: &Tensor, y: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.broadcast_sub(y)
}

/// x + b with b `[columns]` for every row.
pub(super) fn plus_row(x: &Tensor, b: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.broadcast_add(b)
}

/// Rows by their numbers.
pub(super) fn rows_at(x: &Tensor, index: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.index_select(index, 0)
}

/// An element of every row by its column: `[rows, 1]` for an index `[rows, 1]`.
pub(super) fn chosen(x: &Tensor, index: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.gather(index, 1)
}

/// The largest element of every row, `[rows, 1]`.
pub(super) fn largest(x: &Tensor) -> CandleResult<Tensor> {
    launched(1);
    x.max_keepdim(D::Minus1)
}

/// Σ eˣ of every row, `[rows]`.
pub(super) fn sum_exp(x: &Tensor) -> CandleResult<Tensor> {
    launched(2);
    x.exp()?.sum(D::Minus1)
}

/// c·tanh(x / c)
pub(super) fn bounded(x: Tensor, c: f32) -> CandleResult<Tensor> {
    launched(3);
    let c = f64::from(c);
    (x / c)?.tanh()? * c
}

/// x / √(mean(x²) + ε) ∘ factor over rows `[rows, columns]` in one piece, which are rounded once.
pub(super) fn rms_norm(x: &Tensor, factor: &Tensor, epsilon: f32) -> Result<Tensor> {
    if factor.dtype() == x.dtype() {
        launched(1);
        return Ok(ops::rms_norm(x, factor, epsilon)?);
    }
    let (rows, columns) = x.dims2()?;
    let out = zeros((rows, columns), x)?;
    let at_once = (NORMED_AT_ONCE / columns.max(1)).max(1);
    for first in (0..rows).step_by(at_once) {
        let wide = cast(&x.narrow(0, first, at_once.min(rows - first))?, DType::F32)?;
        let normed = ops::rms_norm(&wide, factor, epsilon)?;
        launched(2);
        out.slice_set(&cast(&normed, x.dtype())?, 0, first)?;
    }
    Ok(out)
}
