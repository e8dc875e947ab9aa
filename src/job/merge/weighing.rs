//! Tensors with the statistics of their inputs: what the method weighs with, and what the output errors are computed with.
//!
//! A stack may move layers: a tensor has the statistics of the layer that it comes from.

use std::sync::Arc;

use anyhow::Result;

use super::job::MergeJob;
use super::resolved::ResolvedMerge;
use super::saliency::Saliency;
use super::saliency_file::{MeasuredModel, Measurement, SaliencyFile};
use crate::failure::Failure;
use crate::job::device_records::DeviceRecords;
use crate::merging::pass::MergeTensor;
use crate::model::{InputId, InputMap, ModelConfig};
use crate::run::Events;
use crate::runtime::Reporter;
use crate::settings::SaliencySource;

/// The statistics of a model, shared by the tensors that use them.
struct Shared<'a> {
    measurement: &'a Measurement,
    config: &'a ModelConfig,
    /// a_j² by layer and input.
    squares: Vec<InputMap<Arc<[f32]>>>,
}

impl<'a> Shared<'a> {
    fn new(model: &'a MeasuredModel, config: &'a ModelConfig) -> Self {
        let layers = model.layers.iter();
        let squares = layers.map(|inputs| inputs.clone().map(|_, means| means.into()));
        Self { measurement: &model.measurement, config, squares: squares.collect() }
    }

    /// Layer and input of a linear's weight, by its name.
    fn input_of(&self, tensor: &str) -> Option<(usize, InputId)> {
        let (layer, rest) = tensor.strip_prefix("model.layers.")?.split_once('.')?;
        let module = rest.strip_suffix(".weight")?;
        let mut ids = self.config.linears();
        let id = ids.find(|id| id.name() == module)?;
        Some((layer.parse().ok()?, id.input()))
    }

    fn squares_of(&self, tensor: &str) -> Option<Arc<[f32]>> {
        let (layer, input) = self.input_of(tensor)?;
        Some(Arc::clone(&self.squares.get(layer)?[input]))
    }
}

/// The tensors of a merge with their statistics, and what measuring took.
pub(super) struct MeasuredTensors {
    pub(super) tensors: Vec<MergeTensor>,
    /// The statistics that were used, the base's first.
    pub(super) used: Vec<Measurement>,
    pub(super) devices: DeviceRecords,
}

impl MergeJob {
    /// Measures the statistics that are missing, and gives them to the tensors.
    ///
    /// # Errors
    /// Fails as [`Saliency::measure`], and for statistics that do not fit.
    pub(super) fn weigh(&self, events: &dyn Events) -> Result<MeasuredTensors> {
        let (mut tensors, mut used) = (self.merge.tensors.clone(), Vec::new());
        let mut devices = DeviceRecords::default();
        if let Some(saliency) = &self.saliency {
            let file = saliency.measure(&mut devices, Reporter { clock: &self.clock, events })?;
            used = saliency.weigh(&mut tensors, &file, &self.merge)?;
        }
        Ok(MeasuredTensors { tensors, used, devices })
    }
}

impl Saliency {
    /// Gives every linear its statistics, and returns the measurements that were used, the base's first.
    ///
    /// Output errors use the expert's own statistics where the file has them, else the base's.
    ///
    /// # Errors
    /// Fails for statistics whose width differs from a tensor's.
    pub(super) fn weigh(
        &self,
        tensors: &mut [MergeTensor],
        file: &SaliencyFile,
        merge: &ResolvedMerge,
    ) -> Result<Vec<Measurement>> {
        let mut models = Vec::new();
        for (input, config) in merge.inputs.models.iter().zip(&self.configs) {
            let measured = file.complete(&input.fingerprint()?);
            models.push(measured.map(|model| Shared::new(model, config)));
        }
        let base = merge.base();
        let of_base = base.and_then(|base| models[base].as_ref());
        for tensor in tensors {
            let base_tensor = tensor.recipe.base.map(|at| tensor.recipe.sources[at].tensor.clone());
            for (at, source) in tensor.recipe.sources.iter().enumerate() {
                if Some(at) == tensor.recipe.base {
                    continue;
                }
                let own = models[source.model].as_ref();
                let own = own.and_then(|model| model.squares_of(&source.tensor));
                let name = base_tensor.as_ref().unwrap_or(&source.tensor);
                let bases = of_base.and_then(|model| model.squares_of(name));
                tensor.squares[at] = match self.source {
                    None => None,
                    Some(SaliencySource::Base) => bases.clone(),
                    Some(SaliencySource::Experts) => own.clone(),
                };
                tensor.observed[at] = own.or(bases);
            }
            check_widths(tensor)?;
        }
        let experts = models.iter().enumerate().filter(|(at, _)| Some(*at) != base);
        let experts = experts.filter_map(|(_, model)| model.as_ref());
        Ok(of_base.into_iter().chain(experts).map(|model| model.measurement.clone()).collect())
    }
}

/// Refuses vectors that are not as long as the rows of the tensor.
fn check_widths(tensor: &MergeTensor) -> Result<()> {
    let columns = tensor.matrix().1;
    let mut all = tensor.observed.iter().chain(&tensor.squares).flatten();
    match all.find(|of| of.len() != columns) {
        None => Ok(()),
        Some(other) => {
            Err(Failure::new(format!("the statistics of `{}` do not fit", tensor.recipe.name))
                .detail(format!("they have {} columns, the tensor has {columns}", other.len()))
                .into())
        }
    }
}
