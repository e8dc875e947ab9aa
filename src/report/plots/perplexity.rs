//! Perplexity against sparsity: a line per method, the dense perplexity as a dashed level.

use anyhow::Result;

use super::Figure;
use super::chart::{Chart, ChartLevel, ChartLine};
use super::scale::{Axis, label};
use crate::report::comparison::ComparableRuns;
use crate::run::grid::GridRecord;

/// The ratio of the largest to the smallest perplexity from which the axis is logarithmic.
const WIDE: f64 = 4.0;

/// The lines of a chart, by label: sparsity and perplexity of each point.
type PlottedSeries = Vec<(String, Vec<(f64, f64)>)>;

/// Draws a group of comparable runs; `None` without a pruned perplexity.
pub fn figure(group: &ComparableRuns<'_>) -> Result<Option<Figure>> {
    let series: PlottedSeries = group
        .series
        .iter()
        .map(|series| {
            let points = series.points.iter();
            let points = points.map(|point| (point.sparsity, point.perplexity));
            (series.label.clone(), points.collect())
        })
        .collect();
    let caption = format!(
        "Perplexity of the pruned models over the share of their weights that is zero, one line per method; the dashed line \
         is the dense model. All measured on {}.",
        group.protocol.description
    );
    draw(&series, &group.dense, caption)
}

/// Draws the means of a sweep: a line per method, a point for each of its patterns. `None` without a finite perplexity.
pub fn of_grid(record: &GridRecord) -> Result<Option<Figure>> {
    let mut series = PlottedSeries::new();
    for entry in &record.table {
        let is_drawn = |perplexity: &f64| perplexity.is_finite() && *perplexity > 0.0;
        let perplexity = entry.mean_perplexity.filter(is_drawn);
        let Some(point) = entry.sparsity.zip(perplexity) else {
            continue;
        };
        let label = match entry.column.contains(':') {
            true => format!("{} {}", entry.method, entry.column),
            false => entry.method.clone(),
        };
        match series.iter_mut().find(|(other, _)| *other == label) {
            Some((_, points)) => points.push(point),
            None => series.push((label, vec![point])),
        }
    }
    let dense = record.dense_perplexity;
    let dense: Vec<f64> =
        dense.into_iter().filter(|dense| dense.is_finite() && *dense > 0.0).collect();
    let caption = "Mean perplexity of the pruned models over seeds, over the share of their weights that is zero, one line per method \
         and one point per pattern; the dashed line is the dense model.";
    draw(&series, &dense, caption.to_string())
}

/// Draws lines; `None` without a point.
fn draw(series: &PlottedSeries, dense: &[f64], caption: String) -> Result<Option<Figure>> {
    let points = || series.iter().flat_map(|(_, points)| points.iter().copied());
    if points().next().is_none() {
        return Ok(None);
    }
    let perplexities = || {
        let pruned = points().map(|(_, perplexity)| perplexity);
        pruned.chain(dense.iter().copied())
    };
    let lowest = perplexities().fold(f64::INFINITY, f64::min);
    let highest = perplexities().fold(f64::NEG_INFINITY, f64::max);
    let is_logarithmic = highest / lowest > WIDE;
    let (y, name) = if is_logarithmic {
        (Axis::logarithmic(lowest, highest), "perplexity, logarithmic (lower is better)")
    } else {
        (Axis::around(lowest, highest, 5), "perplexity (lower is better)")
    };
    let height = |perplexity: f64| {
        if is_logarithmic { perplexity.log10() } else { perplexity }
    };
    let y_label = |value: f64| label(if is_logarithmic { 10f64.powf(value) } else { value });
    let sparsities = || points().map(|(sparsity, _)| sparsity);
    let sparsest = sparsities().fold(f64::NEG_INFINITY, f64::max);
    let least = sparsities().fold(f64::INFINITY, f64::min);
    let lines = series.iter().map(|(label, points)| ChartLine {
        label: label.clone(),
        points: points
            .iter()
            .map(|&(sparsity, perplexity)| (sparsity, height(perplexity)))
            .collect(),
        is_marked: true,
    });
    let levels = dense
        .iter()
        .map(|&dense| ChartLevel { label: format!("dense: {dense:.4}"), value: height(dense) });
    let svg = Chart {
        title: "Perplexity against sparsity",
        y_name: name,
        x_name: "sparsity reached (zeros / weights)",
        description: &describe(series, dense),
        x: Axis::around(least, sparsest, 6),
        y,
        x_label: &label,
        y_label: &y_label,
        lines: lines.collect(),
        levels: levels.collect(),
    }
    .draw()?;
    Ok(Some(Figure { name: "perplexity".into(), caption, svg }))
}

fn describe(series: &PlottedSeries, dense: &[f64]) -> String {
    let mut sentences: Vec<String> = series
        .iter()
        .map(|(label, points)| {
            let points: Vec<String> = points
                .iter()
                .map(|(sparsity, perplexity)| format!("{perplexity:.2} at {sparsity:.3}"))
                .collect();
            format!("{label}: {}", points.join(", "))
        })
        .collect();
    sentences.extend(dense.iter().map(|dense| format!("dense: {dense:.2}")));
    sentences.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::comparison::{NamedRun, RunComparison};
    use crate::report::made_up;

    fn figure_of(perplexities: &[f64]) -> Figure {
        let runs: Vec<NamedRun> = perplexities
            .iter()
            .enumerate()
            .map(|(index, &perplexity)| {
                let mut manifest = made_up::manifest("wanda", 0.3 + 0.1 * index as f64);
                made_up::evaluated(&mut manifest, 10.0, perplexity);
                NamedRun { name: format!("run {index}"), manifest }
            })
            .collect();
        let comparison = RunComparison::of(&runs);
        assert_eq!(comparison.groups.len(), 1);
        figure(&comparison.groups[0]).unwrap().unwrap()
    }

    #[test]
    fn close_perplexities_get_a_plain_axis_and_distant_ones_a_logarithmic_one() {
        let close = figure_of(&[11.0, 12.0, 14.0]).svg;
        assert!(close.contains("perplexity (lower is better)"), "{close}");
        let wide = figure_of(&[11.0, 40.0, 2000.0]).svg;
        assert!(wide.contains("logarithmic") && wide.contains(">\n1000\n<"));
        assert!(wide.contains("dense: 10.0000"));
    }

    #[test]
    fn a_single_run_is_a_single_point() {
        let svg = figure_of(&[11.0]).svg;
        // A marker in the legend and a marker in the plot.
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }
}
