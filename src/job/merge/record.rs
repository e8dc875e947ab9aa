//! The record of a finished merge.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::donor::widest;
use super::job::MergeJob;
use super::outputs::MergeOutputs;
use super::weighing::MeasuredTensors;
use crate::bytes::ByteSize;
use crate::job::device_records::DeviceRecords;
use crate::job::folder::state_file::StateFile;
use crate::job::rank_reports;
use crate::job::record::{close, measured_by};
use crate::job::recorder::Recorder;
use crate::linalg::kernel;
use crate::merging::methods::Scope;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::Parameter;
use crate::model::EMBEDDING;
use crate::run::Moment;
use crate::run::fallback::FallbackOutcome;
use crate::run::manifest::{Arithmetic, Manifest, ModelReport, OutputReport};
use crate::run::merging::{InputModel, MergeReport, MergedLayer, MergedTensor};

impl MergeJob {
    /// The merge, in the record.
    pub(super) fn report(
        &self,
        outputs: &MergeOutputs<'_>,
        weighed: &MeasuredTensors,
    ) -> Result<MergeReport> {
        let merge = &self.merge;
        let models = merge.inputs.models.iter().map(|model| {
            Ok(InputModel {
                name: model.spec.to_string(),
                is_base: merge.recipe.base_model.as_ref() == Some(&model.spec),
                path: model.folder.display().to_string(),
                commit: model.hub_model.as_ref().map(|hub| hub.commit.clone()),
                adapter: model.adapter.as_ref().map(|of| of.folder().display().to_string()),
                fingerprint: model.fingerprint()?,
            })
        });
        let read = merge.tensors.iter().map(|tensor| merge.read_bytes(tensor));
        let counted = outputs.state.run().merged.iter();
        let counted: BTreeMap<&str, &MergedTensor> =
            counted.map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let tensors = merge.tensors.iter().map(|tensor| {
            let name = tensor.recipe.name.as_str();
            let counted =
                counted.get(name).with_context(|| format!("tensor `{name}` was not merged"));
            counted.map(|counted| (*counted).clone())
        });
        let tensors = tensors.collect::<Result<Vec<MergedTensor>>>()?;
        let layers = (0..merge.num_hidden_layers).filter_map(|layer| {
            let of_layer = merge.tensors.iter().zip(&tensors);
            let of_layer = of_layer.filter(|(tensor, _)| tensor.recipe.layer == Some(layer));
            // A run that an older program began has no distances of its first tensors.
            let lacks = |(tensor, merged): (&MergeTensor, &MergedTensor)| {
                tensor.recipe.sources.len() > 1 && merged.distances.is_empty()
            };
            if of_layer.clone().any(lacks) {
                return None;
            }
            MergedLayer::of(layer, merge.inputs.models.len(), of_layer.map(|(_, merged)| merged))
        });
        let embedding = merge.tensors.iter().find(|tensor| tensor.recipe.name == EMBEDDING);
        Ok(MergeReport {
            method: merge.recipe.merge_method.clone(),
            semantics: self.semantics_name(),
            trim_scope: self.trim_scope_name(),
            seed: self.settings.seed,
            models: models.collect::<Result<_>>()?,
            recipe: merge.recipe.to_yaml(str::to_string),
            num_hidden_layers: merge.num_hidden_layers,
            vocab_size: embedding.and_then(|of| of.shape.first().copied()).unwrap_or(0),
            vocabulary: merge.vocabulary.report.clone(),
            dtype: widest(&merge.tensors).name().to_string(),
            left_out: merge.left_out.clone(),
            bytes: [ByteSize(read.sum()), self.layout.bytes()],
            saliency: self.saliency.as_ref().map(|saliency| saliency.report(&weighed.used)),
            combined_adapter: None,
            perplexities: Vec::new(),
            layers: layers.collect(),
            tensors,
        })
    }

    fn semantics_name(&self) -> String {
        let name = serde_json::to_value(self.settings.semantics).ok();
        name.and_then(|name| Some(name.as_str()?.to_string())).unwrap_or_default()
    }

    /// The scope of trimming, for methods that trim by magnitude.
    fn trim_scope_name(&self) -> Option<String> {
        let declaration = self.merge.method.declaration();
        let trims =
            declaration.per_model.iter().any(|(parameter, _)| *parameter == Parameter::Density);
        let scope = match self.merge.method.scope(&self.method_settings) {
            // Activations weigh the columns of a row.
            _ if self.settings.saliency.is_some() => "row",
            Scope::Tensor => "tensor",
            Scope::Layer => "layer",
            Scope::Model => "model",
        };
        trims.then(|| scope.to_string())
    }

    /// Writes the record of a merge that ends now, and removes its state.
    pub(super) fn record(
        &self,
        report: MergeReport,
        devices: DeviceRecords,
        (state, output): (StateFile<'_>, OutputReport),
        recorder: &Recorder<'_>,
    ) -> Result<Manifest> {
        self.clock.mark(Moment::End, recorder);
        let donor = self.merge.donor();
        let hub = donor.hub_model.as_ref();
        // Some methods are computed by no GPU, and a GPU may have had no memory for any linear.
        let given: u64 = devices.devices.iter().map(|device| device.units).sum();
        let returned = devices.fallbacks.iter().filter(|fall| fall.outcome == FallbackOutcome::Cpu);
        let on_gpus = given > returned.count() as u64;
        let manifest = Manifest {
            command: "merge".to_string(),
            arguments: self.settings.arguments.clone(),
            started_unix_seconds: self.started_unix_seconds,
            model: ModelReport {
                path: donor.folder.display().to_string(),
                id: hub.map(|hub| hub.id.clone()),
                revision: hub.map(|hub| hub.revision.clone()),
                commit: hub.map(|hub| hub.commit.clone()),
                identity: donor.checkpoint.identity(),
                config: self.merge.donor.config.clone(),
                quantization: None,
                parameters: self.merge.tensors.iter().map(MergeTensor::elements).sum(),
                bytes: self.layout.bytes(),
            },
            arithmetic: Arithmetic {
                device: if on_gpus { self.plan.computing() } else { "cpu".to_string() },
                dtype: "f32".to_string(),
                kernel: "element by element".to_string(),
                cpu_features: kernel::cpu_features().into_iter().map(str::to_string).collect(),
                threads: self.threads,
            },
            evaluation: report.perplexities.last().map(|row| row.text.clone()),
            merge: Some(report),
            plan: Some(self.plan.clone()),
            output: Some(output),
            ranks: rank_reports::gather(&self.ranks, &self.clock, self.threads)?,
            fallbacks: devices.fallbacks,
            devices: devices.devices,
            ..measured_by(&self.clock)
        };
        close(manifest, &self.folder, Some(&state), recorder)
    }
}
