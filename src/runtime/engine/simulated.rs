//! A simulated GPU. It computes on the CPU with the host's arithmetic, so that every mask has the bits of a run on the CPU,
//! whatever units were refused. Its memory exists in the ledger only.

use anyhow::Result;
use candle_core::Tensor;

use super::{CopyAhead, DeviceMemory, Engine};
use crate::model::head::HeadChunk;
use crate::model::on_device::{LogSumExpPart, SampleSums, Tiling};
use crate::model::{DecoderLayer, LayerContext, LayerGradients, LinearId, Observer};

/// A simulated GPU.
#[derive(Debug)]
pub struct Simulated {
    context: LayerContext,
}

impl Simulated {
    /// Creates a GPU with its own context.
    pub fn new(context: LayerContext) -> Self {
        Self { context }
    }
}

impl Engine for Simulated {
    fn begin(&mut self, _layer: &DecoderLayer) -> Result<()> {
        Ok(())
    }

    fn take_up(&mut self, _layer: &DecoderLayer, _id: LinearId) -> Result<()> {
        Ok(())
    }

    fn forward(&mut self, layer: &DecoderLayer, state: &Tensor, _cut: &Tiling) -> Result<Tensor> {
        layer.forward(state, &mut self.context)
    }

    fn capture(
        &mut self,
        layer: &DecoderLayer,
        state: &Tensor,
        _cut: &Tiling,
        observer: &mut dyn Observer,
    ) -> Result<SampleSums> {
        layer.capture(state, &mut self.context, observer)?;
        Ok(SampleSums::default())
    }

    fn backward(
        &mut self,
        layer: &DecoderLayer,
        [state, output_gradient]: [&Tensor; 2],
        gradients: &mut LayerGradients,
        _cut: &Tiling,
    ) -> Result<Tensor> {
        layer.backward(state, output_gradient, gradients, &mut self.context)
    }

    fn collect_gradients(&mut self, _gradients: &mut LayerGradients) -> Result<()> {
        Ok(())
    }

    fn begin_head(&mut self, _chunk: &HeadChunk<'_>) -> Result<()> {
        Ok(())
    }

    fn head_window(
        &mut self,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
        _cut: &Tiling,
    ) -> Result<Vec<LogSumExpPart>> {
        LogSumExpPart::on_host(chunk, state, tokens, &mut self.context)
    }

    fn head_gradient(
        &mut self,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        _cut: &Tiling,
    ) -> Result<(f64, Tensor)> {
        let head = chunk.head();
        head.loss_gradient(state, targets, scale, &mut self.context)
    }

    fn copies_ahead(&self) -> Option<CopyAhead> {
        None
    }

    fn adopt(&mut self) {}

    fn drop_weights(&mut self) {}

    fn release(&mut self) -> Result<()> {
        Ok(())
    }

    fn element(&self) -> usize {
        size_of::<f32>()
    }

    fn name(&self) -> String {
        "simulated".to_string()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        None
    }
}
