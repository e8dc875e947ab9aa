//! The record of a finished merge.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::job::MergeJob;
use super::outputs::MergeOutputs;
use super::published::widest;
use super::weighing::MeasuredTensors;
use crate::bytes::ByteSize;
use crate::job::device_records::DeviceRecords;
use crate::job::folder::state_file::StateFile;
use crate::job::recorder::Recorder;
use crate::linalg::kernel;
use crate::merging::methods::Scope;
use crate::merging::pass::MergeTensor;
use crate::merging::recipe::Parameter;
use crate::model::EMBEDDING;
use crate::run::manifest::{Arithmetic, Manifest, ModelReport, OutputReport, Perplexities, SCHEMA};
use crate::run::merging::{InputModel, MergeReport, MergedLayer, MergedTensor};
use crate::run::{Events, HiddenStatesStorage, Moment};

impl MergeJob {
    /// The merge, in the record.
    pub(super) fn report(
        &self,
        outputs: &MergeOutputs<'_>,
        weighed: &MeasuredTensors,
    ) -> Result<MergeReport> {
        let models: Result<Vec<InputModel>> = self
            .inputs
            .models
            .iter()
            .map(|model| {
                Ok(InputModel {
                    name: model.spec.to_string(),
                    is_base: self.recipe.base_model.as_ref() == Some(&model.spec),
                    path: model.folder.display().to_string(),
                    commit: model.hub_model.as_ref().map(|hub| hub.commit.clone()),
                    adapter: model.adapter.as_ref().map(|of| of.folder().display().to_string()),
                    fingerprint: model.fingerprint()?,
                })
            })
            .collect();
        let read = self.tensors.iter().map(|tensor| {
            let sources = tensor.recipe.sources.iter();
            sources.map(|source| self.inputs.stored_bytes(source)).sum::<u64>()
        });
        let mut counted: BTreeMap<&str, &MergedTensor> = outputs
            .state
            .merged_tensors()
            .iter()
            .map(|tensor| (tensor.name.as_str(), tensor))
            .collect();
        let tensors: Result<Vec<MergedTensor>> = self
            .tensors
            .iter()
            .map(|tensor| {
                let counted = counted.remove(tensor.recipe.name.as_str());
                let counted = counted
                    .with_context(|| format!("tensor `{}` was not merged", tensor.recipe.name));
                counted.cloned()
            })
            .collect();
        let tensors = tensors?;
        let layers = (0..self.num_hidden_layers).filter_map(|layer| {
            let of_layer = self.tensors.iter().zip(&tensors);
            let of_layer = of_layer.filter(|(tensor, _)| tensor.recipe.layer == Some(layer));
            // A run that an older program began has no distances of its first tensors.
            let lacks = |(tensor, merged): (&MergeTensor, &MergedTensor)| {
                tensor.recipe.sources.len() > 1 && merged.distances.is_empty()
            };
            if of_layer.clone().any(lacks) {
                return None;
            }
            MergedLayer::of(layer, self.inputs.models.len(), of_layer.map(|(_, merged)| merged))
        });
        let embedding = self.tensors.iter().find(|tensor| tensor.recipe.name == EMBEDDING);
        Ok(MergeReport {
            method: self.recipe.merge_method.clone(),
            semantics: self.semantics_name(),
            trim_scope: self.trim_scope_name(),
            seed: self.settings.seed,
            models: models?,
            recipe: self.recipe.to_yaml(str::to_string),
            num_hidden_layers: self.num_hidden_layers,
            vocab_size: embedding.and_then(|of| of.shape.first().copied()).unwrap_or(0),
            vocabulary: self.vocabulary.report.clone(),
            dtype: widest(&self.tensors).name().to_string(),
            left_out: self.left_out.clone(),
            bytes: [ByteSize(read.sum()), self.output_bytes()],
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
        let declaration = self.method.declaration();
        let trims =
            declaration.per_model.iter().any(|(parameter, _)| *parameter == Parameter::Density);
        let scope = match self.method.scope(&self.method_settings) {
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
        let donor = self.inputs.models.iter();
        let donor = donor.clone().find(|model| model.folder == self.donor.folder);
        let donor = donor.context("the donor is one of the models")?;
        let parameters = self.tensors.iter().map(|tensor| tensor.elements()).sum();
        let phases = self.clock.report();
        let mut manifest = Manifest {
            schema: SCHEMA,
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            command: "merge".to_string(),
            arguments: self.settings.arguments.clone(),
            settings: BTreeMap::new(),
            started_unix_seconds: self.started_unix_seconds,
            seconds: self.clock.seconds(),
            cells_at_once: None,
            sessions: Vec::new(),
            model: ModelReport {
                path: donor.folder.display().to_string(),
                id: donor.hub_model.as_ref().map(|hub| hub.id.clone()),
                revision: donor.hub_model.as_ref().map(|hub| hub.revision.clone()),
                commit: donor.hub_model.as_ref().map(|hub| hub.commit.clone()),
                identity: donor.checkpoint.identity(),
                config: self.donor.config.clone(),
                quantization: None,
                parameters,
                bytes: self.output_bytes(),
            },
            arithmetic: Arithmetic {
                device: super::devices::name(&self.plan),
                dtype: "f32".to_string(),
                kernel: "element by element".to_string(),
                cpu_features: kernel::cpu_features().into_iter().map(str::to_string).collect(),
                threads: self.threads,
            },
            layer_drop: None,
            width_drop: None,
            pruning: None,
            merge: Some(report),
            recovery: None,
            calibration: None,
            sparsity: None,
            layers: Vec::new(),
            perplexity: Perplexities::default(),
            evaluation: None,
            gate: None,
            plan: Some(self.plan.clone()),
            hidden_states: HiddenStatesStorage::Ram,
            peak_anonymous: phases.iter().filter_map(|phase| phase.peak_anonymous).max(),
            phases,
            memory: self.clock.samples(),
            output: Some(output),
            fallbacks: devices.fallbacks,
            devices: devices.devices,
            profile: None,
            masks: None,
            warnings: Vec::new(),
        };
        let texts = manifest.merge.iter().flat_map(|merge| &merge.perplexities);
        manifest.evaluation = texts.last().map(|row| row.text.clone());
        for exceeded in manifest.exceeded_plan() {
            recorder.warn(exceeded);
        }
        manifest.warnings = recorder.warnings();
        state.complete(&mut manifest);
        self.folder.record(&manifest)?;
        state.remove()?;
        Ok(manifest)
    }
}
