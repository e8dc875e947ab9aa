//! The choice of the lowest scores of a matrix, and zeros for them.

use anyhow::Result;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, InplaceOp2, Layout, Shape, Tensor};

#[cfg(feature = "cuda")]
use super::launch;
use super::{KernelValue, elements, of_type, round, widen};
use crate::linalg::select::Quota;
use crate::model::on_device::CandleResult;
use crate::model::on_device::operators::launched;

/// Columns of a word of a mask.
const WORD: usize = 32;

/// The most columns of a row whose lowest scores a GPU finds.
const MOST_COLUMNS: usize = 1 << 16;

/// Returns whether [`lowest`] can choose from rows of this many columns.
pub(in crate::model::on_device) fn can_choose(columns: usize, quota: Quota) -> bool {
    let has_words = columns.is_multiple_of(WORD) && columns <= MOST_COLUMNS;
    has_words
        && match quota {
            Quota::OfRow(count) => (1..=columns).contains(&count),
            Quota::OfGroup { m, .. } => m <= WORD && WORD.is_multiple_of(m),
        }
}

/// Bits of the lowest scores |w_ij| · norm_j, 1 = lowest, in words of 32 columns, the lowest bit first. A last word is not 0 where a
/// score is not finite; then the bits mean nothing.
///
/// # Arguments
/// * `weight`: `[rows, columns]`, with columns that [`can_choose`] accepts
/// * `norms`: `[columns]` in f32
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn lowest(
    weight: &Tensor,
    norms: &Tensor,
    quota: Quota,
) -> Result<Tensor> {
    launched(1);
    Ok(weight.apply_op2_no_bwd(norms, &ChooseLowest { quota })?)
}

struct ChooseLowest {
    quota: Quota,
}

impl ChooseLowest {
    fn on_cpu<T: KernelValue>(&self, weight: &[T], norms: &[f32]) -> Vec<u32> {
        let columns = norms.len();
        let (group, count) = match self.quota {
            Quota::OfRow(count) => (columns, count),
            Quota::OfGroup { n, m } => (m, n),
        };
        let mut words = vec![0; weight.len() / WORD + 1];
        for (at, weight) in weight.chunks_exact(group).enumerate() {
            let first = at * group;
            let norms = &norms[first % columns..];
            let scores = weight.iter().zip(norms).map(|(&w, norm)| widen(w).abs() * norm);
            let scores: Vec<f32> = scores.collect();
            if scores.iter().any(|score| !score.is_finite()) {
                words[weight.len() / WORD] = 1;
            }
            let mut order: Vec<usize> = (0..group).collect();
            // A stable sort: of equal scores the lower columns.
            order.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
            for column in &order[..count] {
                words[(first + column) / WORD] |= 1 << ((first + column) % WORD);
            }
        }
        words
    }
}

impl CustomOp2 for ChooseLowest {
    fn name(&self) -> &'static str {
        "lowest"
    }

    fn cpu_fwd(
        &self,
        weight: &CpuStorage,
        weight_layout: &Layout,
        norms: &CpuStorage,
        norms_layout: &Layout,
    ) -> CandleResult<(CpuStorage, Shape)> {
        let (weight_at, norms_at) = (elements(weight_layout)?, elements(norms_layout)?);
        let norms = &norms.as_slice::<f32>()?[norms_at];
        let words = of_type!(weight.dtype(), {
            CandleResult::Ok(self.on_cpu(&weight.as_slice::<T>()?[weight_at], norms))
        })?;
        let shape = words.len().into();
        Ok((CpuStorage::U32(words), shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weight: &CudaStorage,
        weight_layout: &Layout,
        norms: &CudaStorage,
        norms_layout: &Layout,
    ) -> CandleResult<(CudaStorage, Shape)> {
        let (weight_at, norms_at) = (elements(weight_layout)?, elements(norms_layout)?);
        let words = weight_at.len() / WORD;
        let (weight, norms) = ((weight, weight_at), (norms, norms_at));
        let bits = of_type!(weight.0.dtype(), launch::lowest::<T>(weight, norms, self.quota))?;
        Ok((bits, (words + 1).into()))
    }
}

/// w ← +0 where a bit of [`lowest`] is set.
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn zero(weight: &Tensor, bits: &Tensor) -> Result<()> {
    launched(1);
    Ok(weight.inplace_op2(bits, &ZeroChosen)?)
}

struct ZeroChosen;

impl InplaceOp2 for ZeroChosen {
    fn name(&self) -> &'static str {
        "zero"
    }

    fn cpu_fwd(
        &self,
        weight: &mut CpuStorage,
        weight_layout: &Layout,
        bits: &CpuStorage,
        bits_layout: &Layout,
    ) -> CandleResult<()> {
        let bits = &bits.as_slice::<u32>()?[elements(bits_layout)?];
        let at = elements(weight_layout)?;
        of_type!(weight.dtype(), {
            for (at, value) in T::of_storage(weight)?[at].iter_mut().enumerate() {
                if bits[at / WORD] >> (at % WORD) & 1 == 1 {
                    *value = round(0.0);
                }
            }
            Ok(())
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        weight: &mut CudaStorage,
        weight_layout: &Layout,
        bits: &CudaStorage,
        bits_layout: &Layout,
    ) -> CandleResult<()> {
        let (weight_at, bits_at) = (elements(weight_layout)?, elements(bits_layout)?);
        of_type!(weight.dtype(), launch::zero::<T>((weight, weight_at), (bits, bits_at)))
    }
}
