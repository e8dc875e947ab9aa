//! The table and the page of a sweep, from the records of all cells in its folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Deserialize;

use super::records::{self, CommonSettings};
use crate::bytes::{LARGEST_RECORD, json_file, read_whole};
use crate::checkpoint::write_atomic;
use crate::failure::Failure;
use crate::pruning::METHODS;
use crate::report;
use crate::run::grid::{CellReport, GRID_FILE, GridRecord};
use crate::run::manifest::name_of;
use crate::run::{Events, Manifest};

/// The table as Markdown.
const MARKDOWN: &str = "sweep.md";

/// The page.
const PAGE: &str = "report.html";

/// Remakes the table and the page of the sweep in `out`. Returns the record and the page's path.
///
/// # Errors
/// Fails for a folder without cells, for records that cannot be read, and when the files cannot be written.
pub fn remake(out: &Path, events: &dyn Events) -> Result<(GridRecord, PathBuf)> {
    let records = records::all(out)?;
    let mut settings: BTreeMap<&CommonSettings, usize> = BTreeMap::new();
    for record in records.values() {
        *settings.entry(&record.settings).or_default() += 1;
    }
    let most = settings.into_iter().max_by_key(|(_, cells)| *cells);
    let (common, _) = most.ok_or_else(|| {
        Failure::usage(format!("`{}` holds no cell of a sweep", out.display()))
            .hint("name the --save folder of a sweep")
    })?;
    write(out, common, &methods_before(out), events)
}

/// The methods in the order of the last table; without a table, in the order of the help.
fn methods_before(out: &Path) -> Vec<String> {
    /// The part of `sweep.json` that is read.
    #[derive(Deserialize)]
    struct MethodOrder {
        methods: Vec<String>,
    }
    let before = read_whole(&out.join(GRID_FILE), LARGEST_RECORD).ok();
    let before = before.and_then(|json| serde_json::from_slice::<MethodOrder>(&json).ok());
    let names = || METHODS.iter().map(|method| method.name().to_string());
    before.map_or_else(|| names().collect(), |order| order.methods)
}

/// The table of the cells with these settings, and the path of the page, where another rank writes them.
///
/// # Errors
/// Fails for records that cannot be read.
pub(super) fn read(
    out: &Path,
    common: &CommonSettings,
    methods: &[String],
) -> Result<(GridRecord, PathBuf)> {
    Ok((collect(out, common, methods)?, out.join(PAGE)))
}

/// Writes the table of the cells with these settings. Methods stand in the order `methods`; methods that it lacks come after.
///
/// Processes of other shards may finish cells meanwhile, so the table is written until the records stay the same: whichever
/// process ends last leaves the table of all cells.
///
/// # Errors
/// Fails for records that cannot be read, and when the files cannot be written.
pub(super) fn write(
    out: &Path,
    common: &CommonSettings,
    methods: &[String],
    events: &dyn Events,
) -> Result<(GridRecord, PathBuf)> {
    let mut record = collect(out, common, methods)?;
    loop {
        let name = name_of(&out.display().to_string());
        write_atomic(&out.join(MARKDOWN), report::grid::markdown(&record).as_bytes())?;
        let page = report::page::of_grid(&name, &record)?;
        write_atomic(&out.join(PAGE), page.as_bytes())?;
        write_atomic(&out.join(GRID_FILE), &json_file(&record)?)?;
        let now = collect(out, common, methods)?;
        let states = |record: &GridRecord| -> Vec<_> {
            let cells = record.cells.iter();
            cells.map(|cell| (cell.name.clone(), cell.state)).collect()
        };
        if states(&now) == states(&record) {
            for warning in &record.warnings {
                events.warn(warning.clone());
            }
            return Ok((record, out.join(PAGE)));
        }
        record = now;
    }
}

/// Reads the records of all cells with these settings.
fn collect(out: &Path, common: &CommonSettings, methods: &[String]) -> Result<GridRecord> {
    let (mut cells, mut others, mut model) = (Vec::new(), Vec::new(), None);
    for (name, record) in records::all(out)? {
        let Some(cell) = record.cell.filter(|cell| cell.name() == name) else {
            others.push(name);
            continue;
        };
        if record.settings != *common {
            others.push(name);
            continue;
        }
        let manifest = records::manifest(&out.join(&name))?;
        let source = |manifest: &Manifest| {
            let of = &manifest.model;
            of.id.clone().unwrap_or_else(|| of.path.clone())
        };
        model = model.or(manifest.as_ref().map(source));
        cells.push(CellReport::of(cell, record.error, manifest.as_ref()));
    }
    let mut record = GridRecord::of(cells, common.clone(), methods);
    record.model = model;
    if !others.is_empty() {
        let left_out =
            format!("folders with other settings are not in the table: {}", others.join(", "));
        record.warnings.push(left_out);
    }
    Ok(record)
}
