//! `--drop-layers`: score the dense model → choose layers → open the smaller model, which the main job then prunes as usual.
//!
//! The scoring pass is a sweep over the dense model, planned like every sweep. The dense perplexity is measured in it, so the weights of
//! the source are read once more than without `--drop-layers`. The choice becomes part of the run's state: a later process does not score
//! again.

use std::sync::Arc;

use anyhow::{Context, Result};

use super::model_report::parameters;
use super::opened::{OpenedModel, ScoringPass};
use super::outputs::Outputs;
use super::pass::{PassOutcome, before_run, note_by_layer, settle_pass};
use super::streams::Streams;
use crate::failure::Failure;
use crate::model::{KeptLayers, ModelConfig};
use crate::pipeline::Observed;
use crate::pipeline::layer_drop::{LayerScores, bound, choose, choose_automatically, most_dropped};
use crate::pipeline::layer_scores::{self, LayerMeter};
use crate::pruning::Pattern;
use crate::run::{Events, LayerDropReport};
use crate::runtime::Side;
use crate::settings::{DropCount, LayerDropSettings, Settings, SparsitySettings};

/// Hint for a model that is too small for every choice.
const ONLY_LAYER: &str = "a model of one layer cannot lose it; leave --drop-layers out";

/// The rule in the record of layers that the user named.
const NAMED: &str = "name";

/// Checks the flags against a model, and returns its configuration with as few layers as the choice can leave.
///
/// # Errors
/// Fails with exit code 2 for more layers than can go, and for `auto` where the number of layers must be known.
pub(super) fn fewest_layers(settings: &Settings, config: &ModelConfig) -> Result<ModelConfig> {
    let Some(drop) = &settings.layer_drop else {
        return Ok(config.clone());
    };
    let layers = config.num_hidden_layers;
    let ratios =
        settings.sparsity.as_ref().and_then(|sparsity| sparsity.selection.layer_ratios.as_ref());
    let beyond = drop.layers_dropped.iter().find(|&&layer| layer >= layers);
    if let Some(layer) = beyond {
        return Err(Failure::usage(format!(
            "--layers-dropped names layer {layer}: the model has {layers}, counted from 0"
        ))
        .hint(format!("name layers from 0 to {}", layers - 1))
        .into());
    }
    let failure = match drop.count() {
        DropCount::Number(number) if number >= layers => {
            let failure = Failure::usage(format!(
                "--drop-layers {number} would leave no layer: the model has {layers}"
            ));
            match layers {
                1 => failure.hint(ONLY_LAYER),
                _ => failure.hint(format!("use --drop-layers {} or less", layers - 1)),
            }
        }
        DropCount::Auto if most_dropped(layers) == 0 => {
            let failure = Failure::usage(format!(
                "--drop-layers auto drops at most a quarter of the layers, and the model has {layers}"
            ));
            match layers {
                1 => failure.hint(ONLY_LAYER),
                _ => failure.hint("name the number: --drop-layers 1"),
            }
        }
        DropCount::Auto if ratios.is_some() => Failure::usage(
            "--layer-ratios names layers of the smaller model, and --drop-layers auto decides their number later",
        )
        .hint("name the number: --drop-layers N"),
        count => {
            let num_hidden_layers = layers - most_gone(count, layers);
            return Ok(ModelConfig { num_hidden_layers, ..config.clone() });
        }
    };
    Err(failure.into())
}

/// The most layers that can go.
fn most_gone(count: DropCount, layers: usize) -> usize {
    match count {
        DropCount::Number(number) => number,
        DropCount::Auto => most_dropped(layers),
    }
}

/// Opens the smaller model in place of `model`, where the settings drop layers. `known` is the choice of an earlier process.
///
/// # Errors
/// Fails where the scoring pass does not fit or its texts are missing, for layers that cannot be read, for a choice that does not fit
/// the model, and when `auto` leaves nothing to do.
pub(super) fn smaller(
    settings: &Settings,
    model: OpenedModel,
    known: Option<LayerDropReport>,
    events: &dyn Events,
) -> Result<OpenedModel> {
    let Some(drop) = &settings.layer_drop else {
        return Ok(model);
    };
    if let Some(report) = known {
        let layers = model.config.num_hidden_layers;
        let kept = KeptLayers::without(layers, &report.dropped);
        if kept.layers() != report.kept || report.kept.is_empty() {
            return Err(Failure::new(
                "the state of the unfinished run names layers that do not fit",
            )
            .detail(format!("{} for a model of {layers}", report.in_words()))
            .hint("start over with --force")
            .into());
        }
        events.note(format!("dropping     {}, as chosen before", report.in_words()));
        return part_of(model, report, None);
    }
    let PassOutcome { model, found: scores, dense, pass } = score(settings, drop, model, events)?;
    let is_named = !drop.layers_dropped.is_empty();
    let dropped = match drop.count() {
        _ if is_named => drop.layers_dropped.clone(),
        DropCount::Number(number) => choose(&scores, drop.drop_rule, number),
        DropCount::Auto => choose_automatically(&scores, drop.drop_rule),
    };
    let kept = KeptLayers::without(model.config.num_hidden_layers, &dropped);
    let is_auto = drop.count() == DropCount::Auto;
    let report = LayerDropReport {
        asked: drop.count().to_string(),
        rule: match is_named {
            true => NAMED.to_string(),
            false => drop.drop_rule.name().to_string(),
        },
        dropped,
        kept: kept.layers().to_vec(),
        block_influence: scores.influence.clone(),
        angular_distance: scores.angles.clone(),
        bound: is_auto.then(|| bound(&scores, drop.drop_rule)),
        dense,
        parameters: [0, 0],
        bytes: [model.checkpoint.total_bytes(); 2],
    };
    note_by_layer(report.name_of_scores(), report.deciding_scores(), events);
    events.note(format!("dropping     {}", report.in_words()));
    if report.dropped.is_empty() {
        check_does_something(settings, &report, events)?;
    }
    part_of(model, report, Some(pass))
}

/// Passes the calibration samples through the dense model, and its evaluation windows.
fn score(
    settings: &Settings,
    asked: &LayerDropSettings,
    model: OpenedModel,
    events: &dyn Events,
) -> Result<PassOutcome<LayerScores>> {
    let longest = most_gone(asked.count(), model.config.num_hidden_layers);
    let scoring = before_run(settings, settings.evaluation.eval.sides().contains(&Side::Dense));
    let calibration = scoring.calibration.as_ref();
    let nsamples = calibration.context("layers are scored with samples")?.nsamples as usize;
    let observes = Observed {
        kind: None,
        kept: layer_scores::bytes(&model.config, nsamples, model.seqlen, longest),
    };
    let job = settle_pass(scoring, model, Some(observes), events)?;
    events.note("scoring the layers of the dense model".to_string());
    job.announce(events);
    let mut streams = Streams::embed(&job, &Outputs::default(), events)?;
    let samples = streams.samples()?;
    let model = &job.model;
    let mut meter = LayerMeter::new(samples, longest, &model.config, model.reporter(events));
    let swept = streams.sweep(&job, None, Some(&mut meter), events)?;
    let scores = meter.into_scores();
    let dense = streams.perplexities(&job).dense;
    drop(streams);
    Ok(PassOutcome::of(*job, scores, dense, swept))
}

/// Warns where `auto` drops nothing.
///
/// # Errors
/// Fails where nothing is pruned either.
fn check_does_something(
    settings: &Settings,
    report: &LayerDropReport,
    events: &dyn Events,
) -> Result<()> {
    let scores = report.deciding_scores().iter().copied().enumerate();
    let lowest = scores.min_by(|(_, a), (_, b)| a.total_cmp(b));
    let (layer, score) = lowest.context("a model has layers")?;
    let bound = report.bound.unwrap_or_default();
    let why = format!(
        "--drop-layers auto drops no layer: the smallest score, {score:.4} of layer {layer}, is not below {bound:.4}, three quarters of the median"
    );
    if settings.sparsity.as_ref().is_some_and(prunes) {
        events.warn(why);
        return Ok(());
    }
    Err(Failure::new(why)
        .detail("without a sparsity ratio nothing is left to do")
        .hint("--drop-layers 1 drops that layer all the same")
        .into())
}

/// Returns whether weights are pruned.
fn prunes(sparsity: &SparsitySettings) -> bool {
    let selection = &sparsity.selection;
    selection.sparsity_type != Pattern::Unstructured
        || selection.layer_ratios.is_some()
        || selection.sparsity_ratio != Some(0.0)
}

/// Opens the part of a model that a choice leaves.
fn part_of(
    mut model: OpenedModel,
    mut layer_drop: LayerDropReport,
    scoring: Option<ScoringPass>,
) -> Result<OpenedModel> {
    let kept = KeptLayers::without(model.config.num_hidden_layers, &layer_drop.dropped);
    let checkpoint = Arc::new(model.checkpoint.view(&|name| kept.rename(name))?);
    layer_drop.parameters = [parameters(&model.checkpoint), parameters(&checkpoint)];
    layer_drop.bytes = [model.checkpoint.total_bytes(), checkpoint.total_bytes()];
    let config = Arc::new(kept.config(&model.config));
    let mut whole = model.whole()?;
    kept.edit_json(&whole.config, &mut whole.config_json);
    whole.layer_drop = Some(layer_drop);
    whole.passes.extend(scoring);
    Ok(model.with_part(whole, checkpoint, config))
}
