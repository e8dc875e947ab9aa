//! An editor that turns trained parameters into the layers of a checkpoint: it merges, writes and passes them on.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};

use super::parameters::TrainedPart;
use super::reuse::BufferReuse;
use super::store::ParameterStore;
use crate::linalg::{StoredDtype, StoredMatrix};
use crate::model::{DecoderLayer, ModelConfig};
use crate::pipeline::Output;
use crate::pruning::Mask;
use crate::recovery::optimizers::rounding::Bf16Rounding;
use crate::run::manifest::{LayerReport, MatrixReport};
use crate::run::recovery::BlockLoss;
use crate::run::{Event, Events};
use crate::runtime::{Compute, Editor};

/// Writes trained layers. The base of a layer is read again, because the sweep's own layer lacks the masks.
pub struct Merger<'a> {
    /// What was trained.
    pub part: &'a TrainedPart,
    /// The model's shape.
    pub config: &'a Arc<ModelConfig>,
    /// The values; the best values if they were kept.
    pub store: &'a ParameterStore,
    /// Reads the base of a layer.
    pub base: super::BaseLayers,
    /// The rounding to bf16.
    pub rounding: Bf16Rounding,
    /// The receivers of layers.
    pub output: LayerOutput<'a>,
}

impl Editor for Merger<'_> {
    fn edit(&mut self, layer: DecoderLayer, _: &mut Compute<'_>) -> Result<DecoderLayer> {
        let (start, index) = (Instant::now(), layer.index());
        let before = zeros(self.part, &layer)?;
        drop(layer);
        let base = self.base.take(index, None)?;
        let values = self.store.best_values(index)?;
        let merged = self
            .part
            .applied(self.config, base, &values, self.rounding, &mut BufferReuse::default())?
            .layer;
        self.output.finish(self.part, &merged, &before, (start, None))?;
        Ok(merged)
    }

    fn pass(&mut self, _: &DecoderLayer, _: &mut Compute<'_>) -> Result<()> {
        Ok(())
    }

    fn has_samples(&self) -> bool {
        false
    }
}

/// The number of zeros of each trained matrix of a layer in memory, as the sweep has read it.
pub(super) fn zeros(part: &TrainedPart, layer: &DecoderLayer) -> Result<Vec<u64>> {
    let count = |&id: &crate::model::LinearId| -> Result<u64> {
        let weight = layer.linear(id).weight().held();
        Ok(weight.context("a layer in memory")?.count_zeros())
    };
    part.ids.iter().map(count).collect()
}

/// The receivers of finished layers, and their reports.
pub struct LayerOutput<'a> {
    /// Writer and journal.
    pub output: Output<'a>,
    /// The reports of finished layers.
    pub layers: Vec<LayerReport>,
    /// The dtype of stored norms.
    pub norms: StoredDtype,
    /// The receiver of events.
    pub events: &'a dyn Events,
}

impl LayerOutput<'_> {
    /// Writes a trained layer, and records it.
    ///
    /// # Arguments
    /// * `before`: the zeros of each trained matrix before the training
    /// * `training`: the losses of a layer that was trained alone
    ///
    /// # Errors
    /// Fails when a file cannot be written, and when the run is asked to stop.
    pub fn finish(
        &mut self,
        part: &TrainedPart,
        layer: &DecoderLayer,
        before: &[u64],
        (start, training): (Instant, Option<BlockLoss>),
    ) -> Result<()> {
        let mut matrices = Vec::new();
        for (&id, &zeros_before) in part.ids.iter().zip(before) {
            let weight = layer.linear(id).weight().held();
            let weight = weight.context("a trained matrix is in memory")?;
            let mask = Mask::from_bits(weight.rows(), weight.columns(), weight.zeros_mask());
            matrices.push(MatrixReport {
                name: id.full_name(layer.index()),
                shape: [weight.rows(), weight.columns()],
                zeros_before,
                zeros: weight.count_zeros(),
                pruned: Some(mask.count()),
                mask_sha256: Some(mask.sha256()),
                relative_output_error: None,
            });
        }
        let sum = |of: &dyn Fn(&MatrixReport) -> u64| matrices.iter().map(of).sum::<u64>();
        let weights = sum(&|matrix| (matrix.shape[0] * matrix.shape[1]) as u64);
        let sparsity = sum(&|matrix| matrix.zeros) as f64 / weights as f64;
        self.layers.push(LayerReport {
            layer: layer.index(),
            seconds: start.elapsed().as_secs_f64(),
            sparsity,
            permutation: None,
            training,
            matrices,
        });
        if part.norms {
            let names = layer.spec().family.norm_names(layer.index());
            for ((_, name), (_, norm)) in names.zip(layer.norms()) {
                let values = norm.stored();
                let stored = StoredMatrix::from_f32(self.norms, 1, values.len(), values);
                self.output.write_tensor(&name, stored.as_bytes())?;
            }
        }
        self.output.save(layer, &part.ids, &self.layers)?;
        self.events.emit(Event::LayerPruned {
            layer: layer.index(),
            sparsity,
            cell: None,
            elapsed: start.elapsed(),
        });
        self.events.check()?;
        Ok(())
    }
}
