//! `prune eval`: a run without outputs and without an editor.

use anyhow::{Context, Result};

use super::outputs::Outputs;
use super::record::RunResults;
use super::recorder::Recorder;
use super::settled_run::SettledRun;
use super::streams::Streams;
use super::{against, eval_state};
use crate::run::manifest::{AgainstReport, SweepMeasurements};
use crate::run::profile::PeakReport;
use crate::run::{Events, Manifest};
use crate::runtime::SweepReport;

/// Measures, and writes the record.
pub(super) fn measure(
    job: &SettledRun,
    peak: Option<PeakReport>,
    recorder: &Recorder<'_>,
) -> Result<Manifest> {
    let outputs = Outputs::default();
    let measured = sweep(job, &outputs, recorder)?;
    let results = RunResults { peak, ..measured };
    job.folder.prepare().context("making room for the record")?;
    let manifest = job.record(&outputs, results, recorder)?;
    if let Some(folder) = &job.folder.run {
        eval_state::remove(folder)?;
    }
    Ok(manifest)
}

/// Passes the windows through the model, and before it through the dense model that it is compared with.
pub(super) fn sweep(
    job: &SettledRun,
    outputs: &Outputs<'_>,
    events: &dyn Events,
) -> Result<RunResults> {
    let folder = job.folder.run.as_deref();
    let both = job.against().is_some().then(|| against::BothSweeps::of(job, events));
    let events: &dyn Events = both.as_ref().map_or(events, |both| both);
    let mut waiting = None;
    let mut before = SweepReport::default();
    if let Some(dense) = job.against() {
        let mut streams = Streams::embed(dense, outputs, events)?;
        let swept = streams.sweep_evaluation(dense, folder, events);
        before = swept.context("in the dense model")?;
        job.model.clock.add(&dense.model.clock.report());
        waiting = Some((dense, streams));
    }
    let mut streams = Streams::embed(job, outputs, events)?;
    let swept = before.and(streams.sweep_evaluation(job, folder, events)?);
    streams.leave_states(job)?;
    let SweepMeasurements { perplexity, mut tasks } = streams.measured(job);
    if let Some((_, streams)) = &waiting
        && let Some(tasks) = &mut tasks
    {
        tasks.pruned = std::mem::take(&mut tasks.dense);
        tasks.dense = streams.tasks().map_or(Vec::new(), |of| of.dense);
    }
    let of_dense = waiting.as_ref().and_then(|(_, streams)| streams.scores().remove("dense"));
    streams.log_samples(job, of_dense)?;
    let against = waiting.map(|(dense, streams)| -> Result<AgainstReport> {
        // Its states were measured when the model's arrived.
        let perplexity = streams.perplexities(dense).dense;
        Ok(AgainstReport { model: dense.model.report()?, perplexity })
    });
    let against = against.transpose()?;
    Ok(RunResults { swept, perplexity, tasks, against, ..RunResults::default() })
}
