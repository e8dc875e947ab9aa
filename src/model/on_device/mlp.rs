//! The MLP of a layer on a device, for some tokens at a time. The formulas are in `model/layer/mlp.rs`.

use anyhow::Result;
use candle_core::Tensor;

use super::observing::Observing;
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
    pub(super) fn activate(&self, gate: &Tensor, up: &Tensor) -> Result<()> {
        match self.spec.activation {
            Activation::Silu => kernels::silu_times(gate, up),
            Activation::GeluTanh => kernels::gelu_tanh_times(gate, up),
        }
    }
}
