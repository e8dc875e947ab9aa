//! The attention block of a decoder layer, forwards and backwards.
//!
//! ```text
//! a = norm(x);  q, k, v = a·Wqᵀ, a·Wkᵀ, a·Wvᵀ;  q, k = rotate(norm(q)), rotate(norm(k))
//! c = attention(q, k, v);  b = c·Woᵀ;  h = x + norm(b)
//!
//! db = norm'(b, dh);  dc = db·Wo;  dq, dk, dv = attention'(dc);  dq, dk = norm'(q, rotate'(dq)), norm'(k, rotate'(dk))
//! dx = dh + norm'(x, dq·Wq + dk·Wk + dv·Wv)
//! ```
//!
//! A family has some of the four norms; the identity stands for the others. The gradient of a rotation is the rotation by the negative
//! angle. Backwards, attention takes all heads at once, whatever the memory settings say of heads.

use std::ops::Range;

use anyhow::Result;

use super::DecoderLayer;
use super::layout::AttentionLayout;
use super::stages::{BackwardPass, ForwardPass};
use crate::linalg::attention::backward::{AttentionGradients, AttentionInputs, causal_backward};
use crate::linalg::attention::{Causal, Columns, Heads};
use crate::linalg::elementwise;
use crate::linalg::linear::{LinearOutput, forward_all};
use crate::linalg::product::Values;
use crate::linalg::profile::Part;
use crate::model::linears::{InputId, LinearRole};
use crate::model::norms::NormRole;

/// The activations of attention: memory that a pass writes, and that the backward pass reads.
///
/// With a single group of heads and nothing kept, the context takes the place of `normed`, and `context` is empty.
pub(super) struct AttentionTape<'a> {
    /// norm(x), `[seqlen, hidden_size]`.
    pub(super) normed: &'a mut [f32],
    /// Rotated queries `[seqlen, heads · head_dim]`.
    pub(super) q: &'a mut [f32],
    /// Rotated keys `[seqlen, key/value heads · head_dim]`.
    pub(super) k: &'a mut [f32],
    /// Values, in the shape of the keys.
    pub(super) v: &'a mut [f32],
    /// Attention's output, in the shape of the queries.
    pub(super) context: &'a mut [f32],
    /// Queries before their norm; empty where nothing is kept, or the family has no such norm.
    pub(super) raw_q: &'a mut [f32],
    /// Keys before their norm, as `raw_q`.
    pub(super) raw_k: &'a mut [f32],
    /// The output of o before its norm, as `raw_q`.
    pub(super) branch: &'a mut [f32],
}

/// The gradients of attention, and memory for them.
pub(super) struct AttentionBuffers<'a> {
    /// dh, which becomes dx.
    pub(super) states: &'a mut [f32],
    /// The gradient of norm(x).
    pub(super) normed: &'a mut [f32],
    /// The gradient of the output of o, where a norm follows.
    pub(super) branch: &'a mut [f32],
    /// The gradient of the context.
    pub(super) context: &'a mut [f32],
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    /// Gradients of keys and values of each query head.
    pub(super) partial: &'a mut [f32],
    /// The gradients of q, k and v side by side, where a matrix has the rows of all.
    pub(super) joined: &'a mut [f32],
}

impl DecoderLayer {
    /// out ← h. With an observer it sees the inputs of q, k and v, and of o.
    pub(super) fn attend(
        &self,
        x: &[f32],
        tape: &mut AttentionTape<'_>,
        layout: &AttentionLayout,
        pass: &mut ForwardPass<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let AttentionTape { normed, q, k, v, context: apart, raw_q, raw_k, branch } = tape;
        let seqlen = x.len() / self.spec.hidden_size;
        let past = pass.cache.as_ref().map_or(0, |cache| cache.tokens());
        pass.products.watch.enter(Part::Qkv);
        self.norm(NormRole::BeforeAttention, x, normed);
        pass.show(InputId::Attention, self.normed(NormRole::BeforeAttention, x, normed));
        for group in layout.groups() {
            pass.products.watch.enter(Part::Qkv);
            let heads = layout.heads(&group);
            let [queries, keys, values] = [LinearRole::Q, LinearRole::K, LinearRole::V]
                .map(|role| layout.columns(role, &group));
            let q = &mut q[..seqlen * queries.len()];
            let k = &mut k[..seqlen * keys.len()];
            let v = &mut v[..seqlen * values.len()];
            let mut outputs = [
                self.output(LinearRole::Q, queries.clone(), q),
                self.output(LinearRole::K, keys, k),
                self.output(LinearRole::V, values, v),
            ];
            let input = self.normed(NormRole::BeforeAttention, x, normed);
            forward_all(&mut outputs, input, pass.single, pass.products)?;
            pass.products.watch.enter(Part::Attention);
            self.norm_in_place(NormRole::Query, q, raw_q);
            self.norm_in_place(NormRole::Key, k, raw_k);
            let scoring = self.spec.scoring;
            if !pass.segments.is_empty() {
                let columns = Columns { width: layout.query_width(), first: queries.start };
                let out = (&mut *layout.context(normed, apart), columns);
                self.attend_segments(heads, [q, k, v], pass, out)?;
                continue;
            }
            if let Some(rotary) = pass.rotary {
                rotary.apply(q, past, heads.num_heads, heads.head_dim)?;
                rotary.apply(k, past, heads.num_key_value_heads, heads.head_dim)?;
            }
            pass.products.watch.count(heads.operations(scoring, past, seqlen));
            let kernel = pass.products.products.of_activations();
            let attended = layout.context(normed, apart);
            if let Some(cache) = pass.cache.as_deref_mut() {
                let past = cache.append(k, v)?;
                let (k, v) = (cache.keys(), cache.values());
                Causal { kernel, heads, scoring, past, q, k, v }.context(attended);
            } else {
                let (k, v) = (Values::F32(k), Values::F32(v));
                let columns = Columns { width: layout.query_width(), first: queries.start };
                Causal { kernel, heads, scoring, past: 0, q, k, v }
                    .context_columns(attended, columns);
            }
        }
        pass.products.watch.enter(Part::O);
        let attended = layout.context(normed, apart);
        pass.show(InputId::O, attended);
        let (o, _) = self.part(LinearRole::O);
        self.linear(o).forward(attended, out, pass.single, pass.products)?;
        self.norm_in_place(NormRole::AfterAttention, out, branch);
        elementwise::add(out, x);
        pass.products.watch.enter(Part::Elsewhere);
        Ok(())
    }

    /// Attention of each sequence of a sample by itself, with positions of its own. A sequence that continues earlier rows sees their keys
    /// and values before its own.
    ///
    /// # Arguments
    /// * `q`, `k`, `v`: of some heads, for all rows
    /// * `out`: the context of all heads, and the columns of these heads in it
    fn attend_segments(
        &self,
        heads: Heads,
        [q, k, v]: [&mut [f32]; 3],
        pass: &mut ForwardPass<'_>,
        (out, columns): (&mut [f32], Columns),
    ) -> Result<()> {
        let Heads { num_heads, num_key_value_heads, head_dim } = heads;
        let (query_width, key_width) = (num_heads * head_dim, num_key_value_heads * head_dim);
        let of = |rows: &Range<usize>, width: usize| rows.start * width..rows.end * width;
        for segment in pass.segments {
            let (rows, first) = (&segment.rows, segment.position());
            if let Some(rotary) = pass.rotary {
                rotary.apply(&mut q[of(rows, query_width)], first, num_heads, head_dim)?;
                rotary.apply(&mut k[of(rows, key_width)], first, num_key_value_heads, head_dim)?;
            }
        }
        let (scoring, kernel) = (self.spec.scoring, pass.products.products.of_activations());
        // Keys and values of a sequence that does not follow the rows it continues.
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for segment in pass.segments {
            let (rows, past) = (&segment.rows, segment.position());
            pass.products.watch.count(heads.operations(scoring, past, rows.len()));
            let (k, v) = match past == 0 || segment.after.end == rows.start {
                true => {
                    let start = if past == 0 { rows.start } else { segment.after.start };
                    let all = of(&(start..rows.end), key_width);
                    (&k[all.clone()], &v[all])
                }
                false => {
                    for (joined, all) in [(&mut keys, &*k), (&mut values, &*v)] {
                        joined.clear();
                        joined.extend_from_slice(&all[of(&segment.after, key_width)]);
                        joined.extend_from_slice(&all[of(rows, key_width)]);
                    }
                    (&keys[..], &values[..])
                }
            };
            let (q, k, v) = (&q[of(rows, query_width)], Values::F32(k), Values::F32(v));
            let out = &mut out[of(rows, columns.width)];
            Causal { kernel, heads, scoring, past, q, k, v }.context_columns(out, columns);
        }
        Ok(())
    }

    /// Adds attention's part to the gradient of the states: dh becomes dx.
    pub(super) fn attention_backward(
        &self,
        x: &[f32],
        tape: &mut AttentionTape<'_>,
        buffers: AttentionBuffers<'_>,
        pass: &mut BackwardPass<'_>,
    ) -> Result<()> {
        let AttentionTape { normed, q, k, v, context, raw_q, raw_k, branch } = tape;
        let AttentionBuffers { states, q: dq, k: dk, v: dv, .. } = buffers;
        let Heads { num_heads, num_key_value_heads, head_dim } = self.spec.heads;
        pass.products.watch.enter(Part::O);
        let (o, _) = self.part(LinearRole::O);
        let dbranch =
            self.branch_backward(NormRole::AfterAttention, branch, states, buffers.branch, pass);
        pass.gradients.add((o, self.linear(o)), dbranch, context, pass.products);
        self.linear(o).backward(dbranch, buffers.context, false, pass.products)?;
        pass.products.watch.enter(Part::Attention);
        let inputs = AttentionInputs {
            scoring: self.spec.scoring,
            q,
            k,
            v,
            context,
            context_gradient: buffers.context,
        };
        let out = AttentionGradients { q: &mut *dq, k: &mut *dk, v: &mut *dv };
        let kernel = pass.products.products.of_activations();
        causal_backward(kernel, self.spec.heads, inputs, out, buffers.partial);
        if let Some(rotary) = pass.rotary {
            rotary.apply_back(dq, num_heads, head_dim)?;
            rotary.apply_back(dk, num_key_value_heads, head_dim)?;
        }
        // The rotated queries and keys are not needed any more: their memory takes the gradients before the norms.
        let dq = self.branch_backward(NormRole::Query, raw_q, dq, q, pass);
        let dk = self.branch_backward(NormRole::Key, raw_k, dk, k, pass);
        pass.products.watch.enter(Part::Qkv);
        let input = self.normed(NormRole::BeforeAttention, x, normed);
        let of_roles = [(LinearRole::Q, dq), (LinearRole::K, dk), (LinearRole::V, &*dv)];
        self.project_backward(&of_roles, input, buffers.normed, buffers.joined, pass)?;
        self.norm_backward(NormRole::BeforeAttention, x, buffers.normed, states, pass.gradients);
        Ok(())
    }

    /// Some columns of a role's output, and the memory for them.
    pub(super) fn output<'a>(
        &'a self,
        role: LinearRole,
        columns: Range<usize>,
        out: &'a mut [f32],
    ) -> LinearOutput<'a> {
        let (id, rows) = self.part(role);
        let features = rows.start + columns.start..rows.start + columns.end;
        LinearOutput { linear: self.linear(id), features, out }
    }

    /// Writes the gradient of an input that linears share to `dinput`, and adds the gradients of these linears.
    ///
    /// # Arguments
    /// * `of_roles`: the gradient of each role's output, `[tokens, rows]`
    /// * `joined`: memory for the gradients of a matrix with the rows of several roles
    pub(super) fn project_backward(
        &self,
        of_roles: &[(LinearRole, &[f32])],
        input: &[f32],
        dinput: &mut [f32],
        joined: &mut [f32],
        pass: &mut BackwardPass<'_>,
    ) -> Result<()> {
        let mut adds = false;
        let mut left = of_roles;
        while let Some(&(role, first)) = left.first() {
            let (id, _) = self.part(role);
            let (own, rest) = left.split_at(id.roles().len());
            let gradient = match own {
                [_] => first,
                _ => {
                    let tokens = first.len() / self.spec.rows(role);
                    join(own, tokens, joined);
                    &*joined
                }
            };
            pass.gradients.add((id, self.linear(id)), gradient, input, pass.products);
            self.linear(id).backward(gradient, dinput, adds, pass.products)?;
            (adds, left) = (true, rest);
        }
        Ok(())
    }
}

/// Puts the rows of several roles side by side.
fn join(of_roles: &[(LinearRole, &[f32])], tokens: usize, joined: &mut [f32]) {
    let width = joined.len() / tokens.max(1);
    let mut first = 0;
    for (_, values) in of_roles {
        let columns = values.len() / tokens.max(1);
        for (row, values) in joined.chunks_exact_mut(width).zip(values.chunks_exact(columns)) {
            row[first..first + columns].copy_from_slice(values);
        }
        first += columns;
    }
}
