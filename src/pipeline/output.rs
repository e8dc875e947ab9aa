//! The output of a pruning run: written matrices, observers of masks, and the journal of finished layers.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::expected::expected_of;
use crate::checkpoint::CheckpointWriter;
use crate::linalg::StoredMatrix;
use crate::model::{DecoderLayer, LinearId};
use crate::pruning::{Mask, Pattern, Statistics, Target};
use crate::run::manifest::LayerReport;

/// A matrix at the moment its mask is known and its zeros are not yet written.
#[derive(Clone, Copy)]
pub struct PrunedMatrix<'a> {
    /// The decoder layer.
    pub layer: usize,
    /// The matrix within the layer.
    pub id: LinearId,
    /// Its weights, including the weights to remove.
    pub weight: &'a StoredMatrix,
    /// Statistics of its input; `None` for methods that need none.
    pub statistics: Option<&'a Statistics>,
    /// The ratio and the pattern.
    pub target: Target,
    /// The weights to remove.
    pub mask: &'a Mask,
}

/// Sees every pruned matrix: writes masks, or compares them in tests.
pub trait MaskObserver: Send {
    /// Called once per matrix, in order.
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()>;

    /// Called after the last matrix of a layer, before the layer is recorded as finished; perhaps on a separate thread.
    fn layer_done(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Records finished layers, so that a later process can continue.
pub trait LayerJournal: Send {
    /// Called when the tensors and masks of all these layers are on the disk; `tensors` has the SHA-256 of each, in hex.
    fn layer_done(
        &mut self,
        layers: &[LayerReport],
        tensors: BTreeMap<String, String>,
    ) -> Result<()>;
}

/// The receivers of pruned layers.
#[derive(Default)]
pub struct Output<'a> {
    /// Writer of pruned matrices; `None` when no model is saved.
    pub sink: Option<&'a mut CheckpointWriter>,
    /// Journal of finished layers; `None` if a later process could not continue.
    pub journal: Option<&'a mut dyn LayerJournal>,
    /// Observers of every matrix, called in this order.
    pub observers: Vec<&'a mut dyn MaskObserver>,
}

impl Output<'_> {
    /// Shows a pruned matrix to the observers.
    pub(super) fn show(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let mut observers = self.observers.iter_mut();
        observers.try_for_each(|observer| observer.matrix(matrix))
    }

    /// Writes a matrix, which is in memory.
    pub(super) fn write(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<()> {
        let Some(sink) = &mut self.sink else {
            return Ok(());
        };
        let name = id.tensor_name(layer.index());
        let weight = layer.linear(id).weight().held();
        let weight = weight.with_context(|| format!("`{name}` is written from memory"))?;
        sink.write(&name, weight.as_bytes()).with_context(|| format!("writing `{name}`"))
    }

    /// Writes a whole tensor.
    ///
    /// # Errors
    /// Fails when the disk refuses.
    pub fn write_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        match &mut self.sink {
            Some(sink) => (sink.write(name, bytes)).with_context(|| format!("writing `{name}`")),
            None => Ok(()),
        }
    }

    /// Writes vectors of the source in a new order: `order[new] = old`.
    pub(super) fn write_permuted(&mut self, names: &[String], order: &[usize]) -> Result<()> {
        let Some(sink) = &mut self.sink else {
            return Ok(());
        };
        names.iter().try_for_each(|name| {
            let written = sink.write_permuted(name, order);
            written.with_context(|| format!("writing `{name}`"))
        })
    }

    /// Writes matrices of a layer, waits for the disk, then records the layer as finished. `layers` holds the reports up to this layer.
    ///
    /// # Errors
    /// Fails when the disk refuses.
    pub fn save(
        &mut self,
        layer: &DecoderLayer,
        unwritten: &[LinearId],
        layers: &[LayerReport],
    ) -> Result<()> {
        for &id in unwritten {
            self.write(layer, id)?;
        }
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        for observer in &mut self.observers {
            observer.layer_done()?;
        }
        match &mut self.sink {
            Some(sink) => journal.layer_done(layers, sink.sync()?),
            None => Ok(()),
        }
    }

    /// Does parts of the output that do not depend on later layers, until `is_over`: copies untouched tensors, then checks whole files.
    /// `layers` holds the reports up to this layer.
    pub(super) fn go_on_until(
        &mut self,
        is_over: &dyn Fn() -> bool,
        layers: &[LayerReport],
        pattern: Pattern,
    ) -> Result<()> {
        let Some(sink) = &mut self.sink else {
            return Ok(());
        };
        sink.copy_untouched_until(is_over)?;
        sink.check_finished_until(&expected_of(layers, pattern), is_over)
    }
}
