//! The table of a sweep: on the terminal, as Markdown, and the parts of its page.

use std::fmt::Write as _;

use serde::Serialize;

use super::format::{self, Table, duration, finite, measured, six_digits, trimmed};
use crate::bytes::ByteSize;
use crate::run::TextProtocol;
use crate::run::grid::{CellState, GridEntry, GridRecord, mean};
use crate::run::metric::Metric;

/// The table for a terminal of `columns`, ending in a newline.
pub fn text(record: &GridRecord, columns: usize) -> String {
    let lines =
        |lines: Vec<String>| -> String { lines.iter().map(|line| format!("{line}\n")).collect() };
    let mut text = lines(lead(record));
    for MetricTable { title, table } in tables(record) {
        if let Some(title) = title {
            text += &format!("\n{title}\n");
        }
        text += &table.text(columns);
    }
    format!("{text}\n{}", lines(notes(record)))
}

/// The table as Markdown.
pub fn markdown(record: &GridRecord) -> String {
    let lines = |lines: Vec<String>| -> String {
        lines.iter().map(|line| format!("{}  \n", format::markdown(line))).collect()
    };
    let tables = tables(record).into_iter().map(|MetricTable { title, table }| {
        let title =
            title.map_or_else(String::new, |title| format!("### {}\n\n", format::markdown(&title)));
        format!("{title}{}\n", table.markdown())
    });
    format!("{}\n{}{}", lines(lead(record)), tables.collect::<String>(), lines(notes(record)))
}

/// Facts above the table.
pub(super) fn lead(record: &GridRecord) -> Vec<String> {
    let model = record.model.as_ref().map(|model| format!("model: {model}"));
    let metrics = std::iter::once(&Metric::Perplexity).chain(&record.metrics);
    let mut dense: Vec<String> = Vec::new();
    for metric in metrics {
        let line = record
            .dense(metric)
            .map(|of| format!("dense {}: {}", metric.title(), measured(metric, of)));
        dense.extend(line.filter(|line| !dense.contains(line)));
    }
    let text = record.evaluation.as_ref().map(|text| {
        let TextProtocol { windows, seqlen, .. } = text;
        format!("measured on: {}, {windows} windows of {seqlen} tokens", format::text_name(text))
    });
    model.into_iter().chain(dense).chain(text).collect()
}

/// Facts below the table.
pub(super) fn notes(record: &GridRecord) -> Vec<String> {
    let names: Vec<String> = record.metrics.iter().map(Metric::title).collect();
    let mut lines = vec![
        format!("pruned {}: mean ± sample deviation over seeds", names.join(", ")),
        "time: mean of a cell; peak memory: the largest".to_string(),
    ];
    let counts: Vec<String> = [CellState::Finished, CellState::Failed, CellState::Unfinished]
        .into_iter()
        .filter(|&state| record.count(state) > 0)
        .map(|state| format!("{} {}", record.count(state), state.name()))
        .collect();
    lines.push(format!("cells: {}", counts.join(", ")));
    lines.extend(record.columns.iter().filter_map(|column| reached(record, column)));
    for cell in &record.cells {
        if let Some(error) = &cell.error {
            let first = error.lines().next().unwrap_or_default();
            lines.push(format!("{} failed: {first}", cell.name));
        }
    }
    lines
}

/// The sparsity that each method has reached in a column; `None` where all have reached the same, and the ratio of the column.
fn reached(record: &GridRecord, column: &str) -> Option<String> {
    let reached = record.methods.iter().filter_map(|method| {
        let sparsity = record.entry(method, column)?.sparsity?;
        Some((method, trimmed(sparsity)))
    });
    let all: Vec<(&String, String)> = reached.collect();
    let target = column
        .parse()
        .map_or_else(|_| all.first().map(|of| of.1.clone()), |ratio| Some(trimmed(ratio)))?;
    let differs = all.iter().any(|(_, sparsity)| *sparsity != target);
    let all = all.iter().map(|(method, sparsity)| format!("{method} {sparsity}"));
    differs.then(|| format!("sparsity reached at {column}: {}", all.collect::<Vec<_>>().join(", ")))
}

/// The means of a metric.
#[derive(Debug, Serialize)]
pub(super) struct MetricTable {
    /// The metric; absent where the perplexity is the only metric.
    title: Option<String>,
    table: Table,
}

/// The tables of all metrics.
pub(super) fn tables(record: &GridRecord) -> Vec<MetricTable> {
    let is_titled = record.metrics != [Metric::Perplexity];
    let tables = record.metrics.iter().enumerate().map(|(at, metric)| MetricTable {
        title: is_titled.then(|| metric.title()),
        table: means(record, metric, at == 0),
    });
    tables.collect()
}

/// The means: a row per method, a column per ratio or pattern; with `has_costs` also time and memory.
fn means(record: &GridRecord, metric: &Metric, has_costs: bool) -> Table {
    let mut columns = vec!["method".to_string()];
    columns.extend(record.columns.iter().cloned());
    columns.extend(["time", "peak memory"].map(String::from).into_iter().filter(|_| has_costs));
    let rows = record.methods.iter().map(|method| {
        let of_method = || record.cells.iter().filter(|cell| cell.cell.method == *method);
        let seconds: Vec<f64> = of_method().filter_map(|cell| cell.seconds).collect();
        let peak = of_method().filter_map(|cell| cell.peak_anonymous).max();
        let mut row = vec![method.clone()];
        row.extend(record.columns.iter().map(|column| {
            let entry = record.entry(method, column);
            entry.map_or_else(dash, |entry| value(entry, metric))
        }));
        let peak = peak.map_or_else(dash, |peak: ByteSize| peak.to_string());
        let costs = [mean(&seconds).map_or_else(dash, duration), peak];
        row.extend(costs.into_iter().filter(|_| has_costs));
        row
    });
    Table { rows: rows.collect(), columns }
}

/// A table with a row for every cell.
pub(super) fn every_cell(record: &GridRecord) -> Table {
    let number = |value: Option<f64>| value.map_or_else(dash, finite);
    let further: Vec<&Metric> =
        record.metrics.iter().filter(|metric| **metric != Metric::Perplexity).collect();
    let mut table = Table::of(record.cells.iter().map(|cell| {
        [
            ("cell", cell.name.clone()),
            ("state", cell.state.name().to_string()),
            ("sparsity", cell.sparsity.map_or_else(dash, six_digits)),
            ("dense perplexity", number(cell.dense_perplexity)),
            ("pruned perplexity", number(cell.pruned_perplexity)),
            ("time", cell.seconds.map_or_else(dash, duration)),
            ("peak memory", cell.peak_anonymous.map_or_else(dash, |peak| peak.to_string())),
        ]
    }));
    if !record.cells.is_empty() {
        table.columns.extend(further.iter().map(|metric| metric.title()));
    }
    for (row, cell) in table.rows.iter_mut().zip(&record.cells) {
        row.extend(
            further
                .iter()
                .map(|metric| cell.value(metric).map_or_else(dash, |of| measured(metric, of))),
        );
    }
    table
}

/// `12.3456 ± 0.0123`, with the number of cells where some are missing.
fn value(entry: &GridEntry, metric: &Metric) -> String {
    let found = entry.mean_of(metric);
    let mut text = match (found.map(|of| of.mean), found.and_then(|of| of.deviation)) {
        (None, _) if entry.finished > 0 => "not measured".to_string(),
        (None, _) if entry.failed > 0 => return "failed".to_string(),
        (None, _) => return CellState::Unfinished.name().to_string(),
        (Some(mean), Some(deviation)) if mean.is_finite() => {
            format!("{} ± {}", measured(metric, mean), measured(metric, deviation))
        }
        (Some(mean), _) => measured(metric, mean),
    };
    if entry.finished < entry.cells {
        let _ = write!(text, " ({} of {})", entry.finished, entry.cells);
    }
    text
}

fn dash() -> String {
    "-".to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::report::made_up;
    use crate::report::page::of_grid;
    use crate::run::grid::{CellReport, GridCell};

    /// Wanda at 0.5 with two seeds, magnitude at 0.5, and a failed cell at 2:4.
    fn record() -> GridRecord {
        let cell = |method: &str, ratio: Option<f64>, kind: &str, seed| GridCell {
            method: method.into(),
            sparsity_ratio: ratio,
            sparsity_type: kind.into(),
            seed,
        };
        let finished = |method: &str, seed, perplexity| {
            let mut manifest = made_up::manifest(method, 0.5);
            made_up::evaluated(&mut manifest, 10.0, perplexity);
            let cell = cell(method, Some(0.5), "unstructured", seed);
            CellReport::of(cell, None, Some(&manifest))
        };
        let error = "no\u{1b} <text>\nhint: none".to_string();
        let cells = vec![
            finished("wanda", 0, 12.0),
            finished("wanda", 1, 13.0),
            finished("magnitude", 0, 60.0),
            CellReport::of(cell("wanda", None, "2:4", 0), Some(error), None),
        ];
        let mut record = GridRecord::of(cells, BTreeMap::new(), &["wanda".to_string()]);
        record.model = Some("a|b".to_string());
        record
    }

    #[test]
    fn the_table_has_a_row_per_method_and_a_column_per_target() {
        let expected = "\
model: a|b
dense perplexity: 10.0000
measured on: test.txt, 5 windows of 64 tokens

method     0.5               2:4     time    peak memory
wanda      12.5000 ± 0.7071  failed  10.0 s  32.00 MiB
magnitude  60.0000           -       10.0 s  32.00 MiB

pruned perplexity: mean ± sample deviation over seeds
time: mean of a cell; peak memory: the largest
cells: 3 finished, 1 failed
wanda-2of4-seed0 failed: no\u{1b} <text>
";
        assert_eq!(text(&record(), 80), expected);
        let markdown = markdown(&record());
        assert!(markdown.contains("| wanda | 12.5000 ± 0.7071 | failed | 10.0 s | 32.00 MiB |"));
        assert!(markdown.contains("| --- | --- | --- | --- | --- |"));
        assert!(!markdown.contains('<') && !markdown.contains('\u{1b}'));
    }

    #[test]
    fn ratios_that_are_not_reached_alike_are_listed() {
        let mut record = record();
        assert_eq!(reached(&record, "0.5"), None, "all have 0.5");
        for entry in &mut record.table {
            entry.sparsity =
                entry.sparsity.map(|_| if entry.method == "wanda" { 0.4951 } else { 0.502 });
        }
        let expected = "sparsity reached at 0.5: wanda 0.4951, magnitude 0.502";
        assert_eq!(reached(&record, "0.5").as_deref(), Some(expected));
        assert_eq!(reached(&record, "2:4"), None, "its cell has failed");
    }

    #[test]
    fn a_wide_table_is_printed_in_blocks_that_fit_the_terminal() {
        let cells = ["0.4", "0.5", "0.6", "0.7"].iter().flat_map(|ratio| {
            [(0, 12.0), (1, 13.0)].map(|(seed, perplexity)| {
                let mut manifest = made_up::manifest("wanda", 0.5);
                made_up::evaluated(&mut manifest, 10.0, perplexity);
                let cell = GridCell {
                    method: "wanda".into(),
                    sparsity_ratio: ratio.parse().ok(),
                    sparsity_type: "unstructured".into(),
                    seed,
                };
                CellReport::of(cell, None, Some(&manifest))
            })
        });
        let record = GridRecord::of(cells.collect(), BTreeMap::new(), &[]);
        let in_columns = |columns: usize| {
            let text = super::text(&record, columns);
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
            text
        };
        in_columns(60);
        let text = in_columns(80);
        let expected = "
method  0.4               0.5               0.6               0.7
wanda   12.5000 ± 0.7071  12.5000 ± 0.7071  12.5000 ± 0.7071  12.5000 ± 0.7071

method  time    peak memory
wanda   10.0 s  32.00 MiB
";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn the_page_has_the_table_a_picture_and_every_cell() {
        let page = of_grid("out", &record()).unwrap();
        assert_eq!(page.matches("<figure>").count(), 1);
        assert!(page.contains("12.5000 ± 0.7071") && page.contains("wanda-2of4-seed0"));
        assert!(!page.contains("<text>") && !page.contains('\u{1b}'));
    }
}
