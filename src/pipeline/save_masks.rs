//! The file of masks: each mask is written as soon as it is known, and none is kept in memory.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::output::MaskObserver;
use super::output::PrunedMatrix;
use super::targets::TargetPlan;
use crate::bytes::ByteSize;
use crate::checkpoint::MaskWriter;
use crate::model::ModelConfig;
use crate::run::Events;

/// An observer that saves the masks of all pruned matrices into a safetensors file.
#[derive(Debug)]
pub struct SaveMasks {
    writer: MaskWriter,
}

impl SaveMasks {
    /// Bytes of the masks of every matrix that `targets` names.
    pub fn bytes(targets: &TargetPlan, config: &ModelConfig) -> ByteSize {
        let shapes = shapes(targets, config).into_values();
        let bytes = shapes.map(|[rows, columns]| (rows * columns).div_ceil(8) as u64);
        bytes.map(ByteSize).sum()
    }

    /// Allocates the file at `path` for every matrix that `targets` names. Its metadata are the `settings` by name.
    ///
    /// # Errors
    /// Fails when the disk refuses or has no room.
    pub fn create(
        path: &Path,
        settings: BTreeMap<String, String>,
        targets: &TargetPlan,
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<Self> {
        let writer = MaskWriter::create(path, &shapes(targets, config), settings, events)?;
        Ok(Self { writer })
    }

    /// Reopens the file of an earlier process at `path`, which holds the masks of `finished` (matrix → SHA-256 of its bits). Returns the
    /// names of damaged masks as well; `None` without such a file.
    pub fn reopen(
        path: &Path,
        settings: BTreeMap<String, String>,
        targets: &TargetPlan,
        config: &ModelConfig,
        finished: &BTreeMap<String, String>,
    ) -> Result<Option<(Self, Vec<String>)>> {
        let reopened = MaskWriter::reopen(path, &shapes(targets, config), settings, finished)?;
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

/// The matrices whose masks are saved, by name.
fn shapes(targets: &TargetPlan, config: &ModelConfig) -> BTreeMap<String, [usize; 2]> {
    let mut matrices = BTreeMap::new();
    for layer in 0..config.num_hidden_layers {
        for id in config.linears() {
            if targets.of(layer, id).is_some() {
                let (rows, columns) = id.shape(config);
                matrices.insert(id.full_name(layer), [rows, columns]);
            }
        }
    }
    matrices
}

impl MaskObserver for SaveMasks {
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()> {
        let name = matrix.id.full_name(matrix.layer);
        self.writer.write(&name, matrix.mask.bits())
    }

    fn layer_done(&mut self) -> Result<()> {
        self.writer.sync()
    }
}
