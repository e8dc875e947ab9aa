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
use crate::ranks::Ranks;
use crate::run::manifest::{LayerReport, SweepMeasurements};
use crate::run::{Events, Manifest, Phase, Stopped};
use crate::runtime::{Passenger, SweepReport};
use crate::settings::{Settings, SparsitySettings};

/// The phases of the pass that are the same for all cells.
const SHARED_PHASES: [Phase; 3] = [Phase::Read, Phase::Calibrate, Phase::Propagate];

/// Returns whether a cell can share statistics with the cells of its seed.
pub(super) fn can_share(cell: &PlannedCell) -> bool {
    let (settings, kind) = (&cell.settings, cell.technique.statistics());
    // Measured ratios and a smaller model give each cell a model or a pass of its own, an order of channels changes its statistics.
    let shares = |sparsity: &SparsitySettings| {
        sparsity.propagate == Propagation::Dense
            && sparsity.allocate == Allocation::Uniform
            && !sparsity.permute_channels
    };
    kind.is_some_and(|kind| kind.rank().is_some())
        && settings.sparsity.as_ref().is_some_and(shares)
        // Packs of tasks pass with a run of its own.
        && settings.evaluation.tasks.is_empty()
        && settings.layer_drop.is_none()
        && settings.width_drop.is_none()
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
    techniques: &[Technique],
    (dense, ranks): (Option<&Manifest>, &Ranks),
    events: &dyn Events,
) -> Result<Option<Vec<Result<Manifest>>>> {
    let recorders: Vec<Recorder<'_>> = cells.iter().map(|cell| recorder_of(cell, events)).collect();
    let mut outcomes: Outcomes = cells.iter().map(|_| None).collect();
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
        let given = RunInputs { dense, sharing, ranks: ranks.clone(), ..RunInputs::default() };
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

/// The recorder of a cell, which is called by its folder.
fn recorder_of<'a>(cell: &Settings, events: &'a dyn Events) -> Recorder<'a> {
    let folder = cell.output.save.as_ref().and_then(|save| save.file_name());
    let recorder = Recorder::new(events);
    match folder {
        Some(name) => recorder.of_cell(name.to_string_lossy().into_owned()),
        None => recorder,
    }
}

fn first_line(error: &anyhow::Error) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_string()
}

/// A cell of the pass, with its files and windows.
struct CellInPass<'a> {
    /// Its position among all that were asked for.
    at: usize,
    job: &'a SettledRun,
    pruning: &'a Pruning,
    recorder: &'a Recorder<'a>,
    outputs: Outputs<'a>,
    windows: Vec<Perplexity<'a>>,
}

impl CellInPass<'_> {
    /// The part of the cell in the sweep, with its clock.
    fn sharing(&mut self) -> Result<SharingCell<'_>> {
        let (finished, before) =
            (self.outputs.finished(&self.job.model.config)?, self.outputs.layers_before.clone());
        let (model, pruning) = (&self.job.model, self.pruning);
        let calibrator = Calibrator::of(None, &model.config, model.reporter(self.recorder));
        let output = self.outputs.receivers();
        let pruner = Pruner::new(&pruning.technique, &pruning.targets, calibrator, output, before);
        let passengers = self.windows.iter_mut();
        Ok(SharingCell {
            pruner: pruner.with_flow(pruning.flow),
            passengers: passengers.map(|of| of as &mut dyn Passenger).collect(),
            finished,
            clock: Some(&model.clock),
            events: self.recorder,
            error: None,
        })
    }
}

/// Passes over the layers once for all cells, and finishes each.
fn pass(jobs: &[SettledCell], recorders: &[Recorder<'_>], outcomes: &mut Outcomes) -> Result<()> {
    let Some((at, first)) = jobs.first() else {
        return Ok(());
    };
    let (events, peak) = (&recorders[*at], profile::measure_peak(first));
    let mut cells = Vec::new();
    for (at, job) in jobs {
        let (recorder, pruning) = (&recorders[*at], job.pruning().context("a cell prunes")?);
        let outputs = Outputs::open(job, recorder)?;
        cells.push(CellInPass { at: *at, job, pruning, recorder, outputs, windows: Vec::new() });
    }
    let devices = first.open_devices()?;
    let finished = cells.iter().map(|cell| cell.outputs.finished_layers());
    let fewest = finished.min().unwrap_or_default();
    let samples = match fewest < first.model.config.num_hidden_layers {
        true => first.embedded_samples(&devices, events)?,
        false => None,
    };
    for cell in &mut cells {
        cell.windows = cell.job.embedded_windows(&devices, &cell.outputs, cell.recorder)?;
    }
    let streams = cells.iter().map(|cell| cell.windows.len()).sum();
    let kind = Technique::statistics_of_all(cells.iter().map(|cell| &cell.pruning.technique));
    let config = &first.model.config;
    let mut shared = SharedPruning {
        calibrator: Calibrator::of(samples.zip(kind), config, first.model.reporter(events)),
        config: Arc::clone(config),
        cells: cells.iter_mut().map(CellInPass::sharing).collect::<Result<_>>()?,
    };
    // The sweep marks the first cell's clock.
    if let Some(cell) = shared.cells.first_mut() {
        cell.clock = None;
    }
    let passes = passes(first, fewest, streams);
    let passengers: &mut [&mut dyn Passenger] = &mut [&mut shared];
    let work = SweepWork { finished: None, editor: None, passengers, passes, passed: 0 };
    let swept = first.sweep(&devices, work, events);
    let ends: Vec<(Vec<LayerReport>, Option<anyhow::Error>)> =
        (shared.cells.into_iter()).map(|cell| (cell.pruner.into_layers(), cell.error)).collect();
    // Where every cell has failed, each has its own error.
    let swept = match swept {
        Err(_) if ends.iter().all(|(_, error)| error.is_some()) => SweepReport::default(),
        swept => swept?,
    };
    let mut measured = Vec::new();
    for (cell, (layers, error)) in cells.iter_mut().zip(ends) {
        if let Some(error) = error {
            measured.push(Err(error));
            continue;
        }
        add_shared_phases(cell.job, first);
        let before = cell.outputs.measured();
        let of_cell = before.unwrap_or_else(|| SweepMeasurements {
            perplexity: cell.job.perplexities(&cell.windows),
            tasks: None,
        });
        let results = (of_cell, swept.clone());
        let concluded = cell.pruning.conclude(&mut cell.outputs, layers, results, cell.recorder);
        measured.push(concluded);
    }
    for (mut cell, results) in cells.into_iter().zip(measured) {
        let (job, outputs) = (cell.job, &mut cell.outputs);
        match results.and_then(|results| finish(job, outputs, results, peak, cell.recorder)) {
            Err(error) if error.is::<Stopped>() => return Err(error),
            outcome => outcomes[cell.at] = Some(outcome),
        }
    }
    Ok(())
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
