//! Passes of a single sample, in the order of the caller: the passes of a training.
//!
//! A sample is computed by the first device of the layer that has room for it, and by the CPU where there is none. Sums of gradients have
//! the order of the samples, so a training on a single device has the same bits each time.

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::clock::Clock;
use super::compute::Compute;
use super::device_worker::DeviceWorker;
use super::hidden_states::HiddenStates;
use crate::model::{DecoderLayer, Head, LayerGradients};
use crate::run::Phase;

impl Compute<'_> {
    /// Passes a sample through a layer, on its first device with room, else on the CPU. The output is f32.
    ///
    /// # Errors
    /// Fails on a device error that is not lack of memory.
    pub fn forward_one(
        &mut self,
        phase: Phase,
        layer: &DecoderLayer,
        sample: usize,
        state: &Tensor,
    ) -> Result<Tensor> {
        if let Some(worker) = first_ready(&mut self.workers, &self.devices, layer)?
            && let Some(out) = worker.forward(phase, sample, layer, state)?
        {
            return Ok(out.to_dtype(DType::F32)?);
        }
        layer.forward(state, &mut self.context)
    }

    /// Passes all states through a layer in turn; each takes the place of its input.
    ///
    /// # Errors
    /// Fails when the run is asked to stop, when a state cannot be read or written, and as [`Compute::forward_one`].
    pub fn forward_each(
        &mut self,
        phase: Phase,
        layer: &DecoderLayer,
        states: &mut HiddenStates,
        clock: &Clock,
    ) -> Result<()> {
        for sample in 0..states.samples() {
            self.events.check()?;
            let state = states.get(sample)?;
            let out = clock.measure(phase, || self.forward_one(phase, layer, sample, &state))?;
            states.put(sample, out)?;
        }
        Ok(())
    }

    /// Passes the gradient of a sample's output back through a layer, on its first device with room, else on the CPU. The gradients of
    /// what is trained are complete after [`Compute::collect_gradients`]. The result is f32.
    ///
    /// # Arguments
    /// * `sample`: its number, the layer's input, and the gradient with respect to its output
    ///
    /// # Errors
    /// Fails on a device error that is not lack of memory.
    pub fn backward_one(
        &mut self,
        layer: &DecoderLayer,
        (sample, state, output_gradient): (usize, &Tensor, &Tensor),
        gradients: &mut LayerGradients,
    ) -> Result<Tensor> {
        if let Some(worker) = first_ready(&mut self.workers, &self.devices, layer)?
            && let Some(out) =
                worker.backward(sample, layer, [state, output_gradient], gradients)?
        {
            return Ok(out.to_dtype(DType::F32)?);
        }
        layer.backward(state, output_gradient, gradients, &mut self.context)
    }

    /// Returns Σ −ln p of a sample's targets, in nat, and the gradient of `scale` times it with respect to the sample, in f32. A head in
    /// memory is computed by the first device of the last layer with room, else by the CPU.
    ///
    /// # Errors
    /// Fails as [`Head::loss_gradient`], and on a device error that is not lack of memory.
    pub fn head_one(
        &mut self,
        head: &Head,
        number: usize,
        (state, targets, scale): (&Tensor, &[Option<u32>], f32),
    ) -> Result<(f64, Tensor)> {
        if let Some(last) = self.devices.last()
            && head.is_in_memory()
        {
            let chunk = head.chunk(0..head.vocab_size())?;
            for worker in &mut self.workers {
                if !last.contains(worker.name()) || !worker.load_head(&chunk)? {
                    continue;
                }
                let sample = (state, targets, scale);
                if let Some((loss, gradient)) = worker.head_gradient(number, &chunk, sample)? {
                    return Ok((loss, gradient.to_dtype(DType::F32)?));
                }
            }
        }
        head.loss_gradient(state, targets, scale, &mut self.context)
    }

    /// Adds the gradients that devices have computed for a layer.
    ///
    /// # Errors
    /// Fails when a device has failed in the meantime.
    pub fn collect_gradients(&mut self, gradients: &mut LayerGradients) -> Result<()> {
        let mut workers = self.workers.iter_mut();
        workers.try_for_each(|worker| worker.collect_gradients(gradients))
    }

    /// Returns whether a device besides the CPU computes a layer, where its memory suffices.
    pub fn has_device_for(&self, layer: &DecoderLayer) -> bool {
        let named = self.devices.get(layer.index());
        named.is_some_and(|named| {
            let mut workers = self.workers.iter();
            workers.any(|worker| named.contains(worker.name()))
        })
    }
}

/// Returns the first device of a layer that could load it.
fn first_ready<'s, 'a>(
    workers: &'s mut [DeviceWorker<'a>],
    devices: &[Vec<String>],
    layer: &DecoderLayer,
) -> Result<Option<&'s mut DeviceWorker<'a>>> {
    let named = devices.get(layer.index()).map_or(&[][..], Vec::as_slice);
    for worker in workers {
        if named.contains(worker.name()) && worker.load_layer(layer)? {
            return Ok(Some(worker));
        }
    }
    Ok(None)
}
