//! `--drop-width`: make every layer narrower → open the narrower model, which the main job then prunes as usual.
//!
//! The pass is a sweep over the model, planned like every sweep; the dense perplexity is measured in it. The matrices whose shapes
//! change are written to the folder `narrower` in the run folder, and the main job reads them there. They are
//! removed when the run is over. A process that is killed in the pass leaves a run that begins anew; after that, a later process
//! continues with these matrices.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::disk_room;
use super::folder::RunFolder;
use super::model_report::parameters;
use super::opened::{OpenedModel, ScoringPass};
use super::outputs::Outputs;
use super::pass::{PassOutcome, before_run, settle_pass};
use super::settled_run::SettledRun;
use super::streams::Streams;
use crate::bytes::ByteSize;
use crate::checkpoint::{
    Checkpoint, Layout, LayoutWriter, PlannedTensor, Published, WeightSource, output_bytes,
};
use crate::failure::Failure;
use crate::model::{DecoderLayer, ModelConfig, Width};
use crate::pipeline::Observed;
use crate::pipeline::width_drop::{
    Narrowed, Narrower, STATISTICS, multiple_of, units_left, working_bytes,
};
use crate::run::{Events, WidthDropReport};
use crate::runtime::Side;
use crate::settings::{Settings, WidthDropSettings, WidthOf};

/// Refuses a number of heads that transformers does not load: it asks that `hidden_size` is a multiple of it, with `head_dim` too.
fn check_heads(asked: &WidthDropSettings, config: &ModelConfig, groups: usize) -> Result<()> {
    if groups < config.num_key_value_heads && config.family.head_norms_are_wide {
        return Err(Failure::usage(format!(
            "--drop-width {} --width-of {} would drop heads, and the norms of queries and keys of {} go over all heads at once",
            asked.drop_width.share(),
            asked.width_of.name(),
            config.family.architectures[0]
        ))
        .hint("use --width-of mlp")
        .into());
    }
    let (hidden, all) = (config.hidden_size, config.num_attention_heads);
    let group = all / config.num_key_value_heads.max(1);
    let loads = |groups: &usize| hidden.is_multiple_of(groups * group);
    if groups == config.num_key_value_heads || loads(&groups) {
        return Ok(());
    }
    let (share, of) = (asked.drop_width.share(), asked.width_of.name());
    let failure = Failure::usage(format!(
        "--drop-width {share} --width-of {of} would keep {} of {all} heads, and transformers loads only numbers of heads that divide \
         hidden_size {hidden}",
        groups * group
    ));
    let fewer = (1..groups).rev().find(loads);
    Err(match fewer {
        Some(fewer) => failure.hint(format!(
            "use --width-of mlp, or --drop-width {:.3} for {} heads",
            1.0 - fewer as f64 / config.num_key_value_heads as f64,
            fewer * group
        )),
        None => failure.hint("use --width-of mlp"),
    }
    .into())
}

/// The sizes that the flags ask for.
///
/// # Errors
/// Fails with exit code 2 for a share that removes nothing, and without a run folder.
pub(super) fn width(
    asked: &WidthDropSettings,
    config: &ModelConfig,
    folder: &RunFolder,
) -> Result<Width> {
    if folder.run.is_none() {
        return Err(Failure::usage("--drop-width needs a run folder for the narrower matrices")
            .hint("add --save DIR; with --no-save-model no model is written")
            .into());
    }
    let (share, of) = (asked.drop_width.share(), asked.width_of);
    let (channels, heads) = (config.intermediate_size, config.num_key_value_heads);
    let multiple = multiple_of(channels);
    let width = Width {
        intermediate_size: match of {
            WidthOf::Heads => channels,
            WidthOf::Mlp | WidthOf::Both => units_left(channels, share, multiple),
        },
        num_key_value_heads: match of {
            WidthOf::Mlp => heads,
            WidthOf::Heads | WidthOf::Both => units_left(heads, share, 1),
        },
    };
    if (width.intermediate_size, width.num_key_value_heads) != (channels, heads) {
        check_heads(asked, config, width.num_key_value_heads)?;
        return Ok(width);
    }
    let (unit, units) = match of {
        WidthOf::Heads => (format!("{heads} key/value heads"), heads),
        _ => (format!("{channels} MLP channels, {multiple} at a time"), channels / multiple),
    };
    let failure = Failure::usage(format!(
        "--drop-width {share} --width-of {} would drop nothing: a layer has {unit}",
        of.name()
    ));
    Err(match units {
        0 | 1 => failure.hint("choose another --width-of"),
        // The smallest share that rounds to one unit less, in steps of a thousandth.
        _ => failure.hint(format!(
            "use --drop-width {} or more",
            ((0.5 / units as f64 * 1000.0).floor() + 1.0) / 1000.0
        )),
    }
    .into())
}

/// Opens the narrower model in place of `model`, where the settings drop width. `known` is the record of an earlier process, whose matrices are in the run folder.
///
/// # Errors
/// Fails where the pass does not fit or its texts are missing, for layers that cannot be read or written, and for matrices of an
/// earlier process that are not there any more.
pub(super) fn narrower(
    settings: &Settings,
    model: OpenedModel,
    known: Option<WidthDropReport>,
    folder: &RunFolder,
    events: &dyn Events,
) -> Result<OpenedModel> {
    let Some(asked) = &settings.width_drop else {
        return Ok(model);
    };
    let width = width(asked, &model.config, folder)?;
    let config = width.config(&model.config);
    if asked.width_of == WidthOf::Both {
        let (of, asked) = (&model.config, asked.drop_width.share());
        for (kept, all, units) in [
            (width.intermediate_size, of.intermediate_size, "MLP channels"),
            (width.num_key_value_heads, of.num_key_value_heads, "key/value heads"),
        ] {
            if kept == all {
                events.warn(format!(
                    "--drop-width {asked} drops none of {all} {units}: the share is too small for one unit"
                ));
            }
        }
    }
    let place = folder.narrower().context("a run folder was required")?;
    if let Some(report) = known {
        let matrices = Checkpoint::open(&place).and_then(|matrices| {
            let found = matrices.fingerprint()?;
            Ok(Some(matrices).filter(|_| found == report.fingerprint))
        });
        let Ok(Some(matrices)) = matrices else {
            return Err(Failure::new(format!(
                "the narrower matrices of the unfinished run are not in `{}` any more, or are others",
                place.display()
            ))
            .hint("start over with --force")
            .into());
        };
        events.note(format!("narrower     {}, as before", report.in_words()));
        return with_matrices(model, width, &matrices, report, None);
    }
    remove(&place)?;
    let (of, dense_shape) = (Arc::clone(&model.config), model.config.heads());
    let passed = pass(settings, model, &config, folder, events)?;
    let matrices = Checkpoint::open(&place)?;
    let report = WidthDropReport {
        asked: asked.drop_width.share(),
        of: asked.width_of.name().to_string(),
        is_refitted: !asked.no_width_refit,
        intermediate_size: [of.intermediate_size, config.intermediate_size],
        multiple: multiple_of(of.intermediate_size),
        num_attention_heads: [dense_shape.num_heads, config.num_attention_heads],
        num_key_value_heads: [of.num_key_value_heads, config.num_key_value_heads],
        kept_heads: match config.num_key_value_heads == of.num_key_value_heads {
            true => Vec::new(),
            false => passed.found.heads,
        },
        lost_scores: passed.found.lost,
        dense: passed.dense,
        parameters: [0, 0],
        bytes: [passed.model.checkpoint.total_bytes(); 2],
        fingerprint: matrices.fingerprint()?,
    };
    events.note(format!("narrower     {}", report.in_words()));
    with_matrices(passed.model, width, &matrices, report, Some(passed.pass))
}

/// Passes the calibration samples through the model, makes its layers narrower, and writes them to the run folder.
fn pass(
    settings: &Settings,
    model: OpenedModel,
    to: &ModelConfig,
    folder: &RunFolder,
    events: &dyn Events,
) -> Result<PassOutcome<Narrowed>> {
    let place = &folder.narrower().context("a run folder was required")?;
    let is_measured = model.part_of.is_some();
    let measures_dense = settings.evaluation.eval.sides().contains(&Side::Dense) && !is_measured;
    let narrowing = before_run(settings, measures_dense);
    let observes =
        Observed { kind: Some(STATISTICS), kept: working_bytes(&model.config, to, model.dtype()) };
    let job = settle_pass(narrowing, model, Some(observes), events)?;
    events.note("making the layers narrower".to_string());
    job.announce(events);
    let (layout, replaced) = layout(&job.model, to)?;
    check_disk(&job, (layout.bytes(), replaced), folder)?;
    let source = job.model.folder.clone();
    let writer = LayoutWriter::create(layout, place, &[&source], events)?;
    let mut streams = Streams::embed(&job, &Outputs::default(), events)?;
    let samples = streams.samples()?;
    let mut narrower =
        Narrower::new(samples, (&job.model.config, to), Some(&writer), job.model.reporter(events));
    if settings.width_drop.as_ref().is_some_and(|asked| asked.no_width_refit) {
        narrower = narrower.without_refit();
    }
    let swept = streams.sweep(&job, None, Some(&mut narrower), events)?;
    let narrowed = narrower.into_narrowed();
    let dense = streams.perplexities(&job).dense;
    drop(streams);
    writer.finish(Published::default(), &[], events)?;
    Ok(PassOutcome::of(*job, narrowed, dense, swept))
}

/// Checks that disks have room for the narrower matrices, which stay until the run ends, for the narrower model, and for the hidden
/// states of the pass. `narrower` and `replaced`: bytes of the narrower matrices and of the matrices that they replace.
fn check_disk(
    job: &SettledRun,
    (narrower, replaced): (ByteSize, ByteSize),
    folder: &RunFolder,
) -> Result<()> {
    let mut needs = Vec::new();
    let place = folder.narrower();
    if let Some(place) = &place {
        needs.push((place.as_path(), narrower, "the narrower matrices"));
    }
    if let Some(model) = &folder.model {
        let all = output_bytes(&job.model.checkpoint)? + narrower;
        let less = replaced + folder.replaced_bytes();
        let more = ByteSize(all.0.saturating_sub(less.0));
        needs.push((model, more, "the model"));
    }
    let spill = job.spill_folder();
    if let Some(spill) = &spill {
        needs.push((spill, job.plan.hidden_states.bytes, "hidden states"));
    }
    disk_room::check(&needs)
}

/// The tensors whose shapes change, in files no larger than the largest of the source, and the bytes of the tensors that they replace.
fn layout(model: &OpenedModel, to: &ModelConfig) -> Result<(Layout, ByteSize)> {
    let mut planned = Vec::new();
    let mut replaced = 0;
    for layer in 0..to.num_hidden_layers {
        let before = model.config.layer_tensors(layer);
        for (before, after) in before.zip(to.layer_tensors(layer)) {
            if before.shape == after.shape {
                continue;
            }
            let entry = model.checkpoint.require(&before.name, &before.shape)?;
            replaced += entry.bytes;
            planned.push(PlannedTensor {
                dtype: entry.dtype,
                name: after.name,
                shape: after.shape,
            });
        }
    }
    let shards = model.checkpoint.shards().iter();
    let largest = shards.map(|shard| shard.file_bytes - shard.data_start).max();
    let layout = Layout::new(planned, largest.unwrap_or_default())?;
    Ok((layout, ByteSize(replaced)))
}

/// Opens the narrower model.
fn with_matrices(
    mut model: OpenedModel,
    width: Width,
    matrices: &Checkpoint,
    mut report: WidthDropReport,
    scoring: Option<ScoringPass>,
) -> Result<OpenedModel> {
    let config = Arc::new(width.config(&model.config));
    let checkpoint = Arc::new(model.checkpoint.with_tensors_of(matrices)?);
    for layer in 0..config.num_hidden_layers {
        DecoderLayer::check(&*checkpoint, &config, layer)?;
    }
    report.parameters = [parameters(&model.checkpoint), parameters(&checkpoint)];
    report.bytes = [model.checkpoint.total_bytes(), checkpoint.total_bytes()];
    let mut whole = model.whole()?;
    width.edit_json(&model.config, &mut whole.config_json);
    whole.width_drop = Some(report);
    whole.passes.extend(scoring);
    Ok(model.with_part(whole, checkpoint, config))
}

/// Removes the narrower matrices of a run that is over.
///
/// # Errors
/// Fails when the folder cannot be removed.
pub(super) fn tidy(folder: &RunFolder) -> Result<()> {
    match folder.narrower() {
        Some(place) => remove(&place),
        None => Ok(()),
    }
}

/// Removes the folder of narrower matrices.
fn remove(place: &Path) -> Result<()> {
    if !place.is_dir() {
        return Ok(());
    }
    fs::remove_dir_all(place).with_context(|| format!("removing `{}`", place.display()))
}
