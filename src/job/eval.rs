//! `prune eval`: the story of the main job without outputs and without an editor.

use anyhow::{Context, Result};

use super::inputs::RunInputs;
use super::outputs::Outputs;
use super::profile;
use super::record::RunResults;
use super::recorder::Recorder;
use super::settle::settle;
use super::settled_run::RunStart;
use super::streams::Streams;
use crate::run::{Events, Manifest};
use crate::settings::Settings;

/// Measures the perplexity of a checkpoint and returns the record.
///
/// # Errors
/// Fails for everything that can be wrong with settings, checkpoint and text, and where a layer cannot be read.
pub fn eval(settings: Settings, events: &dyn Events) -> Result<Manifest> {
    let recorder = Recorder::new(events);
    let RunStart::Run(job) = settle(settings, RunInputs::default(), &recorder)? else {
        return Err(anyhow::anyhow!("only a run that prunes can have finished before"));
    };
    job.announce(&recorder);
    let peak = profile::measure_peak(&job);
    let outputs = Outputs::default();
    let mut streams = Streams::embed(&job, &outputs, &recorder)?;
    let swept = streams.sweep(&job, None, None, &recorder)?;
    let results = RunResults {
        peak,
        swept,
        perplexity: streams.perplexities(&job),
        layers: None,
        output: None,
        recovery: None,
    };
    job.folder.prepare().context("making room for the record")?;
    job.record(&outputs, results, &recorder)
}
