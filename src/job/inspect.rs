//! `prune inspect`: the sparsity of a checkpoint, and its comparison with the dense model.

use std::path::Path;

use anyhow::Result;

use super::earlier_pruning;
use super::located::{self, OpenedWeights};
use super::model_report::parameters;
use super::zeros_gain;
use crate::bytes::{ByteSize, LARGEST_RECORD, read_whole};
use crate::checkpoint::MERGING_FILE;
use crate::eval::{self, Inspected};
use crate::failure::Failure;
use crate::input::{self, Expected};
use crate::model::{KeptLayers, ModelConfig, stored_dtypes};
use crate::pruning::{self, PruningMethod};
use crate::run::inspection::{InspectedLayer, PackedStorage};
use crate::run::manifest::{MANIFEST_FILE, PruningReport};
use crate::run::merging::MergeReport;
use crate::run::pruning_record::PRUNING_FILE;
use crate::run::{Events, Inspection, Manifest, PruningRecord};

/// Memory for the measurement of the gain.
const MEASURING: ByteSize = ByteSize(192 << 20);

/// Measures the sparsity of the checkpoint in `folder`, and compares it with the dense model `against`.
pub fn inspect(folder: &Path, against: Option<&Path>, events: &dyn Events) -> Result<Inspection> {
    let opened = open(folder, events)?;
    let source = opened.source();
    let OpenedWeights { checkpoint: model, quantized, packed } = opened;
    let config = config_of(folder)?;
    if let (Some(_), Some(dense)) = (&quantized, against) {
        return Err(Failure::new(format!("`{}` is quantised to 4 bits", folder.display()))
            .detail(format!("--against `{}` compares weights bit for bit", dense.display()))
            .hint("leave --against out, or compare the checkpoint that was quantised")
            .into());
    }
    let inspected = match &quantized {
        Some(quantized) => Inspected {
            checkpoint: &model,
            source: &**quantized,
            tensors: quantized.tensors().collect(),
        },
        None => Inspected::whole(&model),
    };
    let dense = against.map(|against| Ok::<_, anyhow::Error>(open(against, events)?.checkpoint));
    let dense = dense.transpose()?;
    let found = earlier_pruning::read_record(folder);
    let record = found.as_ref().and_then(|found| found.as_ref().ok());
    let kept = dense.as_ref().zip(record);
    let kept = kept.and_then(|(dense, record)| kept_layers(record, &config, dense.folder()));
    let part = match (&dense, &kept) {
        (Some(dense), Some((kept, _))) => Some(dense.view(&|name| kept.rename(name))?),
        _ => None,
    };
    let mut inspection =
        eval::inspect(&inspected, &config, part.as_ref().or(dense.as_deref()), events)?;
    if let Some((comparison, dense)) = inspection.against.as_mut().zip(dense.as_ref()) {
        comparison.dense_parameters = parameters(dense);
        comparison.dense_bytes = dense.total_bytes();
        comparison.layers_dropped = kept.map_or_else(Vec::new, |(_, dropped)| dropped);
        comparison.width_dropped = record.and_then(|record| width_dropped(record, &config));
        // The record of the run comes first: it stands beside the folder of its model.
        let pruning = match run_record(folder) {
            Some(manifest) => manifest.pruning,
            None => record.map(|record| record.pruning.clone()),
        };
        let changes = |pruning: &PruningReport| {
            pruning.changes_weights
                && (!moves_only(pruning) || !attention_differs(&inspection.layers))
        };
        comparison.permuted = pruning.as_ref().is_some_and(|of| of.permutes_channels);
        comparison.changed_by = pruning.filter(changes).map(|pruning| pruning.method);
        comparison.merged_by = merge(folder, events);
    }
    if quantized.is_none() && inspection.problems.is_empty() && inspection.sparsity.zeros > 0 {
        let dtype = stored_dtypes(&*source, &config).layers;
        // A model with other faults than the inspection found gains nothing.
        inspection.zeros_gain =
            zeros_gain::measured(&*source, &config, dtype, MEASURING).ok().flatten();
    }
    if let Some(packed) = packed {
        let stored = packed.base().total_bytes();
        let matrices = packed.matrices();
        inspection.packed = Some(PackedStorage {
            format: packed.format().to_string(),
            values: packed.values().name().to_string(),
            matrices: matrices.len(),
            dense_bytes: std::mem::replace(&mut inspection.bytes, stored),
        });
    }
    inspection.pruning = found.and_then(|found| pruning_record(found, &inspection, events));
    Ok(inspection)
}

/// The layers of the dense model that this model keeps, and the dropped layers, if the record beside the weights names layers that
/// fit both models.
fn kept_layers(
    record: &PruningRecord,
    config: &ModelConfig,
    dense: &Path,
) -> Option<(KeptLayers, Vec<usize>)> {
    let dropped = record.layer_drop.as_ref()?.dropped.clone();
    let layers = ModelConfig::load(dense).ok()?.num_hidden_layers;
    let kept = KeptLayers::without(layers, &dropped);
    let fits = kept.layers().len() == config.num_hidden_layers && !dropped.is_empty();
    fits.then_some((kept, dropped))
}

/// The width that was dropped, in words, if the record beside the weights has the sizes of the model.
fn width_dropped(record: &PruningRecord, config: &ModelConfig) -> Option<String> {
    let drop = record.width_drop.as_ref()?;
    let sizes = (drop.intermediate_size[1], drop.num_key_value_heads[1]);
    let fits = sizes == (config.intermediate_size, config.num_key_value_heads);
    fits.then(|| drop.in_words())
}

/// The record beside the weights, if it is valid and counts as many zeros as the weights have.
fn pruning_record(
    found: Result<PruningRecord, String>,
    inspection: &Inspection,
    events: &dyn Events,
) -> Option<PruningRecord> {
    let zeros = inspection.sparsity.zeros;
    match found {
        Ok(record) if record.sparsity.zeros == zeros => Some(record),
        Ok(record) => {
            events.warn(format!(
                "{PRUNING_FILE} is of another model: it counts {} zeros, and here are {zeros}",
                record.sparsity.zeros
            ));
            None
        }
        Err(why) => {
            events.warn(format!("{PRUNING_FILE} is passed over: {why}"));
            None
        }
    }
}

/// Returns whether a run moved the weights it kept and changed none of them.
fn moves_only(pruning: &PruningReport) -> bool {
    let (method, refinement) = match pruning.method.split_once('+') {
        Some((method, refinement)) => (method, pruning::refinement(refinement)),
        None => (pruning.method.as_str(), None),
    };
    let changes = pruning::method(method).is_none_or(PruningMethod::changes_weights);
    pruning.permutes_channels
        && !changes
        && !refinement.is_some_and(|refinement| refinement.changes_weights())
}

/// Returns whether a kept weight of attention, which no permutation moves, differs from the dense model's.
fn attention_differs(layers: &[InspectedLayer]) -> bool {
    let mut matrices = layers.iter().flat_map(|layer| &layer.matrices);
    matrices.any(|matrix| {
        matrix.name.contains(".self_attn.") && matrix.changed.is_some_and(|changed| changed > 0)
    })
}

/// The record of the run that wrote a model folder.
fn run_record(model: &Path) -> Option<Manifest> {
    let record = model.canonicalize().ok()?.parent()?.join(MANIFEST_FILE);
    let record = read_whole(&record, LARGEST_RECORD).ok()?;
    serde_json::from_slice(&record).ok()
}

/// The merge that wrote a model folder, from the record beside the weights.
fn merge(model: &Path, events: &dyn Events) -> Option<String> {
    let record = model.join(MERGING_FILE);
    record.symlink_metadata().ok()?;
    let bytes = input::read(&record, LARGEST_RECORD, Expected::Json).ok()?;
    let report: MergeReport = match serde_json::from_slice(&bytes) {
        Ok(report) => report,
        Err(why) => {
            events.warn(format!("{MERGING_FILE} is passed over: {why}"));
            return None;
        }
    };
    let models: Vec<&str> = report.models.iter().map(|model| model.name.as_str()).collect();
    Some(format!("{} of {}", report.method, models.join(", ")))
}

/// Opens a checkpoint; a run folder is answered with its model's folder.
fn open(folder: &Path, events: &dyn Events) -> Result<OpenedWeights> {
    if !folder.exists() {
        let hint = match located::neighbour(folder) {
            Some(near) => format!("did you mean {}?", near.display()),
            None => "name a checkpoint folder, like out/7b/model".to_string(),
        };
        let refusal = format!("there is no folder `{}`", folder.display());
        return Err(Failure::new(refusal).hint(hint).into());
    }
    match located::run_folder(folder) {
        Some(failure) => Err(failure.into()),
        None => OpenedWeights::open(folder, events),
    }
}

fn config_of(folder: &Path) -> Result<ModelConfig> {
    if !folder.join("config.json").is_file() {
        return Err(Failure::new(format!("there is no config.json in `{}`", folder.display()))
            .hint("copy it from the checkpoint these weights belong to")
            .into());
    }
    located::config(folder)
}
