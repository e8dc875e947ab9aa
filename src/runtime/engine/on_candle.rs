//! Layers and head computed by candle's operators on a candle device. With the feature `cuda` this is a GPU; tests use the CPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};

use super::{CopyAhead, DeviceMemory, Engine};
use crate::bytes::ByteSize;
use crate::linalg::StoredMatrix;
use crate::linalg::select::Quota;
use crate::model::head::HeadChunk;
#[cfg(feature = "cuda")]
use crate::model::on_device::candle_dtype;
use crate::model::on_device::{
    DeviceGrams, DeviceHead, DeviceLayer, DeviceTables, DeviceTraining, GramSums, LogSumExpPart,
    SampleSums, Tiling, copy, count_work, take_work, to_device, to_host, wait,
};
use crate::model::{DecoderLayer, LayerContext, LayerGradients, LinearId, Observer};
use crate::run::fallback::DeviceWork;

/// A device of candle's.
#[derive(Debug)]
pub struct OnCandle {
    device: Device,
    dtype: DType,
    name: String,
    tables: DeviceTables,
    /// Hidden states that leave a layer stay on the device.
    keeps_states: bool,
    layer: Option<DeviceLayer>,
    head: Option<DeviceHead>,
    /// The Gram matrices of the current layer's inputs.
    grams: DeviceGrams,
    /// The gradients of the current layer.
    training: Option<DeviceTraining>,
    /// Host memory for sums of samples.
    #[cfg(feature = "cuda")]
    pinned: super::cuda::PinnedBuffers,
    /// The copy of the current layer.
    adopted: Option<DeviceLayer>,
    ahead: Arc<Ahead>,
}

/// The next layer, copied by the thread that reads it while the current layer is in use.
#[derive(Debug, Default)]
struct Ahead {
    layer: Mutex<Option<DeviceLayer>>,
    /// The work of copying, until the layer is adopted.
    work: Mutex<DeviceWork>,
    /// Copying has ended, since its memory is needed.
    is_stopped: AtomicBool,
}

/// Copies a matrix in parallel with the device's work, unless it must be cast: that work contains casts, and the frees of their sources.
fn copy_in_parallel(matrix: &StoredMatrix, dtype: DType, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if candle_dtype(matrix.dtype()) == dtype {
        return super::cuda::copy_on_separate_stream(matrix, device);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = dtype;
    copy(matrix, device)
}

impl Ahead {
    fn take(&self) -> Option<DeviceLayer> {
        self.layer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn put(&self, layer: DeviceLayer) {
        *self.layer.lock().unwrap_or_else(PoisonError::into_inner) = Some(layer);
    }
}

impl OnCandle {
    /// Computes on `device` in `dtype`.
    ///
    /// # Errors
    /// Fails when the device has no memory for the rotary tables.
    pub fn new(device: Device, dtype: DType, name: String, context: &LayerContext) -> Result<Self> {
        let tables = DeviceTables::new(context, dtype, &device)?;
        Ok(Self {
            device,
            dtype,
            name,
            tables,
            keeps_states: false,
            layer: None,
            head: None,
            grams: DeviceGrams::default(),
            training: None,
            #[cfg(feature = "cuda")]
            pinned: super::cuda::PinnedBuffers::default(),
            adopted: None,
            ahead: Arc::default(),
        })
    }

    /// Leaves hidden states on the device. Otherwise they return to the host.
    #[must_use]
    pub fn keeping_states(self, keeps_states: bool) -> Self {
        Self { keeps_states, ..self }
    }

    fn to_device(&self, state: &Tensor) -> Result<Tensor> {
        Ok(to_device(state, self.dtype, &self.device)?)
    }
}

impl Engine for OnCandle {
    fn begin(&mut self, layer: &DecoderLayer) -> Result<()> {
        self.drop_weights();
        let adopted = self.adopted.take().filter(|copied| copied.is_of(layer));
        self.layer = Some(match adopted {
            Some(copied) => copied,
            None => DeviceLayer::begin(layer, self.dtype, &self.device)?,
        });
        Ok(())
    }

    fn product(&mut self, id: LinearId, rows: &[f32]) -> Result<Option<Tensor>> {
        let layer = self.layer.as_ref().context("a layer was begun")?;
        layer.multiply(id, rows).map(Some)
    }

    fn choose_lowest(
        &mut self,
        id: LinearId,
        norms: &[f32],
        quota: Quota,
    ) -> Result<Option<Vec<u8>>> {
        let layer = self.layer.as_mut().context("a layer was begun")?;
        layer.choose_lowest(id, norms, quota)
    }

    fn zero_chosen(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<bool> {
        let copied = self.layer.as_mut().context("a layer was begun")?;
        copied.zero_chosen(layer, id)
    }

    fn take_up(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<()> {
        let device = &self.device;
        self.layer
            .as_mut()
            .context("a layer was begun")?
            .take_up(layer, id, &|matrix| copy(matrix, device))
    }

    fn forward(&mut self, _layer: &DecoderLayer, state: &Tensor, cut: &Tiling) -> Result<Tensor> {
        let state = self.to_device(state)?;
        let layer = self.layer.as_ref().context("a layer was begun")?;
        let out = layer.forward(&state, &self.tables, cut)?;
        Ok(match self.keeps_states {
            true => out,
            // Waits for the device, so that its errors are reported as part of this unit.
            false => to_host(&out)?,
        })
    }

    fn capture(
        &mut self,
        _layer: &DecoderLayer,
        state: &Tensor,
        cut: &Tiling,
        observer: &mut dyn Observer,
    ) -> Result<SampleSums> {
        let state = self.to_device(state)?;
        let layer = self.layer.as_ref().context("a layer was begun")?;
        let captured = layer.capture(&state, &self.tables, cut, observer, &mut self.grams);
        #[cfg(feature = "cuda")]
        let captured = captured.and_then(|sums| sums.sent_by(|values| self.pinned.send(values)));
        // Frees the memory of a block that has failed.
        captured.inspect_err(|_| self.grams.begin_block())
    }

    fn begin_block(&mut self) {
        self.grams.begin_block();
    }

    fn keep_block(&mut self) -> Result<()> {
        self.grams.keep_block()
    }

    fn take_block(&mut self) -> GramSums {
        self.grams.take_block()
    }

    fn take_kept(&mut self) -> GramSums {
        self.grams.take()
    }

    fn wait(&mut self) -> Result<()> {
        Ok(wait(&self.device)?)
    }

    fn grams_held(&self) -> ByteSize {
        self.grams.held()
    }

    fn backward(
        &mut self,
        _layer: &DecoderLayer,
        sample: [&Tensor; 2],
        gradients: &mut LayerGradients,
        cut: &Tiling,
    ) -> Result<Tensor> {
        let [state, output_gradient] = sample.map(|tensor| self.to_device(tensor));
        let layer = self.layer.as_ref().context("a layer was begun")?;
        let training = match &mut self.training {
            Some(training) => training,
            none => none.insert(DeviceTraining::new(gradients, self.dtype, &self.device)?),
        };
        let sample = [&state?, &output_gradient?];
        let out = layer.backward(sample, training, &self.tables, cut)?;
        Ok(to_host(&out)?)
    }

    fn collect_gradients(&mut self, gradients: &mut LayerGradients) -> Result<()> {
        match self.training.take() {
            Some(training) => training.add_to(gradients),
            None => Ok(()),
        }
    }

    fn adopt(&mut self) {
        self.adopted = None;
        self.adopted = self.ahead.take();
        let mut work = self.ahead.work.lock().unwrap_or_else(PoisonError::into_inner);
        count_work(std::mem::take(&mut work));
    }

    fn copies_ahead(&self) -> Option<CopyAhead> {
        let (ahead, device, dtype) = (Arc::clone(&self.ahead), self.device.clone(), self.dtype);
        Some(Box::new(move |layer| {
            if ahead.is_stopped.load(Ordering::Relaxed) {
                return;
            }
            let copied = (|| -> Result<DeviceLayer> {
                let mut copied = DeviceLayer::begin(layer, dtype, &device)?;
                for id in layer.linear_ids() {
                    let copy = |matrix: &StoredMatrix| copy_in_parallel(matrix, dtype, &device);
                    copied.take_up(layer, id, &copy)?;
                }
                Ok(copied)
            })();
            *ahead.work.lock().unwrap_or_else(PoisonError::into_inner) += take_work();
            // A failed copy, above all for lack of memory, is tried again with the ladder when the layer becomes the current layer.
            if let Ok(copied) = copied {
                ahead.put(copied);
            }
        }))
    }

    fn begin_head(&mut self, chunk: &HeadChunk<'_>) -> Result<()> {
        self.drop_weights();
        self.head = Some(DeviceHead::new(chunk, self.dtype, &self.device)?);
        Ok(())
    }

    fn head_window(
        &mut self,
        _chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
        cut: &Tiling,
    ) -> Result<Vec<LogSumExpPart>> {
        let state = self.to_device(state)?;
        let head = self.head.as_ref().context("the head was begun")?;
        head.window(&state, tokens, cut)
    }

    fn head_gradient(
        &mut self,
        _chunk: &HeadChunk<'_>,
        state: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        cut: &Tiling,
    ) -> Result<(f64, Tensor)> {
        let state = self.to_device(state)?;
        let head = self.head.as_ref().context("the head was begun")?;
        let (loss, gradient) = head.loss_gradient(&state, targets, scale, cut)?;
        Ok((loss, to_host(&gradient)?))
    }

    fn drop_weights(&mut self) {
        (self.layer, self.head) = (None, None);
    }

    fn release(&mut self) -> Result<()> {
        // A layer that was copied ahead can be copied again later.
        self.ahead.is_stopped.store(true, Ordering::Relaxed);
        drop(self.ahead.take());
        self.adopted = None;
        #[cfg(feature = "cuda")]
        super::cuda::release(&self.device)?;
        #[cfg(not(feature = "cuda"))]
        wait(&self.device)?;
        Ok(())
    }

    fn element(&self) -> usize {
        self.dtype.size_in_bytes()
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        #[cfg(feature = "cuda")]
        {
            super::cuda::memory(&self.device)
        }
        #[cfg(not(feature = "cuda"))]
        None
    }
}
