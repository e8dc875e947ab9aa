//! A run of several ranks: the first rank settles it and tells the others, which sweep with it and write nothing.
//!
//! ```text
//! rank 0      settle → outputs → share ─┬→ streams → sweep → finish → record ─┬→ record
//! rank 1 …    wait ─────────────────────┴→ settle as told → streams → sweep ──┴→ record
//! ```
//!
//! Sweeps that come before the run (`--drop-layers`, `--drop-width`, `--allocate`) are part of settling: the first rank does them alone.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::folder::RunFolder;
use super::opened::OpenedModel;
use super::outputs::{FirstRank, Outputs};
use super::prune::sweep;
use super::recover::{Recovery, closing, train};
use super::resolved::{Pruning, allocates};
use super::same_run::RunIdentity;
use super::settle::smaller;
use super::settled_run::{RunTask, SettledRun};
use super::texts::{Texts, id_file};
use super::{
    against, allocate, eval, layer_drop, rank_reports, same_run, target_size, weight_choice,
};
use crate::checkpoint::{PartialModel, WrittenPlaces};
use crate::data::{Calibration, Evaluation, Examples};
use crate::failure::Failure;
use crate::model::WeightForm;
use crate::ranks::Ranks;
use crate::run::manifest::SweepMeasurements;
use crate::run::{Event, Events, Manifest, Plan, RunState, Unfinished};
use crate::settings::{Settings, WeightChoice};
use crate::tasks::{PackedTasks, TaskLayout};

/// The message of the first rank before the sweep.
#[derive(Serialize, Deserialize)]
pub(super) enum Start {
    /// The run begins.
    Run(Box<SharedRun>),
    /// The run had finished already.
    Finished(Box<Manifest>),
}

/// A run that the first rank has settled.
#[derive(Serialize, Deserialize)]
pub(super) struct SharedRun {
    calibration: Option<Calibration>,
    windows: Option<Evaluation>,
    /// The examples of a training, and the held-out examples.
    examples: Option<(Examples, Option<Examples>)>,
    /// The parts of the file of their token ids follow.
    tasks: Option<TaskLayout>,
    plan: Plan,
    /// The plan of the dense model that it is compared with.
    against: Option<Plan>,
    /// Finished layers, and what earlier sweeps have decided.
    state: RunState,
    /// The measurements, where an earlier process measured all of them.
    measured: Option<SweepMeasurements>,
    written: Option<WrittenPlaces>,
    /// Layers whose frozen weights stay in memory in a training.
    resident_layers: usize,
    /// The form of the matrices of an evaluated model.
    weights: WeightChoice,
    /// Settings that decide the results and depend on the machine, by name.
    deciding: BTreeMap<String, String>,
}

/// Refuses a settled run that several ranks cannot share, before anything is written.
///
/// # Errors
/// Fails for a plan with GPUs.
pub(super) fn check(job: &SettledRun) -> Result<(), Failure> {
    if job.ranks.is_alone() || job.plan.devices.len() <= 1 {
        return Ok(());
    }
    Err(Failure::usage("several ranks compute on their CPUs only, and this plan has a GPU")
        .hint("add --use-cpu, or start one rank with `srun -n 1`"))
}

/// Shares a settled run with the other ranks.
///
/// # Errors
/// Fails when a rank has left.
pub(super) fn share(job: &SettledRun, outputs: &Outputs<'_>) -> Result<()> {
    if job.ranks.is_alone() {
        return Ok(());
    }
    let begun = job.identity.begin(&job.settings.arguments, job.model.started_unix_seconds);
    let whole = job.model.part_of.as_ref();
    let written = outputs.finished_model()?;
    let shared = SharedRun {
        calibration: job.texts.calibration.clone(),
        windows: job.texts.windows.clone(),
        examples: job.texts.examples.clone(),
        tasks: job.texts.task_layout().cloned(),
        plan: job.plan.clone(),
        against: job.against().map(|dense| dense.plan.clone()),
        state: RunState {
            allocation: job.allocation().cloned(),
            layer_drop: whole.and_then(|whole| whole.layer_drop.clone()),
            width_drop: whole.and_then(|whole| whole.width_drop.clone()),
            layers: outputs.layers_before.clone(),
            ..begun
        },
        measured: outputs.measured(),
        written: written.map(|written| written.places()),
        resident_layers: match &job.task {
            RunTask::Recover(recovery) => recovery.resident_layers,
            RunTask::Prune(_) | RunTask::Measure(_) => 0,
        },
        weights: match job.model.forms.form() {
            WeightForm::Dense => WeightChoice::Dense,
            WeightForm::Compact => WeightChoice::Compact,
            WeightForm::Int8 => WeightChoice::Int8,
        },
        deciding: same_run::late(&job.texts, &job.model, &job.settings.device, &job.plan),
    };
    job.ranks.tell_others(&Start::Run(Box::new(shared)))?;
    let tasks = job.texts.tasks.iter();
    tasks.flat_map(PackedTasks::parts).try_for_each(|part| job.ranks.tell_others(&part?))
}

/// Tells the other ranks that the run had finished already.
///
/// # Errors
/// Fails when a rank has left.
pub(super) fn share_finished(manifest: &Manifest, ranks: &Ranks) -> Result<()> {
    if ranks.is_alone() {
        return Ok(());
    }
    ranks.tell_others(&Start::Finished(Box::new(manifest.clone())))
}

/// Sweeps with the first rank, and returns its record.
///
/// # Errors
/// Fails where this machine computes otherwise than the machine of the first rank, when files cannot be read, and when a rank has left.
pub(super) fn run(settings: Settings, ranks: &Ranks, events: &dyn Events) -> Result<Manifest> {
    // A signal stops this rank between two samples, so that it can tell the other ranks.
    events.emit(Event::IfInterrupted(Some(Unfinished {
        text: String::new(),
        is_resumable: true,
        has_begun: true,
    })));
    let shared = match ranks.hear_first()? {
        Start::Run(shared) => *shared,
        Start::Finished(manifest) => return Ok(*manifest),
    };
    let layers = shared.state.layers.clone();
    let (measured, written) = (shared.measured.clone(), shared.written.clone());
    let job = shared.settle(settings, ranks, events)?;
    let written = written.map(|places| PartialModel::at(Arc::clone(&job.model.checkpoint), places));
    let first = FirstRank { measured, written: written.transpose()?.map(Arc::new) };
    let mut outputs =
        Outputs { layers_before: layers, of_first: Some(first), ..Outputs::default() };
    match &job.task {
        RunTask::Prune(pruning) => drop(sweep(&job, pruning, &mut outputs, None, events)?),
        RunTask::Recover(recovery) => drop(train(&job, recovery, &mut outputs, events)?),
        RunTask::Measure(_) => drop(eval::sweep(&job, &outputs, events)?),
    }
    rank_reports::gather(ranks, &job.model.clock, job.model.threads)?;
    ranks.hear_first()
}

impl SharedRun {
    /// Settles the run on this rank. It opens no file of the run: the first rank writes.
    fn settle(self, settings: Settings, ranks: &Ranks, events: &dyn Events) -> Result<SettledRun> {
        let mut settings = settings;
        let tasks = self.tasks.map(|layout| {
            PackedTasks::of_parts(layout, id_file(&settings)?, || ranks.hear_first())
        });
        if let Some(weights) = &mut settings.weights {
            weights.weights = self.weights;
        }
        let mut model =
            OpenedModel::open(&settings.model, &settings.device, settings.seqlen, events)?;
        settings.seqlen = Some(model.seqlen);
        let mut recovery = Recovery::resolve(&settings, &mut model, events)?;
        let source: &Path = &model.folder.clone();
        let folder = RunFolder::at(&[source], &settings.output, false)?;
        weight_choice::settle_sweep(&mut model, &settings, &|_| Ok(self.plan.clone()), events)?;
        target_size::resolve(&mut settings, &model, &folder, events)?;
        let fewest_layers = layer_drop::fewest_layers(&settings, &model.config)?;
        let mut pruning = Pruning::resolve(&mut settings, &fewest_layers, &folder)?;
        if settings.layer_drop.is_some() || settings.width_drop.is_some() {
            model = smaller(&settings, model, Some(&self.state), &folder, events)?;
            pruning = Pruning::resolve(&mut settings.clone(), &model.config, &folder)?;
        }
        if pruning.as_ref().is_some_and(|of| allocates(&settings, of)) {
            let known = self.state.allocation.clone();
            (model, pruning) = allocate::resolved(&settings, model, pruning, known, events)?;
        }
        let known = self.state.allocation.clone();
        model = closing::settle(&settings, model, recovery.as_mut(), known, events)?;
        if let Some(recovery) = &mut recovery {
            recovery.resident_layers = self.resident_layers;
        }
        let texts = Texts {
            calibration: self.calibration,
            windows: self.windows,
            tasks: tasks.transpose()?,
            examples: self.examples,
        };
        let here = same_run::late(&texts, &model, &settings.device, &self.plan);
        for (name, first) in &self.deciding {
            let own = here.get(name).map_or("none", String::as_str);
            if own != first {
                return Err(other_machine(name, own, first, ranks).into());
            }
        }
        let dense = against::open(&settings, &model, events)?;
        let job = SettledRun {
            settings,
            model,
            folder,
            task: RunTask::of(pruning, recovery),
            texts: Arc::new(texts),
            plan: self.plan,
            identity: RunIdentity::default(),
            ranks: ranks.clone(),
            comparison: None,
        };
        against::join(job, dense.zip(self.against))
    }
}

/// The refusal of ranks that would compute different bits.
fn other_machine(name: &str, own: &str, first: &str, ranks: &Ranks) -> Failure {
    Failure::new(format!("the ranks have different settings of \"{name}\""))
        .detail(format!("{ranks:?} has {own}"))
        .detail(format!("rank 0 has {first}"))
        .hint(
            "use machines with the same CPU, or add --dtype f32 where all of them have its kernel",
        )
}
