//! Operators of a decoder layer that candle lacks, or has as several kernels: `kernels.cu` on a GPU, plain loops on the CPU.
//!
//! ```text
//! soften        x_c ← exp(s_c − m) / Σ exp(s_c − m), m = max s_c, over the keys c that a query sees, with s_c = scale·x_c, or
//!               cap·tanh(scale·x_c / cap); 0 for other keys
//! rotate_heads  out[h, t] ← x[t, h] with (a, b) ← (a·cos − b·sin, b·cos + a·sin) for the halves a, b of a head's first elements
//! heads_first   out[h, t] ← x[t, h]
//! place         out[t, first + h·head_dim + d] ← x[h, t, d]
//! silu_times    x ← silu(x) · y
//! gelu_tanh_times
//!               x ← x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))) · y
//! add           x ← x + y
//! column_sums   Σ_t x_tj² and Σ_t x_tj, in f64
//! lowest        bits of the lowest |w_ij|·norm_j of every row or group, on ties the lower columns; the host's bits
//! zero          w ← 0 where a bit is set
//! ```
//!
//! Operands are f32, f16 or bf16, row-major and without gaps. Values are widened to f32, and a result is rounded once.
//!
//! | file | contents |
//! | --- | --- |
//! | `heads` | attention: soften, rotate_heads, heads_first, place |
//! | `elements` | silu_times, gelu_tanh_times, add, column_sums |
//! | `choice` | lowest, zero |
//! | `launch` | launches on a GPU; only with the feature `cuda` |

mod choice;
mod elements;
mod heads;
#[cfg(feature = "cuda")]
mod launch;

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, WithDType, bail};

use super::CandleResult;

pub(super) use choice::{can_choose, lowest, zero};
pub(super) use elements::{add, column_sums, gelu_tanh_times, silu_times};
pub(super) use heads::{heads_first, place, rotate_heads, soften};

/// An element type with kernels.
trait KernelValue: WithDType {
    /// The elements of a storage that the operator changes.
    fn of_storage(storage: &mut CpuStorage) -> CandleResult<&mut [Self]>;
}

macro_rules! value {
    ($type:ty, $dtype:ident) => {
        impl KernelValue for $type {
            fn of_storage(storage: &mut CpuStorage) -> CandleResult<&mut [Self]> {
                match storage {
                    CpuStorage::$dtype(values) => Ok(values),
                    other => bail!("operands of {:?} and {:?}", Self::DTYPE, other.dtype()),
                }
            }
        }
    };
}

value!(f32, F32);
value!(half::f16, F16);
value!(half::bf16, BF16);

/// Calls a generic function for the element type of an operand.
macro_rules! of_type {
    ($dtype:expr, $($call:tt)+) => {
        match $dtype {
            candle_core::DType::F32 => { type T = f32; $($call)+ }
            candle_core::DType::F16 => { type T = half::f16; $($call)+ }
            candle_core::DType::BF16 => { type T = half::bf16; $($call)+ }
            other => candle_core::bail!("a layer on a device has no values of {other:?}"),
        }
    };
}

/// The elements of an operand in its storage, which indices of 32 bits must reach.
fn elements(layout: &Layout) -> CandleResult<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) if end - start <= i32::MAX as usize => Ok(start..end),
        Some(_) => {
            bail!("an operand of {:?} has more elements than a kernel can index", layout.dims())
        }
        None => bail!("an operand of {:?} has gaps", layout.dims()),
    }
}

fn widen<T: WithDType>(value: T) -> f32 {
    value.to_f64() as f32
}

fn round<T: WithDType>(value: f32) -> T {
    T::from_f64(f64::from(value))
}

/// The last two sizes of an operand.
fn last_two(layout: &Layout) -> CandleResult<(usize, usize)> {
    match layout.dims() {
        [.., rows, columns] => Ok((*rows, *columns)),
        dims => bail!("an operand of {dims:?} has no rows"),
    }
}

use of_type;
