//! The record of a finished run: `run.json` from the job, its measurements and its results.

use anyhow::Result;

use super::device_records::{DeviceRecords, joined};
use super::folder::RunFolder;
use super::folder::state_file::StateFile;
use super::model_report::arithmetic;
use super::outputs::Outputs;
use super::profile;
use super::rank_reports;
use super::recorder::Recorder;
use super::settled_run::{RunTask, SettledRun};
use super::zeros_gain;
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, ExpectedMatrix};
use crate::run::manifest::{
    AgainstReport, GateReport, LayerReport, Manifest, OutputReport, Perplexities, PruningReport,
    SCHEMA, SparsityReport,
};
use crate::run::profile::PeakReport;
use crate::run::tasks::TaskResults;
use crate::run::{Events, Moment, Phase, RecoveryReport, ZerosGain};
use crate::runtime::{Clock, SweepReport};

/// Memory of a finished run's process, beside its measurements.
const PROCESS: ByteSize = ByteSize(16 << 20);
/// Memory that a measurement always has.
const ALWAYS: ByteSize = ByteSize(1 << 20);

/// The results of a run.
#[derive(Default)]
pub(super) struct RunResults {
    /// Facts that the read-back checks in the files.
    pub(super) expected: Vec<ExpectedMatrix>,
    /// The peak of the CPU, where `--profile` measured it.
    pub(super) peak: Option<PeakReport>,
    pub(super) swept: SweepReport,
    pub(super) perplexity: Perplexities,
    /// Accuracies of tasks.
    pub(super) tasks: Option<TaskResults>,
    /// The dense model of a comparison, which had a sweep of its own.
    pub(super) against: Option<AgainstReport>,
    /// The pruned layers; `None` for `prune eval`.
    pub(super) layers: Option<Vec<LayerReport>>,
    pub(super) output: Option<OutputReport>,
    /// The training of `prune recover`.
    pub(super) recovery: Option<RecoveryReport>,
}

/// The beginning of every record: the program, and what the clock has measured.
pub(super) fn measured_by(clock: &Clock) -> Manifest {
    let phases = clock.report();
    Manifest {
        schema: SCHEMA,
        prune_version: env!("CARGO_PKG_VERSION").to_string(),
        seconds: clock.seconds(),
        peak_anonymous: phases.iter().filter_map(|phase| phase.peak_anonymous).max(),
        phases,
        memory: clock.samples(),
        ..Manifest::default()
    }
}

/// Completes the record of a run with its warnings and earlier sessions, writes it, and removes the state of the run.
pub(super) fn close(
    mut manifest: Manifest,
    folder: &RunFolder,
    state: Option<&StateFile<'_>>,
    recorder: &Recorder<'_>,
) -> Result<Manifest> {
    for exceeded in manifest.exceeded_plan() {
        recorder.warn(exceeded);
    }
    manifest.warnings = recorder.warnings();
    if let Some(state) = state {
        state.complete(&mut manifest);
    }
    folder.record(&manifest)?;
    if let Some(state) = state {
        state.remove()?;
    }
    Ok(manifest)
}

impl SettledRun {
    /// Writes the record of a run that ends now, and removes its state.
    pub(super) fn record(
        &self,
        outputs: &Outputs<'_>,
        results: RunResults,
        recorder: &Recorder<'_>,
    ) -> Result<Manifest> {
        // Inside a phase, so that its memory is measured and compared with the plan.
        let clock = &self.model.clock;
        let zeros_gain = clock.measure(Phase::SaveAndVerify, || self.zeros_gain(&results));
        clock.mark(Moment::End, recorder);
        let manifest = Manifest {
            zeros_gain,
            ranks: rank_reports::gather(&self.ranks, &self.model.clock, self.model.threads)?,
            ..self.manifest(results)?
        };
        warn_of_infinite(&manifest, recorder);
        close(manifest, &self.folder, outputs.state.as_ref(), recorder)
    }

    fn manifest(&self, results: RunResults) -> Result<Manifest> {
        let Self { settings, model, texts, plan, .. } = self;
        let whole = model.part_of.as_ref();
        let passes = whole.map_or(&[][..], |whole| &whole.passes);
        let mut devices = DeviceRecords::default();
        for pass in passes {
            devices.add(pass.swept.fallbacks.clone(), pass.swept.devices.clone());
        }
        devices.add(results.swept.fallbacks, results.swept.devices);
        let plans = passes.iter().rev().map(|pass| pass.plan.clone());
        let plan = plans.fold(plan.clone(), |later, earlier| joined(earlier, later));
        let watch = results.swept.watch.clone();
        let measured = results.perplexity.pruned.or(results.perplexity.dense);
        let evaluation = texts.windows.as_ref().map(|windows| &windows.protocol);
        let layers = results.layers.as_deref();
        let command = match self.task {
            RunTask::Recover(_) => "recover",
            RunTask::Prune(_) => "prune",
            RunTask::Measure(_) => "eval",
        };
        let runs_at_once = self.pruning().map_or(1, |pruning| pruning.runs_at_once);
        let mut manifest = Manifest {
            command: command.to_string(),
            arguments: settings.arguments.clone(),
            settings: settings.by_name()?,
            started_unix_seconds: model.started_unix_seconds,
            cells_at_once: Some(runs_at_once).filter(|&runs| runs > 1),
            model: model.report()?,
            arithmetic: arithmetic(model, &settings.device, &plan),
            layer_drop: whole.and_then(|whole| whole.layer_drop.clone()),
            width_drop: whole.and_then(|whole| whole.width_drop.clone()),
            pruning: self.pruning_report(),
            recovery: results.recovery,
            calibration: texts.calibration.as_ref().map(|samples| samples.protocol.clone()),
            sparsity: layers.map(sparsity),
            layers: results.layers.unwrap_or_default(),
            evaluation: evaluation.cloned(),
            against: results.against,
            limits: settings.evaluation.limits(&results.perplexity, results.tasks.as_ref()),
            tasks: results.tasks,
            gate: GateReport::of(settings.evaluation.max_perplexity, measured),
            perplexity: results.perplexity,
            hidden_states: plan.hidden_states.storage,
            plan: Some(plan),
            fallbacks: devices.fallbacks,
            devices: devices.devices,
            output: results.output,
            masks: self.masks().map(|path| path.display().to_string()),
            ..measured_by(&model.clock)
        };
        manifest.profile =
            Some(profile::report(results.peak, (model.products, model.dtype()), &watch, &manifest));
        Ok(manifest)
    }

    /// The gain of the zeros of the written model. A run that is finished does not fail for a measurement.
    fn zeros_gain(&self, results: &RunResults) -> Option<ZerosGain> {
        let folder = self.folder.model.as_ref().filter(|_| results.output.is_some())?;
        results.layers.as_deref().map(sparsity).filter(|of| of.zeros > 0)?;
        let source = Checkpoint::open(folder).ok()?;
        let room = self.plan.cpu().map_or(ByteSize::ZERO, |cpu| cpu.peak);
        let room = ByteSize(room.0.saturating_sub(PROCESS.0)).max(ALWAYS);
        zeros_gain::measured(&source, &self.model.config, self.model.dtype(), room).ok()?
    }

    /// The targets as resolved.
    pub(super) fn pruning_report(&self) -> Option<PruningReport> {
        let pruning = self.pruning()?;
        let selection = &self.settings.sparsity.as_ref()?.selection;
        let targets = &pruning.targets;
        Some(PruningReport {
            method: pruning.technique.name(),
            sparsity_ratio: targets.sparsity_ratio,
            sparsity_type: targets.pattern.to_string(),
            changes_weights: pruning.technique.changes_weights(),
            permutes_channels: pruning.technique.permutes.is_some(),
            allocation: pruning.allocation.clone(),
            include: selection.include.clone(),
            exclude: selection.exclude.clone(),
            matrices: targets.matrices(),
            matrices_in_model: targets.matrices_in_model,
            layer_ratios: targets.uneven_ratios(),
        })
    }
}

/// Zeros over all decoder linears.
pub(super) fn sparsity(layers: &[LayerReport]) -> SparsityReport {
    let matrices = || layers.iter().flat_map(|layer| &layer.matrices);
    let zeros = matrices().map(|matrix| matrix.zeros).sum();
    let weights = matrices().map(|matrix| (matrix.shape[0] * matrix.shape[1]) as u64).sum();
    SparsityReport {
        zeros,
        zeros_before: matrices().map(|matrix| matrix.zeros_before).sum(),
        weights,
        ratio: zeros as f64 / weights as f64,
    }
}

/// Warns of a perplexity that is not finite.
fn warn_of_infinite(manifest: &Manifest, events: &dyn Events) {
    for (side, report) in
        [("dense", manifest.perplexity.dense), ("pruned", manifest.perplexity.pruned)]
    {
        if report.is_some_and(|report| !report.perplexity.is_finite()) {
            events.warn(format!(
                "the {side} perplexity is not finite: the model's outputs overflow or are NaN"
            ));
        }
    }
}
