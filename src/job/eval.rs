//! `prune eval`: a run without outputs and without an editor.

use anyhow::{Context, Result};

use super::outputs::Outputs;
use super::record::RunResults;
use super::recorder::Recorder;
use super::settled_run::SettledRun;
use super::streams::Streams;
use crate::run::Manifest;
use crate::run::profile::PeakReport;

/// Measures, and writes the record.
pub(super) fn measure(
    job: &SettledRun,
    peak: Option<PeakReport>,
    recorder: &Recorder<'_>,
) -> Result<Manifest> {
    let outputs = Outputs::default();
    let mut streams = Streams::embed(job, &outputs, recorder)?;
    let swept = streams.sweep(job, None, None, recorder)?;
    let results =
        RunResults { peak, swept, perplexity: streams.perplexities(job), ..RunResults::default() };
    job.folder.prepare().context("making room for the record")?;
    job.record(&outputs, results, recorder)
}
