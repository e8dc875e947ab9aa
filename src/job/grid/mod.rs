//! `prune sweep`: a grid of pruning runs. check → dense perplexity → cells, one after the other → table.
//!
//! | file | story |
//! | --- | --- |
//! | `cells` | the cells of a grid, and the settings of each |
//! | `records` | `cell.json`, and the comparison of a sweep with the cells in its folder |
//! | `dense` | the dense perplexity, measured once |
//! | `table` | `sweep.json`, `sweep.md` and `report.html`, from the records of all cells |
//! | `messages` | events of a cell on their way out: its number, and nothing twice |
//!
//! Every cell is an ordinary run folder. Cells follow one another, so each is the run that its flags mean; processes with different
//! shards work in one folder and never on one cell.

mod cells;
mod dense;
mod messages;
mod records;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use self::cells::PlannedCell;
use self::messages::CellEvents;
use self::records::CommonSettings;
use super::folder::state_file::StateFile;
use super::folder::{MANIFEST, RunFolder};
use super::opened::OpenedModel;
use super::prune::prune_given;
use super::settle::Given;
use crate::failure::Failure;
use crate::pipeline::{TargetPlan, check_verification};
use crate::run::grid::{CellReport, CellState, GridRecord};
use crate::run::{Events, Manifest, Stopped};
use crate::settings::GridSettings;

pub use self::table::remake;

/// The end of a sweep.
#[derive(Debug)]
pub struct GridOutcome {
    /// The table of all cells in the folder.
    pub record: GridRecord,
    /// The cells of this process that failed, by name.
    pub failed: Vec<String>,
    /// Cells of this process.
    pub cells: usize,
    /// Cells of the grid that are not finished and belong to other processes.
    pub elsewhere: usize,
    /// The page.
    pub page: PathBuf,
}

/// Runs the cells of a grid that are not finished, and writes the table of all cells in the folder.
///
/// # Errors
/// Fails before the first cell for settings that no run would take and for a folder with cells of other settings; and when the
/// dense perplexity cannot be measured or a record cannot be written. The error of a cell is recorded, and the next cell begins.
pub fn grid(settings: &GridSettings, events: &dyn Events) -> Result<GridOutcome> {
    let out = folder(settings)?;
    let cells = cells::of(settings, &out)?;
    let events = CellEvents::new(events, &out, &settings.run.arguments);
    let common = check(settings, &cells, &events)?;
    records::check(&out, &common, &cells, settings.run.output.force)?;
    let dense = dense::perplexity(&settings.run, &out, &common, &events)?;
    let mine: Vec<&PlannedCell> = cells
        .iter()
        .enumerate()
        .filter_map(|(position, cell)| settings.shard.has(position).then_some(cell))
        .collect();
    let mut failed = Vec::new();
    for (index, cell) in mine.iter().enumerate() {
        events.check()?;
        events.begin(index + 1, mine.len(), &cell.name());
        if let Err(error) = run(cell, &common, dense.as_ref(), &events) {
            if error.is::<Stopped>() {
                return Err(error);
            }
            failed.push(cell.name());
            events.failed(&cell.name(), &error);
        }
    }
    let methods = &settings.methods;
    let (record, page) = table::write(&out, &common, methods, &events)?;
    events.end();
    let is_finished = |cell: &&PlannedCell| {
        let mut reports = record.cells.iter();
        reports.any(|of| of.name == cell.name() && of.state == CellState::Finished)
    };
    let finished = cells.iter().filter(is_finished).count();
    Ok(GridOutcome {
        elsewhere: (cells.len() - finished).saturating_sub(failed.len()),
        record,
        failed,
        cells: mine.len(),
        page,
    })
}

/// The cells of this process and the states of their folders. Writes nothing.
///
/// # Errors
/// Fails for records that cannot be read.
pub fn preview(settings: &GridSettings) -> Result<Vec<CellReport>> {
    let out = folder(settings)?;
    let cells = cells::of(settings, &out)?;
    let mine = cells
        .into_iter()
        .enumerate()
        .filter_map(|(position, cell)| settings.shard.has(position).then_some(cell));
    mine.map(|cell| {
        let report = records::report(&cell.folder)?;
        Ok(report.unwrap_or_else(|| CellReport {
            state: CellState::Missing,
            ..CellReport::of(cell.cell.clone(), None, None)
        }))
    })
    .collect()
}

/// The folder of the sweep.
fn folder(settings: &GridSettings) -> Result<PathBuf> {
    let save = settings.run.output.save.clone();
    save.ok_or_else(|| {
        Failure::usage("a sweep needs a folder for its cells")
            .hint("add --save DIR, like --save out/sweep")
            .into()
    })
}

/// Checks every cell against the model, and returns the settings that all cells share.
fn check(
    settings: &GridSettings,
    cells: &[PlannedCell],
    events: &dyn Events,
) -> Result<CommonSettings> {
    let run = &settings.run;
    let model = OpenedModel::open(&run.model, &run.device, run.seqlen, events)?;
    RunFolder::at(&[&model.folder], &run.output, false)?;
    for cell in cells {
        let sparsity = cell.settings.sparsity.as_ref();
        let sparsity = sparsity.context("a cell prunes")?;
        let technique = sparsity.technique()?;
        check_verification(&technique, run.output.verify)?;
        TargetPlan::resolve(&sparsity.selection, technique.method, &model.config)
            .with_context(|| format!("in the cell {}", cell.name()))?;
    }
    records::common(run, &model)
}

/// Runs one cell, unless it is finished.
///
/// # Errors
/// Fails as `prune` does. The error is recorded, unless another process works on the cell.
fn run(
    cell: &PlannedCell,
    common: &CommonSettings,
    dense: Option<&Manifest>,
    events: &CellEvents<'_>,
) -> Result<()> {
    let has_state = StateFile::path(&cell.folder).exists();
    let is_forced = cell.settings.output.force;
    if is_finished(&cell.folder) && !is_forced {
        events.already_finished();
        return Ok(());
    }
    records::begin(cell, common)?;
    let mut settings = cell.settings.clone();
    // Without a state, the files here are those of an attempt at this cell: its record was compared.
    settings.output.force = is_forced || !has_state;
    let given = Given {
        dense,
        ..Given::default()
    };
    let done = prune_given(settings, given, events, None);
    match done {
        Err(error) if !error.is::<Stopped>() => {
            if !RunFolder::is_locked(&cell.folder) {
                records::failed(cell, common, &messages::in_words(&error))?;
            }
            Err(error)
        }
        done => done.map(|manifest| events.finished(&manifest)),
    }
}

/// Returns whether a cell has its record, and nothing of its run is left to do.
fn is_finished(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file() && !StateFile::path(folder).exists()
}
