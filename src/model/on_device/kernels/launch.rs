//! Launches of the kernels of `kernels.cu`, which the build script compiles to PTX; only with the feature `cuda`.
//!
//! The callers have checked that operands have no gaps, and that indices of 32 bits reach every element (`elements` in `mod.rs`).

use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, DeviceRepr, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage};
use half::{bf16, f16};

use crate::linalg::attention::Scoring;
use crate::linalg::select::Quota;
use crate::model::on_device::CandleResult;

const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/on_device.ptx"));

/// Threads of a block: of a row, of element-wise kernels, of column sums.
const OF_ROW: usize = 256;
const OF_ELEMENTS: usize = 256;
const OF_COLUMNS: usize = 1024;

/// Columns of a word of a mask.
const WORD: usize = 32;

/// Scores of a row that a thread of `soften_*` keeps in registers.
const OF_THREAD: usize = 8;

/// Columns of a block of column sums.
const COLUMNS: usize = 32;

/// An element type with kernels.
pub(super) trait LaunchValue: CudaDType + DeviceRepr {
    /// The end of the names of its kernels.
    const NAME: &'static str;
}

impl LaunchValue for f32 {
    const NAME: &'static str = "f32";
}

impl LaunchValue for f16 {
    const NAME: &'static str = "f16";
}

impl LaunchValue for bf16 {
    const NAME: &'static str = "bf16";
}

/// A storage and the elements of it that an operand has.
type Operand<'a> = (&'a CudaStorage, Range<usize>);

fn kernel<T: LaunchValue>(name: &str, device: &CudaDevice) -> CandleResult<CudaFunction> {
    let name = format!("{name}_{}", T::NAME);
    Ok(device.get_or_load_custom_func(&name, "prune_on_device", PTX)?.into_cuda_function())
}

fn blocks(count: usize, threads: usize) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (count.max(1) as u32, 1, 1),
        block_dim: (threads as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// Launches a kernel with its arguments, which must match its signature.
macro_rules! launch {
    ($device:expr, $kernel:expr, $blocks:expr, $($argument:expr),+) => {{
        let (stream, kernel) = ($device.cuda_stream(), $kernel);
        let mut builder = stream.launch_builder(&kernel);
        $(builder.arg($argument);)+
        #[expect(unsafe_code, reason = "a launch of a kernel")]
        // SAFETY: the arguments match the kernel's signature in kernels.cu, and the sizes among them are the sizes of the operands,
        // which the callers have taken from their layouts; a kernel reads and writes within these sizes.
        unsafe {
            builder.launch($blocks)
        }
        .w()?;
    }};
}

/// `soften_*` or `soften_bounded_*` for `[rows, keys]` with sizes queries, keys, and the position of the first query among the keys.
pub(super) fn soften<T: LaunchValue>(
    scores: &mut CudaStorage,
    at: Range<usize>,
    sizes @ [_, keys, _]: [usize; 3],
    Scoring { scale, soft_cap, window }: Scoring,
) -> CandleResult<()> {
    let device = scores.device.clone();
    let name = if soft_cap.is_some() { "soften_bounded" } else { "soften" };
    let kernel = kernel::<T>(name, &device)?;
    let rows = at.len() / keys.max(1);
    // As few threads as have the row in their registers.
    let threads = keys.div_ceil(OF_THREAD).next_power_of_two().clamp(32, 1024);
    let mut scores = scores.as_cuda_slice_mut::<T>()?.slice_mut(at);
    let [queries, keys, first] = sizes.map(|size| size as i32);
    let window = window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX).max(1));
    let (cap, blocks) = (soft_cap.unwrap_or(0.0), blocks(rows, threads));
    launch!(device, kernel, blocks, &mut scores, &queries, &keys, &first, &window, &scale, &cap);
    Ok(())
}

/// `rotate_heads_*` for x, cos and sin, with sizes tokens, heads, half of the rotated elements, and head_dim.
pub(super) fn rotate_heads<T: LaunchValue>(
    [x, cos, sin]: [Operand<'_>; 3],
    sizes @ [tokens, heads, half, head_dim]: [usize; 4],
) -> CandleResult<CudaStorage> {
    let device = x.0.device.clone();
    let kernel = kernel::<T>("rotate_heads", &device)?;
    let elements = x.1.len();
    let x = x.0.as_cuda_slice::<T>()?.slice(x.1);
    let cos = cos.0.as_cuda_slice::<T>()?.slice(cos.1);
    let sin = sin.0.as_cuda_slice::<T>()?.slice(sin.1);
    #[expect(unsafe_code, reason = "memory without a value")]
    // SAFETY: the kernel writes every element before anything reads one.
    let mut out = unsafe { device.alloc::<T>(elements)? };
    // A thread for a pair, or for an element that stays.
    let steps = tokens * heads * (head_dim - half);
    let blocks = blocks(steps.div_ceil(OF_ELEMENTS), OF_ELEMENTS);
    let [tokens, heads, half, head_dim] = sizes.map(|size| size as i32);
    launch!(device, kernel, blocks, &x, &cos, &sin, &tokens, &heads, &half, &head_dim, &mut out);
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

/// `heads_first_*` with sizes tokens, heads and head_dim.
pub(super) fn heads_first<T: LaunchValue>(
    (x, at): Operand<'_>,
    sizes: [usize; 3],
) -> CandleResult<CudaStorage> {
    let device = x.device.clone();
    let kernel = kernel::<T>("heads_first", &device)?;
    let elements = at.len();
    let x = x.as_cuda_slice::<T>()?.slice(at);
    #[expect(unsafe_code, reason = "memory without a value")]
    // SAFETY: the kernel writes every element before anything reads one.
    let mut out = unsafe { device.alloc::<T>(elements)? };
    let [tokens, heads, head_dim] = sizes.map(|size| size as i32);
    let blocks = blocks(elements.div_ceil(OF_ELEMENTS), OF_ELEMENTS);
    launch!(device, kernel, blocks, &x, &tokens, &heads, &head_dim, &mut out);
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

/// `place_*` with sizes heads, tokens, head_dim, width of `out` and first column.
pub(super) fn place<T: LaunchValue>(
    (out, out_at): (&mut CudaStorage, Range<usize>),
    (x, x_at): Operand<'_>,
    sizes: [usize; 5],
) -> CandleResult<()> {
    let device = x.device.clone();
    let kernel = kernel::<T>("place", &device)?;
    let blocks = blocks(x_at.len().div_ceil(OF_ELEMENTS), OF_ELEMENTS);
    let x = x.as_cuda_slice::<T>()?.slice(x_at);
    let mut out = out.as_cuda_slice_mut::<T>()?.slice_mut(out_at);
    let [heads, tokens, head_dim, width, first] = sizes.map(|size| size as i32);
    launch!(device, kernel, blocks, &x, &heads, &tokens, &head_dim, &mut out, &width, &first);
    Ok(())
}

/// An element-wise kernel that changes its first operand.
pub(super) fn elementwise<T: LaunchValue>(
    name: &str,
    (x, x_at): (&mut CudaStorage, Range<usize>),
    (y, y_at): Operand<'_>,
) -> CandleResult<()> {
    let device = y.device.clone();
    let kernel = kernel::<T>(name, &device)?;
    let elements = x_at.len().min(y_at.len());
    let y = y.as_cuda_slice::<T>()?.slice(y_at);
    let mut x = x.as_cuda_slice_mut::<T>()?.slice_mut(x_at);
    let blocks = blocks(elements.div_ceil(OF_ELEMENTS), OF_ELEMENTS);
    let elements = elements as u32;
    launch!(device, kernel, blocks, &mut x, &y, &elements);
    Ok(())
}

/// `column_sums_*`: `[2, columns]`.
pub(super) fn column_sums<T: LaunchValue>(
    (x, at): Operand<'_>,
    rows: usize,
    columns: usize,
) -> CandleResult<CudaStorage> {
    let device = x.device.clone();
    let kernel = kernel::<T>("column_sums", &device)?;
    let x = x.as_cuda_slice::<T>()?.slice(at);
    #[expect(unsafe_code, reason = "memory without a value")]
    // SAFETY: the kernel writes both sums of every column before anything reads a sum.
    let mut out = unsafe { device.alloc::<f64>(2 * columns)? };
    let blocks = blocks(columns.div_ceil(COLUMNS), OF_COLUMNS);
    let [rows, columns] = [rows, columns].map(|size| size as i32);
    launch!(device, kernel, blocks, &x, &rows, &columns, &mut out);
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

/// `lowest_of_rows_*` or `lowest_of_groups_*`: a word for 32 columns, and a last word that becomes 1 if a score is not finite.
pub(super) fn lowest<T: LaunchValue>(
    (weight, weight_at): Operand<'_>,
    (norms, norms_at): Operand<'_>,
    quota: Quota,
) -> CandleResult<CudaStorage> {
    let device = weight.device.clone();
    let (elements, columns) = (weight_at.len(), norms_at.len());
    let weight = weight.as_cuda_slice::<T>()?.slice(weight_at);
    let norms = norms.as_cuda_slice::<f32>()?.slice(norms_at);
    let words = elements / WORD;
    let mut bits = device.alloc_zeros::<u32>(words + 1)?;
    let of_row = columns as i32;
    let count_of_words = words as u32;
    match quota {
        Quota::OfRow(count) => {
            let kernel = kernel::<T>("lowest_of_rows", &device)?;
            let (count, blocks) = (count as u32, blocks(elements / columns.max(1), OF_ROW));
            launch!(
                device,
                kernel,
                blocks,
                &weight,
                &norms,
                &of_row,
                &count,
                &mut bits,
                &count_of_words
            );
        }
        Quota::OfGroup { n, m } => {
            let kernel = kernel::<T>("lowest_of_groups", &device)?;
            let (n, m) = (n as i32, m as i32);
            let blocks = blocks(words.div_ceil(OF_ELEMENTS), OF_ELEMENTS);
            launch!(
                device,
                kernel,
                blocks,
                &weight,
                &norms,
                &of_row,
                &n,
                &m,
                &mut bits,
                &count_of_words
            );
        }
    }
    Ok(CudaStorage::wrap_cuda_slice(bits, device))
}

/// `zero_*`
pub(super) fn zero<T: LaunchValue>(
    (weight, weight_at): (&mut CudaStorage, Range<usize>),
    (bits, bits_at): Operand<'_>,
) -> CandleResult<()> {
    let device = bits.device.clone();
    let kernel = kernel::<T>("zero", &device)?;
    let blocks = blocks(weight_at.len().div_ceil(OF_ELEMENTS), OF_ELEMENTS);
    let elements = weight_at.len() as u32;
    let mut weight = weight.as_cuda_slice_mut::<T>()?.slice_mut(weight_at);
    let bits = bits.as_cuda_slice::<u32>()?.slice(bits_at);
    launch!(device, kernel, blocks, &mut weight, &bits, &elements);
    Ok(())
}
