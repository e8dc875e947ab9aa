//! The file of masks: each mask is written as soon as it is known, and none is kept in memory.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::output::MaskObserver;
use super::prune::PrunedMatrix;
use super::targets::TargetPlan;
use crate::checkpoint::MaskWriter;
use crate::model::ModelConfig;
use crate::pruning::PruningMethod;
use crate::run::Events;

/// An observer that saves the mask of every pruned matrix into one safetensors file.
#[derive(Debug)]
pub struct SaveMasks {
    writer: MaskWriter,
}

impl SaveMasks {
    /// Allocates the file at `path` for every matrix that `targets` names.
    ///
    /// # Errors
    /// Fails when the disk refuses or has no room.
    pub fn create(
        path: &Path,
        method: &dyn PruningMethod,
        targets: &TargetPlan,
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<Self> {
        let (matrices, metadata) = layout(method, targets, config);
        let writer = MaskWriter::create(path, &matrices, metadata, events)?;
        Ok(Self { writer })
    }

    /// Reopens the file of an earlier process at `path`, which holds the masks of `finished` (matrix → SHA-256 of its bits). Returns the
    /// names of damaged masks as well; `None` without such a file.
    ///
    /// # Errors
    /// Fails when the file cannot be read.
    pub fn reopen(
        path: &Path,
        method: &dyn PruningMethod,
        targets: &TargetPlan,
        config: &ModelConfig,
        finished: &BTreeMap<String, String>,
    ) -> Result<Option<(Self, Vec<String>)>> {
        let (matrices, metadata) = layout(method, targets, config);
        let reopened = MaskWriter::reopen(path, &matrices, metadata, finished)?;
        Ok(reopened.map(|(writer, damaged)| (Self { writer }, damaged)))
    }

    /// Forgets masks that were written, so that they are written again.
    pub fn forget<'n>(&mut self, matrices: impl IntoIterator<Item = &'n str>) {
        self.writer.forget(matrices);
    }

    /// Reads the masks back and gives the file its name.
    ///
    /// # Errors
    /// Fails when a mask is missing or is not what was written.
    pub fn finish(self) -> Result<()> {
        self.writer.finish()
    }
}

/// The matrices whose masks are saved, and the metadata of the file.
fn layout(
    method: &dyn PruningMethod,
    targets: &TargetPlan,
    config: &ModelConfig,
) -> (BTreeMap<String, [usize; 2]>, BTreeMap<String, String>) {
    let mut matrices = BTreeMap::new();
    for layer in 0..config.num_hidden_layers {
        for projection in config.projections() {
            if targets.of(layer, projection).is_some() {
                let (rows, columns) = projection.shape(config);
                matrices.insert(projection.full_name(layer), [rows, columns]);
            }
        }
    }
    let metadata = [
        ("method", method.name().to_string()),
        ("sparsity_ratio", targets.sparsity_ratio.to_string()),
        ("sparsity_type", targets.pattern.to_string()),
    ];
    let metadata = metadata.map(|(key, text)| (key.to_string(), text)).into();
    (matrices, metadata)
}

impl MaskObserver for SaveMasks {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let name = matrix.projection.full_name(matrix.layer);
        self.writer.write(&name, matrix.mask.bits())
    }

    fn layer_done(&mut self) -> Result<()> {
        self.writer.sync()
    }
}
