//! A run that is settled and has not begun: everything that can be wrong is checked, and nothing is written.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;

use super::folder::RunFolder;
use super::inputs::{RunInputs, Sharing};
use super::opened::OpenedModel;
use super::pass::early_shape;
use super::planned::Planning;
use super::planned_texts::plan_early;
use super::recover::{Recovery, closing};
use super::resolved::{Pruning, allocates};
use super::same_run::{self, RunIdentity};
use super::settled_run::{RunStart, RunTask, SettledRun, offload_folder};
use super::{against, allocate, layer_drop, target_size, weight_choice, width_drop};
use crate::checkpoint::check_sidecars;
use crate::data::chat::begin_run;
use crate::failure::Failure;
use crate::pipeline::RunShape;
use crate::run::divergence::KlPositions;
use crate::run::{AllocationReport, Events, Manifest, RunState};
use crate::settings::{EvalSides, Settings};

/// Opens the checkpoint, resolves targets, folders and memory, and tokenizes the texts.
///
/// # Errors
/// Fails for everything that can be wrong with settings, checkpoint, texts and folders.
pub(super) fn settle(
    settings: Settings,
    given: RunInputs<'_>,
    events: &dyn Events,
) -> Result<RunStart> {
    check_gate(&settings)?;
    let model = OpenedModel::open(&settings.model, &settings.device, settings.seqlen, events)?;
    settle_opened(settings, model, given, events)
}

/// Settles a run of a model that is open.
///
/// # Errors
/// Fails as [`settle`].
fn settle_opened(
    mut settings: Settings,
    mut model: OpenedModel,
    given: RunInputs<'_>,
    events: &dyn Events,
) -> Result<RunStart> {
    settings.seqlen = Some(model.seqlen);
    let mut recovery = Recovery::resolve(&settings, &mut model, events)?;
    refuse_compressed(&settings, &model)?;
    let mut folder = run_folder(&settings, &model, recovery.as_ref())?;
    target_size::resolve(&mut settings, &model, &folder, events)?;
    let fewest_layers = layer_drop::fewest_layers(&settings, &model.config)?;
    if let Some(drop) = &settings.width_drop {
        width_drop::width(drop, &model.config, &folder)?;
    }
    let mut pruning = Pruning::resolve(&mut settings, &fewest_layers, &folder)?;
    folder.lock(events)?;
    let mut unfinished = folder.look()?;
    if unfinished.is_none() && settings.output.resume {
        return Err(folder.nothing_to_resume().into());
    }
    let mut deciding = early_deciding(&settings, &model, &folder, recovery.as_ref())?;
    if let Some(state) = unfinished.take() {
        match continued(state, &deciding, &mut folder, &settings, events)? {
            ControlFlow::Continue(state) => unfinished = state,
            ControlFlow::Break(manifest) => return Ok(RunStart::Finished(manifest)),
        }
    }

    date_texts(unfinished.as_ref(), &model);
    let dense = against::open(&settings, &model, events)?;
    let planning = Planning::new(&settings.device, model.threads)?.beside(&given.ranks);
    let measured =
        |model: &OpenedModel| planning.plan(&early_shape(&settings, model, None, &given, &folder));
    weight_choice::settle_sweep(&mut model, &settings, &measured, events)?;
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
    let known = known_allocation(&settings, unfinished.as_ref());
    if pruning.as_ref().is_some_and(|of| allocates(&settings, of)) {
        let mut shape = early_shape(&settings, &model, pruning.as_ref(), &given, &folder);
        plan_early(&planning, &mut shape, &model)?;
        let known = known.clone();
        (model, pruning) = allocate::resolved(&settings, model, pruning, known, events)?;
    }
    model = closing::settle(&settings, model, recovery.as_mut(), known, events)?;
    let (texts, plan, resident_layers) = match given.sharing {
        Sharing::Next(first) => (Arc::clone(&first.texts), first.plan.clone(), 0),
        Sharing::Alone | Sharing::First(_) => {
            let mut shape = early_shape(&settings, &model, pruning.as_ref(), &given, &folder);
            let samples = settings.calibration.as_ref().map_or(0, |of| of.nsamples as usize);
            let of = |of: &Recovery| of.shape(&shape, samples, given.ranks.size());
            shape.trains = recovery.as_ref().map(of);
            shape.against = dense.as_ref().map(OpenedModel::as_against).or(shape.against);
            planning.texts_and_plan(&settings, &model, shape, &given, events)?
        }
    };
    planning.check_spill(&plan, &offload_folder(&settings), events)?;
    if let Some(pruning) = &mut pruning {
        let device = &settings.device;
        let dense = given.dense;
        pruning.dense =
            dense.and_then(|dense| same_run::dense_of(dense, &texts, &model, device, &plan));
        pruning.runs_at_once = given.runs_at_once();
    }
    if let Some(recovery) = &mut recovery {
        recovery.given = Arc::clone(&given.training);
        recovery.resident_layers = resident_layers;
    }
    if folder.state().is_some() {
        deciding.extend(same_run::late(&texts, &model, &settings.device, &plan));
    }
    if let Some(state) = unfinished.take() {
        unfinished = same_run::check(state, &deciding, &folder, &settings.output)?;
    }
    let dense = against::planned(dense, &settings, &given, (&texts, &plan))?;
    let job = SettledRun {
        settings,
        model,
        folder,
        task: RunTask::of(pruning, recovery),
        texts,
        plan,
        identity: RunIdentity { deciding, unfinished },
        ranks: given.ranks.clone(),
        comparison: None,
    };
    let job = against::join(job, dense)?;
    job.check_disk()?;
    Ok(RunStart::Run(Box::new(job)))
}

/// The allocation that an earlier process measured.
fn known_allocation(
    settings: &Settings,
    unfinished: Option<&RunState>,
) -> Option<AllocationReport> {
    unfinished.filter(|_| !settings.output.force)?.allocation.clone()
}

/// Gives texts the date of the first process, also where a run continues on a later day.
fn date_texts(unfinished: Option<&RunState>, model: &OpenedModel) {
    begin_run(unfinished.map_or(model.started_unix_seconds, |of| of.started_unix_seconds));
}

/// The settings that decide the outcome and are known before texts are; none for a run that cannot be continued.
fn early_deciding(
    settings: &Settings,
    model: &OpenedModel,
    folder: &RunFolder,
    recovery: Option<&Recovery>,
) -> Result<BTreeMap<String, String>> {
    if folder.state().is_none() {
        return Ok(BTreeMap::new());
    }
    let mut deciding = same_run::early(settings, model, folder)?;
    deciding.extend(recovery.into_iter().flat_map(Recovery::deciding));
    Ok(deciding)
}

/// Refuses a checkpoint whose weights are to be changed and are quantised or packed.
///
/// # Errors
/// Fails for such a checkpoint.
fn refuse_compressed(settings: &Settings, model: &OpenedModel) -> Result<()> {
    let drops_layers = settings.layer_drop.is_some();
    if settings.sparsity.is_some() || drops_layers {
        model.refuse_quantized()?;
    }
    if settings.sparsity.is_some() || drops_layers || settings.width_drop.is_some() {
        model.refuse_packed()?;
    }
    Ok(())
}

/// Compares the state of a run with this run. A training that diverged continues from its best state if the settings of its learning
/// rate changed. Breaks with the record of a run that is finished; continues without a state where a run begins anew.
///
/// # Errors
/// Fails for a run whose settings differ, and when files cannot be read or removed.
fn continued(
    state: RunState,
    deciding: &BTreeMap<String, String>,
    folder: &mut RunFolder,
    settings: &Settings,
    events: &dyn Events,
) -> Result<ControlFlow<Box<Manifest>, Option<RunState>>> {
    let unfinished = same_run::check(state, deciding, folder, &settings.output)?;
    let has_other_rate =
        |state: &RunState| state.divergence.is_some() && !state.differences(deciding).is_empty();
    if let Some(diverged) = unfinished.as_ref().filter(|state| has_other_rate(state)) {
        folder.replace_model();
        let mut begun = diverged.clone().begun_again();
        begun.replaces_model = true;
        begun.settings.extend(deciding.clone());
        return Ok(ControlFlow::Continue(Some(begun)));
    }
    if unfinished.as_ref().is_some_and(|state| state.replaces_model) {
        folder.replace_model();
    }
    let Some(manifest) = folder.record_of_the_last_step(&settings.evaluation)? else {
        return Ok(ControlFlow::Continue(unfinished));
    };
    width_drop::tidy(folder)?;
    let recovery = manifest.recovery.as_ref();
    events.note(match recovery.and_then(|of| of.divergence.as_ref()) {
        Some(_) => "this run is finished, and another --lr continues it".to_string(),
        None => "this run is finished; only a file of its state was left".to_string(),
    });
    Ok(ControlFlow::Break(Box::new(manifest)))
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
pub(super) fn smaller(
    settings: &Settings,
    model: OpenedModel,
    unfinished: Option<&RunState>,
    folder: &RunFolder,
    events: &dyn Events,
) -> Result<OpenedModel> {
    let known = unfinished.filter(|_| !settings.output.force);
    let of_layers = known.and_then(|state| state.layer_drop.clone());
    let of_width = known.and_then(|state| state.width_drop.clone());
    let model = layer_drop::smaller(settings, model, of_layers, events)?;
    width_drop::narrower(settings, model, of_width, folder, events)
}

/// Refuses gates without their measurements.
fn check_gate(settings: &Settings) -> Result<()> {
    let evaluation = &settings.evaluation;
    if evaluation.max_perplexity.is_some() && evaluation.eval == EvalSides::None {
        return Err(Failure::usage(
            "--max-perplexity needs a perplexity, and --eval none measures none",
        )
        .hint("use --eval pruned, or leave --max-perplexity out")
        .into());
    }
    let prunes = settings.sparsity.is_some();
    let is_smaller = settings.layer_drop.is_some() || settings.width_drop.is_some();
    let compares = evaluation.against.is_some()
        || (prunes && !is_smaller && evaluation.eval == EvalSides::Both);
    // In a sweep, the run of the dense model leaves the states that cells are compared with.
    let chooses = evaluation.kl_positions != KlPositions::All && evaluation.dense_states.is_none();
    let asked = [
        (evaluation.max_kl.is_some(), "--max-kl", "X"),
        (chooses, "--kl-positions", "second-half"),
    ];
    if let Some((_, flag, value)) = asked.into_iter().find(|asked| asked.0 && !compares) {
        let why = format!("{flag} needs the dense model, and nothing is compared with it");
        let hint = match (prunes, is_smaller || settings.recovery.is_some()) {
            (_, true) => {
                format!("measure the result: prune eval OUT/model --against DENSE {flag} {value}")
            }
            (true, false) => "add --eval both".to_string(),
            (false, false) => "name the dense model with --against".to_string(),
        };
        return Err(Failure::usage(why).hint(hint).into());
    }
    let tasks = &evaluation.tasks;
    if tasks.min_accuracy.is_some() && tasks.is_empty() {
        return Err(Failure::usage("--min-accuracy needs tasks, and none is asked for")
            .hint("name them, like --tasks arc_easy,piqa --tasks-from DIR")
            .into());
    }
    if !tasks.is_empty() && evaluation.eval == EvalSides::None {
        return Err(Failure::usage("--tasks needs a model to ask, and --eval none measures none")
            .hint("use --eval pruned, or leave --tasks out")
            .into());
    }
    Ok(())
}
