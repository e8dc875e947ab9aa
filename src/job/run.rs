//! The story of a run: settle → outputs → streams → work → finish → record. The task of the run is its work.

use std::sync::Arc;

use anyhow::Result;

use super::eval::measure;
use super::inputs::RunInputs;
use super::outputs::Outputs;
use super::prune::sweep;
use super::record::RunResults;
use super::recorder::Recorder;
use super::recover::{GivenTraining, prepare, train};
use super::settle::settle;
use super::settled_run::{RunStart, RunTask, SettledRun};
use super::{interruption, machine, members, profile, unused_flags, width_drop};
use crate::checkpoint::Published;
use crate::pipeline::MaskObserver;
use crate::ranks::Ranks;
use crate::run::profile::PeakReport;
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
    prune_on(&Ranks::alone(), settings, events, observer)
}

/// Prunes as [`prune`] does, together with other ranks.
///
/// # Errors
/// Fails as [`prune`], and when a rank has left.
pub fn prune_on(
    ranks: &Ranks,
    settings: Settings,
    events: &dyn Events,
    observer: Option<&mut dyn MaskObserver>,
) -> Result<Manifest> {
    let given = RunInputs { ranks: ranks.clone(), ..RunInputs::default() };
    ranks.or_departure(run(settings, given, events, observer))
}

/// Measures the perplexity of a checkpoint and returns the record.
///
/// # Errors
/// Fails for everything that can be wrong with settings, checkpoint and text, and where a layer cannot be read.
pub fn eval(settings: Settings, events: &dyn Events) -> Result<Manifest> {
    eval_on(&Ranks::alone(), settings, events)
}

/// Measures as [`eval`] does, together with other ranks.
///
/// # Errors
/// Fails as [`eval`], and when a rank has left.
pub fn eval_on(ranks: &Ranks, settings: Settings, events: &dyn Events) -> Result<Manifest> {
    prune_on(ranks, settings, events, None)
}

/// Trains what a pruned checkpoint lost, writes the results, and returns the record.
///
/// # Errors
/// Everything that can be wrong with settings, checkpoints, texts and folders fails before the training; after that, reading, writing,
/// and a loss or gradients that are not finite.
pub fn recover(settings: Settings, events: &dyn Events) -> Result<Manifest> {
    recover_given(settings, GivenTraining::default(), events)
}

/// Trains as [`recover`] does, with recorded data.
///
/// # Errors
/// Fails as [`recover`].
pub fn recover_given(
    mut settings: Settings,
    training: GivenTraining,
    events: &dyn Events,
) -> Result<Manifest> {
    prepare(&mut settings)?;
    let given = RunInputs { training: Arc::new(training), ..RunInputs::default() };
    run(settings, given, events, None)
}

/// Trains as [`recover`] does, together with other ranks.
///
/// # Errors
/// Fails as [`recover`], and when a rank has left.
pub fn recover_on(ranks: &Ranks, mut settings: Settings, events: &dyn Events) -> Result<Manifest> {
    prepare(&mut settings)?;
    prune_on(ranks, settings, events, None)
}

/// Does what the settings say, and returns the record.
///
/// # Arguments
/// * `given`: results of other runs
/// * `observer`: sees every mask
///
/// # Errors
/// Everything that can be wrong with settings, checkpoint, texts and folders fails before the sweep; after that, reading,
/// writing, and weights or activations that are not finite.
pub(super) fn run(
    mut settings: Settings,
    given: RunInputs<'_>,
    events: &dyn Events,
    observer: Option<&mut dyn MaskObserver>,
) -> Result<Manifest> {
    let ranks = given.ranks.clone();
    let recorder = Recorder::new(events).among(&ranks);
    settings.device.threads = machine::threads_beside(settings.device.threads, &ranks);
    if !ranks.is_first() {
        return members::run(settings, &ranks, &recorder);
    }
    if settings.output.log_memory {
        recorder.log_memory();
    }
    interruption::before_outputs(&settings, &recorder);
    let job = match settle(settings, given, &recorder)? {
        RunStart::Run(job) => job,
        RunStart::Finished(manifest) => {
            interruption::is_over(&recorder);
            members::share_finished(&manifest, &ranks)?;
            return Ok(*manifest);
        }
    };
    members::check(&job)?;
    unused_flags::warn(&job.settings, job.pruning(), &recorder);
    job.announce(&recorder);
    let peak = profile::measure_peak(&job);
    let manifest = match &job.task {
        RunTask::Measure(_) => {
            interruption::in_evaluation(&job, &recorder);
            members::share(&job, &Outputs::default())?;
            measure(&job, peak, &recorder)?
        }
        RunTask::Prune(pruning) => {
            interruption::with_outputs(&job, &recorder);
            let mut outputs = Outputs::open(&job, &recorder)?;
            members::share(&job, &outputs)?;
            let swept = sweep(&job, pruning, &mut outputs, observer, &recorder)?;
            finish(&job, &mut outputs, swept, peak, &recorder)?
        }
        RunTask::Recover(recovery) => {
            interruption::with_outputs(&job, &recorder);
            let mut outputs = Outputs::open(&job, &recorder)?;
            members::share(&job, &outputs)?;
            let swept = train(&job, recovery, &mut outputs, &recorder)?;
            finish(&job, &mut outputs, swept, peak, &recorder)?
        }
    };
    interruption::is_over(&recorder);
    ranks.tell_others(&manifest)?;
    Ok(manifest)
}

/// Finishes the files of a run whose sweep is over, and writes its record.
///
/// # Errors
/// Fails when a file cannot be written, or is not on the disk as it was written.
pub(super) fn finish(
    job: &SettledRun,
    outputs: &mut Outputs<'_>,
    results: RunResults,
    peak: Option<PeakReport>,
    recorder: &Recorder<'_>,
) -> Result<Manifest> {
    let own = match &job.task {
        _ if job.folder.model.is_none() => Published::default(),
        RunTask::Recover(_) => job.published_recovery(&results)?,
        RunTask::Prune(_) | RunTask::Measure(_) => job.published(&results)?,
    };
    let output = outputs.finish(job, own, &results.expected, recorder)?;
    let results = RunResults { output, peak, ..results };
    let manifest = job.record(outputs, results, recorder)?;
    if job.settings.width_drop.is_some() {
        width_drop::tidy(&job.folder)?;
    }
    Ok(manifest)
}
