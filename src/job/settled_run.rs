//! A settled run: model, folder, texts, plan. Nothing is written yet.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

use super::disk_room;
use super::folder::RunFolder;
use super::opened::OpenedModel;
use super::recover::Recovery;
use super::resolved::{Pruning, prunes_nothing};
use super::same_run::RunIdentity;
use super::texts::Texts;
use crate::bytes::ByteSize;
use crate::checkpoint::output_bytes;
use crate::data::Calibration;
use crate::eval::{Meeting, MeetingRole, NamedModel};
use crate::pipeline::{Observed, SaveMasks};
use crate::ranks::Ranks;
use crate::report;
use crate::run::manifest::PerplexityReport;
use crate::run::{AllocationReport, Events, HiddenStatesStorage, Manifest, Plan};
use crate::runtime::Side;
use crate::settings::{EvalSides, Settings};

/// A run that can begin.
pub(super) struct SettledRun {
    /// The settings, with everything resolved that the checkpoint decides.
    pub(super) settings: Settings,
    pub(super) model: OpenedModel,
    pub(super) folder: RunFolder,
    pub(super) task: RunTask,
    pub(super) texts: Arc<Texts>,
    pub(super) plan: Plan,
    pub(super) identity: RunIdentity,
    /// The ranks that share its samples and windows.
    pub(super) ranks: Ranks,
    /// The part of this run in the comparison of two models.
    pub(super) comparison: Option<Comparison>,
}

/// The part of a run in the comparison of two models that are evaluated.
pub(super) struct Comparison {
    pub(super) meeting: Arc<Meeting>,
    pub(super) role: MeetingRole,
    /// The run of the dense model; `None` in that run itself.
    pub(super) dense: Option<Box<SettledRun>>,
}

/// The work of a run.
pub(super) enum RunTask {
    /// It prunes layer by layer.
    Prune(Box<Pruning>),
    /// It trains.
    Recover(Box<Recovery>),
    /// It measures perplexities, and what samples are observed for.
    Measure(Option<Observed>),
}

impl RunTask {
    /// The work of a run that prunes, that trains, or that only measures.
    pub(super) fn of(pruning: Option<Pruning>, recovery: Option<Recovery>) -> Self {
        match (pruning, recovery) {
            (Some(pruning), _) => Self::Prune(Box::new(pruning)),
            (None, Some(recovery)) => Self::Recover(Box::new(recovery)),
            (None, None) => Self::Measure(None),
        }
    }
}

/// The outcome of settling a run, or a merge.
pub(super) enum RunStart<R = SettledRun> {
    /// A run that can begin.
    Run(Box<R>),
    /// The record of a run that had finished already.
    Finished(Box<Manifest>),
}

impl SettledRun {
    /// The pruning part; `None` where the run does not prune.
    pub(super) fn pruning(&self) -> Option<&Pruning> {
        match &self.task {
            RunTask::Prune(pruning) => Some(pruning),
            RunTask::Recover(_) | RunTask::Measure(_) => None,
        }
    }

    /// The run of the dense model that this run's model is compared with.
    pub(super) fn against(&self) -> Option<&SettledRun> {
        self.comparison.as_ref()?.dense.as_deref()
    }

    /// The folder of the spill file; `None` where hidden states stay in memory.
    pub(super) fn spill_folder(&self) -> Option<PathBuf> {
        let on_disk = self.plan.hidden_states.storage == HiddenStatesStorage::Disk;
        on_disk.then(|| offload_folder(&self.settings))
    }

    /// The models that perplexity is measured of.
    pub(super) fn sides(&self) -> &'static [Side] {
        sides_left(self.settings.evaluation.eval, &self.model, false)
    }

    /// The calibration samples; `None` where no statistics are made of them.
    pub(super) fn samples(&self) -> Option<&Calibration> {
        let is_used = self.pruning().is_none_or(|of| of.calibrates);
        self.texts.calibration.as_ref().filter(|_| is_used)
    }

    /// Passes of a calibration sample through layers, of which an earlier process finished some.
    pub(super) fn passes_of_a_sample(&self, finished: usize) -> usize {
        let layers = self.model.config.num_hidden_layers;
        let only_passes = matches!(self.task, RunTask::Measure(Some(Observed { kind: None, .. })));
        match layers - finished.min(layers) {
            0 => 0,
            left if only_passes => finished + left,
            // Each layer twice, once dense and once pruned, but the last layer only once.
            left => finished + 2 * left - 1,
        }
    }

    /// The name of the model of a side.
    pub(super) fn named(&self, side: Side) -> NamedModel {
        let is_beside_pruned = self.left_states().is_some() || self.model.part_of.is_some();
        match (&self.task, side) {
            (RunTask::Recover(_), Side::Dense) => NamedModel::Before,
            (RunTask::Recover(_), Side::Pruned) => NamedModel::After,
            (RunTask::Measure(None), _) if self.against().is_some() => NamedModel::Compared,
            (RunTask::Measure(None), _) if self.comparison.is_none() && !is_beside_pruned => {
                NamedModel::Only
            }
            (_, Side::Dense) => NamedModel::Dense,
            (_, Side::Pruned) => NamedModel::Pruned,
        }
    }

    /// The models whose perplexity this run measures itself.
    pub(super) fn measured_sides(&self) -> &'static [Side] {
        sides_left(self.settings.evaluation.eval, &self.model, self.dense().is_some())
    }

    /// The dense perplexity, where an earlier run has measured it.
    pub(super) fn dense(&self) -> Option<PerplexityReport> {
        self.pruning()?.dense
    }

    /// The allocation of the layers' ratios, where they were measured.
    pub(super) fn allocation(&self) -> Option<&AllocationReport> {
        match &self.task {
            RunTask::Prune(pruning) => pruning.allocation.as_ref(),
            RunTask::Recover(recovery) => recovery.closing.as_ref()?.allocation.as_ref(),
            RunTask::Measure(_) => None,
        }
    }

    /// The file of `--save-masks`.
    pub(super) fn masks(&self) -> Option<&Path> {
        self.pruning()?.masks.as_deref()
    }

    /// Checks that the disk has room for everything that will be written.
    pub(super) fn check_disk(&self) -> Result<()> {
        let mut needs: Vec<disk_room::Need<'_>> = Vec::new();
        // The files of a run that is continued already have their sizes.
        if self.identity.unfinished.is_none() {
            if let Some(model) = &self.folder.model {
                let bytes = output_bytes(&self.model.checkpoint)?;
                let replaced = self.folder.replaced_bytes();
                let more = ByteSize(bytes.0.saturating_sub(replaced.0));
                needs.push((model, more, "the model"));
            }
            if let Some((masks, pruning)) = self.masks().zip(self.pruning()) {
                let bytes = SaveMasks::bytes(&pruning.targets, &self.model.config);
                needs.push((masks, bytes, "the masks"));
            }
        }
        let of_training = self.recovery_files();
        for (folder, bytes, what) in &of_training {
            needs.push((folder, *bytes, what));
        }
        let states = self.left_states();
        if let Some((path, bytes)) = &states {
            needs.push((path, *bytes, "the dense model's final states"));
        }
        let spill = self.spill_folder();
        if let Some(folder) = &spill {
            needs.push((folder, self.plan.hidden_states.bytes, "hidden states"));
        }
        disk_room::check(&needs)
    }

    /// Tells the settings and the plan.
    pub(super) fn announce(&self, events: &dyn Events) {
        let Self { settings, model, texts, .. } = self;
        let config = &model.config;
        events.note(format!(
            "model        {}: {} layers of {}, {}, {}",
            model.folder.display(),
            config.num_hidden_layers,
            config.hidden_size,
            model.dtype().name(),
            model.checkpoint.total_bytes()
        ));
        let drops_only =
            |pruning: &&Pruning| self.model.part_of.is_some() && prunes_nothing(&pruning.targets);
        if let Some(Pruning { technique, targets, .. }) =
            self.pruning().filter(|of| !drops_only(of))
        {
            let permuted = match technique.permutes {
                Some(_) => ", channels permuted",
                None => "",
            };
            events.note(format!(
                "pruning      {} {:.4} {}{permuted}",
                technique.name(),
                targets.sparsity_ratio,
                targets.pattern
            ));
            for line in targets.describe() {
                events.note(format!("             {line}"));
            }
        }
        if let RunTask::Recover(recovery) = &self.task {
            recovery.announce(self, events);
        }
        if let Some((samples, of)) = texts.calibration.as_ref().zip(settings.calibration.as_ref()) {
            events.note(format!(
                "calibration  {}: {} samples of {} tokens, seed {}",
                of.dataset, samples.nsamples, samples.seqlen, of.seed
            ));
        }
        if let Some(dense) = self.against() {
            events.note(format!("against      {}", dense.model.folder.display()));
        }
        if let Some(windows) = &texts.windows {
            let sides: Vec<_> = self.sides().iter().map(|&side| self.named(side).name()).collect();
            let sides = match self.task {
                RunTask::Measure(_) => String::new(),
                _ => format!(", {}", sides.join(" and ")),
            };
            events.note(format!(
                "evaluation   {}: {} windows of {} tokens{sides}",
                settings.evaluation.eval_dataset, windows.windows, windows.seqlen
            ));
        }
        if let Some(tasks) = texts.task_layout() {
            let names: Vec<String> =
                settings.evaluation.tasks.asked().iter().map(ToString::to_string).collect();
            events.note(format!(
                "tasks        {}: {} choices, {} tokens in {} packs",
                names.join(", "),
                tasks.requests,
                tasks.rows,
                tasks.packs()
            ));
        }
        report::plan::announce(&self.plan, events);
        self.announce_places(events);
    }

    /// Tells the device and the folders.
    fn announce_places(&self, events: &dyn Events) {
        if self.plan.devices.len() == 1 && !self.settings.device.names_the_cpu() {
            let why = if cfg!(feature = "cuda") {
                "no GPU computes in this plan"
            } else {
                "this build has no CUDA"
            };
            events.note(format!("device       cpu; {why} (--use-cpu hides this line)"));
        }
        if matches!(self.task, RunTask::Measure(_)) {
            return;
        }
        match &self.folder.model {
            Some(model) => events.note(format!("output       {}", model.display())),
            None if self.folder.run.is_some() => {
                events.note("output       no model (--no-save-model)".to_string());
            }
            None => events.warn("nothing will be saved; name a run folder with --save".to_string()),
        }
        if let Some(masks) = self.masks() {
            events.note(format!("masks        {}", masks.display()));
        }
    }
}

/// The folder of files that go with the process.
pub(super) fn offload_folder(settings: &Settings) -> PathBuf {
    let asked = settings.device.offload_folder.as_ref();
    asked.or(settings.output.save.as_ref()).cloned().unwrap_or_else(std::env::temp_dir)
}

/// The models that a run has yet to measure. A pass that made the model smaller has measured the dense model. In a sweep
/// of runs, an earlier run may have measured it.
pub(super) fn sides_left(
    eval: EvalSides,
    model: &OpenedModel,
    is_dense_known: bool,
) -> &'static [Side] {
    let is_known = is_dense_known || model.part_of.is_some();
    match (eval, &model.part_of) {
        (EvalSides::Both, _) if is_known => EvalSides::Pruned.sides(),
        (EvalSides::Dense, Some(_)) => &[],
        _ => eval.sides(),
    }
}
