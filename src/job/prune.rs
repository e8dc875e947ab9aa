//! `prune`: the sweep that prunes, and its outcome.

use anyhow::Result;

use super::outputs::Outputs;
use super::record::RunResults;
use super::resolved::Pruning;
use super::settled_run::SettledRun;
use super::streams::Streams;
use crate::pipeline::{Calibrator, MaskObserver, Pruner, expected};
use crate::run::Events;
use crate::run::manifest::{LayerReport, SweepMeasurements};
use crate::runtime::SweepReport;

/// Prunes the layers that are left and measures the perplexities.
pub(super) fn sweep(
    job: &SettledRun,
    pruning: &Pruning,
    outputs: &mut Outputs<'_>,
    observer: Option<&mut dyn MaskObserver>,
    events: &dyn Events,
) -> Result<RunResults> {
    let mut streams = Streams::embed(job, outputs, events)?;
    let finished = outputs.finished(&job.model.config)?;
    let measured = outputs.measured();
    let layers_before = outputs.layers_before.clone();
    let (technique, targets, model) = (&pruning.technique, &pruning.targets, &job.model);
    let samples = streams.calibration.take();
    let calibrator = Calibrator::new(technique, samples, &model.config, model.reporter(events));
    let mut output = outputs.receivers();
    if let Some(observer) = observer {
        output.observers.insert(0, observer);
    }
    let mut pruner =
        Pruner::new(technique, targets, calibrator, output, layers_before).with_flow(pruning.flow);
    let swept = streams.sweep(job, finished, Some(&mut pruner), events)?;
    let layers = pruner.into_layers();
    streams.log_samples(job, None)?;
    let measured = measured.unwrap_or_else(|| streams.measured(job));
    pruning.conclude(outputs, layers, (measured, swept), events)
}

impl Pruning {
    /// The outcome of a sweep that has pruned these layers. The state of the run records what was measured.
    ///
    /// # Errors
    /// Fails when the state cannot be written.
    pub(super) fn conclude(
        &self,
        outputs: &mut Outputs<'_>,
        layers: Vec<LayerReport>,
        (measured, swept): (SweepMeasurements, SweepReport),
        events: &dyn Events,
    ) -> Result<RunResults> {
        if let Some(missed) = self.targets.missed(&self.technique, &layers) {
            events.warn(missed);
        }
        if let Some(state) = &mut outputs.state {
            state.measured(measured.clone(), &layers)?;
        }
        Ok(RunResults {
            expected: expected::expected_of(&layers, self.targets.pattern),
            swept,
            perplexity: measured.perplexity,
            tasks: measured.tasks,
            layers: Some(layers),
            ..RunResults::default()
        })
    }
}
