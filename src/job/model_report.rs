//! Facts of a model and of its arithmetic, for records and comparisons of runs.

use std::sync::Arc;

use anyhow::Result;

use super::opened::OpenedModel;
use crate::checkpoint::Checkpoint;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, kernel};
use crate::packed::{PackedSource, PackedValues};
use crate::run::Plan;
use crate::run::manifest::{Arithmetic, ModelReport};
use crate::settings::DeviceSettings;

impl OpenedModel {
    /// The checkpoint, as the record names it.
    pub(super) fn report(&self) -> Result<ModelReport> {
        let hub = self.hub_model.as_ref();
        let (checkpoint, config) = match &self.part_of {
            Some(whole) => (&whole.checkpoint, &whole.config),
            None => (&self.checkpoint, &self.config),
        };
        Ok(ModelReport {
            path: self.folder.display().to_string(),
            id: hub.map(|model| model.id.clone()),
            revision: hub.map(|model| model.revision.clone()),
            commit: hub.map(|model| model.commit.clone()),
            identity: checkpoint.identity(),
            config: serde_json::to_value(&**config)?,
            quantization: self.quantization(),
            parameters: match &self.quantized {
                Some(quantized) => quantized.tensors().map(|entry| entry.elements() as u64).sum(),
                None => parameters(checkpoint),
            },
            bytes: checkpoint.total_bytes(),
        })
    }
}

impl OpenedModel {
    /// The name by which peft finds the model as a base: its id of the hub, or its folder as an absolute path.
    pub(super) fn base_name(&self) -> String {
        match &self.hub_model {
            Some(model) => model.id.clone(),
            None => {
                let folder = self.folder.canonicalize();
                folder.unwrap_or_else(|_| self.folder.clone()).display().to_string()
            }
        }
    }

    /// The format that rounded the weights; `None` for weights as they were trained.
    fn quantization(&self) -> Option<String> {
        let is_rounded = |packed: &Arc<PackedSource>| packed.values() == PackedValues::Int8;
        match (&self.quantized, &self.packed) {
            (Some(_), _) => Some("nf4".to_string()),
            (None, Some(packed)) if is_rounded(packed) => Some("int8".to_string()),
            (None, _) => None,
        }
    }
}

/// Weights in all tensors.
pub(super) fn parameters(checkpoint: &Checkpoint) -> u64 {
    let tensors = checkpoint.tensors();
    tensors.map(|tensor| tensor.elements() as u64).sum()
}

/// Returns the arithmetic of the devices that compute layers.
pub(super) fn arithmetic(model: &OpenedModel, device: &DeviceSettings, plan: &Plan) -> Arithmetic {
    let computing = plan.computing();
    let on_gpus = computing != "cpu" && device.simulate.is_none();
    let (dtype, kernel) = match model.products {
        _ if on_gpus => (model.gpu_dtype.name(), "cuBLAS".to_string()),
        Products::F32 => ("f32", Kernel::Fused.name().to_string()),
        Products::Split => ("f32", Kernel::split(model.dtype()).name().to_string()),
        Products::Bf16(kernel) | Products::AllBf16(kernel) => ("bf16", kernel.name().to_string()),
    };
    Arithmetic {
        device: computing,
        dtype: dtype.to_string(),
        kernel,
        cpu_features: kernel::cpu_features().into_iter().map(str::to_string).collect(),
        threads: model.threads,
    }
}
