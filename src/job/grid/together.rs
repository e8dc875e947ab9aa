//! Cells of one seed in a single pass over the layers: with `--propagate dense` the samples that reach a layer do not depend on the method
//! or the ratio, so the statistics of a layer are computed once for all of them (`pipeline/shared.rs`).
//!
//! settle every cell, with the texts and the plan of the first → outputs of each → streams → sweep → record of each.

use std::sync::Arc;

use anyhow::{Context, Result};

use super::cells::PlannedCell;
use crate::eval::Perplexity;
use crate::job::inputs::{RunInputs, Sharing};
use crate::job::outputs::Outputs;
use crate::job::profile;
use crate::job::recorder::Recorder;
use crate::job::resolved::Pruning;
use crate::job::run::finish;
use crate::job::settle::settle;
use crate::job::settled_run::{RunStart, SettledRun};
use crate::job::streams::{SweepWork, passes};
use crate::pipeline::allocation::Allocation;
use crate::pipeline::{Calibrator, Propagation, Pruner, SharedPruning, SharingCell};
use crate::pruning::Technique;
use crate::run::manifest::LayerReport;
use crate::run::{Events, Manifest, Phase, Stopped};
use crate::runtime::{Passenger, SweepReport};
use crate::settings::Settings;

/// The phases of the pass that are the same for all cells.
const SHARED_PHASES: [Phase; 3] = [Phase::Read, Phase::Calibrate, Phase::Propagate];

/// Returns whether a cell can share statistics with the cells of its seed.
///
/// # Errors
/// Fails for a method that does not exist.
pub(super) fn can_share(cell: &PlannedCell) -> Result<bool> {
    let settings = &cell.settings;
    let sparsity = settings.sparsity.as_ref().context("a cell prunes")?;
    let kind = sparsity.technique()?.statistics();
    // Measured ratios and a smaller model give each cell a model or a pass of its own, an order of channels changes its statistics.
    Ok(sparsity.propagate == Propagation::Dense
        && kind.is_some_and(|kind| kind.rank().is_some())
        && sparsity.allocate == Allocation::Uniform
        && !sparsity.permute_channels
        && settings.layer_drop.is_none()
        && settings.width_drop.is_none())
}

/// A cell that is settled, and its position among all that were asked for.
type SettledCell = (usize, Box<SettledRun>);

/// The outcomes of cells, by their position among all that were asked for.
type Outcomes = Vec<Option<Result<Manifest>>>;

/// Runs cells of one seed together, and returns the outcome of each. `None` where the first cannot be settled, for lack of memory for
/// all of them at once or for a reason that holds for each alone: nothing has begun then.
///
/// # Errors
/// Fails for an error that ends all cells.
pub(super) fn run(
    cells: Vec<Settings>,
    dense: Option<&Manifest>,
    events: &dyn Events,
) -> Result<Option<Vec<Result<Manifest>>>> {
    let recorders: Vec<Recorder<'_>> = cells.iter().map(|_| Recorder::new(events)).collect();
    let mut outcomes: Outcomes = cells.iter().map(|_| None).collect();
    let techniques = techniques(&cells)?;
    let mut jobs: Vec<SettledCell> = Vec::new();
    for (at, settings) in cells.into_iter().enumerate() {
        let recorder = &recorders[at];
        if settings.output.log_memory {
            recorder.log_memory();
        }
        let sharing = match jobs.first() {
            None => Sharing::First(techniques[at + 1..].to_vec()),
            Some((_, first)) => Sharing::Next(first),
        };
        let given = RunInputs { dense, sharing, ..RunInputs::default() };
        match settle(settings, given, recorder) {
            Ok(RunStart::Run(job)) => jobs.push((at, job)),
            Ok(RunStart::Finished(manifest)) => outcomes[at] = Some(Ok(*manifest)),
            Err(error) if error.is::<Stopped>() => return Err(error),
            Err(error) if jobs.is_empty() => {
                events.note(format!(
                    "  these cells follow one another: together they cannot begin ({})",
                    first_line(&error)
                ));
                return Ok(None);
            }
            Err(error) => outcomes[at] = Some(Err(error)),
        }
    }
    for (at, job) in &jobs {
        job.announce(&recorders[*at]);
    }
    pass(&jobs, &recorders, &mut outcomes)?;
    outcomes.into_iter().map(|of| of.context("every cell has an outcome").map(Some)).collect()
}

fn techniques(cells: &[Settings]) -> Result<Vec<Technique>> {
    let of = |settings: &Settings| -> Result<Technique> {
        let sparsity = settings.sparsity.as_ref().context("a cell prunes")?;
        sparsity.technique()
    };
    cells.iter().map(of).collect()
}

fn first_line(error: &anyhow::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_string()
}

/// Passes over the layers once for all cells, and finishes each.
fn pass(jobs: &[SettledCell], recorders: &[Recorder<'_>], outcomes: &mut Outcomes) -> Result<()> {
    let Some((at, first)) = jobs.first() else {
        return Ok(());
    };
    let peak = profile::measure_peak(first);
    let mut outputs = Vec::new();
    for (at, job) in jobs {
        outputs.push(Outputs::open(job, &recorders[*at])?);
    }
    let devices = first.open_devices()?;
    let layers = first.model.config.num_hidden_layers;
    let finished: Vec<usize> = outputs.iter().map(Outputs::finished_layers).collect();
    let samples = match finished.iter().any(|&finished| finished < layers) {
        true => first.embedded_samples(&devices, &recorders[*at])?,
        false => None,
    };
    let mut windows: Vec<Vec<Perplexity<'_>>> = Vec::new();
    for ((at, job), outputs) in jobs.iter().zip(&outputs) {
        windows.push(job.embedded_windows(&devices, outputs, &recorders[*at])?);
    }
    let streams = windows.iter().map(Vec::len).sum();
    let fewest = finished.into_iter().min().unwrap_or_default();
    let mut shared = SharedPruning {
        calibrator: calibrator(jobs, samples, &recorders[*at])?,
        config: Arc::clone(&first.model.config),
        cells: Vec::new(),
    };
    for (((at, job), outputs), windows) in jobs.iter().zip(&mut outputs).zip(&mut windows) {
        let cell = sharing_cell(job, outputs, windows, &recorders[*at])?;
        shared.cells.push(cell);
    }
    // The sweep marks the first cell's clock.
    if let Some(cell) = shared.cells.first_mut() {
        cell.clock = None;
    }
    let steps = passes(first, fewest, streams);
    let passengers: &mut [&mut dyn Passenger] = &mut [&mut shared];
    let work = SweepWork { finished: None, editor: None, passengers, passes: steps };
    let swept = first.sweep(&devices, work, &recorders[*at]);
    let ends: Vec<(Vec<LayerReport>, Option<anyhow::Error>)> =
        (shared.cells.into_iter()).map(|cell| (cell.pruner.into_layers(), cell.error)).collect();
    // Where every cell has failed, each has its own error.
    let swept = match swept {
        Err(_) if ends.iter().all(|(_, error)| error.is_some()) => SweepReport::default(),
        swept => swept?,
    };
    let mut measured = Vec::new();
    for ((((at, job), outputs), windows), (layers, error)) in
        jobs.iter().zip(&mut outputs).zip(&windows).zip(ends)
    {
        if let Some(error) = error {
            measured.push(Err(error));
            continue;
        }
        add_shared_phases(job, first);
        let before = outputs.measured().cloned();
        let perplexity = before.unwrap_or_else(|| job.perplexities(windows));
        let results = (perplexity, swept.clone());
        measured.push(pruning_of(job)?.conclude(outputs, layers, results, &recorders[*at]));
    }
    for (((at, job), outputs), pruned) in jobs.iter().zip(&mut outputs).zip(measured) {
        let finish = |pruned| finish(job, outputs, pruned, peak, &recorders[*at]);
        let outcome = pruned.and_then(finish);
        if let Err(error) = &outcome
            && error.is::<Stopped>()
        {
            return outcome.map(drop);
        }
        outcomes[*at] = Some(outcome);
    }
    Ok(())
}

/// The samples, and statistics that serve all cells.
fn calibrator<'a>(
    jobs: &'a [SettledCell],
    samples: Option<crate::runtime::HiddenStates>,
    events: &'a dyn Events,
) -> Result<Calibrator<'a>> {
    let pruning = jobs.iter().filter_map(|(_, job)| job.pruning());
    let kind = Technique::statistics_of_all(pruning.map(|pruning| &pruning.technique));
    let (_, first) = jobs.first().context("there is a cell")?;
    let (config, clock) = (&first.model.config, &first.model.clock);
    Ok(Calibrator::of(samples.zip(kind), config, clock, events))
}

/// The pruning part of a cell.
fn pruning_of(job: &SettledRun) -> Result<&Pruning> {
    job.pruning().context("a cell prunes")
}

/// A cell of the pass, with its clock.
fn sharing_cell<'a>(
    job: &'a SettledRun,
    outputs: &'a mut Outputs<'_>,
    windows: &'a mut [Perplexity<'_>],
    events: &'a dyn Events,
) -> Result<SharingCell<'a>> {
    let pruning = pruning_of(job)?;
    let (finished, before) = (outputs.finished()?, outputs.layers_before.clone());
    let model = &job.model;
    let calibrator = Calibrator::of(None, &model.config, &model.clock, events);
    let output = outputs.receivers();
    let pruner = Pruner::new(&pruning.technique, &pruning.targets, calibrator, output, before);
    let passengers = windows.iter_mut();
    Ok(SharingCell {
        pruner: pruner.with_flow(pruning.flow),
        passengers: passengers.map(|of| of as &mut dyn Passenger).collect(),
        finished,
        clock: Some(&model.clock),
        events,
        error: None,
    })
}

/// Adds the shared phases, which the first cell's clock has measured, to the clock of `job`.
fn add_shared_phases(job: &SettledRun, first: &SettledRun) {
    if std::ptr::eq(job, first) {
        return;
    }
    let mut shared = first.model.clock.report();
    shared.retain(|report| SHARED_PHASES.contains(&report.phase));
    job.model.clock.add(&shared);
}
