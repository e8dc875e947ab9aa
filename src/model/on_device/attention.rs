//! The attention block of a layer on a device. The formulas are in `model/layer/attention.rs`.
//!
//! Attention takes some key/value heads with their queries at a time, and some of these queries. Scores `[heads, queries, keys]` exist for
//! a single block, with the keys from the first that its first query sees up to its last query; so a window costs O(seqlen·window).
//!
//! ```text
//! S = a·q·kᵀ, with a bound b S ← b·tanh(S / b);  P = softmax(S + mask);  c = P·v
//! ```

use std::ops::Range;

use anyhow::Result;
use candle_core::Tensor;

use super::observing::Observing;
use super::tables::DeviceTables;
use super::{DeviceLayer, Tiling, kernels, operators};
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
        let context = operators::zeros((seqlen, width), normed)?;
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

    pub(super) fn queries_per_key(&self) -> usize {
        self.spec.heads.num_heads / self.spec.heads.num_key_value_heads.max(1)
    }

    /// The output of a role for some key/value heads, `[seqlen, heads · head_dim]`.
    pub(super) fn project(
        &self,
        role: LinearRole,
        normed: &Tensor,
        group: &Range<usize>,
    ) -> Result<Tensor> {
        let heads = if role == LinearRole::Q { self.queries_per_key() } else { 1 };
        let width = heads * self.spec.heads.head_dim;
        let (id, rows) = self.spec.part(role);
        let first = rows.start + group.start * width;
        self.linear(id)?.forward_rows(normed, first, group.len() * width)
    }

    /// Rotated q `[heads, seqlen, head_dim]`, rotated k and v `[keys, seqlen, head_dim]` of some key/value heads.
    pub(super) fn group(
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
                _ => operators::contiguous(&q.narrow(2, first, rows)?)?.reshape(joined)?,
            };
            let scores = operators::matmul(&q, &k.narrow(1, start, seen)?.transpose(1, 2)?)?;
            drop(q);
            let weights = {
                let scores = scores.reshape((keys * per_key, rows, seen))?;
                kernels::soften(&scores, first - start, self.spec.scoring)?;
                scores.reshape((keys, per_key * rows, seen))?
            };
            let attended = operators::matmul(&weights, &v.narrow(1, start, seen)?)?;
            drop(weights);
            body(first, attended.reshape((keys * per_key, rows, head_dim))?)?;
            first += rows;
        }
        Ok(())
    }
}
