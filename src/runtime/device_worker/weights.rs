//! The weights on a device: a layer or rows of the head, copied matrix by matrix. A matrix that was changed is copied again, alone, or
//! gets the same zeros on the device.

use anyhow::{Context, Result};
use candle_core::Tensor;

use super::{DeviceWorker, Loaded};
use crate::bytes::ByteSize;
use crate::linalg::Weight;
use crate::linalg::select::Quota;
use crate::model::head::HeadChunk;
use crate::model::on_device::Tiling;
use crate::model::{DecoderLayer, LinearId};
use crate::runtime::engine::Engine;

impl DeviceWorker<'_> {
    /// Loads a layer unless it is loaded, and returns whether it is. A matrix that does not fit leaves the whole layer to the CPU.
    /// Fails on a device error that is not lack of memory.
    pub(in crate::runtime) fn load_layer(&mut self, layer: &DecoderLayer) -> Result<bool> {
        let wanted = Loaded::Layer(layer.index(), layer.revision());
        if self.loaded == wanted {
            return Ok(!self.is_paused);
        }
        if self.failed == wanted {
            return Ok(false);
        }
        if !self.has_begun(layer) {
            self.drop_weights();
            let norms = Tiling::norm_bytes(&self.config, self.engine.element());
            let unit = format!("model.layers.{} (norms)", layer.index());
            if !self.upload(&unit, norms, ByteSize::ZERO, |engine| engine.begin(layer))? {
                self.failed = wanted;
                return Ok(false);
            }
            self.begun = Some((layer.index(), layer.base_revision()));
        }
        (self.fallbacks_in_a_row, self.is_paused) = (0, false);
        for id in layer.linear_ids() {
            if !self.load_matrix(layer, id)? {
                self.failed = wanted;
                return Ok(false);
            }
        }
        (self.loaded, self.failed) = (wanted, Loaded::Nothing);
        Ok(true)
    }

    /// Returns whether the device has the norms of this layer, so that only matrices that were changed are copied.
    fn has_begun(&self, layer: &DecoderLayer) -> bool {
        self.begun == Some((layer.index(), layer.base_revision()))
    }

    /// Loads a matrix of the current layer unless its revision is loaded, and returns whether it is.
    fn load_matrix(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<bool> {
        let revision = layer.linear_revision(id);
        if self.matrices.get(&id) == Some(&revision) {
            return Ok(true);
        }
        let element = self.engine.element();
        let (rows, columns) = id.shape(&self.config);
        let bytes = ByteSize::of(rows * columns, element);
        let cast = match layer.linear(id).weight() {
            Weight::Held(matrix) => cast_bytes(rows * columns, matrix.dtype().bytes(), element),
            Weight::Compact(_) | Weight::AtRest(_) => ByteSize::ZERO,
        };
        self.loaded = Loaded::Nothing;
        if self.matrices.remove(&id).is_some() {
            // The engine frees the earlier revision first.
            self.ledger.give_back(bytes);
            self.loaded_bytes = ByteSize(self.loaded_bytes.0 - bytes.0);
        }
        let unit = format!("{} (upload)", id.full_name(layer.index()));
        if !self.upload(&unit, bytes, cast, |engine| engine.take_up(layer, id))? {
            return Ok(false);
        }
        self.matrices.insert(id, revision);
        Ok(true)
    }

    /// X·Wᵀ of a matrix of the loaded layer, in f32 on the device; `None` leaves the product to the CPU. A matrix that was changed is
    /// copied again, and need not be copied for the next pass.
    /// Fails on a device error that is not lack of memory.
    pub(in crate::runtime) fn product(
        &mut self,
        layer: &DecoderLayer,
        id: LinearId,
        rows: &[f32],
    ) -> Result<Option<Tensor>> {
        if !self.load_layer(layer)? {
            return Ok(None);
        }
        let (_, columns) = id.shape(&self.config);
        let bytes = Tiling::product_bytes(&self.config, id, rows.len() / columns.max(1));
        let unit = format!("{} (output error)", id.full_name(layer.index()));
        let product =
            self.attempt(&unit, false, &|_| bytes, &mut |engine, _| engine.product(id, rows))?;
        Ok(product.flatten())
    }

    /// Loads some rows of the head, as [`DeviceWorker::load_layer`] loads a layer.
    /// Fails on a device error that is not lack of memory.
    pub(in crate::runtime) fn load_head(&mut self, chunk: &HeadChunk<'_>) -> Result<bool> {
        let wanted = Loaded::Head(chunk.rows.start);
        if self.loaded == wanted {
            return Ok(!self.is_paused);
        }
        if self.failed == wanted {
            return Ok(false);
        }
        self.drop_weights();
        self.failed = wanted;
        // No layer follows the head.
        self.ledger.give_back(std::mem::take(&mut self.ahead));
        let bytes =
            ByteSize::of((chunk.rows.len() + 1) * self.config.hidden_size, self.engine.element());
        let stored = chunk.stored_bytes();
        let cast =
            cast_bytes(chunk.rows.len() * self.config.hidden_size, stored, self.engine.element());
        let taken =
            self.upload("lm_head (upload)", bytes, cast, |engine| engine.begin_head(chunk))?;
        if taken {
            (self.loaded, self.failed) = (wanted, Loaded::Nothing);
        }
        Ok(taken)
    }

    /// Drops the last layer. The layer that was copied ahead becomes the current layer.
    pub(in crate::runtime) fn begin_layer(&mut self) {
        self.drop_weights();
        self.engine.adopt();
        self.count_work();
    }

    /// Drops all weights. Pieces of work stay as small as they are: memory that was short once is likely to be short again.
    fn drop_weights(&mut self) {
        self.forget_weights();
        self.fallbacks_in_a_row = 0;
        self.is_paused = false;
    }

    fn forget_weights(&mut self) {
        self.engine.drop_weights();
        self.ledger.give_back(std::mem::take(&mut self.loaded_bytes));
        (self.loaded, self.begun) = (Loaded::Nothing, None);
        self.matrices.clear();
    }

    /// Copies weights that stay on the device. Where they do not fit, all weights of the layer are dropped.
    /// `cast` counts the bytes that exist only while the weights are cast.
    fn upload(
        &mut self,
        unit: &str,
        bytes: ByteSize,
        cast: ByteSize,
        mut copy: impl FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<bool> {
        let done = self.attempt(unit, false, &|_| bytes + cast, &mut |engine, _| copy(engine))?;
        if done.is_some() {
            // The attempt gave its reservation back, and the weights stay.
            self.ledger.keep(bytes);
            self.loaded_bytes = self.loaded_bytes + bytes;
            return Ok(true);
        }
        self.forget_weights();
        Ok(false)
    }

    /// Chooses the lowest scores |w_ij| · norm_j of a matrix of the loaded layer: the bits of a mask; `None` leaves the choice to the CPU.
    /// Fails on a device error that is not lack of memory.
    pub(in crate::runtime) fn choose_lowest(
        &mut self,
        layer: &DecoderLayer,
        id: LinearId,
        norms: &[f32],
        quota: Quota,
    ) -> Result<Option<Vec<u8>>> {
        if !self.load_layer(layer)? {
            return Ok(None);
        }
        let (rows, columns) = id.shape(&self.config);
        let bytes = Tiling::choice_bytes(rows, columns);
        let unit = format!("{} (score)", id.full_name(layer.index()));
        let chosen = self.attempt(&unit, false, &|_| bytes, &mut |engine, _| {
            engine.choose_lowest(id, norms, quota)
        })?;
        Ok(chosen.flatten())
    }

    /// Writes zeros for the weights chosen last, which are zero in `layer` already, so that the matrix need not be copied again.
    pub(in crate::runtime) fn zero_chosen(
        &mut self,
        layer: &DecoderLayer,
        id: LinearId,
    ) -> Result<()> {
        if !self.has_begun(layer) || !self.matrices.contains_key(&id) {
            return Ok(());
        }
        let zeroed = self.engine.zero_chosen(layer, id);
        if zeroed.with_context(|| format!("on {}", self.device))? {
            self.matrices.insert(id, layer.linear_revision(id));
            self.loaded = Loaded::Nothing;
        }
        Ok(())
    }
}

/// Returns the bytes of the stored weights that exist during a copy, where they are cast to the dtype of the arithmetic.
fn cast_bytes(elements: usize, stored: usize, element: usize) -> ByteSize {
    match stored == element {
        true => ByteSize::ZERO,
        false => ByteSize::of(elements, stored),
    }
}
