//! The MLP of a decoder layer, forwards and backwards, for some tokens at a time.
//!
//! ```text
//! m = norm(h);  g, u = m·Wgateᵀ, m·Wupᵀ;  p = act(g) ∘ u;  b = p·Wdownᵀ;  y = h + norm(b)
//!
//! db = norm'(b, dy);  dp = db·Wdown;  dg, du = (act(g) ∘ u)'(dp);  dh = dy + norm'(h, dg·Wgate + du·Wup)
//! ```
//!
//! A family has one norm or both; the identity stands for the other.

use anyhow::Result;

use super::DecoderLayer;
use super::stages::{BackwardPass, ForwardPass};
use crate::linalg::derivatives::{gelu_tanh_times_backward, silu_times_backward};
use crate::linalg::linear::{SingleToken, forward_all};
use crate::linalg::profile::Part;
use crate::linalg::{ProductContext, elementwise};
use crate::model::family::Activation;
use crate::model::linears::{InputId, LinearRole};
use crate::model::norms::NormRole;

/// The activations of an MLP: memory that a pass writes, and that the backward pass reads.
pub(super) struct MlpTape<'a> {
    /// norm(h), then the output of down, `[tokens, hidden_size]`.
    pub(super) normed: &'a mut [f32],
    /// g, then p where nothing is kept, `[tokens, intermediate_size]`.
    pub(super) gate: &'a mut [f32],
    /// u, in the shape of g.
    pub(super) up: &'a mut [f32],
    /// Memory for p where g is kept; else empty.
    pub(super) product: &'a mut [f32],
    /// The output of down before its norm; empty where nothing is kept, or the family has no such norm.
    pub(super) branch: &'a mut [f32],
    /// The backward pass finds g, u and b here.
    pub(super) is_kept: bool,
}

/// The gradients of an MLP, and memory for them.
pub(super) struct MlpBuffers<'a> {
    /// dy
    pub(super) output: &'a [f32],
    /// dy, which becomes dh.
    pub(super) states: &'a mut [f32],
    /// The gradient of the output of down, where a norm follows.
    pub(super) branch: &'a mut [f32],
    /// The gradient of norm(h).
    pub(super) normed: &'a mut [f32],
    /// The gradients of g and u side by side, where a matrix has the rows of both.
    pub(super) joined: &'a mut [f32],
}

impl DecoderLayer {
    /// rows ← y, with h in `rows`. With an observer the pass ends at down's input, because its output is not needed.
    pub(super) fn mlp(
        &self,
        rows: &mut [f32],
        tape: MlpTape<'_>,
        pass: &mut ForwardPass<'_>,
    ) -> Result<()> {
        let MlpTape { normed, gate, up, product, branch, .. } = tape;
        pass.products.watch.enter(Part::Mlp);
        self.norm(NormRole::BeforeMlp, rows, normed);
        let input = self.normed(NormRole::BeforeMlp, rows, normed);
        pass.show(InputId::Mlp, input);
        self.gate_and_up(input, gate, up, (pass.single, pass.products))?;
        let product = match product.is_empty() {
            true => gate,
            false => {
                product.copy_from_slice(gate);
                product
            }
        };
        self.activate(product, up);
        pass.show(InputId::Down, product);
        if pass.observer.is_none() {
            // The normed rows are free from here on.
            let (down, _) = self.part(LinearRole::Down);
            self.linear(down).forward(product, normed, pass.single, pass.products)?;
            self.norm_in_place(NormRole::AfterMlp, normed, branch);
            elementwise::add(rows, normed);
        }
        pass.products.watch.enter(Part::Elsewhere);
        Ok(())
    }

    fn gate_and_up(
        &self,
        input: &[f32],
        gate: &mut [f32],
        up: &mut [f32],
        (single, products): (SingleToken, &mut ProductContext),
    ) -> Result<()> {
        let wide = 0..self.spec.intermediate_size;
        let mut outputs = [
            self.output(LinearRole::Gate, wide.clone(), gate),
            self.output(LinearRole::Up, wide, up),
        ];
        forward_all(&mut outputs, input, single, products)
    }

    /// gate ← act(gate) ∘ up
    fn activate(&self, gate: &mut [f32], up: &[f32]) {
        match self.spec.activation {
            Activation::Silu => elementwise::silu_times(gate, up),
            Activation::GeluTanh => elementwise::gelu_tanh_times(gate, up),
        }
    }

    /// Adds the MLP's part to the gradient of the states. Of the tape, `gate`, `up` and `product` are lost.
    pub(super) fn mlp_backward(
        &self,
        h: &[f32],
        tape: MlpTape<'_>,
        buffers: MlpBuffers<'_>,
        pass: &mut BackwardPass<'_>,
    ) -> Result<()> {
        let MlpTape { normed, gate, up, product, branch, is_kept } = tape;
        pass.products.watch.enter(Part::Mlp);
        let (down, _) = self.part(LinearRole::Down);
        self.norm(NormRole::BeforeMlp, h, normed);
        let input = self.normed(NormRole::BeforeMlp, h, normed);
        if !is_kept {
            self.gate_and_up(input, gate, up, (SingleToken::AsMany, pass.products))?;
            if self.spec.has_norm(NormRole::AfterMlp) {
                product.copy_from_slice(gate);
                self.activate(product, up);
                self.linear(down).forward(product, branch, SingleToken::AsMany, pass.products)?;
            }
        }
        let MlpBuffers { output, states, .. } = buffers;
        let dbranch =
            self.branch_backward(NormRole::AfterMlp, branch, output, buffers.branch, pass);
        self.linear(down).backward(dbranch, product, false, pass.products)?;
        match self.spec.activation {
            Activation::Silu => silu_times_backward(gate, up, product),
            Activation::GeluTanh => gelu_tanh_times_backward(gate, up, product),
        }
        pass.gradients.add((down, self.linear(down)), dbranch, product, pass.products);
        let of_roles = [(LinearRole::Gate, &*gate), (LinearRole::Up, &*up)];
        self.project_backward(&of_roles, input, buffers.normed, buffers.joined, pass)?;
        self.norm_backward(NormRole::BeforeMlp, h, buffers.normed, states, pass.gradients);
        Ok(())
    }
}
