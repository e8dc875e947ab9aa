//! `prune inspect`: the sparsity of a checkpoint, and its comparison with the dense one.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use super::record::parameters;
use super::{located, published};
use crate::bytes::{LARGEST_RECORD, read_whole};
use crate::checkpoint::{Checkpoint, MERGING_FILE};
use crate::eval::{self, Inspected};
use crate::failure::Failure;
use crate::model::{KeptLayers, ModelConfig};
use crate::quantized::QuantizedSource;
use crate::run::merging::MergeReport;
use crate::run::pruning_record::PRUNING_FILE;
use crate::run::{Events, Inspection, Manifest, PruningRecord};

/// Measures the sparsity of the checkpoint in `folder`, and compares it with the dense one `against`.
pub fn inspect(folder: &Path, against: Option<&Path>, events: &dyn Events) -> Result<Inspection> {
    let model = open(folder)?;
    let (config, is_quantized) = load_config(folder)?;
    if let (true, Some(dense)) = (is_quantized, against) {
        return Err(
            Failure::new(format!("`{}` is quantised to 4 bits", folder.display()))
                .detail(format!(
                    "--against `{}` compares weights bit for bit",
                    dense.display()
                ))
                .hint("leave --against out, or compare the checkpoint that was quantised")
                .into(),
        );
    }
    let model = Arc::new(model);
    let quantized = match is_quantized {
        true => Some(QuantizedSource::open(Arc::clone(&model))?),
        false => None,
    };
    let inspected = match &quantized {
        Some(quantized) => Inspected {
            checkpoint: &model,
            source: quantized,
            tensors: quantized.tensors().collect(),
        },
        None => Inspected::whole(&model),
    };
    let dense = against.map(open).transpose()?;
    let kept = match &dense {
        Some(dense) => kept_layers(folder, &config, dense.folder()),
        None => None,
    };
    let part = match (&dense, &kept) {
        (Some(dense), Some((kept, _))) => Some(dense.view(&|name| kept.rename(name))?),
        _ => None,
    };
    let mut inspection = eval::inspect(
        &inspected,
        &config,
        part.as_ref().or(dense.as_ref()),
        events,
    )?;
    if let Some((comparison, dense)) = inspection.against.as_mut().zip(dense.as_ref()) {
        comparison.dense_parameters = parameters(dense);
        comparison.dense_bytes = dense.total_bytes();
        comparison.layers_dropped = kept.map_or_else(Vec::new, |(_, dropped)| dropped);
        comparison.changed_by = method_that_changes_weights(folder);
        comparison.merged_by = merge(folder, events);
    }
    inspection.pruning = pruning_record(folder, &inspection, events);
    Ok(inspection)
}

/// The layers of the dense model that this one was made of, and the dropped ones, if the record beside the weights names layers that
/// fit both models.
fn kept_layers(
    folder: &Path,
    config: &ModelConfig,
    dense: &Path,
) -> Option<(KeptLayers, Vec<usize>)> {
    let record = published::read_record(folder)?.ok()?;
    let dropped = record.layer_drop?.dropped;
    let layers = ModelConfig::load(dense).ok()?.num_hidden_layers;
    let kept = KeptLayers::without(layers, &dropped);
    let fits = kept.layers().len() == config.num_hidden_layers && !dropped.is_empty();
    fits.then_some((kept, dropped))
}

/// The record beside the weights, if it is one and counts the zeros that are there.
fn pruning_record(
    folder: &Path,
    inspection: &Inspection,
    events: &dyn Events,
) -> Option<PruningRecord> {
    let zeros = inspection.sparsity.zeros;
    match published::read_record(folder)? {
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

/// The method of the run that wrote a model folder, if the record of the run says that it changes the weights it keeps.
fn method_that_changes_weights(model: &Path) -> Option<String> {
    let record = model.canonicalize().ok()?.parent()?.join("run.json");
    let record = read_whole(&record, LARGEST_RECORD).ok()?;
    let manifest: Manifest = serde_json::from_slice(&record).ok()?;
    let pruning = manifest.pruning?;
    pruning.changes_weights.then_some(pruning.method)
}

/// The merge that wrote a model folder, from the record beside the weights.
fn merge(model: &Path, events: &dyn Events) -> Option<String> {
    let record = model.join(MERGING_FILE);
    record.symlink_metadata().ok()?;
    let bytes = read_whole(&record, LARGEST_RECORD).ok()?;
    let report: MergeReport = match serde_json::from_slice(&bytes) {
        Ok(report) => report,
        Err(why) => {
            events.warn(format!("{MERGING_FILE} is passed over: {why}"));
            return None;
        }
    };
    let models: Vec<&str> = report
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    Some(format!("{} of {}", report.method, models.join(", ")))
}

/// Opens a checkpoint; a run folder is answered with its model's folder.
fn open(folder: &Path) -> Result<Checkpoint> {
    match located::run_folder(folder) {
        Some(failure) => Err(failure.into()),
        None => Checkpoint::open(folder),
    }
}

fn load_config(folder: &Path) -> Result<(ModelConfig, bool)> {
    if !folder.join("config.json").is_file() {
        return Err(
            Failure::new(format!("there is no config.json in `{}`", folder.display()))
                .hint("copy it from the checkpoint these weights belong to")
                .into(),
        );
    }
    located::config(folder)
}
