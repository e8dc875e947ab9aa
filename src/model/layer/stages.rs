//! Inputs of a pass beside the layer and memory, and the norms of a decoder layer as its stages. A norm that the family does not have is
//! the identity.

use super::DecoderLayer;
use crate::linalg::derivatives::rms_norm_backward;
use crate::linalg::linear::SingleToken;
use crate::linalg::profile::Part;
use crate::linalg::{ProductContext, elementwise};
use crate::model::backward::LayerGradients;
use crate::model::kv_cache::LayerCache;
use crate::model::linears::InputId;
use crate::model::norms::NormRole;
use crate::model::observe::Observer;
use crate::model::rotary::Rotary;
use crate::model::segments::Segment;

/// Inputs of a forward pass beside the layer and memory for activations.
pub(super) struct ForwardPass<'a> {
    pub(super) rotary: Option<&'a Rotary>,
    pub(super) products: &'a mut ProductContext,
    pub(super) single: SingleToken,
    pub(super) cache: Option<&'a mut LayerCache>,
    pub(super) observer: Option<&'a mut dyn Observer>,
    /// The sequences of the sample; empty where it is a single one.
    pub(super) segments: &'a [Segment],
}

impl<'a> ForwardPass<'a> {
    pub(super) fn of_sample(rotary: Option<&'a Rotary>, products: &'a mut ProductContext) -> Self {
        let single = SingleToken::AsMany;
        Self { rotary, products, single, cache: None, observer: None, segments: &[] }
    }

    /// Shows the rows of an input to the observer, and counts the time as statistics.
    pub(super) fn show(&mut self, input: InputId, rows: &[f32]) {
        if let Some(observer) = &mut self.observer {
            let part = self.products.watch.enter(Part::Statistics);
            observer.observe(input, rows);
            self.products.watch.enter(part);
        }
    }
}

/// Inputs of a backward pass beside the layer and memory.
pub(super) struct BackwardPass<'a> {
    pub(super) rotary: Option<&'a Rotary>,
    pub(super) products: &'a mut ProductContext,
    pub(super) gradients: &'a mut LayerGradients,
}

impl DecoderLayer {
    fn factor(&self, role: NormRole) -> Option<&[f32]> {
        self.norms.get(&role).map(|norm| norm.factor())
    }

    /// out ← norm(x) in the first elements of `out`; nothing without the norm.
    pub(super) fn norm(&self, role: NormRole, x: &[f32], out: &mut [f32]) {
        if let Some(factor) = self.factor(role) {
            elementwise::rms_norm(x, factor, self.spec.rms_norm_eps, &mut out[..x.len()]);
        }
    }

    /// The normed values that [`DecoderLayer::norm`] wrote; `x` without the norm.
    pub(super) fn normed<'a>(&self, role: NormRole, x: &'a [f32], out: &'a [f32]) -> &'a [f32] {
        match self.factor(role) {
            Some(_) => &out[..x.len()],
            None => x,
        }
    }

    /// values ← norm(values). The values before it are copied to `raw`, unless it is empty.
    pub(super) fn norm_in_place(&self, role: NormRole, values: &mut [f32], raw: &mut [f32]) {
        if let Some(factor) = self.factor(role) {
            if !raw.is_empty() {
                raw.copy_from_slice(values);
            }
            elementwise::rms_norm_in_place(values, factor, self.spec.rms_norm_eps);
        }
    }

    /// Adds norm'(x, gradient) to `dx`: the gradient through a norm of a residual connection's input.
    pub(super) fn norm_backward(
        &self,
        role: NormRole,
        x: &[f32],
        gradient: &[f32],
        dx: &mut [f32],
        gradients: &mut LayerGradients,
    ) {
        match self.factor(role) {
            Some(factor) => {
                let weight = gradients.norm_mut(role);
                rms_norm_backward(x, factor, self.spec.rms_norm_eps, gradient, dx, weight);
            }
            None => elementwise::add(dx, gradient),
        }
    }

    /// Returns norm'(x, gradient), the gradient through a norm of values that a product made. It is written to `out`, or is `gradient`
    /// itself without the norm.
    pub(super) fn branch_backward<'a>(
        &self,
        role: NormRole,
        x: &[f32],
        gradient: &'a [f32],
        out: &'a mut [f32],
        pass: &mut BackwardPass<'_>,
    ) -> &'a [f32] {
        if self.factor(role).is_none() {
            return gradient;
        }
        out.fill(0.0);
        self.norm_backward(role, x, gradient, out, pass.gradients);
        out
    }
}
