//! Tensors with the statistics of their inputs: what the method weighs with, what the output errors are computed with, and AIM's factors.
//!
//! ```text
//! AIM: W' = W_0 + (W − W_0)_ij · f_j        f_j = 1 − (m_j / max_j m_j)·(1 − ω)        m_j: mean |x_j| under the base model
//! ```
//!
//! The maximum is over the columns of one input, as in the authors' code. A column that is never active keeps its difference. Only the
//! linears of layers are damped: embedding, head and norms have no statistics here. The authors damp head and norms as well.
//! Source: A. H. Nobari et al., "Activation-informed merging of large language models" (2025, arXiv:2502.02421), equation 3.
//!
//! A tensor that comes from another layer of its source has the statistics of that layer.

use std::sync::Arc;

use anyhow::Result;

use super::devices::DeviceRecords;
use super::measuring::MeasuredStatistics;
use super::models::InputModels;
use super::saliency::{Saliency, base_of};
use super::saliency_file::{MeasuredModel, Measurement};
use super::settle::MergeJob;
use crate::failure::Failure;
use crate::merge::MergeTensor;
use crate::model::ModelConfig;
use crate::run::Events;
use crate::settings::SaliencySource;

/// The statistics of one model, shared by the tensors that use them.
struct Shared<'a> {
    measurement: &'a Measurement,
    config: &'a ModelConfig,
    /// a_j² by layer and input.
    squares: Vec<[Arc<[f32]>; 4]>,
    /// m_j by layer and input; empty without.
    factors: Vec<[Arc<[f32]>; 4]>,
}

impl<'a> Shared<'a> {
    /// `omega` of AIM, for the base model.
    fn new(model: &'a MeasuredModel, config: &'a ModelConfig, omega: Option<f64>) -> Self {
        let layers = model.layers.iter();
        let squares = layers
            .clone()
            .map(|inputs| inputs.each_ref().map(|means| means.squares.clone().into()));
        let factors = layers.filter_map(|inputs| {
            let omega = omega?;
            let inputs = inputs.each_ref();
            Some(inputs.map(|means| {
                let magnitudes = means.magnitudes.as_deref().unwrap_or_default();
                factors(magnitudes, omega).into()
            }))
        });
        Self {
            measurement: &model.measurement,
            config,
            squares: squares.collect(),
            factors: factors.collect(),
        }
    }

    /// Layer and input of a linear's weight, by its name.
    fn input_of(&self, tensor: &str) -> Option<(usize, usize)> {
        let (layer, rest) = tensor.strip_prefix("model.layers.")?.split_once('.')?;
        let module = rest.strip_suffix(".weight")?;
        let mut projections = self.config.projections();
        let projection = projections.find(|projection| projection.name() == module)?;
        Some((layer.parse().ok()?, projection.observed_at() as usize))
    }

    fn squares_of(&self, tensor: &str) -> Option<Arc<[f32]>> {
        let (layer, input) = self.input_of(tensor)?;
        Some(Arc::clone(&self.squares.get(layer)?[input]))
    }

    fn factors_of(&self, tensor: &str) -> Option<Arc<[f32]>> {
        let (layer, input) = self.input_of(tensor)?;
        Some(Arc::clone(&self.factors.get(layer)?[input]))
    }
}

/// f_j of AIM.
fn factors(magnitudes: &[f32], omega: f64) -> Vec<f32> {
    let largest = magnitudes.iter().copied().fold(0.0f32, f32::max);
    let factor = |&mean: &f32| {
        let importance = match largest > 0.0 {
            true => f64::from(mean) / f64::from(largest),
            false => 0.0,
        };
        (1.0 - importance * (1.0 - omega)) as f32
    };
    magnitudes.iter().map(factor).collect()
}

/// The tensors of a merge with their statistics, and what measuring took.
pub(super) struct Weighed {
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
    pub(super) fn weigh(&self, events: &dyn Events) -> Result<Weighed> {
        let mut weighed = Weighed {
            tensors: self.tensors.clone(),
            used: Vec::new(),
            devices: DeviceRecords::default(),
        };
        if let Some(saliency) = &self.saliency {
            let activations = saliency.measure(&self.clock, events)?;
            let base = base_of(&self.recipe, &self.inputs);
            weighed.used =
                saliency.weigh(&mut weighed.tensors, &activations, &self.inputs, base)?;
            weighed.devices = activations.devices;
        }
        Ok(weighed)
    }
}

impl Saliency {
    /// Gives every linear its statistics, and returns the measurements that were used, the base's first.
    ///
    /// Output errors use the expert's own statistics where the file has them, else the base's.
    ///
    /// # Errors
    /// Fails for `--aim` where a linear has no base to differ from, and for statistics of another width than a tensor.
    pub(super) fn weigh(
        &self,
        tensors: &mut [MergeTensor],
        activations: &MeasuredStatistics,
        inputs: &InputModels,
        base: Option<usize>,
    ) -> Result<Vec<Measurement>> {
        let mut models = Vec::new();
        for (at, (input, config)) in inputs.models.iter().zip(&self.configs).enumerate() {
            let measured = activations.file.complete(&input.fingerprint()?);
            let omega = self.aim.filter(|_| Some(at) == base);
            models.push(measured.map(|model| Shared::new(model, config, omega)));
        }
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
            if let (Some(_), Some(model)) = (self.aim, of_base) {
                let name = base_tensor.as_ref().unwrap_or(&tensor.recipe.name);
                tensor.damping = model.factors_of(name);
                check_base(tensor)?;
            }
            check_widths(tensor)?;
        }
        let used = std::iter::once(of_base).chain(
            models
                .iter()
                .enumerate()
                .filter(|(at, _)| Some(*at) != base)
                .map(|(_, model)| model.as_ref()),
        );
        Ok(used.flatten().map(|model| model.measurement.clone()).collect())
    }
}

/// Refuses a factor without a base.
fn check_base(tensor: &MergeTensor) -> Result<()> {
    if tensor.damping.is_none() || tensor.recipe.base.is_some() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "--aim damps differences from the base model, and `{}` is merged without it",
        tensor.recipe.name
    ))
    .hint("use a method that subtracts the base, such as task_arithmetic")
    .into())
}

/// Refuses vectors of another length than the rows of the tensor.
fn check_widths(tensor: &MergeTensor) -> Result<()> {
    let columns = tensor.matrix().1;
    let all = tensor.observed.iter().chain(&tensor.squares).flatten();
    match all.chain(&tensor.damping).find(|of| of.len() != columns) {
        None => Ok(()),
        Some(other) => {
            Err(Failure::new(format!("the statistics of `{}` do not fit", tensor.recipe.name))
                .detail(format!("they have {} columns, the tensor has {columns}", other.len()))
                .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aim_damps_a_column_by_its_share_of_the_most_active_one() {
        // 1 - (m / 4)·(1 - 0.4).
        assert_eq!(factors(&[4.0, 2.0, 0.0], 0.4), [0.4, 0.7, 1.0]);
        assert_eq!(factors(&[4.0, 2.0, 0.0], 1.0), [1.0; 3]);
        assert_eq!(factors(&[0.0, 0.0], 0.4), [1.0; 2], "nothing is active");
    }
}
