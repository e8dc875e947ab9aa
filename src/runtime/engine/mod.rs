//! What computes decoder layers beside the CPU: a GPU, or the CPU in a GPU's place.
//!
//! | file | story |
//! | --- | --- |
//! | `on_candle` | candle's operators on one of its devices: CUDA |
//! | `simulated` | the host's own arithmetic, for tests of placement and fallback without a GPU |
//! | `cuda` | GPUs by number, their memory counters, what their errors mean; only with the feature `cuda` |

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod on_candle;
pub mod simulated;

use anyhow::Result;
use candle_core::Tensor;

use super::ledger::Refused;
use crate::bytes::ByteSize;
use crate::model::head::HeadChunk;
use crate::model::on_device::{Cut, Seen};
use crate::model::{DecoderLayer, Observer, Projection};

pub use on_candle::OnCandle;
pub use simulated::Simulated;

/// Computes with one layer at a time. Whoever calls holds the account of its memory.
pub trait Engine: Send {
    /// Drops the layer before and makes room for this one.
    ///
    /// # Errors
    /// Where the device has no memory, or fails.
    fn begin(&mut self, layer: &DecoderLayer) -> Result<()>;

    /// Copies one matrix of the layer that was begun.
    ///
    /// # Errors
    /// As [`Engine::begin`].
    fn take_up(&mut self, layer: &DecoderLayer, projection: Projection) -> Result<()>;

    /// Passes one sample through: `[seqlen, hidden_size]` on the host in, the same shape on the host out.
    ///
    /// # Errors
    /// As [`Engine::begin`].
    fn forward(&mut self, layer: &DecoderLayer, state: &Tensor, cut: &Cut) -> Result<Tensor>;

    /// Shows one sample's observation points to `observer`.
    ///
    /// # Errors
    /// As [`Engine::begin`].
    fn capture(
        &mut self,
        layer: &DecoderLayer,
        state: &Tensor,
        cut: &Cut,
        observer: &mut dyn Observer,
    ) -> Result<()>;

    /// Copies the norm and some rows of the head, in place of a layer or of other rows.
    ///
    /// # Errors
    /// As [`Engine::begin`].
    fn begin_head(&mut self, chunk: &HeadChunk<'_>) -> Result<()>;

    /// What one window's tokens have of those rows.
    ///
    /// # Errors
    /// As [`Engine::begin`].
    fn see(
        &mut self,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
        cut: &Cut,
    ) -> Result<Vec<Seen>>;

    /// Copies layers onto the device while others are in use; `None` where there is nothing to copy.
    fn copies_ahead(&self) -> Option<CopyAhead>;

    /// Sets the layer that was copied ahead aside for [`Engine::begin`], so that the next one can be.
    fn adopt(&mut self);

    /// Drops layer and head.
    fn drop_weights(&mut self);

    /// Waits for what is under way and gives unused memory back to the device, a layer that was copied ahead included; from now on
    /// none is.
    ///
    /// # Errors
    /// Where the device failed meanwhile.
    fn release(&mut self) -> Result<()>;

    /// Bytes per element of its arithmetic.
    fn element(&self) -> usize;

    /// As its driver calls it.
    fn name(&self) -> String;

    /// Its memory, by its own counters; `None` where it has none.
    fn memory(&self) -> Option<DeviceMemory>;
}

/// Copies a layer that has just been read, as it is; the engine finds it when the layer's turn has come.
pub type CopyAhead = Box<dyn Fn(&DecoderLayer) + Send + Sync>;

/// A device's memory, as its driver counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In use by this process's allocations.
    pub allocated: ByteSize,
    /// The most there was of that.
    pub peak_allocated: ByteSize,
    /// What the process's pool has from the device.
    pub reserved: ByteSize,
    /// The most there was of that.
    pub peak_reserved: ByteSize,
    /// Free on the device, whoever uses the rest.
    pub free: ByteSize,
    /// All of the device.
    pub total: ByteSize,
}

impl DeviceMemory {
    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            allocated: self.allocated + other.allocated,
            peak_allocated: self.peak_allocated + other.peak_allocated,
            reserved: self.reserved + other.reserved,
            peak_reserved: self.peak_reserved + other.peak_reserved,
            free: self.free + other.free,
            total: self.total + other.total,
        }
    }
}

/// A device without memory for a unit of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutOfMemory {
    /// The ledger refused the reservation.
    Ledger(Refused),
    /// The device refused an allocation.
    Device,
}

impl OutOfMemory {
    /// Classifies an error by its type and code, never by its text; `None` for every other error.
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
