//! Masks beside the model: every mask is written as it comes, and none is kept.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::prune::{PrunedMatrix, Watcher};
use super::targets::TargetPlan;
use crate::checkpoint::MaskWriter;
use crate::model::{LlamaConfig, Projection};
use crate::pruning::PruningMethod;
use crate::run::Events;

/// A watcher that saves the mask of every pruned matrix into one safetensors file.
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
        config: &LlamaConfig,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut matrices = BTreeMap::new();
        for layer in 0..config.num_hidden_layers {
            for projection in Projection::ALL {
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
            ("use_variant", targets.use_variant.to_string()),
        ];
        let metadata = metadata.map(|(key, text)| (key.to_string(), text)).into();
        let writer = MaskWriter::create(path, &matrices, metadata, events)?;
        Ok(Self { writer })
    }

    /// Reads the masks back and gives the file its name.
    ///
    /// # Errors
    /// Fails when a mask is missing or is not what was written.
    pub fn finish(self) -> Result<()> {
        self.writer.finish()
    }
}

impl Watcher for SaveMasks {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let name = matrix.projection.full_name(matrix.layer);
        self.writer.write(&name, matrix.mask.bits())
    }
}
