//! A metric against sparsity: a line per method, the dense model as a dashed level.

use super::Figure;
use super::chart::{Chart, ChartSeries, SeriesForm};
use super::scale::{Axis, range};
use crate::report::comparison::{ComparableRuns, is_drawable};
use crate::run::grid::GridRecord;
use crate::run::metric::Metric;

/// The ratio of the largest to the smallest value from which the axis is logarithmic.
const WIDE: f64 = 4.0;

/// Draws a group of comparable runs; `None` without a value.
pub fn figure(metric: &Metric, group: &ComparableRuns) -> Option<Figure> {
    let series = group.series.iter();
    let series = series.map(|series| {
        ChartSeries::new(&series.label, SeriesForm::Marked, series.points.iter().copied())
    });
    let dense = match group.dense[..] {
        [] => "",
        _ => "; the dashed line is the dense model",
    };
    let caption = format!(
        "{} of the pruned models over the share of their weights that is zero, one line per method{dense}. All measured on {}.",
        capital(&metric.title()),
        group.description
    );
    draw(metric, series.collect(), &group.dense, caption)
}

/// Draws the means of a sweep: a line per method, a point for each of its patterns. `None` without a finite value.
pub fn of_grid(metric: &Metric, record: &GridRecord) -> Option<Figure> {
    let mut all: Vec<ChartSeries> = Vec::new();
    for entry in &record.table {
        let mean = entry.mean_of(metric).map(|of| of.mean);
        let mean = mean.filter(|mean| is_drawable(metric, mean));
        let Some(point) = entry.sparsity.zip(mean) else {
            continue;
        };
        let label = match entry.column.contains(':') {
            true => format!("{} {}", entry.method, entry.column),
            false => entry.method.clone(),
        };
        match all.iter_mut().find(|series| series.label == label) {
            Some(series) => series.points.push(point),
            None => all.push(ChartSeries::new(label, SeriesForm::Marked, [point])),
        }
    }
    let dense = record.dense(metric).into_iter().filter(|dense| is_drawable(metric, dense));
    let dense: Vec<f64> = dense.collect();
    let level = if dense.is_empty() { "" } else { "; the dashed line is the dense model" };
    let caption = format!(
        "{} of the pruned models, mean over seeds, over the share of their weights that is zero, one line per method and one point \
         per pattern{level}.",
        capital(&metric.title())
    );
    draw(metric, all, &dense, caption)
}

/// Draws series and dense models; `None` without a point.
fn draw(
    metric: &Metric,
    mut series: Vec<ChartSeries>,
    dense: &[f64],
    caption: String,
) -> Option<Figure> {
    let description = describe(&series, dense);
    let points: Vec<_> = series.iter().flat_map(|series| series.points.iter().copied()).collect();
    let (least, sparsest) = range(points.iter().map(|point| point.0))?;
    let values = points.iter().map(|point| point.1).chain(dense.iter().copied());
    let (lowest, highest) = range(values)?;
    let (y, y_name) = axis(metric, lowest, highest);
    series.extend(dense.iter().map(|&dense| {
        ChartSeries::new(format!("dense: {dense:.4}"), SeriesForm::Level, [(least, dense)])
    }));
    let svg = Chart {
        title: &format!("{} against sparsity", capital(&metric.title())),
        y_name: &y_name,
        x_name: "sparsity reached (zeros / weights)",
        description: &description,
        x: Axis::around(least, sparsest, 6),
        y,
        series,
    }
    .draw();
    Some(Figure { name: metric.to_string(), caption, svg })
}

/// The axis of a metric, and its name.
pub(super) fn axis(metric: &Metric, lowest: f64, highest: f64) -> (Axis, String) {
    let unit = if *metric == Metric::Kl { ", nat" } else { "" };
    let title = metric.title() + unit;
    match metric.is_loss() {
        false => (Axis::around(lowest, highest, 5), format!("{title} (higher is better)")),
        true if highest / lowest > WIDE => {
            (Axis::logarithmic(lowest, highest), format!("{title}, logarithmic (lower is better)"))
        }
        true => (Axis::around(lowest, highest, 5), format!("{title} (lower is better)")),
    }
}

/// The text with a capital letter first.
pub(super) fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.collect::<String>() + letters.as_str()
}

/// A value in a description.
pub(super) fn number(value: f64) -> String {
    if value < 1.0 { format!("{value:.4}") } else { format!("{value:.2}") }
}

fn describe(series: &[ChartSeries], dense: &[f64]) -> String {
    let of_series = series.iter().map(|series| {
        let points = series.points.iter();
        let points = points.map(|(sparsity, of)| format!("{} at {sparsity:.3}", number(*of)));
        format!("{}: {}", series.label, points.collect::<Vec<_>>().join(", "))
    });
    let dense = dense.iter().map(|&dense| format!("dense: {}", number(dense)));
    of_series.chain(dense).collect::<Vec<_>>().join("; ")
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
                NamedRun { name: format!("run {index}"), manifest, speed: None }
            })
            .collect();
        let comparison = RunComparison::of(&runs, &Metric::Perplexity);
        assert_eq!(comparison.groups.len(), 1);
        figure(&Metric::Perplexity, &comparison.groups[0]).unwrap()
    }

    #[test]
    fn close_perplexities_get_a_plain_axis_and_distant_ones_a_logarithmic_one() {
        let close = figure_of(&[11.0, 12.0, 14.0]).svg;
        assert!(close.contains("perplexity (lower is better)"), "{close}");
        let wide = figure_of(&[11.0, 40.0, 2000.0]).svg;
        assert!(wide.contains("logarithmic") && wide.contains(">1000<"));
        assert!(wide.contains("dense: 10.0000"));
    }

    #[test]
    fn a_single_run_is_a_single_point() {
        let svg = figure_of(&[11.0]).svg;
        // A marker in the legend and a marker in the plot.
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }
}
