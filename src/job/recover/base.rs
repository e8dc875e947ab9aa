//! The frozen base of a training: the model as it is, or its matrices quantised once into a file in the offload folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use super::super::settled_run::{SettledRun, offload_folder};
use super::resolved::Recovery;
use crate::checkpoint::{CONFIG_FILE, Checkpoint, LayoutWriter, Published, WeightSource};
use crate::model::ModelConfig;
use crate::quantized::{FourBitFormat, PIECE, Quantization, QuantizePass, QuantizedSource, config};
use crate::recovery::{BaseLayers, BaseReader, MaskFile};
use crate::run::Events;

/// The frozen base.
pub(super) struct FrozenBase {
    source: Arc<dyn WeightSource>,
    masks: Option<Arc<MaskFile>>,
    /// The folder of a quantised copy, which goes with this value.
    folder: Option<PathBuf>,
}

impl Drop for FrozenBase {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // On Unix it is gone already. Elsewhere open files keep it until here.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

impl FrozenBase {
    /// Opens the base. `--base-quant` reads the whole model once, for its masks and its codes.
    ///
    /// # Errors
    /// Fails when a matrix cannot be read or the offload folder cannot be written.
    pub(super) fn open(job: &SettledRun, recovery: &Recovery, events: &dyn Events) -> Result<Self> {
        let model = &job.model;
        let Some(format) = recovery.settings.base_quant else {
            return Ok(Self { source: Arc::clone(&model.source), masks: None, folder: None });
        };
        let offload = offload_folder(&job.settings);
        std::fs::create_dir_all(&offload)
            .with_context(|| format!("creating the offload folder `{}`", offload.display()))?;
        let masks = MaskFile::of(&*model.source, &model.config, &recovery.part, &offload)?;
        let (process, rank) = (std::process::id(), job.ranks.rank());
        let folder = offload.join(format!("base-{}-{process}-{rank}", format.name()));
        let mut base = Self {
            source: Arc::clone(&model.source),
            masks: Some(Arc::new(masks)),
            folder: Some(folder.clone()),
        };
        base.source = quantised(job, format, &folder, events)?;
        // The open files stay readable, and nothing remains of a process that is killed.
        #[cfg(unix)]
        let _ = std::fs::remove_dir_all(&folder);
        Ok(base)
    }

    /// The layers of the base.
    pub(super) fn layers(
        &self,
        job: &SettledRun,
        recovery: &Recovery,
        resident: usize,
    ) -> BaseLayers {
        BaseLayers::new(
            BaseReader {
                source: Arc::clone(&self.source),
                config: Arc::clone(&job.model.config),
                part: recovery.part.clone(),
                masks: self.masks.clone(),
            },
            resident,
        )
        .reading_ahead(job.plan.memory_settings.prefetch)
    }
}

/// Writes the quantised copy of a model's layers, and opens it.
fn quantised(
    job: &SettledRun,
    format: FourBitFormat,
    folder: &Path,
    events: &dyn Events,
) -> Result<Arc<dyn WeightSource>> {
    let model = &job.model;
    let matrices: BTreeSet<String> = model.config.linear_names().collect();
    let checkpoint = &model.checkpoint;
    let quantization = Quantization { source: checkpoint, format, piece: PIECE };
    let mut pass = QuantizePass::new(quantization, &matrices, BTreeMap::new(), &mut (), events)?;
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).with_context(|| format!("creating `{}`", folder.display()))?;
    let writer = LayoutWriter::create(pass.layout()?, folder, &[&*model.folder], events)?;
    pass.run(&writer, &mut (), events)?;
    let mut json = ModelConfig::read_json(&model.folder)?;
    let dtype = matrices.first().and_then(|name| checkpoint.entry(name));
    let dtype = dtype.context("a model has matrices")?.dtype;
    json[config::KEY] = config::quantization_config(format, dtype, None);
    let published = Published {
        written: vec![(CONFIG_FILE, serde_json::to_vec(&json)?)],
        ..Published::default()
    };
    writer.finish(published, &[], events)?;
    let quantised = QuantizedSource::open(Arc::new(Checkpoint::open(folder)?))?;
    Ok(Arc::new(quantised))
}
