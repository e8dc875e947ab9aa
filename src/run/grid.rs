//! Records of a sweep: a grid of pruning runs in a folder.
//!
//! | file | content |
//! | --- | --- |
//! | `CELL/cell.json` | [`CellRecord`]: the settings of a cell, and its error if it failed |
//! | `CELL/run.json` | the record of the run; a cell with it is finished |
//! | `sweep.json` | [`GridRecord`]: all cells, and the table of their means |

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::manifest::{Manifest, TextProtocol};
use super::metric::Metric;
use crate::bytes::ByteSize;

/// The version of both schemas. It rises when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// The file's name in the folder of a cell.
pub const CELL_FILE: &str = "cell.json";

/// The file's name in the folder of a sweep.
pub const GRID_FILE: &str = "sweep.json";

/// The settings in which the cells of a sweep differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GridCell {
    /// `--prune-method`.
    pub method: String,
    /// `--sparsity-ratio`; absent for an N:M pattern.
    pub sparsity_ratio: Option<f64>,
    /// `--sparsity-type`.
    pub sparsity_type: String,
    /// `--seed`; 0 for a method without calibration.
    pub seed: u64,
}

impl GridCell {
    /// The name of its folder: `wanda-0.5-seed0`, `ria-2of4-seed1`.
    pub fn name(&self) -> String {
        let target = self.column().replace(':', "of");
        format!("{}-{target}-seed{}", self.method, self.seed)
    }

    /// Its column of the table: `0.5`, `2:4`.
    pub fn column(&self) -> String {
        match self.sparsity_ratio {
            Some(ratio) => ratio.to_string(),
            None => self.sparsity_type.clone(),
        }
    }
}

/// `cell.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Absent for the run that measures the dense model.
    #[serde(flatten)]
    pub cell: Option<GridCell>,
    /// Everything that decides the outcome and that all cells of a sweep share, as text by name.
    pub settings: BTreeMap<String, String>,
    /// The error of the last attempt; absent for a cell that did not fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// States of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CellState {
    /// It has a record.
    Finished,
    /// Its last attempt failed.
    Failed,
    /// It has begun.
    Unfinished,
    /// It has no folder.
    Missing,
}

impl CellState {
    /// The state in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Unfinished => "unfinished",
            Self::Missing => "to do",
        }
    }
}

/// A cell in `sweep.json`.
#[derive(Debug, Clone, Serialize)]
pub struct CellReport {
    /// The name of its folder.
    pub name: String,
    /// Method, target and seed.
    #[serde(flatten)]
    pub cell: GridCell,
    /// The state.
    pub state: CellState,
    /// The error of a failed cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Zeros over weights of the decoder's linears.
    pub sparsity: Option<f64>,
    /// Perplexity of the pruned model; `null` also unless it is finite.
    pub pruned_perplexity: Option<f64>,
    /// Perplexity of the dense model.
    pub dense_perplexity: Option<f64>,
    /// Further values of the pruned model that were measured: divergences from the dense model, accuracies of tasks.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, f64>,
    /// Duration of the run, divided by the number of cells that ran together.
    pub seconds: Option<f64>,
    /// The largest peak of its phases.
    pub peak_anonymous: Option<ByteSize>,
    /// The evaluation text and windows.
    #[serde(skip)]
    pub evaluation: Option<TextProtocol>,
}

impl CellReport {
    /// The report of a cell; `manifest` is its record if it is finished.
    pub fn of(cell: GridCell, error: Option<String>, manifest: Option<&Manifest>) -> Self {
        let state = match (manifest, &error) {
            (Some(_), _) => CellState::Finished,
            (None, Some(_)) => CellState::Failed,
            (None, None) => CellState::Unfinished,
        };
        let perplexity = manifest.map(|manifest| &manifest.perplexity);
        Self {
            name: cell.name(),
            cell,
            state,
            error: error.filter(|_| state == CellState::Failed),
            sparsity: manifest.and_then(|manifest| Some(manifest.sparsity?.ratio)),
            pruned_perplexity: perplexity.and_then(|of| Some(of.pruned?.perplexity)),
            dense_perplexity: perplexity.and_then(|of| Some(of.dense?.perplexity)),
            metrics: manifest.map(further_metrics).unwrap_or_default(),
            seconds: manifest
                .map(|manifest| manifest.seconds / manifest.cells_at_once.unwrap_or(1) as f64),
            peak_anonymous: manifest.and_then(|manifest| manifest.peak_anonymous),
            evaluation: manifest.and_then(|manifest| manifest.evaluation.clone()),
        }
    }
}

/// Everything that was measured of a run's model besides its perplexity, by the name of the metric.
pub fn further_metrics(manifest: &Manifest) -> BTreeMap<String, f64> {
    let tasks = manifest.tasks.iter().flat_map(|of| of.of_result());
    let tasks = tasks.map(|task| Metric::Task(task.task.clone()));
    let all = [Metric::Kl, Metric::SameTop, Metric::Accuracy].into_iter().chain(tasks);
    all.filter_map(|metric| Some((metric.to_string(), metric.of_result(manifest)?))).collect()
}

impl CellReport {
    /// The value of a metric; `None` where it was not measured.
    pub fn value(&self, metric: &Metric) -> Option<f64> {
        match metric {
            Metric::Perplexity => self.pruned_perplexity,
            other => self.metrics.get(&other.to_string()).copied(),
        }
    }
}

/// The mean of a metric over cells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MetricMean {
    /// The mean.
    pub mean: f64,
    /// The sample deviation (n − 1); absent for fewer than two cells.
    pub deviation: Option<f64>,
}

impl MetricMean {
    /// The mean of these values; `None` without values.
    pub fn of(values: &[f64]) -> Option<Self> {
        Some(Self { mean: mean(values)?, deviation: deviation(values) })
    }
}

/// A method at a ratio or pattern, over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GridEntry {
    /// The method.
    pub method: String,
    /// The ratio or the pattern.
    pub column: String,
    /// Cells, finished or not.
    pub cells: usize,
    /// Finished cells.
    pub finished: usize,
    /// Failed cells.
    pub failed: usize,
    /// Mean of the pruned perplexity over finished cells; `null` also unless it is finite.
    pub mean_perplexity: Option<f64>,
    /// Sample deviation of the pruned perplexity (n − 1); absent for fewer than two cells.
    pub deviation: Option<f64>,
    /// Mean of the sparsity reached.
    pub sparsity: Option<f64>,
    /// Means of further metrics.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metrics: BTreeMap<String, MetricMean>,
}

impl GridEntry {
    /// The mean of a metric; `None` where no cell has measured it.
    pub fn mean_of(&self, metric: &Metric) -> Option<MetricMean> {
        match metric {
            Metric::Perplexity => {
                let deviation = self.deviation;
                self.mean_perplexity.map(|mean| MetricMean { mean, deviation })
            }
            other => self.metrics.get(&other.to_string()).copied(),
        }
    }
}

/// `sweep.json`.
#[derive(Debug, Clone, Serialize)]
pub struct GridRecord {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The program's version.
    pub prune_version: String,
    /// The checkpoint, as given.
    pub model: Option<String>,
    /// Perplexity of the dense model; absent where none was measured.
    pub dense_perplexity: Option<f64>,
    /// Further values of the dense model that were measured.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub dense_metrics: BTreeMap<String, f64>,
    /// The metrics that the table shows, in its order.
    pub metrics: Vec<Metric>,
    /// Everything that decides the outcome and that all cells share.
    pub settings: BTreeMap<String, String>,
    /// The methods, in the order of the table.
    pub methods: Vec<String>,
    /// The ratios and patterns, in the order of the table.
    pub columns: Vec<String>,
    /// The table.
    pub table: Vec<GridEntry>,
    /// All cells, in the order of the table.
    pub cells: Vec<CellReport>,
    /// The evaluation text and windows of the first finished cell.
    pub evaluation: Option<TextProtocol>,
    /// Facts that a reader of the table must know.
    pub warnings: Vec<String>,
}

impl GridRecord {
    /// The table of these cells. Columns are the ratios, ascending, then the patterns. Rows are `methods`, in order, then methods that it
    /// does not name.
    pub fn of(
        mut cells: Vec<CellReport>,
        settings: BTreeMap<String, String>,
        methods: &[String],
    ) -> Self {
        let rank = |method: &String| methods.iter().position(|other| other == method);
        let ratio = |cell: &GridCell| cell.sparsity_ratio.unwrap_or(f64::INFINITY);
        cells.sort_by(|one, other| {
            let (one, other) = (&one.cell, &other.cell);
            let key =
                |cell: &GridCell| (rank(&cell.method).unwrap_or(usize::MAX), cell.method.clone());
            key(one)
                .cmp(&key(other))
                .then(ratio(one).total_cmp(&ratio(other)))
                .then(one.sparsity_type.cmp(&other.sparsity_type))
                .then(one.seed.cmp(&other.seed))
        });
        let mut columns: Vec<&GridCell> = cells.iter().map(|report| &report.cell).collect();
        columns.sort_by(|one, other| {
            let by_ratio = ratio(one).total_cmp(&ratio(other));
            by_ratio.then(one.sparsity_type.cmp(&other.sparsity_type))
        });
        let mut columns: Vec<String> = columns.into_iter().map(GridCell::column).collect();
        columns.dedup();
        let mut methods: Vec<String> =
            cells.iter().map(|report| report.cell.method.clone()).collect();
        methods.dedup();
        let mut table = Vec::new();
        for method in &methods {
            for column in &columns {
                table.extend(entry(&cells, method, column));
            }
        }
        let finished = || cells.iter().filter_map(|cell| cell.evaluation.as_ref());
        let evaluation = finished().next().cloned();
        let mut warnings = Vec::new();
        let is_same = |other: &TextProtocol| {
            let first = evaluation.as_ref();
            first.is_some_and(|first| first.tokens_sha256 == other.tokens_sha256)
        };
        if !finished().all(is_same) {
            warnings.push(
                "the cells were not all measured on the same tokens: compare their perplexities with care"
                    .to_string(),
            );
        }
        Self {
            schema: SCHEMA,
            prune_version: env!("CARGO_PKG_VERSION").to_string(),
            model: None,
            dense_perplexity: cells.iter().find_map(|cell| cell.dense_perplexity),
            dense_metrics: BTreeMap::new(),
            metrics: vec![Metric::Perplexity],
            settings,
            methods,
            columns,
            table,
            evaluation,
            warnings,
            cells,
        }
    }

    /// The entry of a method and a column; `None` where the grid has none.
    pub fn entry(&self, method: &str, column: &str) -> Option<&GridEntry> {
        let is_it = |entry: &&GridEntry| entry.method == method && entry.column == column;
        self.table.iter().find(is_it)
    }

    /// The dense model's value of a metric; `None` where it was not measured.
    pub fn dense(&self, metric: &Metric) -> Option<f64> {
        match metric {
            Metric::Perplexity => self.dense_perplexity,
            other => self.dense_metrics.get(&other.to_string()).copied(),
        }
    }

    /// Number of cells in this state.
    pub fn count(&self, state: CellState) -> usize {
        self.cells.iter().filter(|cell| cell.state == state).count()
    }
}

/// The entry of a method and a column over its cells; `None` without cells.
fn entry(cells: &[CellReport], method: &str, column: &str) -> Option<GridEntry> {
    let here = || {
        cells.iter().filter(|report| report.cell.method == method && report.cell.column() == column)
    };
    let of = |state: CellState| here().filter(move |report| report.state == state);
    let values = |metric: &Metric| here().filter_map(|of| of.value(metric)).collect::<Vec<f64>>();
    let perplexity = MetricMean::of(&values(&Metric::Perplexity));
    let names: BTreeSet<&String> = here().flat_map(|of| of.metrics.keys()).collect();
    let metrics = names.into_iter().filter_map(|name| {
        let values: Vec<f64> = here().filter_map(|of| of.metrics.get(name).copied()).collect();
        Some((name.clone(), MetricMean::of(&values)?))
    });
    let sparsities: Vec<f64> = here().filter_map(|report| report.sparsity).collect();
    (here().count() > 0).then(|| GridEntry {
        method: method.to_string(),
        column: column.to_string(),
        cells: here().count(),
        finished: of(CellState::Finished).count(),
        failed: of(CellState::Failed).count(),
        mean_perplexity: perplexity.map(|of| of.mean),
        deviation: perplexity.and_then(|of| of.deviation),
        sparsity: mean(&sparsities),
        metrics: metrics.collect(),
    })
}

/// The mean; `None` without values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The sample deviation, √(Σ (x − mean)² / (n − 1)); `None` for fewer than two values.
pub fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(method: &str, ratio: Option<f64>, kind: &str, seed: u64) -> GridCell {
        GridCell {
            method: method.to_string(),
            sparsity_ratio: ratio,
            sparsity_type: kind.to_string(),
            seed,
        }
    }

    #[test]
    fn cells_have_plain_names() {
        let half = cell("wanda", Some(0.5), "unstructured", 0);
        assert_eq!(half.name(), "wanda-0.5-seed0");
        assert_eq!(cell("ria-per-row", None, "2:4", 1).name(), "ria-per-row-2of4-seed1");
    }

    #[test]
    fn a_deviation_needs_two_values() {
        // statistics.stdev([2, 4, 9]) = 3.605551275463989
        assert_eq!(deviation(&[2.0, 4.0, 9.0]), Some(13f64.sqrt()));
        assert_eq!((deviation(&[2.0]), mean(&[])), (None, None));
    }

    #[test]
    fn columns_are_ratios_in_order_then_patterns_and_methods_as_they_were_given() {
        let report = |cell: GridCell, perplexity: f64| CellReport {
            pruned_perplexity: Some(perplexity),
            state: CellState::Finished,
            ..CellReport::of(cell, None, None)
        };
        let failed =
            CellReport::of(cell("wanda", Some(0.4), "unstructured", 2), Some("no".into()), None);
        let cells = vec![
            report(cell("magnitude", Some(0.5), "unstructured", 0), 20.0),
            report(cell("wanda", None, "2:4", 0), 15.0),
            report(cell("wanda", Some(0.5), "unstructured", 0), 12.0),
            report(cell("wanda", Some(0.4), "unstructured", 1), 11.0),
            report(cell("wanda", Some(0.4), "unstructured", 0), 10.0),
            failed,
        ];
        let grid = GridRecord::of(cells, BTreeMap::new(), &["wanda".to_string()]);
        assert_eq!(grid.methods, ["wanda", "magnitude"]);
        assert_eq!(grid.columns, ["0.4", "0.5", "2:4"]);
        let entry = grid.entry("wanda", "0.4").unwrap();
        assert_eq!((entry.cells, entry.finished, entry.failed), (3, 2, 1));
        assert_eq!(entry.mean_perplexity, Some(10.5));
        assert_eq!(entry.deviation, Some(0.5f64.sqrt()));
        assert_eq!(grid.entry("magnitude", "0.4"), None);
        assert_eq!(grid.count(CellState::Failed), 1);
    }
}
