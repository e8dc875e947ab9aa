//! The attention block of a layer on a device, forwards and backwards. The formulas are in `model/layer/attention.rs`.
//!
//! Attention takes some key/value heads with their queries at a time, and some of these queries. Scores `[heads, queries, keys]` exist for
//! a single block, with the keys from the first that its first query sees up to its last query; so a window costs O(seqlen·window).
//!
//! ```text
//! forward   S = a·q·kᵀ, with a bound b S ← b·tanh(S / b);  P = softmax(S + mask);  c = P·v
//! backward  dv = Pᵀ·dc,  dP = dc·vᵀ,  dS = P ∘ (dP − Σ dP ∘ P),  with a bound dS ← dS ∘ (1 − (S / b)²),  dq = a·dS·k,  dk = a·dSᵀ·q
//! ```
//!
//! Backwards, weights of attention and sums over blocks are f32.

use std::ops::Range;

use anyhow::Result;
use candle_core::{D, DType, Tensor};
use candle_nn::ops;

use super::observing::Observing;
use super::tables::DeviceTables;
use super::training::DeviceBackward;
use super::{DeviceLayer, Tiling, bounded, bounded_backward, kernels};
use crate::model::{InputId, LinearRole, NormRole};

impl DeviceLayer {
    /// Returns hidden + norm(attention(norm(hidden))·Woᵀ) in a tensor of its own.
    pub(super) fn attend(
        &self,
        hidden: &Tensor,
        tables: &DeviceTables,
        cut: &Tiling,
        mut observing: Option<&mut Observing<'_>>,
    ) -> Result<Tensor> {
        let normed = self.normed(NormRole::BeforeAttention, hidden.clone())?;
        if let Some(observing) = &mut observing {
            observing.add(InputId::Attention, 0, &normed, cut)?;
        }
        let context = self.context(&normed, tables, cut)?;
        drop(normed);
        if let Some(observing) = &mut observing {
            observing.add(InputId::O, 0, &context, cut)?;
        }
        let branch = self.product(LinearRole::O, &context)?;
        drop(context);
        let out = self.normed(NormRole::AfterAttention, branch)?;
        kernels::add(&out, hidden)?;
        Ok(out)
    }

    /// Attention's output before o, `[seqlen, heads · head_dim]`, from the normed input.
    pub(super) fn context(
        &self,
        normed: &Tensor,
        tables: &DeviceTables,
        cut: &Tiling,
    ) -> Result<Tensor> {
        let (seqlen, head_dim) = (normed.dim(0)?, self.spec.heads.head_dim);
        let (per_key, width) = (self.queries_per_key(), self.spec.rows(LinearRole::Q));
        let context = Tensor::zeros((seqlen, width), self.dtype, &self.device)?;
        for group in cut.groups(&self.spec) {
            let [q, k, v] = self.group(normed, &group, tables)?;
            let q = q.reshape((group.len(), per_key, seqlen, head_dim))?;
            self.attend_blocks([&q, &k, &v], cut.queries, |position, attended| {
                // The heads of this group are neighbouring columns.
                let columns = group.start * per_key * head_dim;
                let rows = context.narrow(0, position, attended.dim(1)?)?;
                kernels::place(&attended, &rows, columns)
            })?;
        }
        Ok(context)
    }

    fn queries_per_key(&self) -> usize {
        self.spec.heads.num_heads / self.spec.heads.num_key_value_heads.max(1)
    }

    /// The output of a role for some key/value heads, `[seqlen, heads · head_dim]`.
    fn project(&self, role: LinearRole, normed: &Tensor, group: &Range<usize>) -> Result<Tensor> {
        let heads = if role == LinearRole::Q { self.queries_per_key() } else { 1 };
        let width = heads * self.spec.heads.head_dim;
        let (id, rows) = self.spec.part(role);
        let first = rows.start + group.start * width;
        self.linear(id)?.forward_rows(normed, first, group.len() * width)
    }

    /// Rotated q `[heads, seqlen, head_dim]`, rotated k and v `[keys, seqlen, head_dim]` of some key/value heads.
    fn group(
        &self,
        normed: &Tensor,
        group: &Range<usize>,
        tables: &DeviceTables,
    ) -> Result<[Tensor; 3]> {
        let v = self.project(LinearRole::V, normed, group)?;
        let rotated = |role: LinearRole, norm: NormRole| {
            let x = self.normed(norm, self.project(role, normed, group)?)?;
            tables.rotate(&x, &self.spec)
        };
        Ok([
            rotated(LinearRole::Q, NormRole::Query)?,
            rotated(LinearRole::K, NormRole::Key)?,
            kernels::heads_first(&v, self.spec.heads.head_dim)?,
        ])
    }

    /// Calls `body(first query, context [heads, queries, head_dim])` block by block, with q `[keys, queries per key, seqlen, head_dim]`
    /// and k, v `[keys, seqlen, head_dim]`.
    fn attend_blocks(
        &self,
        [q, k, v]: [&Tensor; 3],
        queries: usize,
        mut body: impl FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let (keys, per_key, seqlen, head_dim) = q.dims4()?;
        let mut first = 0;
        while first < seqlen {
            let rows = queries.clamp(1, seqlen - first);
            let start = self.spec.scoring.first_key(first);
            let seen = first + rows - start;
            let joined = (keys, per_key * rows, head_dim);
            // Views of heads are operands of a product as they are. Only queries that share keys are moved together.
            let q = match per_key {
                1 => q.squeeze(1)?.narrow(1, first, rows)?,
                _ => q.narrow(2, first, rows)?.contiguous()?.reshape(joined)?,
            };
            let scores = q.matmul(&k.narrow(1, start, seen)?.transpose(1, 2)?)?;
            drop(q);
            let weights = {
                let scores = scores.reshape((keys * per_key, rows, seen))?;
                kernels::soften(&scores, first - start, self.spec.scoring)?;
                scores.reshape((keys, per_key * rows, seen))?
            };
            let attended = weights.matmul(&v.narrow(1, start, seen)?)?;
            drop(weights);
            body(first, attended.reshape((keys * per_key, rows, head_dim))?)?;
            first += rows;
        }
        Ok(())
    }

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
                let dweights = gradient.matmul(&v.transpose(1, 2)?)?;
                softmax_backward(weights, dweights.to_dtype(DType::F32)?)?
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
