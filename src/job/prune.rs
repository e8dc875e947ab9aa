//! The main job: settle → outputs → streams → sweep → finish → record.

use anyhow::{Context, Result};

use super::outputs::Outputs;
use super::record::RunResults;
use super::recorder::Recorder;
use super::settle::{Given, Job, Settled};
use super::streams::Streams;
use super::{interruption, profile, width_drop};
use crate::checkpoint::ExpectedMatrix;
use crate::pipeline::{Calibrator, LayerJournal, MaskObserver, Output, Pruner, expected};
use crate::run::{Events, Manifest};
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
    prune_given(settings, Given::default(), events, observer)
}

/// Prunes as [`prune`] does, with results of other runs.
///
/// # Errors
/// Fails as [`prune`].
pub(super) fn prune_given(
    settings: Settings,
    given: Given<'_>,
    events: &dyn Events,
    observer: Option<&mut dyn MaskObserver>,
) -> Result<Manifest> {
    let recorder = Recorder::new(events);
    if settings.output.log_memory {
        recorder.log_memory();
    }
    interruption::before_outputs(&settings, &recorder);
    let job = match Job::settle(settings, given, &recorder)? {
        Settled::Job(job) => job,
        Settled::Finished(manifest) => {
            interruption::is_over(&recorder);
            return Ok(*manifest);
        }
    };
    job.announce(&recorder);
    let peak = profile::measure_peak(&job);
    interruption::with_outputs(&job, &recorder);
    let mut outputs = Outputs::open(&job, &recorder)?;
    let mut streams = Streams::embed(&job, &outputs, &recorder)?;
    let pruned = sweep(&job, &mut outputs, &mut streams, observer, &recorder)?;
    let own = job.published(&pruned.results)?;
    let output = outputs.finish(&job, own, &pruned.expected, &recorder)?;
    let results = RunResults {
        output,
        peak,
        ..pruned.results
    };
    let manifest = job.record(&outputs, results, &recorder)?;
    if job.settings.width_drop.is_some() {
        width_drop::tidy(&job.folder)?;
    }
    interruption::is_over(&recorder);
    Ok(manifest)
}

/// The outcome of the sweep.
struct Pruned {
    /// Facts that the read-back checks in the file.
    expected: Vec<ExpectedMatrix>,
    results: RunResults,
}

/// Prunes the layers that are left and measures the perplexities.
fn sweep(
    job: &Job,
    outputs: &mut Outputs<'_>,
    streams: &mut Streams<'_>,
    observer: Option<&mut dyn MaskObserver>,
    events: &dyn Events,
) -> Result<Pruned> {
    let pruning = job.pruning.as_ref().context("this run prunes")?;
    let finished = outputs.finished()?;
    let measured = outputs.measured().cloned();
    let layers_before = outputs.layers_before.clone();
    let Outputs {
        writer,
        masks,
        state,
        ..
    } = outputs;
    let (technique, targets, model) = (&pruning.technique, &pruning.targets, &job.model);
    let samples = streams.calibration.take();
    let calibrator = Calibrator::new(technique, samples, &model.config, &model.clock, events);
    let mut observers: Vec<&mut dyn MaskObserver> = Vec::new();
    if let Some(observer) = observer {
        observers.push(observer);
    }
    if let Some(masks) = masks {
        observers.push(masks);
    }
    let output = Output {
        sink: writer.as_mut(),
        journal: state.as_mut().map(|state| state as &mut dyn LayerJournal),
        observers,
    };
    let mut pruner =
        Pruner::new(technique, targets, calibrator, output, layers_before).with_flow(pruning.flow);
    let swept = streams.sweep(job, finished, Some(&mut pruner), events)?;
    let layers = pruner.into_layers();
    if let Some(missed) = targets.missed(technique, &layers) {
        events.warn(missed);
    }
    let perplexity = measured.unwrap_or_else(|| streams.perplexities(job));
    if let Some(state) = state {
        state.measured(perplexity.clone(), &layers)?;
    }
    Ok(Pruned {
        expected: expected::expected_of(&layers, targets.pattern),
        results: RunResults {
            peak: None,
            swept,
            perplexity,
            layers: Some(layers),
            output: None,
        },
    })
}
