//! A run that is settled and has not begun: everything that can be wrong is checked, and nothing is written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;

use super::disk_room;
use super::folder::RunFolder;
use super::given::{Given, Sharing};
use super::opened::OpenedModel;
use super::planned::Planning;
use super::planned_texts::{plan_early, texts_and_plan};
use super::recover::{GivenTraining, Recovery};
use super::resolved::{Pruning, allocates, prunes_nothing};
use super::same_run;
use super::texts::Texts;
use super::{allocate, layer_drop, width_drop};
use crate::bytes::ByteSize;
use crate::checkpoint::{check_sidecars, output_bytes};
use crate::data::Calibration;
use crate::failure::Failure;
use crate::pipeline::{Flow, Observed, RunShape, SaveMasks};
use crate::report;
use crate::run::manifest::PerplexityReport;
use crate::run::{Events, Manifest, Plan, RunState};
use crate::runtime::Side;
use crate::settings::{EvalSides, Settings};

/// A run that can begin.
pub(super) struct Job {
    /// The settings, with everything resolved that the checkpoint decides.
    pub(super) settings: Settings,
    pub(super) model: OpenedModel,
    pub(super) folder: RunFolder,
    /// `None` for `prune eval` and `prune recover`.
    pub(super) pruning: Option<Pruning>,
    /// `None` where nothing is trained.
    pub(super) recovery: Option<Recovery>,
    /// Data of a training, in place of the data that texts and seeds give.
    pub(super) given_training: Option<Arc<GivenTraining>>,
    pub(super) texts: Arc<Texts>,
    /// The measurements of a run that prunes nothing.
    observes: Option<Observed>,
    pub(super) plan: Plan,
    /// Layers whose frozen weights stay in memory during a training.
    pub(super) resident_layers: usize,
    /// The folder of the spill file; `None` where hidden states stay in RAM.
    pub(super) spill_folder: Option<PathBuf>,
    /// Everything that decides the outcome, by name.
    pub(super) deciding: BTreeMap<String, String>,
    /// The state that an earlier process left of this run.
    pub(super) unfinished: Option<RunState>,
    /// The dense perplexity, where another run has measured it.
    pub(super) dense: Option<PerplexityReport>,
    /// The runs that share its sweep, itself included.
    pub(super) runs_at_once: usize,
}

/// The outcome of settling.
pub(super) enum Settled {
    /// A run that can begin.
    Job(Box<Job>),
    /// The record of a run that had finished already.
    Finished(Box<Manifest>),
}

impl Job {
    /// Opens the checkpoint, resolves targets, folders and memory, and tokenizes the texts.
    ///
    /// # Errors
    /// Fails for everything that can be wrong with settings, checkpoint, texts and folders.
    pub(super) fn settle(
        settings: Settings,
        given: Given<'_>,
        events: &dyn Events,
    ) -> Result<Settled> {
        check_gate(&settings)?;
        let model = OpenedModel::open(&settings.model, &settings.device, settings.seqlen, events)?;
        Self::settle_opened(settings, model, given, events)
    }

    /// Settles a run of a model that is open.
    ///
    /// # Errors
    /// Fails as [`Job::settle`].
    pub(super) fn settle_opened(
        mut settings: Settings,
        mut model: OpenedModel,
        given: Given<'_>,
        events: &dyn Events,
    ) -> Result<Settled> {
        settings.seqlen = Some(model.seqlen);
        let prunes = settings.sparsity.is_some();
        let recovery = Recovery::resolve(&settings, &mut model, events)?;
        if prunes || settings.layer_drop.is_some() || given.observes.is_some() {
            model.refuse_quantized()?;
        }
        let mut folder = run_folder(&settings, &model, recovery.as_ref())?;
        let fewest_layers = layer_drop::fewest_layers(&settings, &model.config)?;
        if let Some(drop) = &settings.width_drop {
            width_drop::width(drop, &model.config, &folder)?;
        }
        let mut pruning = Pruning::resolve(&mut settings, &fewest_layers, &folder)?;
        folder.lock(events)?;
        let mut unfinished = folder.look()?;
        if unfinished.is_none() && settings.output.resume {
            return Err(nothing_to_resume(&folder).into());
        }
        let mut deciding = BTreeMap::new();
        if folder.state().is_some() {
            deciding = same_run::early(&settings, &model, &folder)?;
            deciding.extend(recovery.iter().flat_map(Recovery::deciding));
        }
        if let Some(state) = unfinished.take() {
            match continued(state, &deciding, &mut folder, &settings, events)? {
                Continued::Unfinished(state) => unfinished = state.map(|state| *state),
                Continued::Finished(manifest) => return Ok(Settled::Finished(manifest)),
            }
        }

        let planning = Planning::new(&settings.device, model.threads)?;
        if settings.layer_drop.is_some() || settings.width_drop.is_some() {
            if settings.layer_drop.is_some() {
                let shape = early_shape(&settings, &model, pruning.as_ref(), &given, &folder);
                let mut shape = RunShape { config: &fewest_layers, ..shape };
                plan_early(&planning, &mut shape, &model)?;
            }
            model = smaller(&settings, model, unfinished.as_ref(), &folder, events)?;
            // The settings are resolved already.
            pruning = Pruning::resolve(&mut settings.clone(), &model.config, &folder)?;
        }
        if pruning.as_ref().is_some_and(|of| allocates(&settings, of)) {
            let mut shape = early_shape(&settings, &model, pruning.as_ref(), &given, &folder);
            plan_early(&planning, &mut shape, &model)?;
            let known = unfinished.as_ref().filter(|_| !settings.output.force);
            let known = known.and_then(|state| state.allocation.clone());
            (model, pruning) = allocate::resolved(&settings, model, pruning, known, events)?;
        }
        let (texts, plan, resident_layers) = match given.sharing {
            Sharing::Next(first) => (Arc::clone(&first.texts), first.plan.clone(), 0),
            Sharing::Alone | Sharing::First(_) => {
                let mut shape = early_shape(&settings, &model, pruning.as_ref(), &given, &folder);
                shape.trains = Recovery::shape_of(recovery.as_ref(), &settings, &model);
                texts_and_plan(&settings, &model, &planning, shape, &given, events)?
            }
        };
        let dense = given.dense.and_then(|dense| {
            let device = &settings.device;
            same_run::dense_of(dense, &texts, &model, device, &plan)
        });
        let save = settings.output.save.as_deref();
        let spill_folder = planning.spill_folder(&plan, save, events)?;
        if folder.state().is_some() {
            deciding.extend(same_run::late(&texts, &model, &settings.device, &plan));
        }
        if let Some(state) = unfinished.take() {
            unfinished = same_run::check(state, &deciding, &folder, &settings.output)?;
        }
        let job = Self {
            settings,
            model,
            folder,
            pruning,
            recovery,
            given_training: given.training.clone(),
            texts,
            observes: given.observes,
            plan,
            resident_layers,
            spill_folder,
            deciding,
            unfinished,
            dense,
            runs_at_once: given.runs_at_once(),
        };
        job.check_disk()?;
        Ok(Settled::Job(Box::new(job)))
    }

    /// The models that perplexity is measured of.
    pub(super) fn sides(&self) -> &'static [Side] {
        sides_left(self.settings.evaluation.eval, &self.model, false)
    }

    /// The calibration samples; `None` where no statistics are made of them.
    pub(super) fn samples(&self) -> Option<&Calibration> {
        let is_used = self.pruning.as_ref().is_none_or(|of| of.calibrates);
        self.texts.calibration.as_ref().filter(|_| is_used)
    }

    /// Passes of a calibration sample through layers, of which an earlier process finished some.
    pub(super) fn passes_of_a_sample(&self, finished: usize) -> usize {
        let layers = self.model.config.num_hidden_layers;
        let only_passes = self.observes.is_some_and(|observes| observes.kind.is_none());
        match layers - finished.min(layers) {
            0 => 0,
            left if only_passes => finished + left,
            // Each layer twice, once dense and once pruned, but the last layer only once.
            left => finished + 2 * left - 1,
        }
    }

    /// The models whose perplexity this run measures itself.
    pub(super) fn measured_sides(&self) -> &'static [Side] {
        sides_left(self.settings.evaluation.eval, &self.model, self.dense.is_some())
    }

    /// The file of `--save-masks`.
    pub(super) fn masks(&self) -> Option<&Path> {
        self.pruning.as_ref()?.masks.as_deref()
    }

    /// Checks that the disk has room for everything that will be written.
    fn check_disk(&self) -> Result<()> {
        let mut needs: Vec<disk_room::Need<'_>> = Vec::new();
        // The files of a run that is continued already have their sizes.
        if self.unfinished.is_none() {
            if let Some(model) = &self.folder.model {
                let bytes = output_bytes(&self.model.checkpoint)?;
                let replaced = self.folder.replaced_bytes();
                let more = ByteSize(bytes.0.saturating_sub(replaced.0));
                needs.push((model, more, "the model"));
            }
            if let Some((masks, pruning)) = self.masks().zip(self.pruning.as_ref()) {
                let bytes = SaveMasks::bytes(&pruning.targets, &self.model.config);
                needs.push((masks, bytes, "the masks"));
            }
        }
        let of_training = self.recovery_files();
        for (folder, bytes, what) in &of_training {
            needs.push((folder, *bytes, what));
        }
        if let Some(folder) = &self.spill_folder {
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
            self.pruning.as_ref().filter(|of| !drops_only(of))
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
        if let Some(recovery) = &self.recovery {
            recovery.announce(self, events);
        }
        if let Some((samples, of)) = texts.calibration.as_ref().zip(settings.calibration.as_ref()) {
            events.note(format!(
                "calibration  {}: {} samples of {} tokens, seed {}",
                of.dataset, samples.nsamples, samples.seqlen, of.seed
            ));
        }
        if let Some(windows) = &texts.windows {
            let sides: Vec<_> = self.sides().iter().map(|side| side.name()).collect();
            events.note(format!(
                "evaluation   {}: {} windows of {} tokens, {}",
                settings.evaluation.eval_dataset,
                windows.windows,
                windows.seqlen,
                sides.join(" and ")
            ));
        }
        for line in report::plan::text(&self.plan).lines() {
            events.note(line.to_string());
        }
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
        if self.pruning.is_none() && self.recovery.is_none() {
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

/// A run whose state was found in its folder.
enum Continued {
    /// The run continues; `None` where a new run begins.
    Unfinished(Option<Box<RunState>>),
    /// Its record is written.
    Finished(Box<Manifest>),
}

/// Compares the state of a run with this run. A training that diverged continues from its best state if the settings of its learning
/// rate changed.
///
/// # Errors
/// Fails for a run whose settings differ, and when files cannot be read or removed.
fn continued(
    state: RunState,
    deciding: &BTreeMap<String, String>,
    folder: &mut RunFolder,
    settings: &Settings,
    events: &dyn Events,
) -> Result<Continued> {
    let unfinished = same_run::check(state, deciding, folder, &settings.output)?;
    let has_other_rate =
        |state: &RunState| state.divergence.is_some() && !state.differences(deciding).is_empty();
    if let Some(diverged) = unfinished.as_ref().filter(|state| has_other_rate(state)) {
        folder.replace_model();
        let mut begun = diverged.clone().begun_again();
        begun.replaces_model = true;
        begun.settings.extend(deciding.clone());
        return Ok(Continued::Unfinished(Some(Box::new(begun))));
    }
    if unfinished.as_ref().is_some_and(|state| state.replaces_model) {
        folder.replace_model();
    }
    let max_perplexity = settings.evaluation.max_perplexity;
    let Some(manifest) = folder.record_of_the_last_step(max_perplexity)? else {
        return Ok(Continued::Unfinished(unfinished.map(Box::new)));
    };
    width_drop::tidy(folder)?;
    let recovery = manifest.recovery.as_ref();
    events.note(match recovery.and_then(|of| of.divergence.as_ref()) {
        Some(_) => "this run is finished, and another --lr continues it".to_string(),
        None => "this run is finished; only a file of its state was left".to_string(),
    });
    Ok(Continued::Finished(Box::new(manifest)))
}

/// The folders of a run's results. A model is written where weights change, with the files that lie beside the weights of its source.
fn run_folder(
    settings: &Settings,
    model: &OpenedModel,
    recovery: Option<&Recovery>,
) -> Result<RunFolder> {
    let writes = settings.sparsity.is_some() || recovery.is_some();
    let teacher = recovery.and_then(Recovery::teacher_folder);
    let sources: Vec<&Path> = [&*model.folder].into_iter().chain(teacher).collect();
    let folder = RunFolder::at(&sources, &settings.output, writes)?;
    if folder.model.is_some() {
        check_sidecars(&model.folder)?;
    }
    Ok(folder)
}

/// Replaces a model by the part of it that the flags ask for: first layers are dropped, then width. An earlier process may have
/// decided both.
fn smaller(
    settings: &Settings,
    mut model: OpenedModel,
    unfinished: Option<&RunState>,
    folder: &RunFolder,
    events: &dyn Events,
) -> Result<OpenedModel> {
    let known = unfinished.filter(|_| !settings.output.force);
    if settings.layer_drop.is_some() {
        let known = known.and_then(|state| state.layer_drop.clone());
        model = layer_drop::smaller(settings, model, known, folder, events)?;
    }
    if settings.width_drop.is_some() {
        let known = known.and_then(|state| state.width_drop.clone());
        model = width_drop::narrower(settings, model, known, folder, events)?;
    }
    Ok(model)
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

/// A run in numbers before its texts are tokenized. The number of windows is unknown, and a single window stands for all: a run
/// that does not fit with it fails early.
fn early_shape<'m>(
    settings: &Settings,
    model: &'m OpenedModel,
    pruning: Option<&Pruning>,
    given: &Given<'_>,
    folder: &RunFolder,
) -> RunShape<'m> {
    let sides = sides_left(settings.evaluation.eval, model, given.dense.is_some());
    let is_used = pruning.is_none_or(|pruning| pruning.calibrates);
    // The text decides how many examples a whole training has; the shape of the training has the fewest.
    let is_used = is_used && !settings.trains_whole();
    let calibration = settings.calibration.as_ref().filter(|_| is_used);
    RunShape {
        samples: calibration.map_or(0, |calibration| calibration.nsamples as usize),
        windows: sides.len().min(1),
        sides,
        technique: pruning.map(|pruning| pruning.technique.clone()),
        shared_with: given.shared_with(),
        flow: pruning.map_or_else(Flow::default, |pruning| pruning.flow),
        observes: given.observes,
        saves: folder.model.is_some(),
        ..model.run_shape(&settings.device)
    }
}

/// Refuses `--max-perplexity` without a measured perplexity.
fn check_gate(settings: &Settings) -> Result<()> {
    let evaluation = &settings.evaluation;
    if evaluation.max_perplexity.is_some() && evaluation.eval == EvalSides::None {
        return Err(Failure::usage(
            "--max-perplexity needs a perplexity, and --eval none measures none",
        )
        .hint("use --eval pruned, or leave --max-perplexity out")
        .into());
    }
    Ok(())
}

pub(super) fn nothing_to_resume(folder: &RunFolder) -> Failure {
    match folder.state() {
        Some(folder) => {
            Failure::new(format!("--resume: there is no unfinished run in `{}`", folder.display()))
                .hint("leave --resume out to begin one")
        }
        None => Failure::usage("--resume needs the folder of the model that is unfinished")
            .hint("add --save DIR, and leave --no-save-model out"),
    }
}
