//! The MLP of a layer on a device, forwards and backwards, for some tokens at a time. The formulas are in `model/layer/mlp.rs`.

use anyhow::Result;
use candle_core::Tensor;

use super::observing::Observing;
use super::training::{DeviceBackward, piece};
use super::{DeviceLayer, Tiling, kernels};
use crate::model::family::Activation;
use crate::model::{InputId, LinearRole, NormRole};

impl DeviceLayer {
    /// hidden ← hidden + norm((act(m·Wgateᵀ) ∘ m·Wupᵀ)·Wdownᵀ) with m = norm(hidden). Writes into the memory of `hidden`, although the
    /// reference is shared. With an observer the pass ends at down's input.
    pub(super) fn mlp(
        &self,
        hidden: &Tensor,
        cut: &Tiling,
        mut observing: Option<&mut Observing<'_>>,
    ) -> Result<()> {
        let seqlen = hidden.dim(0)?;
        let mut first = 0;
        while first < seqlen {
            let tokens = cut.mlp_tokens.min(seqlen - first);
            let rows = hidden.narrow(0, first, tokens)?;
            let normed = self.normed(NormRole::BeforeMlp, rows.clone())?;
            if let Some(observing) = &mut observing {
                observing.add(InputId::Mlp, first, &normed, cut)?;
            }
            let inner = self.product(LinearRole::Gate, &normed)?;
            let up = self.product(LinearRole::Up, &normed)?;
            drop(normed);
            self.activate(&inner, &up)?;
            drop(up);
            if let Some(observing) = &mut observing {
                observing.add(InputId::Down, first, &inner, cut)?;
            }
            if observing.is_none() {
                let branch = self.product(LinearRole::Down, &inner)?;
                drop(inner);
                kernels::add(&rows, &self.normed(NormRole::AfterMlp, branch)?)?;
            }
            first += tokens;
        }
        Ok(())
    }

    /// gate ← act(gate) ∘ up, in the memory of `gate`.
    fn activate(&self, gate: &Tensor, up: &Tensor) -> Result<()> {
        match self.spec.activation {
            Activation::Silu => kernels::silu_times(gate, up),
            Activation::GeluTanh => kernels::gelu_tanh_times(gate, up),
        }
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
}
