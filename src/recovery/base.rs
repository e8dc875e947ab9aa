//! The frozen weights of layers, and the masks of the matrices that are trained.
//!
//! The next layer is read ahead while a layer is in use. The caller sets the order: forwards, then backwards. As many layers as the plan
//! has room for stay in memory. Where all kept weights are trained, the matrices stay at rest: their values are the parameters.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};

use super::parameters::{BaseLayer, TrainedForm, TrainedPart};
use crate::checkpoint::WeightSource;
use crate::disk::positioned;
use crate::model::{DecoderLayer, LinearId, ModelConfig};
use crate::runtime::spill_file;

/// The masks of a model in a file, taken before its weights were quantised.
#[derive(Debug)]
pub struct MaskFile {
    file: File,
    /// Offset and bytes of each matrix inside a layer.
    matrices: BTreeMap<LinearId, (u64, usize)>,
    layer_bytes: u64,
}

impl MaskFile {
    /// Writes the zeros of a checkpoint's matrices to a file in `folder`, which has no name and goes with the process.
    ///
    /// # Errors
    /// Fails when a matrix cannot be read or the file cannot be written.
    pub fn of(
        source: &dyn WeightSource,
        config: &ModelConfig,
        part: &TrainedPart,
        folder: &Path,
    ) -> Result<Self> {
        let file = spill_file(folder)?;
        let mut matrices = BTreeMap::new();
        let mut layer_bytes = 0;
        for &id in &part.ids {
            let bytes = id.elements(config).div_ceil(8);
            matrices.insert(id, (layer_bytes, bytes));
            layer_bytes += bytes as u64;
        }
        let masks = Self { file, matrices, layer_bytes };
        for index in 0..config.num_hidden_layers {
            for (&id, &(offset, _)) in &masks.matrices {
                let (rows, columns) = id.shape(config);
                let name = id.tensor_name(index);
                let weight = crate::model::read_matrix(source, &name, rows, columns)?;
                let at = index as u64 * masks.layer_bytes + offset;
                positioned::write_all_at(&masks.file, &weight.zeros_mask(), at)
                    .context("writing masks to the offload folder")?;
            }
        }
        Ok(masks)
    }

    fn read(&self, index: usize, id: LinearId) -> Result<Vec<u8>> {
        let (offset, bytes) = self.matrices.get(&id).context("a trained matrix")?;
        let mut mask = vec![0; *bytes];
        let at = index as u64 * self.layer_bytes + offset;
        positioned::read_exact_at(&self.file, &mut mask, at)
            .context("reading masks from the offload folder")?;
        Ok(mask)
    }
}

/// Everything that reads a layer; a thread has a copy.
#[derive(Clone)]
pub struct BaseReader {
    /// The frozen weights.
    pub source: Arc<dyn WeightSource>,
    /// The model's shape.
    pub config: Arc<ModelConfig>,
    /// The part of each layer that is trained.
    pub part: TrainedPart,
    /// The masks of the matrices; `None` takes the zeros of the source.
    pub masks: Option<Arc<MaskFile>>,
}

impl BaseReader {
    fn read(&self, index: usize) -> Result<BaseLayer> {
        let mut pruned = BTreeMap::new();
        let layer = match self.part.form {
            TrainedForm::Weights => {
                let mut layer = DecoderLayer::at_rest(&self.source, &self.config, index)?;
                for id in self.config.linears() {
                    if !self.part.ids.contains(&id) {
                        layer.linear_mut(id).weight_mut().hold()?;
                    }
                }
                layer
            }
            TrainedForm::Factors { .. } => {
                let layer = DecoderLayer::load(&*self.source, &self.config, index)?;
                for &id in &self.part.ids {
                    let mask = match &self.masks {
                        Some(masks) => masks.read(index, id)?,
                        None => {
                            let weight = layer.linear(id).weight().held();
                            weight.context("a layer in memory")?.zeros_mask()
                        }
                    };
                    pruned.insert(id, mask.into());
                }
                layer
            }
        };
        Ok(BaseLayer { layer, pruned })
    }
}

/// The base of all layers.
pub struct BaseLayers {
    reader: BaseReader,
    reads_ahead: bool,
    /// The first layers, as many as may stay.
    resident: Vec<Option<BaseLayer>>,
    ahead: Option<(usize, JoinHandle<Result<BaseLayer>>)>,
}

impl BaseLayers {
    /// Opens the layers of a source, of which `resident` stay in memory once they are read.
    pub fn new(reader: BaseReader, resident: usize) -> Self {
        let resident = vec![None; resident.min(reader.config.num_hidden_layers)];
        Self { reader, reads_ahead: false, resident, ahead: None }
    }

    /// Reads the next layer while a layer is in use, if it `reads_ahead`.
    #[must_use]
    pub fn reading_ahead(self, reads_ahead: bool) -> Self {
        Self { reads_ahead, ..self }
    }

    /// Returns the base of a layer, and begins to read `next`, unless it is in memory.
    ///
    /// # Errors
    /// Fails when a tensor cannot be read.
    pub fn take(&mut self, index: usize, next: Option<usize>) -> Result<BaseLayer> {
        let stays = self.resident.get(index).cloned().flatten();
        let layer = match stays {
            Some(layer) => layer,
            None => self.read(index)?,
        };
        if let Some(next) = next.filter(|_| self.reads_ahead) {
            self.read_ahead(next);
        }
        Ok(layer)
    }

    /// Reads a layer that is not resident, unless it was read ahead.
    fn read(&mut self, index: usize) -> Result<BaseLayer> {
        let layer = match self.ahead.take() {
            Some((ahead, reading)) if ahead == index => {
                reading.join().map_err(|_| anyhow!("the reader of layer {index} panicked"))?
            }
            _ => self.reader.read(index),
        };
        let layer = layer.with_context(|| format!("in model.layers.{index}"))?;
        if let Some(place) = self.resident.get_mut(index) {
            *place = Some(layer.clone());
        }
        Ok(layer)
    }

    fn read_ahead(&mut self, index: usize) {
        let is_resident = matches!(self.resident.get(index), Some(Some(_)));
        let is_ahead = matches!(self.ahead, Some((ahead, _)) if ahead == index);
        if is_resident || is_ahead {
            return;
        }
        let reader = self.reader.clone();
        let reading = std::thread::Builder::new()
            .name("reading ahead".to_string())
            .spawn(move || reader.read(index));
        // If the system refuses a thread, `take` reads the layer.
        self.ahead = reading.ok().map(|reading| (index, reading));
    }
}
