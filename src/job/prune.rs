//! The main job: settle → outputs → streams → sweep → finish → record.

use anyhow::{Context, Result};

use super::inputs::RunInputs;
use super::outputs::Outputs;
use super::record::RunResults;
use super::recorder::Recorder;
use super::settle::settle;
use super::settled_run::{RunStart, SettledRun};
use super::streams::Streams;
use super::{interruption, profile, width_drop};
use crate::checkpoint::ExpectedMatrix;
use crate::pipeline::{Calibrator, MaskObserver, Pruner, expected};
use crate::run::manifest::{LayerReport, Perplexities};
use crate::run::profile::PeakReport;
use crate::run::{Events, Manifest};
use crate::runtime::SweepReport;
use crate::settings::Settings;

/// Prunes a checkpoint as the settings say, writes the results, and returns the record. `observer` sees every mask.
///
/// # Errors
/// Everything that can be wrong with settings, checkpoint, texts and folders fails before the sweep; after that, reading,
/// writing, and weights or activations that are not finite.
pub fn prune(
    settings: Settings,
    events: &dyn Events,
    observer: Option<&mut dyn MaskObserver>,
) -> Result<Manifest> {
    prune_given(settings, RunInputs::default(), events, observer)
}

/// Prunes as [`prune`] does, with results of other runs.
///
/// # Errors
/// Fails as [`prune`].
pub(super) fn prune_given(
    settings: Settings,
    given: RunInputs<'_>,
    events: &dyn Events,
    observer: Option<&mut dyn MaskObserver>,
) -> Result<Manifest> {
    let recorder = Recorder::new(events);
    let job = match settled(settings, given, &recorder)? {
        RunStart::Run(job) => job,
        RunStart::Finished(manifest) => return Ok(*manifest),
    };
    job.announce(&recorder);
    let peak = profile::measure_peak(&job);
    interruption::with_outputs(&job, &recorder);
    let mut outputs = Outputs::open(&job, &recorder)?;
    let mut streams = Streams::embed(&job, &outputs, &recorder)?;
    let pruned = sweep(&job, &mut outputs, &mut streams, observer, &recorder)?;
    let manifest = finish(&job, &mut outputs, pruned, peak, &recorder)?;
    interruption::is_over(&recorder);
    Ok(manifest)
}

/// Settles a run that can be interrupted.
///
/// # Errors
/// Fails as [`settle`].
pub(super) fn settled(
    settings: Settings,
    given: RunInputs<'_>,
    recorder: &Recorder<'_>,
) -> Result<RunStart> {
    if settings.output.log_memory {
        recorder.log_memory();
    }
    interruption::before_outputs(&settings, recorder);
    let settled = settle(settings, given, recorder)?;
    if let RunStart::Finished(_) = settled {
        interruption::is_over(recorder);
    }
    Ok(settled)
}

/// Finishes the files of a run whose sweep is over, and writes its record.
///
/// # Errors
/// Fails when a file cannot be written, or is not on the disk as it was written.
pub(super) fn finish(
    job: &SettledRun,
    outputs: &mut Outputs<'_>,
    pruned: Pruned,
    peak: Option<PeakReport>,
    recorder: &Recorder<'_>,
) -> Result<Manifest> {
    let own = match &job.recovery {
        Some(_) => job.published_recovery(&pruned.results)?,
        None => job.published(&pruned.results)?,
    };
    let output = outputs.finish(job, own, &pruned.expected, recorder)?;
    let results = RunResults { output, peak, ..pruned.results };
    let manifest = job.record(outputs, results, recorder)?;
    if job.settings.width_drop.is_some() {
        width_drop::tidy(&job.folder)?;
    }
    Ok(manifest)
}

/// The outcome of the sweep.
pub(super) struct Pruned {
    /// Facts that the read-back checks in the file.
    pub(super) expected: Vec<ExpectedMatrix>,
    pub(super) results: RunResults,
}

/// Prunes the layers that are left and measures the perplexities.
fn sweep(
    job: &SettledRun,
    outputs: &mut Outputs<'_>,
    streams: &mut Streams<'_>,
    observer: Option<&mut dyn MaskObserver>,
    events: &dyn Events,
) -> Result<Pruned> {
    let pruning = job.pruning.as_ref().context("this run prunes")?;
    let finished = outputs.finished()?;
    let measured = outputs.measured().cloned();
    let layers_before = outputs.layers_before.clone();
    let (technique, targets, model) = (&pruning.technique, &pruning.targets, &job.model);
    let samples = streams.calibration.take();
    let calibrator = Calibrator::new(technique, samples, &model.config, &model.clock, events);
    let mut output = outputs.receivers();
    if let Some(observer) = observer {
        output.observers.insert(0, observer);
    }
    let mut pruner =
        Pruner::new(technique, targets, calibrator, output, layers_before).with_flow(pruning.flow);
    let swept = streams.sweep(job, finished, Some(&mut pruner), events)?;
    let layers = pruner.into_layers();
    let perplexity = measured.unwrap_or_else(|| streams.perplexities(job));
    conclude(job, outputs, layers, (perplexity, swept), events)
}

/// The outcome of a sweep that has pruned these layers. The state of the run records what was measured.
///
/// # Errors
/// Fails when the state cannot be written.
pub(super) fn conclude(
    job: &SettledRun,
    outputs: &mut Outputs<'_>,
    layers: Vec<LayerReport>,
    (perplexity, swept): (Perplexities, SweepReport),
    events: &dyn Events,
) -> Result<Pruned> {
    let pruning = job.pruning.as_ref().context("this run prunes")?;
    if let Some(missed) = pruning.targets.missed(&pruning.technique, &layers) {
        events.warn(missed);
    }
    if let Some(state) = &mut outputs.state {
        state.measured(perplexity.clone(), &layers)?;
    }
    Ok(Pruned {
        expected: expected::expected_of(&layers, pruning.targets.pattern),
        results: RunResults {
            peak: None,
            swept,
            perplexity,
            layers: Some(layers),
            output: None,
            recovery: None,
        },
    })
}
