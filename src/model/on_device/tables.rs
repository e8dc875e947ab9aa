//! Rotary tables on a device, and the rotation of heads.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::{kernels, operators};
use crate::model::{LayerContext, LayerSpec};

/// Rotary tables on a device: cos and sin of each rope of a model, `[seqlen, dims / 2]` each.
#[derive(Debug, Clone)]
pub struct DeviceTables(Vec<[Tensor; 2]>);

impl DeviceTables {
    /// Copies the tables of a context onto a device.
    ///
    /// # Errors
    /// Fails when the device has too little memory.
    pub fn new(context: &LayerContext, dtype: DType, device: &Device) -> Result<Self> {
        let tables = context.rotaries().iter().map(|rotary| {
            let half = rotary.dims() / 2;
            let table = |values: &[f32]| -> Result<Tensor> {
                let shape = (values.len() / half.max(1), half);
                Ok(operators::cast(&operators::upload(values, shape, device)?, dtype)?)
            };
            let (cos, sin) = rotary.tables();
            Ok([table(cos)?, table(sin)?])
        });
        Ok(Self(tables.collect::<Result<_>>()?))
    }

    /// cos and sin of the first `seqlen` positions.
    pub(super) fn rows(&self, rope: usize, seqlen: usize) -> Result<[Tensor; 2]> {
        let [cos, sin] = &self.0[rope];
        Ok([cos.narrow(0, 0, seqlen)?, sin.narrow(0, 0, seqlen)?])
    }

    /// Rotates heads `[seqlen, heads · head_dim]`, and puts them before the tokens: `[heads, seqlen, head_dim]`. In a layer without
    /// rotation they are only moved.
    pub(super) fn rotate(&self, x: &Tensor, spec: &LayerSpec) -> Result<Tensor> {
        let head_dim = spec.heads.head_dim;
        match spec.rope {
            Some(rope) => kernels::rotate_heads(x, &self.rows(rope, x.dim(0)?)?, head_dim),
            None => kernels::heads_first(x, head_dim),
        }
    }
}
