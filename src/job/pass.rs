//! A pass that measures a model: its samples or windows go through the layers, and nothing is pruned, written or resumed.

use std::path::Path;

use anyhow::Result;

use super::final_states;
use super::folder::RunFolder;
use super::inputs::RunInputs;
use super::opened::{OpenedModel, ScoringPass};
use super::planned::Planning;
use super::resolved::Pruning;
use super::same_run::RunIdentity;
use super::settled_run::{RunTask, SettledRun, offload_folder, sides_left};
use crate::pipeline::{AgainstShape, Flow, Observed, RunShape};
use crate::ranks::Ranks;
use crate::run::Events;
use crate::run::manifest::PerplexityReport;
use crate::runtime::SweepReport;
use crate::settings::{EvalSides, EvaluationSettings, OutputSettings, Settings, TaskSettings};

/// Settles a pass of a model that is open, with what it observes. `settings` neither prune nor train, and name no folder.
///
/// # Errors
/// Fails for a quantised model that is to be observed, for texts that cannot be read, and where the pass does not fit.
pub(super) fn settle_pass(
    settings: Settings,
    model: OpenedModel,
    observes: Option<Observed>,
    events: &dyn Events,
) -> Result<Box<SettledRun>> {
    let settings = Settings {
        sparsity: None,
        layer_drop: None,
        width_drop: None,
        recovery: None,
        seqlen: Some(model.seqlen),
        evaluation: EvaluationSettings { tasks: TaskSettings::default(), ..settings.evaluation },
        ..settings
    };
    if observes.is_some() {
        model.refuse_quantized()?;
    }
    let inputs = RunInputs::default();
    let source: &Path = &model.folder;
    let folder = RunFolder::at(&[source], &settings.output, false)?;
    let planning = Planning::new(&settings.device, model.threads)?;
    let shape = RunShape { observes, ..early_shape(&settings, &model, None, &inputs, &folder) };
    let (texts, plan, _) = planning.texts_and_plan(&settings, &model, shape, &inputs, events)?;
    planning.check_spill(&plan, &offload_folder(&settings), events)?;
    let run = SettledRun {
        settings,
        model,
        folder,
        task: RunTask::Measure(observes),
        texts,
        plan,
        identity: RunIdentity::default(),
        ranks: Ranks::alone(),
        comparison: None,
    };
    run.check_disk()?;
    Ok(Box::new(run))
}

/// The settings of a pass over the dense model that comes before the run: it writes nothing, and spills into the folder of the run.
pub(super) fn before_run(settings: &Settings, measures_dense: bool) -> Settings {
    let mut pass = Settings { output: OutputSettings::default(), ..settings.clone() };
    pass.evaluation.max_perplexity = None;
    pass.evaluation.max_kl = None;
    pass.evaluation.eval = if measures_dense { EvalSides::Dense } else { EvalSides::None };
    let save = settings.output.save.clone();
    pass.device.offload_folder = pass.device.offload_folder.or(save);
    pass
}

/// Tells a number of every layer, with a name, in lines of 8 layers.
pub(super) fn note_by_layer(name: &str, numbers: &[f64], events: &dyn Events) {
    const PER_LINE: usize = 8;
    for (line, numbers) in numbers.chunks(PER_LINE).enumerate() {
        let first = line * PER_LINE;
        let place = format!("layers {first}-{}", first + numbers.len() - 1);
        let shown: Vec<String> = numbers.iter().map(|number| format!("{number:.4}")).collect();
        events.note(format!("{name:<13}{place:<13}{}", shown.join(" ")));
    }
}

/// The outcome of a pass that came before the run.
pub(super) struct PassOutcome<T> {
    pub(super) model: OpenedModel,
    pub(super) found: T,
    /// The dense perplexity, where the pass measured it.
    pub(super) dense: Option<PerplexityReport>,
    pub(super) pass: ScoringPass,
}

impl<T> PassOutcome<T> {
    /// Ends a pass.
    pub(super) fn of(
        run: SettledRun,
        found: T,
        dense: Option<PerplexityReport>,
        swept: SweepReport,
    ) -> Self {
        let SettledRun { model, plan, .. } = run;
        Self { model, found, dense, pass: ScoringPass { plan, swept } }
    }
}

/// A run in numbers before its texts are tokenized. The number of windows is unknown, and a single window stands for all: a run
/// that does not fit with it fails early.
pub(super) fn early_shape<'m>(
    settings: &Settings,
    model: &'m OpenedModel,
    pruning: Option<&Pruning>,
    given: &RunInputs<'_>,
    folder: &RunFolder,
) -> RunShape<'m> {
    let sides = sides_left(settings.evaluation.eval, model, given.dense.is_some());
    let is_used = pruning.is_none_or(|pruning| pruning.calibrates);
    // The text decides how many examples a whole training has; the shape of the training has the fewest.
    let is_used = is_used && !settings.trains_whole();
    let calibration = settings.calibration.as_ref().filter(|_| is_used);
    RunShape {
        samples: calibration.map_or(0, |of| given.samples_here(of.nsamples as usize)),
        windows: sides.len().min(1),
        sides,
        technique: pruning.map(|pruning| pruning.technique.clone()),
        of_all_ranks: given
            .of_all_ranks(calibration.map_or(0, |calibration| calibration.nsamples as usize), 1),
        shared_with: given.shared_with(),
        flow: pruning.map_or_else(Flow::default, |pruning| pruning.flow),
        saves: folder.model.is_some(),
        against: final_states::compares(settings, given).then_some(AgainstShape::Kept),
        ..model.run_shape(&settings.device)
    }
}
