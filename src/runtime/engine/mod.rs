//! Engines compute decoder layers in place of the CPU: a GPU, or a simulated GPU.
//!
//! | file | story |
//! | --- | --- |
//! | `on_candle` | candle's operators on a candle device: CUDA |
//! | `simulated` | the host's own arithmetic, for tests of placement and fallback without a GPU |
//! | `device_memory` | the memory of a device, as its driver counts it |
//! | `cuda` | GPUs by number, their memory counters, the classes of their errors; only with the feature `cuda` |

#[cfg(feature = "cuda")]
pub mod cuda;
mod device_memory;
pub mod on_candle;
pub mod simulated;

use anyhow::Result;
use candle_core::Tensor;

use super::ledger::Refused;
use crate::bytes::ByteSize;
use crate::linalg::select::Quota;
use crate::model::head::HeadChunk;
use crate::model::on_device::{GramSums, LogSumExpPart, SampleSums, Tiling};
use crate::model::{DecoderLayer, LayerGradients, LinearId, Observer};

pub use device_memory::DeviceMemory;
pub use on_candle::OnCandle;
pub use simulated::Simulated;

/// An engine computes with one layer at a time. The caller keeps the account of its memory.
pub trait Engine: Send {
    /// Drops the last layer and makes room for `layer`.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    fn begin(&mut self, layer: &DecoderLayer) -> Result<()>;

    /// X·Wᵀ of a matrix of the current layer, in f32 and without its bias; X is `[tokens, in_features]` from the host. `None` from an
    /// engine without products.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    fn product(&mut self, _id: LinearId, _rows: &[f32]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Chooses the lowest scores |w_ij| · norm_j of a matrix of the current layer: the bits of a mask, equal to the host's. `None` leaves
    /// the choice to the host.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    fn choose_lowest(
        &mut self,
        _id: LinearId,
        _norms: &[f32],
        _quota: Quota,
    ) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Writes zeros for the weights chosen last, where they are of this matrix, which has the same zeros in `layer`. Returns whether the
    /// device has the matrix of `layer` now.
    ///
    /// # Errors
    /// Fails when the device fails.
    fn zero_chosen(&mut self, _layer: &DecoderLayer, _id: LinearId) -> Result<bool> {
        Ok(false)
    }

    /// Copies a matrix of the current layer, in place of an earlier revision.
    fn take_up(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<()>;

    /// Passes a sample through the layer: `[seqlen, hidden_size]` on the host or the device in, the same shape out; an engine that
    /// keeps hidden states leaves it on the device.
    fn forward(&mut self, layer: &DecoderLayer, state: &Tensor, cut: &Tiling) -> Result<Tensor>;

    /// Waits for the samples that have passed and whose states stay on the device.
    ///
    /// # Errors
    /// Fails when the device has failed in the meantime.
    fn wait(&mut self) -> Result<()> {
        Ok(())
    }

    /// Begins a block of samples whose Gram matrices are summed up, and forgets the sums of a block that has failed.
    fn begin_block(&mut self) {}

    /// Calls `observer` with the inputs of a sample at the observation points, as far as it wants rows. The caller shows it the returned
    /// sums. Gram matrices are added to the sums of the current block, which are of no use after a failure.
    fn capture(
        &mut self,
        layer: &DecoderLayer,
        state: &Tensor,
        cut: &Tiling,
        observer: &mut dyn Observer,
    ) -> Result<SampleSums>;

    /// Adds the Gram matrices of the current block to the sums of the blocks before it. After a failure, the next call adds the rest.
    ///
    /// # Errors
    /// Fails when the device fails, mostly for lack of memory.
    fn keep_block(&mut self) -> Result<()> {
        Ok(())
    }

    /// The Gram matrices of the current block, as far as they were not kept. An engine that shows all rows has none.
    fn take_block(&mut self) -> GramSums {
        GramSums::default()
    }

    /// The Gram matrices of the blocks that were kept.
    fn take_kept(&mut self) -> GramSums {
        GramSums::default()
    }

    /// Bytes of the Gram matrices of the blocks that were kept, which are part of the memory of the next block.
    fn grams_held(&self) -> ByteSize {
        ByteSize::ZERO
    }

    /// Passes the gradient of a sample's output back through the layer: `[seqlen, hidden_size]` on the host in and out. The gradients
    /// of what is trained are added to `gradients` now, or by [`Engine::collect_gradients`].
    ///
    /// # Arguments
    /// * `sample`: the layer's input, and the gradient with respect to its output
    fn backward(
        &mut self,
        layer: &DecoderLayer,
        sample: [&Tensor; 2],
        gradients: &mut LayerGradients,
        cut: &Tiling,
    ) -> Result<Tensor>;

    /// Adds the gradients of all samples since the last call to `gradients`.
    ///
    /// # Errors
    /// Fails when the device has failed in the meantime.
    fn collect_gradients(&mut self, gradients: &mut LayerGradients) -> Result<()>;

    /// Copies the norm and some rows of the head. They replace a layer or earlier rows.
    fn begin_head(&mut self, chunk: &HeadChunk<'_>) -> Result<()>;

    /// Computes a window's part of the log-sum-exp over the copied rows.
    fn head_window(
        &mut self,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
        cut: &Tiling,
    ) -> Result<Vec<LogSumExpPart>>;

    /// Computes the loss of a sample from the whole head, Σ −ln p of the targets, and the gradient of `scale` times the loss with respect
    /// to the sample: `[seqlen, hidden_size]` on the host in and out.
    fn head_gradient(
        &mut self,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        targets: &[Option<u32>],
        scale: f32,
        cut: &Tiling,
    ) -> Result<(f64, Tensor)>;

    /// Returns a function that copies layers onto the device while earlier layers are in use; `None` for an engine without copies.
    fn copies_ahead(&self) -> Option<CopyAhead>;

    /// Keeps the layer that was copied ahead for [`Engine::begin`], so that the next layer can be copied.
    fn adopt(&mut self);

    /// Drops layer and head.
    fn drop_weights(&mut self);

    /// Waits for all work and gives unused memory back, with a layer that was copied ahead. From now on no layer is copied ahead.
    ///
    /// # Errors
    /// Fails when the device has failed in the meantime.
    fn release(&mut self) -> Result<()>;

    /// Bytes per element of its arithmetic.
    fn element(&self) -> usize;

    /// The device's name as reported by the driver.
    fn name(&self) -> String;

    /// The device's memory by its own counters; `None` without counters.
    fn memory(&self) -> Option<DeviceMemory>;
}

/// Copies a layer that has just been read. The engine uses the copy when the layer becomes the current layer.
pub type CopyAhead = Box<dyn Fn(&DecoderLayer) + Send + Sync>;

/// A device without memory for a unit of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutOfMemory {
    /// The ledger refused the reservation.
    Ledger(Refused),
    /// The device refused an allocation.
    Device,
}

impl OutOfMemory {
    /// Classifies an error by its type and code, never by its text; `None` for an error that is not lack of memory.
    pub fn of(error: &anyhow::Error) -> Option<Self> {
        for cause in error.chain() {
            if let Some(refused) = cause.downcast_ref::<Refused>() {
                return Some(Self::Ledger(*refused));
            }
            #[cfg(feature = "cuda")]
            if cuda::is_out_of_memory(cause) {
                return Some(Self::Device);
            }
        }
        None
    }
}
