//! NVIDIA GPUs: their list, the counters of their memory pools, and the errors that mean lack of memory.
//!
//! Allocations are stream-ordered: they come from the device's default pool, which keeps freed memory until it is told to give
//! it back ([`release`]) or until the device has no memory left outside the pool. The pool's counters are exact. "Free on the device" is
//! not, as long as the pool keeps freed memory.

use std::error::Error;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::{Context, Result};
use candle_core::cuda_backend::cudarc::cublas::result::CublasError;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasStatus_t;
use candle_core::cuda_backend::cudarc::curand::result::CurandError;
use candle_core::cuda_backend::cudarc::curand::sys::curandStatus_t;
use candle_core::cuda_backend::cudarc::driver::result::{device, mem_pool};
use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute, CUmemoryPool, CUresult};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaSlice, DriverError, PinnedHostSlice,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaError, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Device, Error as CandleError, Storage, Tensor};
use half::{bf16, f16};

use super::device_memory::DeviceMemory;
use crate::bytes::ByteSize;
use crate::linalg::{StoredDtype, StoredMatrix};
use crate::model::on_device::{ArrivingValues, copy, count_work};
use crate::run::fallback::DeviceWork;

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundGpu {
    /// The name reported by the driver.
    pub name: String,
    /// Free bytes, after this process created its context; zero for a GPU that does not answer.
    pub free: ByteSize,
    /// The GPU computes in bf16: compute capability 8.0 and newer.
    pub has_bf16: bool,
}

/// Copies a matrix onto a GPU on a separate stream, so that the transfer overlaps computing. Returns when the copy is complete. Only
/// products may read the copy: freeing it waits for the events that a product records on the GPU's main stream. Of candle's operators, only
/// products record events, so a tensor that is cast must not come from here.
pub fn copy_on_separate_stream(matrix: &StoredMatrix, device: &Device) -> Result<Tensor> {
    let Ok(cuda) = device.as_cuda_device() else {
        return copy(matrix, device);
    };
    let stream = cuda.cuda_stream().context().new_stream()?;
    let bytes = matrix.as_bytes();
    let storage = match matrix.dtype() {
        StoredDtype::F32 => wrap(cuda, stream.clone_htod(bytemuck::cast_slice::<u8, f32>(bytes))?),
        StoredDtype::F16 => wrap(cuda, stream.clone_htod(bytemuck::cast_slice::<u8, f16>(bytes))?),
        StoredDtype::Bf16 => {
            wrap(cuda, stream.clone_htod(bytemuck::cast_slice::<u8, bf16>(bytes))?)
        }
    };
    stream.synchronize()?;
    let uploaded = ByteSize(bytes.len() as u64);
    count_work(DeviceWork { uploaded, waits: 1, ..DeviceWork::default() });
    let shape = (matrix.rows(), matrix.columns());
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
}

/// Page-locked host memory. A GPU copies values into it and computes at the same time. Buffers are reused.
#[derive(Debug, Clone, Default)]
pub struct PinnedBuffers(Arc<Mutex<Vec<PinnedHostSlice<f64>>>>);

impl PinnedBuffers {
    /// Begins a copy of values to the host, after the work that the GPU has been given so far; `None` for values that are not on a GPU,
    /// and where there is no page-locked memory.
    ///
    /// # Errors
    /// Fails when the GPU has failed.
    pub fn send(&self, values: &Tensor) -> Result<Option<ArrivingValues>> {
        let (storage, layout) = values.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Ok(None);
        };
        let (start, end) = layout.contiguous_offsets().context("values are contiguous")?;
        let count = end - start;
        let stream = storage.device.cuda_stream();
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free.iter().position(|buffer| buffer.len() >= count);
        let mut buffer = match fitting {
            Some(at) => free.swap_remove(at),
            None => {
                #[expect(unsafe_code, reason = "memory without a value")]
                // SAFETY: the elements up to `count` are written by the copy before anything reads them, and nothing reads beyond them.
                let buffer = unsafe { stream.context().alloc_pinned_with_flags::<f64>(count, 0) };
                match buffer {
                    Ok(buffer) => buffer,
                    // Without page-locked memory the values stay on the GPU until they are shown.
                    Err(_) => return Ok(None),
                }
            }
        };
        drop(free);
        stream.memcpy_dtoh(&storage.as_cuda_slice::<f64>()?.slice(start..end), &mut buffer)?;
        let buffers = self.clone();
        Ok(Some(Box::new(move |take| {
            // Waits for the copy.
            take(&buffer.as_slice()?[..count]);
            buffers.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
            Ok(())
        })))
    }
}

fn wrap<T: CudaDType>(cuda: &CudaDevice, slice: CudaSlice<T>) -> CudaStorage {
    CudaStorage::wrap_cuda_slice(slice, cuda.clone())
}

/// Returns all GPUs by index, as they were at the first call. Each has a context of this process. Empty without a driver or without GPUs.
pub fn gpus() -> Vec<FoundGpu> {
    static FOUND: OnceLock<Vec<FoundGpu>> = OnceLock::new();
    FOUND.get_or_init(look_for_gpus).clone()
}

fn look_for_gpus() -> Vec<FoundGpu> {
    let count = CudaContext::device_count().unwrap_or(0).max(0) as usize;
    let mut gpus = Vec::with_capacity(count);
    for index in 0..count {
        let found = CudaContext::new(index).and_then(|context| {
            let (free, _) = context.mem_get_info()?;
            let (major, _) = context.compute_capability()?;
            Ok(FoundGpu {
                name: context.name()?,
                free: ByteSize(free as u64),
                has_bf16: major >= 8,
            })
        });
        match found {
            Ok(gpu) => gpus.push(gpu),
            // Indices must be the driver's, so a GPU that does not answer stays in the list, without memory.
            Err(error) => gpus.push(FoundGpu {
                name: format!("unusable: {error}"),
                free: ByteSize::ZERO,
                has_bf16: false,
            }),
        }
    }
    gpus
}

/// Opens a GPU with a stream for all threads: a worker's thread computes, and the reader's copies small vectors in between.
pub fn open(index: usize) -> Result<Device> {
    let device =
        Device::new_cuda_with_stream(index).with_context(|| format!("opening cuda:{index}"))?;
    if let Ok(cuda) = device.as_cuda_device() {
        // Freed memory stays in the pool. Otherwise every wait for the device would give it back.
        let mut keep_all = u64::MAX;
        with_pool(cuda, |pool| {
            #[expect(unsafe_code, reason = "a call into the CUDA driver")]
            // SAFETY: this is the device's default pool, which lives as long as the context; the attribute is a u64, and
            // the driver copies it before it returns.
            unsafe {
                mem_pool::set_attribute(
                    pool,
                    CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                    (&raw mut keep_all).cast::<c_void>(),
                )
            }
        });
    }
    Ok(device)
}

/// Calls `body` with the device's default pool; `None` without a pool, and when the call fails.
fn with_pool<R>(
    cuda: &CudaDevice,
    body: impl FnOnce(CUmemoryPool) -> Result<R, DriverError>,
) -> Option<R> {
    let stream = cuda.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return None;
    }
    context.bind_to_thread().ok()?;
    #[expect(unsafe_code, reason = "a call into the CUDA driver")]
    // SAFETY: `cu_device` is the device this context was made for.
    let pool = unsafe { device::get_default_mem_pool(context.cu_device()) };
    body(pool.ok()?).ok()
}

fn counter(pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Result<ByteSize, DriverError> {
    let mut value = 0u64;
    #[expect(unsafe_code, reason = "a call into the CUDA driver")]
    // SAFETY: this is a device's default pool; all attributes asked for here are u64.
    unsafe {
        mem_pool::get_attribute(pool, attribute, (&raw mut value).cast::<c_void>())?;
    }
    Ok(ByteSize(value))
}

/// Returns the counters of a GPU; `None` for a device that is not a GPU, and for a GPU without a memory pool.
pub fn memory(device: &Device) -> Option<DeviceMemory> {
    let cuda = device.as_cuda_device().ok()?;
    let stream = cuda.cuda_stream();
    let (free, total) = stream.context().mem_get_info().ok()?;
    let pool = with_pool(cuda, |pool| {
        Ok(DeviceMemory {
            allocated: counter(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            peak_allocated: counter(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
            reserved: counter(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            peak_reserved: counter(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            free: ByteSize::ZERO,
            total: ByteSize::ZERO,
        })
    })?;
    // Memory that the pool keeps without use is available.
    let kept = pool.reserved.0.saturating_sub(pool.allocated.0);
    Some(DeviceMemory { free: ByteSize(free as u64 + kept), total: ByteSize(total as u64), ..pool })
}

/// Resets the pool's high-water marks to the memory in use.
pub fn reset_peaks(device: &Device) {
    let Ok(cuda) = device.as_cuda_device() else {
        return;
    };
    for attribute in [
        CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    ] {
        let mut zero = 0u64;
        with_pool(cuda, |pool| {
            #[expect(unsafe_code, reason = "a call into the CUDA driver")]
            // SAFETY: as in `open`; 0 is the only value these attributes may be set to.
            unsafe {
                mem_pool::set_attribute(pool, attribute, (&raw mut zero).cast::<c_void>())
            }
        });
    }
}

/// Waits for all streams of a GPU, and gives the unused memory of the pool back to it.
///
/// # Errors
/// Fails with the driver's error when work on the GPU has failed in the meantime.
pub fn release(device: &Device) -> Result<()> {
    let Ok(cuda) = device.as_cuda_device() else {
        return Ok(());
    };
    cuda.cuda_stream().context().synchronize()?;
    count_work(DeviceWork { waits: 1, ..DeviceWork::default() });
    with_pool(cuda, |pool| {
        #[expect(unsafe_code, reason = "a call into the CUDA driver")]
        // SAFETY: this is the device's default pool; memory in use is not touched.
        unsafe {
            mem_pool::trim_to(pool, 0)
        }
    });
    Ok(())
}

/// cuBLAS allocates its workspace at the first product. Where that fails it returns any of these codes, of which only the first
/// names the cause. An error with a different cause is not hidden: [`release`] follows, waits for the device and returns its error.
const CUBLAS_WITHOUT_MEMORY: [cublasStatus_t; 3] = [
    cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED,
    cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED,
    cublasStatus_t::CUBLAS_STATUS_INTERNAL_ERROR,
];

/// Returns whether an error means that a device has no memory left, by its type and code: the driver's code 2, and codes of
/// cuBLAS and cuRAND. A dead context (an illegal address, a failed launch) has different codes.
pub fn is_out_of_memory(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<CandleError>() {
        return match error {
            CandleError::Cuda(inner) => is_out_of_memory(&**inner),
            CandleError::WithBacktrace { inner, .. }
            | CandleError::WithPath { inner, .. }
            | CandleError::Context { inner, .. } => is_out_of_memory(&**inner),
            CandleError::WrappedContext { wrapped, .. } => is_out_of_memory(&**wrapped),
            _ => false,
        };
    }
    if let Some(error) = error.downcast_ref::<CudaError>() {
        return match error {
            CudaError::Cuda(driver) | CudaError::Load { cuda: driver, .. } => {
                is_out_of_memory(driver)
            }
            CudaError::Cublas(error) => is_out_of_memory(error),
            CudaError::Curand(error) => is_out_of_memory(error),
            _ => false,
        };
    }
    if let Some(DriverError(code)) = error.downcast_ref() {
        return *code == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    }
    if let Some(CublasError(code)) = error.downcast_ref() {
        return CUBLAS_WITHOUT_MEMORY.contains(code);
    }
    if let Some(CurandError(code)) = error.downcast_ref() {
        return *code == curandStatus_t::CURAND_STATUS_ALLOCATION_FAILED;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::OutOfMemory;
    use super::*;

    #[test]
    fn errors_are_told_by_code_through_all_wrappings() {
        let candle = |code| CandleError::Cuda(Box::new(CudaError::Cuda(DriverError(code))));
        let wrapped = |code| candle(code).context("layer 3").with_path("model.safetensors");
        let out = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let dead = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        assert!(is_out_of_memory(&candle(out)) && is_out_of_memory(&wrapped(out)));
        assert!(!is_out_of_memory(&candle(dead)) && !is_out_of_memory(&wrapped(dead)));
        let loading = CudaError::Load { cuda: DriverError(out), module_name: "reduce".to_string() };
        assert!(is_out_of_memory(&CandleError::Cuda(Box::new(loading))));
        for (code, expected) in [
            (cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED, true),
            (cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED, true),
            (cublasStatus_t::CUBLAS_STATUS_INTERNAL_ERROR, true),
            (cublasStatus_t::CUBLAS_STATUS_EXECUTION_FAILED, false),
            (cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE, false),
        ] {
            let product = CandleError::Cuda(Box::new(CudaError::Cublas(CublasError(code))));
            assert_eq!(is_out_of_memory(&product), expected, "{code:?}");
        }
        let message = CandleError::Msg("out of memory on cuda".to_string());
        assert!(!is_out_of_memory(&message), "words do not count");
        let error = anyhow::Error::new(wrapped(out)).context("in layer 3");
        assert_eq!(OutOfMemory::of(&error), Some(OutOfMemory::Device));
    }
}
