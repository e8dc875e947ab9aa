//! Operators element by element, and sums over columns.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use anyhow::Result;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, InplaceOp2, Layout, Shape, Tensor};

#[cfg(feature = "cuda")]
use super::launch;
use super::{KernelValue, elements, last_two, of_type, round, widen};
use crate::model::on_device::CandleResult;
use crate::model::on_device::operators::launched;

/// x ← silu(x) · y
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn silu_times(x: &Tensor, y: &Tensor) -> Result<()> {
    launched(1);
    Ok(x.inplace_op2(y, &Elementwise::SiluTimes)?)
}

/// x ← gelu(x) · y with gelu(x) = x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn gelu_tanh_times(x: &Tensor, y: &Tensor) -> Result<()> {
    launched(1);
    Ok(x.inplace_op2(y, &Elementwise::GeluTanhTimes)?)
}

/// x ← x + y
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn add(x: &Tensor, y: &Tensor) -> Result<()> {
    launched(1);
    Ok(x.inplace_op2(y, &Elementwise::Add)?)
}

enum Elementwise {
    SiluTimes,
    GeluTanhTimes,
    Add,
}

impl InplaceOp2 for Elementwise {
    fn name(&self) -> &'static str {
        match self {
            Self::SiluTimes => "silu_times",
            Self::GeluTanhTimes => "gelu_tanh_times",
            Self::Add => "add",
        }
    }

    fn cpu_fwd(
        &self,
        x: &mut CpuStorage,
        x_layout: &Layout,
        y: &CpuStorage,
        y_layout: &Layout,
    ) -> CandleResult<()> {
        let (x_at, y_at) = (elements(x_layout)?, elements(y_layout)?);
        of_type!(y.dtype(), {
            let x = &mut T::of_storage(x)?[x_at];
            for (x, y) in x.iter_mut().zip(&y.as_slice::<T>()?[y_at]) {
                let [a, b] = [*x, *y].map(widen);
                *x = round(match self {
                    Self::SiluTimes => a / (1.0 + (-a).exp()) * b,
                    Self::GeluTanhTimes => {
                        let inner = FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (a + 0.044_715 * a * a * a);
                        0.5 * a * (1.0 + inner.tanh()) * b
                    }
                    Self::Add => a + b,
                });
            }
            Ok(())
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &mut CudaStorage,
        x_layout: &Layout,
        y: &CudaStorage,
        y_layout: &Layout,
    ) -> CandleResult<()> {
        let (x_at, y_at) = (elements(x_layout)?, elements(y_layout)?);
        of_type!(y.dtype(), launch::elementwise::<T>(self.name(), (x, x_at), (y, y_at)))
    }
}

/// Σ_t x_tj² and Σ_t x_tj of `x` `[tokens, columns]`: `[2, columns]` in f64.
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn column_sums(x: &Tensor) -> Result<Tensor> {
    launched(1);
    Ok(x.apply_op1_no_bwd(&SumColumns)?)
}

struct SumColumns;

impl CustomOp1 for SumColumns {
    fn name(&self) -> &'static str {
        "column_sums"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> CandleResult<(CpuStorage, Shape)> {
        let (_, columns) = last_two(layout)?;
        let at = elements(layout)?;
        let mut sums = vec![0.0f64; 2 * columns];
        of_type!(x.dtype(), {
            for row in x.as_slice::<T>()?[at].chunks_exact(columns) {
                for (column, value) in row.iter().enumerate() {
                    let value = f64::from(widen(*value));
                    sums[column] += value * value;
                    sums[columns + column] += value;
                }
            }
            CandleResult::Ok(())
        })?;
        Ok((CpuStorage::F64(sums), (2, columns).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> CandleResult<(CudaStorage, Shape)> {
        let (rows, columns) = last_two(layout)?;
        let at = elements(layout)?;
        let sums = of_type!(x.dtype(), launch::column_sums::<T>((x, at), rows, columns))?;
        Ok((sums, (2, columns).into()))
    }
}
