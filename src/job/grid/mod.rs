//! `prune sweep`: a grid of pruning runs. check → dense perplexity → cells, in sequence or in groups → table.
//!
//! | file | story |
//! | --- | --- |
//! | `cells` | the cells of a grid, and the settings of each |
//! | `together` | cells of the same seed in a single pass over the layers, with the same statistics |
//! | `records` | `cell.json`, and the comparison of a sweep with the cells in its folder |
//! | `dense` | the dense model, measured once |
//! | `table` | `sweep.json`, `sweep.md` and `report.html`, from the records of all cells |
//! | `messages` | events of a cell on their way out: its number, and nothing twice |
//!
//! Every cell is an ordinary run folder, with the bytes of a run of its own. Processes with different shards share the
//! folder and never work on the same cell. Ranks are shards that share the windows of the dense perplexity, and the first rank writes the
//! table once all of them are done.

mod cells;
mod dense;
mod messages;
pub(super) mod records;
mod table;
mod together;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use self::cells::PlannedCell;
use self::dense::{DenseModel, DenseRun};
use self::messages::CellEvents;
use self::records::CommonSettings;
use self::table::TableOrder;
use super::folder::lock::FolderInUse;
use super::folder::state_file::StateFile;
use super::folder::{MANIFEST, RunFolder};
use super::inputs::RunInputs;
use super::opened::OpenedModel;
use super::run;
use crate::failure::Failure;
use crate::pipeline::{TargetPlan, check_verification};
use crate::pruning::Technique;
use crate::ranks::Ranks;
use crate::run::grid::{CellReport, CellState, GridRecord};
use crate::run::{Events, Manifest, Stopped};
use crate::settings::{GridSettings, GridShard, Settings, ShardOrder};

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

/// Runs the cells of a grid that are not finished, and writes the table of all cells in the folder. A cell on which another process works
/// is left to that process.
///
/// # Errors
/// Fails before the first cell for settings that no run would take, if the model can have no cell, and for a folder whose cells have
/// different settings; and when the dense perplexity cannot be measured or a record cannot be written. The error of a cell is recorded,
/// and the next cell begins.
pub fn grid(settings: &GridSettings, events: &dyn Events) -> Result<GridOutcome> {
    grid_on(&Ranks::alone(), settings, events)
}

/// Runs the cells as [`grid`] does, together with other ranks. The outcome of the first rank has the cells of all.
///
/// # Errors
/// Fails as [`grid`], and when a rank has left.
pub fn grid_on(ranks: &Ranks, settings: &GridSettings, events: &dyn Events) -> Result<GridOutcome> {
    let of_rank = GridShard::of_rank(ranks.rank(), ranks.size());
    let shard = if ranks.is_alone() { settings.shard } else { of_rank };
    ranks.or_departure(cells_of_rank(ranks, &GridSettings { shard, ..settings.clone() }, events))
}

/// Runs the cells of this rank, and waits for the other ranks.
fn cells_of_rank(
    ranks: &Ranks,
    settings: &GridSettings,
    events: &dyn Events,
) -> Result<GridOutcome> {
    let out = folder(settings)?;
    let cells = cells::of(settings, &out)?;
    let events = CellEvents::new(ranks, events, &out, &settings.run.arguments);
    let (common, impossible) = check(settings, &cells, &events)?;
    records::check(&out, &common, &cells, settings.run.output.force)?;
    let mine = mine(settings, &cells);
    let cells_of_all: Vec<&PlannedCell> = cells.iter().collect();
    let own = if ranks.is_alone() { &mine } else { &cells_of_all };
    let has_work = own.iter().any(|cell| is_left(cell));
    let dense = DenseModel::of(ranks, &settings.run, &common, &out);
    let dense = dense.map(|dense| dense.measured(has_work, &events)).transpose()?;
    let sweep = CellsOfSweep {
        common: &common,
        dense: dense.as_ref(),
        events: &events,
        cells: mine.len(),
        ranks: ranks.apart(),
    };
    let (mut failed, mut begun) = (Vec::new(), 0);
    for (cell, error) in
        impossible.into_iter().filter(|(cell, _)| mine.iter().any(|of| of.name() == cell.name()))
    {
        begun += 1;
        events.begin(begun..=begun, mine.len(), &cell.name());
        sweep.end(cell, Err(error), &mut failed)?;
    }
    let possible = mine.iter().copied().filter(|cell| !failed.contains(&cell.name()));
    for group in groups(&possible.collect::<Vec<_>>()) {
        begun += sweep.run_group(group, begun, &mut failed)?;
    }
    // The table is written when all ranks are done.
    let failed = ranks.all_gather_values(&failed)?.concat();
    let (methods, metrics) = (settings.methods.clone(), settings.metrics.clone());
    let order = TableOrder { methods, metrics };
    let (record, page) = match ranks.is_first() {
        true => table::write(&out, &common, &order, &events)?,
        false => table::read(&out, &common, &order)?,
    };
    ranks.all_gather(&[])?;
    events.end();
    let is_finished = |cell: &&PlannedCell| {
        let mut reports = record.cells.iter();
        reports.any(|of| of.name == cell.name() && of.state == CellState::Finished)
    };
    let finished = cells.iter().filter(is_finished).count();
    let elsewhere = (cells.len() - finished).saturating_sub(failed.len());
    if elsewhere == 0 && ranks.is_first() {
        dense::tidy(&out)?;
    }
    Ok(GridOutcome {
        elsewhere,
        record,
        failed,
        cells: if ranks.is_alone() { mine.len() } else { cells.len() },
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
    let mine = mine(settings, &cells).into_iter();
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

/// A cell that the model cannot have, and the error.
type ImpossibleCell<'c> = (&'c PlannedCell, anyhow::Error);

/// Checks every cell against the model, and returns the settings that all cells share, and the cells that are impossible.
///
/// # Errors
/// Fails where no cell is possible.
fn check<'c>(
    settings: &GridSettings,
    cells: &'c [PlannedCell],
    events: &dyn Events,
) -> Result<(CommonSettings, Vec<ImpossibleCell<'c>>)> {
    let run = &settings.run;
    let model = OpenedModel::open(&run.model, &run.device, run.seqlen, events)?;
    RunFolder::at(&[&model.folder], &run.output, false)?;
    let check = |cell: &PlannedCell| {
        let sparsity = cell.settings.sparsity.as_ref().context("a cell prunes")?;
        cell.technique.check()?;
        check_verification(&cell.technique, run.output.verify)?;
        TargetPlan::resolve(&sparsity.selection, cell.technique.method, &model.config).map(drop)
    };
    let mut impossible: Vec<ImpossibleCell<'c>> =
        cells.iter().filter_map(|cell| Some((cell, check(cell).err()?))).collect();
    if impossible.len() == cells.len() && !cells.is_empty() {
        let (cell, error) = impossible.swap_remove(0);
        return Err(error.context(format!("in the cell {}", cell.name())));
    }
    Ok((records::common(run, &model)?, impossible))
}

/// The cells of this process, in their order.
fn mine<'c>(settings: &GridSettings, cells: &'c [PlannedCell]) -> Vec<&'c PlannedCell> {
    let mut all: Vec<&PlannedCell> = cells.iter().collect();
    let deal = match cells.iter().any(together::can_share) {
        // Statistics belong to a seed, so a process gets as few seeds as possible.
        true => {
            all.sort_by_key(|cell| cell.cell.seed);
            ShardOrder::InARow
        }
        false => ShardOrder::InTurn,
    };
    let (count, positions) = (all.len(), all.into_iter().enumerate());
    let shard = settings.shard;
    let mine = positions.filter(|(position, _)| shard.has(*position, count, deal));
    mine.map(|(_, cell)| cell).collect()
}

/// Groups the cells that share statistics. A cell that cannot share forms its own group.
fn groups<'c>(cells: &[&'c PlannedCell]) -> Vec<Vec<&'c PlannedCell>> {
    let mut groups: Vec<Vec<&PlannedCell>> = Vec::new();
    let mut of_seed: BTreeMap<u64, usize> = BTreeMap::new();
    for &cell in cells {
        let seed = cell.cell.seed;
        match of_seed.get(&seed) {
            _ if !together::can_share(cell) => groups.push(vec![cell]),
            Some(&at) => groups[at].push(cell),
            None => {
                of_seed.insert(seed, groups.len());
                groups.push(vec![cell]);
            }
        }
    }
    groups
}

/// All that the cells of a process have in common.
struct CellsOfSweep<'a> {
    common: &'a CommonSettings,
    dense: Option<&'a DenseRun>,
    events: &'a CellEvents<'a>,
    /// Their number.
    cells: usize,
    /// This rank, apart from the others.
    ranks: Ranks,
}

impl CellsOfSweep<'_> {
    /// Runs the cells of a group that are not finished, together where several are left. Returns the number of cells.
    ///
    /// # Errors
    /// Fails when the sweep is asked to stop, or a record cannot be written.
    fn run_group(
        &self,
        group: Vec<&PlannedCell>,
        before: usize,
        failed: &mut Vec<String>,
    ) -> Result<usize> {
        let (events, cells) = (self.events, group.len());
        let (done, left): (Vec<_>, Vec<_>) = group.into_iter().partition(|cell| !is_left(cell));
        for (number, cell) in (before + 1..).zip(&done) {
            events.begin(number..=number, self.cells, &cell.name());
            events.already_finished();
            RunFolder::at(&[], &cell.settings.output, true)?.tidy_finished(events)?;
        }
        let first = before + done.len() + 1;
        if left.len() > 1 && self.run_together(&left, first, failed)? {
            return Ok(cells);
        }
        for (number, cell) in (first..).zip(left) {
            events.check()?;
            events.begin(number..=number, self.cells, &cell.name());
            let settings = self.begin(cell)?;
            let ranks = self.ranks.clone();
            let dense = self.dense.map(|of| &of.manifest);
            let given = RunInputs { dense, ranks, ..RunInputs::default() };
            let outcome = run::run(settings, given, events, None);
            self.end(cell, outcome, failed)?;
        }
        Ok(cells)
    }

    /// Runs cells of one seed in a single pass. Returns false where they cannot begin together.
    fn run_together(
        &self,
        cells: &[&PlannedCell],
        first: usize,
        failed: &mut Vec<String>,
    ) -> Result<bool> {
        let events = self.events;
        events.check()?;
        let names: Vec<String> = cells.iter().map(|cell| cell.name()).collect();
        let last = first + cells.len() - 1;
        events.begin(first..=last, self.cells, &names.join(", "));
        let settings = cells.iter().map(|cell| self.begin(cell));
        let settings = settings.collect::<Result<Vec<_>>>()?;
        let techniques: Vec<Technique> = cells.iter().map(|cell| cell.technique.clone()).collect();
        let dense = self.dense.map(|of| &of.manifest);
        match together::run(settings, &techniques, (dense, &self.ranks), events) {
            Ok(None) => return Ok(false),
            Ok(Some(outcomes)) => {
                for (cell, outcome) in cells.iter().zip(outcomes) {
                    self.end(cell, outcome, failed)?;
                }
            }
            Err(error) if error.is::<Stopped>() => return Err(error),
            Err(error) => {
                let error = messages::in_words(&error);
                for cell in cells {
                    self.end(cell, Err(Failure::new(error.clone()).into()), failed)?;
                }
            }
        }
        Ok(true)
    }

    /// Records that a cell begins, and returns the settings of its run.
    fn begin(&self, cell: &PlannedCell) -> Result<Settings> {
        let has_state = StateFile::path(&cell.folder).exists();
        records::begin(cell, self.common)?;
        let mut settings = cell.settings.clone();
        // Without a state, the files here come from an attempt at this cell: its record was compared.
        settings.output.force = settings.output.force || !has_state;
        settings.evaluation.dense_states = self.dense.and_then(|of| of.states.clone());
        Ok(settings)
    }

    /// Reports the outcome of a cell. An error is recorded, unless another process works on the cell or has finished it.
    fn end(
        &self,
        cell: &PlannedCell,
        outcome: Result<Manifest>,
        failed: &mut Vec<String>,
    ) -> Result<()> {
        match outcome {
            Ok(manifest) => self.events.finished(&cell.name(), &manifest),
            Err(error) if error.is::<Stopped>() => return Err(error),
            Err(error) if error.is::<FolderInUse>() => {
                self.events.note(format!("  {}: another process works on it", cell.name()));
            }
            // It ended its work after this process had looked at the cell.
            Err(_) if !cell.settings.output.force && is_finished(&cell.folder) => {
                self.events.note(format!("  {}: another process has finished it", cell.name()));
            }
            Err(error) => {
                records::failed(cell, self.common, &messages::in_words(&error))?;
                failed.push(cell.name());
                self.events.failed(&cell.name(), &error);
            }
        }
        Ok(())
    }
}

/// Returns whether a cell has to run.
fn is_left(cell: &PlannedCell) -> bool {
    !is_finished(&cell.folder) || cell.settings.output.force
}

/// Returns whether a cell has its record, and nothing of its run is left to do.
fn is_finished(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file() && !StateFile::path(folder).exists()
}
