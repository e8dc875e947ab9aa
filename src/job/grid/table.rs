//! The table and the page of a sweep, from the records of all cells in its folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Deserialize;

use super::dense;
use super::records::{self, CommonSettings};
use crate::bytes::{LARGEST_RECORD, json_file, read_whole};
use crate::checkpoint::write_atomic;
use crate::failure::Failure;
use crate::pruning::METHODS;
use crate::report;
use crate::run::grid::{CellReport, GRID_FILE, GridRecord, further_metrics};
use crate::run::manifest::name_of;
use crate::run::metric::Metric;
use crate::run::{Events, Manifest};

/// The table as Markdown.
const MARKDOWN: &str = "sweep.md";

/// The page.
const PAGE: &str = "report.html";

/// The order of a table.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct TableOrder {
    /// Methods stand in this order; methods that it lacks come after.
    pub(super) methods: Vec<String>,
    /// The metrics that are shown.
    #[serde(default = "perplexity_alone")]
    pub(super) metrics: Vec<Metric>,
}

fn perplexity_alone() -> Vec<Metric> {
    vec![Metric::Perplexity]
}

/// Remakes the table and the page of the sweep in `out`, with these metrics or with the metrics of the last table. Returns the record and
/// the page's path.
///
/// # Errors
/// Fails for a folder without cells, for records that cannot be read, for metrics that no cell has measured, and when the files cannot be
/// written.
pub fn remake(
    out: &Path,
    metrics: Option<&[Metric]>,
    events: &dyn Events,
) -> Result<(GridRecord, PathBuf)> {
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
    let mut order = order_before(out);
    if let Some(metrics) = metrics {
        check_measured(&collect(out, common, &order)?, metrics)?;
        order.metrics = metrics.to_vec();
    }
    write(out, common, &order, events)
}

/// Refuses metrics that no cell has measured.
fn check_measured(record: &GridRecord, metrics: &[Metric]) -> Result<(), Failure> {
    let is_measured = |metric: &&Metric| record.cells.iter().any(|of| of.value(metric).is_some());
    let Some(missing) = metrics.iter().find(|metric| !is_measured(metric)) else {
        return Ok(());
    };
    let of_cells = record.cells.iter().flat_map(|cell| cell.metrics.keys().map(String::as_str));
    let measured: BTreeSet<&str> = std::iter::once("perplexity").chain(of_cells).collect();
    let measured: Vec<&str> = measured.into_iter().collect();
    Err(Failure::usage(format!("--metrics names `{missing}`, which no cell has measured"))
        .hint(format!("the cells have: {}", measured.join(", "))))
}

/// The order of the last table; without a table, the methods in the order of the help.
fn order_before(out: &Path) -> TableOrder {
    let before = read_whole(&out.join(GRID_FILE), LARGEST_RECORD).ok();
    let before = before.and_then(|json| serde_json::from_slice::<TableOrder>(&json).ok());
    let names = || METHODS.iter().map(|method| method.name().to_string());
    before.unwrap_or_else(|| TableOrder { methods: names().collect(), metrics: perplexity_alone() })
}

/// The table of the cells with these settings, and the path of the page, where another rank writes them.
///
/// # Errors
/// Fails for records that cannot be read.
pub(super) fn read(
    out: &Path,
    common: &CommonSettings,
    order: &TableOrder,
) -> Result<(GridRecord, PathBuf)> {
    Ok((collect(out, common, order)?, out.join(PAGE)))
}

/// Writes the table of the cells with these settings.
///
/// Processes of other shards may finish cells meanwhile, so the table is written until the records stay the same: whichever
/// process ends last leaves the table of all cells.
///
/// # Errors
/// Fails for records that cannot be read, and when the files cannot be written.
pub(super) fn write(
    out: &Path,
    common: &CommonSettings,
    order: &TableOrder,
    events: &dyn Events,
) -> Result<(GridRecord, PathBuf)> {
    let mut record = collect(out, common, order)?;
    loop {
        let name = name_of(&out.display().to_string());
        write_atomic(&out.join(MARKDOWN), report::grid::markdown(&record).as_bytes())?;
        let page = report::page::of_grid(&name, &record)?;
        write_atomic(&out.join(PAGE), page.as_bytes())?;
        write_atomic(&out.join(GRID_FILE), &json_file(&record)?)?;
        let now = collect(out, common, order)?;
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
fn collect(out: &Path, common: &CommonSettings, order: &TableOrder) -> Result<GridRecord> {
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
    let mut record = GridRecord::of(cells, common.clone(), &order.methods);
    record.model = model;
    record.metrics.clone_from(&order.metrics);
    if let Some(dense) = dense::record(out, common)? {
        record.dense_metrics = further_metrics(&dense);
    }
    if !others.is_empty() {
        let left_out =
            format!("folders with other settings are not in the table: {}", others.join(", "));
        record.warnings.push(left_out);
    }
    Ok(record)
}
