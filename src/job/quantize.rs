//! `prune quantize`: settle → allocate → pass → finish.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use safetensors::Dtype;

use super::folder::RunFolder;
use super::{located, machine};
use crate::checkpoint::{
    CONFIG_FILE, Checkpoint, INDEX_FILE, MergedWriter, Published, WeightSource, check_sidecars,
    sidecars_in,
};
use crate::failure::Failure;
use crate::model::{DecoderLayer, ModelConfig};
use crate::quantized::{FourBitFormat, QuantizePass, config};
use crate::run::{Events, QuantizationReport};
use crate::settings::{ModelSettings, OutputSettings, QuantizeSettings};

/// Quantises the decoder linears of a checkpoint and writes the result.
///
/// # Errors
/// Fails for a folder that is no checkpoint or is quantised already, for an output folder with files in it, for weights that are not
/// finite, and where files cannot be read or written.
pub fn quantize(settings: &QuantizeSettings, events: &dyn Events) -> Result<QuantizationReport> {
    let (source_folder, _) = located::model(&ModelSettings::of(&settings.model), events)?;
    let json = ModelConfig::read_json(&source_folder)?;
    if json.get(config::KEY).is_some_and(|value| !value.is_null()) {
        return Err(Failure::new(format!(
            "`{}` is quantised already",
            source_folder.display()
        ))
        .detail("its config.json has a `quantization_config`")
        .hint("name the unquantised checkpoint: prune quantize --to nf4-double DENSE --save OUT")
        .into());
    }
    let model = ModelConfig::of_json(&source_folder, &json)?;
    let checkpoint = Checkpoint::open(&source_folder)?;
    for layer in 0..model.num_hidden_layers {
        DecoderLayer::check(&checkpoint, &model, layer)?;
    }
    check_sidecars(&source_folder)?;
    machine::start_workers(settings.threads)?;

    let output = OutputSettings {
        save_model: Some(settings.save.clone()),
        force: settings.force,
        ..OutputSettings::default()
    };
    let mut folder = RunFolder::at(&[&source_folder], &output, true)?;
    folder.lock(events)?;
    // An interrupted quantisation left nothing but partial files, which are replaced.
    folder.refuse_files(false)?;

    let matrices: BTreeSet<String> = (0..model.num_hidden_layers)
        .flat_map(|layer| model.projections().map(move |one| one.tensor_name(layer)))
        .collect();
    let pass = QuantizePass::new(&checkpoint, &matrices, settings.to, events)?;
    let layout = pass.layout()?;
    let bytes_after = layout.bytes();
    folder.prepare()?;
    let target = folder
        .model
        .as_ref()
        .context("a quantised model has a folder")?;
    let writer = MergedWriter::create(layout, target, &[&source_folder], events)?;
    let totals = pass.run(&writer, events)?;
    let dtype = matrices.first().and_then(|name| checkpoint.entry(name));
    let dtype = dtype.map_or(Dtype::F32, |entry| entry.dtype);
    writer.finish(
        published(&source_folder, json, settings.to, dtype)?,
        &[],
        events,
    )?;
    Ok(QuantizationReport {
        prune_version: env!("CARGO_PKG_VERSION").to_string(),
        model: source_folder.display().to_string(),
        output: target.display().to_string(),
        format: settings.to.name().to_string(),
        matrices: totals.matrices,
        weights: totals.weights,
        zeros_before: totals.zeros_before,
        zeros_after: totals.zeros_after,
        bytes_before: checkpoint.total_bytes(),
        bytes_after,
    })
}

/// The files beside the weights: the source's, with a `config.json` that names the quantisation.
fn published(
    source: &Path,
    mut json: serde_json::Value,
    format: FourBitFormat,
    dtype: Dtype,
) -> Result<Published> {
    json[config::KEY] = config::quantization_config(format, dtype);
    let mut text = serde_json::to_vec_pretty(&json)?;
    text.push(b'\n');
    let sidecars = sidecars_in(source)?.into_iter();
    let copied = sidecars.filter(|name| name != CONFIG_FILE && name != INDEX_FILE);
    Ok(Published {
        written: vec![(CONFIG_FILE.to_string(), text)],
        copied: copied.map(|name| (source.join(&name), name)).collect(),
    })
}
