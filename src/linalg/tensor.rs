//! Conversion between slices and candle tensors.

use anyhow::{Context, Result, ensure};
use candle_core::{CpuStorage, Device, Storage, Tensor};

/// Moves `values` into a tensor on the CPU without a copy.
///
/// # Errors
/// Fails when `values` does not fill `shape`.
pub fn from_vec(values: Vec<f32>, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu).context("shaping a tensor")
}

/// Calls `body` with the elements of a contiguous f32 tensor on the CPU, without a copy.
///
/// # Errors
/// Fails when the tensor is not f32, not on the CPU, or not contiguous.
pub fn with_slice<R>(tensor: &Tensor, body: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout.contiguous_offsets().context("the tensor is not contiguous")?;
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            ensure!(end <= values.len(), "the tensor reaches beyond its storage");
            Ok(body(&values[start..end]))
        }
        _ => anyhow::bail!("the tensor is not f32 on the CPU"),
    }
}

/// Calls `body` with the bytes of a contiguous f32, f16 or bf16 tensor on the CPU, without a copy.
///
/// # Errors
/// Fails when the tensor is not f32, f16 or bf16, not on the CPU, or not contiguous.
pub fn with_bytes<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout.contiguous_offsets().context("the tensor is not contiguous")?;
    let outside = "the tensor reaches beyond its storage";
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            body(bytemuck::cast_slice(values.get(start..end).context(outside)?))
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            body(bytemuck::cast_slice(values.get(start..end).context(outside)?))
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            body(bytemuck::cast_slice(values.get(start..end).context(outside)?))
        }
        _ => anyhow::bail!("the tensor is not f32, f16 or bf16 on the CPU"),
    })
}
