//! Operators of attention: scores, rotation, and the order of heads and tokens.

use anyhow::Result;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, InplaceOp1, InplaceOp2, Layout, Shape, Tensor, WithDType,
};

#[cfg(feature = "cuda")]
use super::launch;
use super::{KernelValue, elements, last_two, of_type, round, widen};
use crate::linalg::attention::Scoring;
use crate::model::on_device::CandleResult;
use crate::model::on_device::operators::launched;

/// Turns products of queries and keys into weights of keys, in place: the softmax of the scores of the keys that a query sees.
///
/// # Arguments
/// * `scores`: `[.., queries, keys]`
/// * `first`: the position of the first query among the keys
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn soften(
    scores: &Tensor,
    first: usize,
    scoring: Scoring,
) -> Result<()> {
    launched(1);
    Ok(scores.inplace_op1(&SoftenScores { first, scoring })?)
}

struct SoftenScores {
    first: usize,
    scoring: Scoring,
}

impl SoftenScores {
    fn on_cpu<T: WithDType>(&self, scores: &mut [T], queries: usize, keys: usize) {
        let Scoring { scale, soft_cap, .. } = self.scoring;
        let score = |product: &T| match soft_cap {
            None => scale * widen(*product),
            Some(cap) => cap * (scale / cap * widen(*product)).tanh(),
        };
        for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
            let seen = self.scoring.visible(self.first + row % queries, &(0..keys));
            let scaled: Vec<f32> = scores[seen.clone()].iter().map(score).collect();
            let largest = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scaled.iter().map(|score| (score - largest).exp()).collect();
            let sum: f32 = weights.iter().sum();
            scores.fill(T::zero());
            for (score, weight) in scores[seen].iter_mut().zip(weights) {
                *score = round(weight / sum);
            }
        }
    }
}

impl InplaceOp1 for SoftenScores {
    fn name(&self) -> &'static str {
        "soften"
    }

    fn cpu_fwd(&self, scores: &mut CpuStorage, layout: &Layout) -> CandleResult<()> {
        let (queries, keys) = last_two(layout)?;
        let at = elements(layout)?;
        of_type!(scores.dtype(), {
            self.on_cpu(&mut T::of_storage(scores)?[at], queries, keys);
            Ok(())
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, scores: &mut CudaStorage, layout: &Layout) -> CandleResult<()> {
        let (queries, keys) = last_two(layout)?;
        let at = elements(layout)?;
        let sizes = [queries, keys, self.first];
        of_type!(scores.dtype(), launch::soften::<T>(scores, at, sizes, self.scoring))
    }
}

/// Rotates the first elements of the heads of some tokens by their positions, and puts heads before tokens: `[tokens, heads · head_dim]`
/// in, `[heads, tokens, head_dim]` out.
///
/// # Arguments
/// * `tables`: cos and sin, `[tokens, half of the rotated elements]`
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn rotate_heads(
    x: &Tensor,
    [cos, sin]: &[Tensor; 2],
    head_dim: usize,
) -> Result<Tensor> {
    launched(1);
    Ok(x.apply_op3_no_bwd(cos, sin, &RotateHeads { head_dim })?)
}

struct RotateHeads {
    head_dim: usize,
}

impl RotateHeads {
    /// Tokens, heads, half of the rotated elements of a head, and head_dim.
    fn sizes(&self, x: &Layout, cos: &Layout) -> CandleResult<[usize; 4]> {
        let (tokens, width) = last_two(x)?;
        let (_, half) = last_two(cos)?;
        Ok([tokens, width / self.head_dim.max(1), half, self.head_dim])
    }

    fn on_cpu<T: WithDType>(
        x: &[T],
        cos: &[T],
        sin: &[T],
        [tokens, heads, half, head_dim]: [usize; 4],
    ) -> Vec<T> {
        let mut out = vec![T::zero(); x.len()];
        for (row, x) in x.chunks_exact(head_dim).enumerate() {
            let (token, head) = (row / heads, row % heads);
            let to = (head * tokens + token) * head_dim;
            for column in 0..half {
                let [a, b] = [x[column], x[half + column]].map(widen);
                let [c, s] = [cos, sin].map(|table| widen(table[token * half + column]));
                out[to + column] = round(a * c - b * s);
                out[to + half + column] = round(b * c + a * s);
            }
            out[to + 2 * half..to + head_dim].copy_from_slice(&x[2 * half..]);
        }
        out
    }
}

impl CustomOp3 for RotateHeads {
    fn name(&self) -> &'static str {
        "rotate-heads"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        cos: &CpuStorage,
        cos_layout: &Layout,
        sin: &CpuStorage,
        sin_layout: &Layout,
    ) -> CandleResult<(CpuStorage, Shape)> {
        let sizes @ [tokens, heads, _, head_dim] = self.sizes(x_layout, cos_layout)?;
        let [x_at, cos_at, sin_at] =
            [elements(x_layout)?, elements(cos_layout)?, elements(sin_layout)?];
        of_type!(x.dtype(), {
            let [x, cos, sin] = [
                &x.as_slice::<T>()?[x_at],
                &cos.as_slice::<T>()?[cos_at],
                &sin.as_slice::<T>()?[sin_at],
            ];
            let out = T::to_cpu_storage_owned(Self::on_cpu(x, cos, sin, sizes));
            Ok((out, (heads, tokens, head_dim).into()))
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        cos: &CudaStorage,
        cos_layout: &Layout,
        sin: &CudaStorage,
        sin_layout: &Layout,
    ) -> CandleResult<(CudaStorage, Shape)> {
        let sizes @ [tokens, heads, _, head_dim] = self.sizes(x_layout, cos_layout)?;
        let operands =
            [(x, elements(x_layout)?), (cos, elements(cos_layout)?), (sin, elements(sin_layout)?)];
        let out = of_type!(x.dtype(), launch::rotate_heads::<T>(operands, sizes))?;
        Ok((out, (heads, tokens, head_dim).into()))
    }
}

/// Puts heads before tokens: `[tokens, heads · head_dim]` in, `[heads, tokens, head_dim]` out.
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn heads_first(x: &Tensor, head_dim: usize) -> Result<Tensor> {
    launched(1);
    Ok(x.apply_op1_no_bwd(&HeadsFirst { head_dim })?)
}

struct HeadsFirst {
    head_dim: usize,
}

impl HeadsFirst {
    /// Tokens, heads and head_dim.
    fn sizes(&self, layout: &Layout) -> CandleResult<[usize; 3]> {
        let (tokens, width) = last_two(layout)?;
        Ok([tokens, width / self.head_dim.max(1), self.head_dim])
    }
}

impl CustomOp1 for HeadsFirst {
    fn name(&self) -> &'static str {
        "heads_first"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> CandleResult<(CpuStorage, Shape)> {
        let [tokens, heads, head_dim] = self.sizes(layout)?;
        let at = elements(layout)?;
        let out = of_type!(x.dtype(), {
            let mut out = vec![round::<T>(0.0); at.len()];
            for (row, x) in x.as_slice::<T>()?[at].chunks_exact(head_dim).enumerate() {
                let to = (row % heads * tokens + row / heads) * head_dim;
                out[to..to + head_dim].copy_from_slice(x);
            }
            CandleResult::Ok(T::to_cpu_storage_owned(out))
        })?;
        Ok((out, (heads, tokens, head_dim).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> CandleResult<(CudaStorage, Shape)> {
        let sizes @ [tokens, heads, head_dim] = self.sizes(layout)?;
        let at = elements(layout)?;
        let out = of_type!(x.dtype(), launch::heads_first::<T>((x, at), sizes))?;
        Ok((out, (heads, tokens, head_dim).into()))
    }
}

/// Writes heads `[heads, tokens, head_dim]` into columns from `first` on of `out` `[tokens, width]`.
///
/// # Errors
/// Fails when the device fails.
pub(in crate::model::on_device) fn place(heads: &Tensor, out: &Tensor, first: usize) -> Result<()> {
    launched(1);
    Ok(out.inplace_op2(heads, &PlaceHeads { first })?)
}

struct PlaceHeads {
    first: usize,
}

impl InplaceOp2 for PlaceHeads {
    fn name(&self) -> &'static str {
        "place"
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        out_layout: &Layout,
        x: &CpuStorage,
        x_layout: &Layout,
    ) -> CandleResult<()> {
        let (_, width) = last_two(out_layout)?;
        let (_, tokens, head_dim) = x_layout.shape().dims3()?;
        let (out_at, x_at) = (elements(out_layout)?, elements(x_layout)?);
        of_type!(x.dtype(), {
            let out = &mut T::of_storage(out)?[out_at];
            for (row, x) in x.as_slice::<T>()?[x_at].chunks_exact(head_dim).enumerate() {
                let to = row % tokens * width + self.first + row / tokens * head_dim;
                out[to..to + head_dim].copy_from_slice(x);
            }
            Ok(())
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        out: &mut CudaStorage,
        out_layout: &Layout,
        x: &CudaStorage,
        x_layout: &Layout,
    ) -> CandleResult<()> {
        let (_, width) = last_two(out_layout)?;
        let (heads, tokens, head_dim) = x_layout.shape().dims3()?;
        let (out_at, x_at) = (elements(out_layout)?, elements(x_layout)?);
        let sizes = [heads, tokens, head_dim, width, self.first];
        of_type!(x.dtype(), launch::place::<T>((out, out_at), (x, x_at), sizes))
    }
}
