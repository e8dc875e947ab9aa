//! The vector-Jacobian product of a decoder layer on a device: products and attention (`attention_backward`) by hand, norms and the
//! activation by candle's autograd (`training`).
//!
//! ```text
//! h = x + norm(b), b = c·Woᵀ, c = attention(q, k, v);  y = h + norm(p·Wdownᵀ), p = act(g) ∘ u
//! dh = dy + mlp'(dy);  db = norm'(b, dh);  dc = db·Wo;  dq, dk, dv = attention'(dc);  dx = dh + norm'(x, dq·Wq + dk·Wk + dv·Wv)
//! ```
//!
//! candle's own backward pass of a product makes the gradient of a frozen weight, too, and its backward pass of attention keeps nine times
//! the scores. Outputs of products that enter a norm are computed again.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_nn::ops;

use super::tables::DeviceTables;
use super::training::{DeviceBackward, SampleGradients, only, piece};
use super::{DeviceLayer, DeviceTraining, Tiling};
use crate::model::family::Activation;
use crate::model::{LinearRole, NormRole};

impl DeviceLayer {
    /// Returns the gradient of a loss with respect to the layer's input, and adds the gradients of the layer's trained
    /// parameters to `training`.
    ///
    /// # Arguments
    /// * `hidden`: the layer's input, `[seqlen, hidden_size]` on the device
    /// * `output_gradient`: the gradient with respect to the layer's output, in the same shape
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory; `training` is unchanged then.
    pub fn backward(
        &self,
        [hidden, output_gradient]: [&Tensor; 2],
        training: &mut DeviceTraining,
        tables: &DeviceTables,
        cut: &Tiling,
    ) -> Result<Tensor> {
        let sample = SampleGradients::default();
        let mut pass = DeviceBackward { training, tables, cut, sample };
        let normed = self.normed(NormRole::BeforeAttention, hidden.clone())?;
        let context = self.context(&normed, tables, cut)?;
        let branch = || self.product(LinearRole::O, &context);
        let dbetween = {
            let between = (self.normed(NormRole::AfterAttention, branch()?)? + hidden)?;
            self.mlp_backward(&between, output_gradient, &mut pass)?
        };
        let dbranch = self.norm_backward(NormRole::AfterAttention, branch, &dbetween, &mut pass)?;
        let (o, _) = self.spec.part(LinearRole::O);
        pass.add(o, &dbranch, &context)?;
        drop(context);
        let dcontext = dbranch.matmul(&self.linear(o)?.weight)?;
        drop(dbranch);
        let of_roles = self.attention_backward(&normed, &dcontext, &mut pass)?;
        drop(dcontext);
        let mut dx = Vec::new();
        for first in (0..hidden.dim(0)?).step_by(cut.mlp_tokens) {
            let tokens = cut.mlp_tokens.min(hidden.dim(0)? - first);
            let rows = |tensor: &Tensor| tensor.narrow(0, first, tokens);
            let of_rows = of_roles.iter().map(|(role, dz)| Ok((*role, rows(dz)?)));
            let of_rows = of_rows.collect::<Result<Vec<_>>>()?;
            let dnormed = self.project_backward(of_rows, &rows(&normed)?, &mut pass)?;
            let x = || Ok(rows(hidden)?);
            let part = self.norm_backward(NormRole::BeforeAttention, x, &dnormed, &mut pass)?;
            dx.push((part + rows(&dbetween)?)?);
        }
        let dx = Tensor::cat(&dx, 0)?;
        let sample = pass.sample;
        training.commit(sample);
        Ok(dx)
    }

    /// The gradient with respect to the MLP's input before its norm, `dy` included.
    pub(super) fn mlp_backward(
        &self,
        between: &Tensor,
        dy: &Tensor,
        pass: &mut DeviceBackward<'_>,
    ) -> Result<Tensor> {
        let (down, _) = self.spec.part(LinearRole::Down);
        let mut parts = Vec::new();
        for first in (0..between.dim(0)?).step_by(pass.cut.mlp_tokens) {
            let tokens = pass.cut.mlp_tokens.min(between.dim(0)? - first);
            let (x, dy) = (between.narrow(0, first, tokens)?, dy.narrow(0, first, tokens)?);
            let normed = self.normed(NormRole::BeforeMlp, x.clone())?;
            let (g, u) =
                (self.product(LinearRole::Gate, &normed)?, self.product(LinearRole::Up, &normed)?);
            let branch = || {
                let inner = g.copy()?;
                self.activate(&inner, &u)?;
                self.product(LinearRole::Down, &inner)
            };
            let dbranch = self.norm_backward(NormRole::AfterMlp, branch, &dy, pass)?;
            let dinner = dbranch.matmul(&self.linear(down)?.weight)?;
            let (gradients, inner) = piece(&[&g, &u], &dinner, |inputs| {
                let [gate, up] = [inputs[0].as_tensor(), inputs[1].as_tensor()];
                Ok(match self.spec.activation {
                    Activation::Silu => (gate.silu()? * up)?,
                    Activation::GeluTanh => (gate.gelu()? * up)?,
                })
            })?;
            drop((g, u, dinner));
            pass.add(down, &dbranch, &inner)?;
            drop(inner);
            let of_roles = [LinearRole::Gate, LinearRole::Up].into_iter().zip(gradients).collect();
            let dnormed = self.project_backward(of_roles, &normed, pass)?;
            let part = self.norm_backward(NormRole::BeforeMlp, || Ok(x.clone()), &dnormed, pass)?;
            parts.push((part + dy)?);
        }
        Ok(Tensor::cat(&parts, 0)?)
    }

    /// The gradient of an input that linears share, for some tokens, from the gradient of each role's output, `[tokens, rows]`. A matrix
    /// with the rows of several roles takes their gradients side by side.
    pub(super) fn project_backward(
        &self,
        of_roles: Vec<(LinearRole, Tensor)>,
        input: &Tensor,
        pass: &mut DeviceBackward<'_>,
    ) -> Result<Tensor> {
        let mut sum: Option<Tensor> = None;
        let mut left = of_roles.into_iter();
        while let Some((role, first)) = left.next() {
            let (id, _) = self.spec.part(role);
            let others = left.by_ref().take(id.roles().len() - 1).map(|(_, dz)| dz);
            let dz = Tensor::cat(&[first].into_iter().chain(others).collect::<Vec<_>>(), 1)?;
            pass.add(id, &dz, input)?;
            let part = dz.matmul(&self.linear(id)?.weight)?;
            sum = Some(match sum {
                None => part,
                Some(sum) => (sum + part)?,
            });
        }
        sum.context("an input has a linear")
    }

    /// The gradient through a norm with respect to its input, for some tokens at a time; `gradient` itself without the norm.
    pub(super) fn norm_backward(
        &self,
        norm: NormRole,
        x: impl FnOnce() -> Result<Tensor>,
        gradient: &Tensor,
        pass: &mut DeviceBackward<'_>,
    ) -> Result<Tensor> {
        let Some(factor) = self.norm(norm) else {
            return Ok(gradient.clone());
        };
        let factor = &factor.to_dtype(self.dtype)?;
        let (x, eps, has_norms) = (x()?, self.spec.rms_norm_eps, pass.training.has_norms);
        let mut parts = Vec::new();
        for first in (0..x.dim(0)?).step_by(pass.cut.mlp_tokens) {
            let tokens = pass.cut.mlp_tokens.min(x.dim(0)? - first);
            let rows = |of: &Tensor| -> Result<Tensor> {
                let rows = of.narrow(0, first, tokens)?.contiguous()?;
                Ok(rows.reshape(((), factor.elem_count()))?)
            };
            let (x, gradient) = (rows(&x)?, rows(gradient)?);
            let gradients = match has_norms {
                false => piece(&[&x], &gradient, |inputs| {
                    Ok(ops::rms_norm_slow(&inputs[0], factor, eps)?)
                }),
                true => piece(&[&x, factor], &gradient, |inputs| {
                    Ok(ops::rms_norm_slow(&inputs[0], &inputs[1], eps)?)
                }),
            };
            let (mut gradients, _) = gradients?;
            if has_norms {
                let of_weight = gradients.pop().context("a norm has a weight")?;
                pass.add_norm(norm, &of_weight.to_dtype(DType::F32)?)?;
            }
            parts.push(only(gradients)?.reshape((tokens, ()))?);
        }
        Ok(Tensor::cat(&parts, 0)?)
    }
}
