//! The vector-Jacobian product of attention on a device.
//!
//! ```text
//! dv = Pᵀ·dc,  dP = dc·vᵀ,  dS = P ∘ (dP − Σ dP ∘ P),  with a bound dS ← dS ∘ (1 − (S / b)²),  dq = a·dS·k,  dk = a·dSᵀ·q
//! ```
//!
//! `attention.rs` has the symbols. Weights of attention and sums over blocks are f32.

use anyhow::Result;
use candle_core::{D, DType, Tensor};
use candle_nn::ops;
use candle_nn::rotary_emb::rope;

use super::DeviceLayer;
use super::operators::bounded;
use super::tables::DeviceTables;
use super::training::{DeviceBackward, bounded_backward};
use crate::model::{LayerSpec, LinearRole, NormRole};

impl DeviceTables {
    /// Rotates heads `[heads, seqlen, head_dim]` back: by the negative angle, which is also the gradient of a rotation.
    pub(super) fn rotate_back(&self, x: Tensor, spec: &LayerSpec) -> Result<Tensor> {
        let Some(of_layer) = spec.rope else {
            return Ok(x);
        };
        let (_, seqlen, head_dim) = x.dims3()?;
        let [cos, sin] = self.rows(of_layer, seqlen)?;
        let (sin, dims) = (sin.neg()?, 2 * cos.dim(1)?);
        let turned = x.narrow(2, 0, dims)?.contiguous()?.unsqueeze(0)?;
        let turned = rope(&turned, &cos, &sin)?.squeeze(0)?;
        if dims == head_dim {
            return Ok(turned);
        }
        Ok(Tensor::cat(&[turned, x.narrow(2, dims, head_dim - dims)?], 2)?)
    }
}

impl DeviceLayer {
    /// The gradients with respect to the outputs of q, k and v, `[seqlen, heads · head_dim]` each, from the gradient of attention's
    /// output.
    pub(super) fn attention_backward(
        &self,
        normed: &Tensor,
        dcontext: &Tensor,
        pass: &mut DeviceBackward<'_>,
    ) -> Result<Vec<(LinearRole, Tensor)>> {
        let (seqlen, head_dim) = (normed.dim(0)?, self.spec.heads.head_dim);
        let (tables, per_key) = (pass.tables, self.queries_per_key());
        let of_roles = [LinearRole::Q, LinearRole::K, LinearRole::V].map(|role| {
            let shape = (seqlen, self.spec.rows(role));
            Ok((role, Tensor::zeros(shape, self.dtype, &self.device)?))
        });
        let of_roles = of_roles.into_iter().collect::<Result<Vec<_>>>()?;
        let norms = [Some(NormRole::Query), Some(NormRole::Key), None];
        for group in pass.cut.groups(&self.spec) {
            let dcontext = {
                let [first, width] = [group.start, group.len()].map(|at| at * per_key * head_dim);
                dcontext.narrow(1, first, width)?
            };
            let gradients = {
                let [q, k, v] = self.group(normed, &group, tables)?;
                self.group_backward([&q, &k, &v], &dcontext, pass.cut.queries)?
            };
            for (((role, out), norm), gradient) in of_roles.iter().zip(norms).zip(gradients) {
                let gradient = match norm {
                    None => flat(gradient)?,
                    Some(norm) => {
                        let gradient = flat(tables.rotate_back(gradient, &self.spec)?)?;
                        let before = || self.project(*role, normed, &group);
                        self.norm_backward(norm, before, &gradient, pass)?
                    }
                };
                let first = group.start * gradient.dim(1)? / group.len();
                out.slice_set(&gradient, 1, first)?;
            }
        }
        Ok(of_roles)
    }

    /// 0 where a query sees a key and −∞ where it does not, `[rows, keys]` in f32. The first query is at position `first` of the keys.
    fn mask(&self, first: usize, (rows, keys): (usize, usize)) -> Result<Tensor> {
        let mut mask = vec![f32::NEG_INFINITY; rows * keys];
        for (row, mask) in mask.chunks_exact_mut(keys).enumerate() {
            mask[self.spec.scoring.visible(first + row, &(0..keys))].fill(0.0);
        }
        Ok(Tensor::from_vec(mask, (rows, keys), &self.device)?)
    }

    /// The softmax of the scores of some queries in f32, `[keys, queries, keys that they see]`, and the scores if they are bounded. The
    /// first query is at position `first` of k. Each step frees its input.
    fn attention_weights(
        &self,
        q: &Tensor,
        k: &Tensor,
        (per_key, first): (usize, usize),
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (keys, queries, _) = q.dims3()?;
        let (rows, seen) = (queries / per_key, k.dim(1)?);
        let scoring = self.spec.scoring;
        let scores = {
            let scores = q.matmul(&k.transpose(1, 2)?)?;
            (scores.to_dtype(DType::F32)? * f64::from(scoring.scale))?
        };
        let scores = match scoring.soft_cap {
            None => scores,
            Some(cap) => bounded(scores, cap)?,
        };
        let kept = scoring.soft_cap.map(|_| scores.clone());
        let masked = {
            let scores = scores.reshape((keys, per_key, rows, seen))?;
            scores.broadcast_add(&self.mask(first, (rows, seen))?)?
        };
        Ok((ops::softmax_last_dim(&masked)?.reshape((keys, queries, seen))?, kept))
    }

    /// The gradients with respect to rotated q `[heads, seqlen, head_dim]`, rotated k and v `[keys, seqlen, head_dim]` of some heads,
    /// from the gradient of their output `[seqlen, heads · head_dim]`. Some queries pass at once.
    fn group_backward(
        &self,
        [q, k, v]: [&Tensor; 3],
        dcontext: &Tensor,
        queries: usize,
    ) -> Result<[Tensor; 3]> {
        let (keys, seqlen, head_dim) = k.dims3()?;
        let per_key = q.dim(0)? / keys.max(1);
        let q = q.reshape((keys, per_key, seqlen, head_dim))?;
        let dq = Tensor::zeros(q.shape(), self.dtype, &self.device)?;
        let sums = [k, v].map(|of| Tensor::zeros(of.shape(), DType::F32, &self.device));
        let [dk, dv] = sums;
        let (dk, dv) = (dk?, dv?);
        let mut first = 0;
        while first < seqlen {
            let rows = queries.clamp(1, seqlen - first);
            let start = self.spec.scoring.first_key(first);
            let seen = first + rows - start;
            let joined = (keys, per_key * rows, head_dim);
            let of_block = q.narrow(2, first, rows)?.contiguous()?.reshape(joined)?;
            let [k, v] = [k, v].map(|of| of.narrow(1, start, seen)?.contiguous());
            let (k, v) = (k?, v?);
            let gradient = dcontext
                .narrow(0, first, rows)?
                .contiguous()?
                .reshape((rows, keys, per_key, head_dim))?
                .permute((1, 2, 0, 3))?
                .contiguous()?
                .reshape(joined)?;
            let (weights, kept) =
                self.attention_weights(&of_block, &k, (per_key, first - start))?;
            let rounded = weights.to_dtype(self.dtype)?;
            let of_values = rounded.transpose(1, 2)?.matmul(&gradient)?;
            drop(rounded);
            let scores = {
                let dweights = widened(gradient.matmul(&v.transpose(1, 2)?)?)?;
                softmax_backward(weights, dweights)?
            };
            let scores = match kept.zip(self.spec.scoring.soft_cap) {
                None => scores,
                Some((kept, cap)) => bounded_backward(kept, scores, cap)?,
            };
            let scores = (scores * f64::from(self.spec.scoring.scale))?.to_dtype(self.dtype)?;
            let of_queries = scores.matmul(&k)?.reshape((keys, per_key, rows, head_dim))?;
            dq.slice_set(&of_queries.contiguous()?, 2, first)?;
            let of_keys = scores.transpose(1, 2)?.matmul(&of_block)?;
            drop(scores);
            for (sum, term) in [(&dk, of_keys), (&dv, of_values)] {
                let added = (sum.narrow(1, start, seen)? + term.to_dtype(DType::F32)?)?;
                sum.slice_set(&added.contiguous()?, 1, start)?;
            }
            first += rows;
        }
        Ok([
            dq.reshape((keys * per_key, seqlen, head_dim))?,
            dk.to_dtype(self.dtype)?,
            dv.to_dtype(self.dtype)?,
        ])
    }
}

/// The same values in f32. The memory of other values is free then.
fn widened(x: Tensor) -> Result<Tensor> {
    Ok(x.to_dtype(DType::F32)?)
}

/// The gradient with respect to scores, P ∘ (dP − Σ dP ∘ P), from the gradient dP of their softmax P. Sums go over the last dimension.
fn softmax_backward(weights: Tensor, gradient: Tensor) -> Result<Tensor> {
    let sums = (&gradient * &weights)?.sum_keepdim(D::Minus1)?;
    let centred = {
        let gradient = gradient;
        gradient.broadcast_sub(&sums)?
    };
    Ok((centred * weights)?)
}

/// `[heads, seqlen, head_dim]` as `[seqlen, heads · head_dim]`.
fn flat(x: Tensor) -> Result<Tensor> {
    let (heads, seqlen, head_dim) = x.dims3()?;
    Ok(x.transpose(0, 1)?.contiguous()?.reshape((seqlen, heads * head_dim))?)
}
