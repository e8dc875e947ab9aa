//! Perplexity against sparsity: a line per method, the dense perplexity as a dashed level.

use super::Figure;
use super::chart::{Chart, ChartSeries, SeriesForm};
use super::scale::{Axis, range};
use crate::report::comparison::{ComparableRuns, is_drawable};
use crate::run::grid::GridRecord;

/// The ratio of the largest to the smallest perplexity from which the axis is logarithmic.
const WIDE: f64 = 4.0;

/// Draws a group of comparable runs; `None` without a pruned perplexity.
pub fn figure(group: &ComparableRuns) -> Option<Figure> {
    let series = group.series.iter();
    let series = series.map(|series| {
        ChartSeries::new(&series.label, SeriesForm::Marked, series.points.iter().copied())
    });
    let dense = match group.dense[..] {
        [] => "",
        _ => "; the dashed line is the dense model",
    };
    let caption = format!(
        "Perplexity of the pruned models over the share of their weights that is zero, one line per method{dense}. All measured \
         on {}.",
        group.description
    );
    draw(series.collect(), &group.dense, caption)
}

/// Draws the means of a sweep: a line per method, a point for each of its patterns. `None` without a finite perplexity.
pub fn of_grid(record: &GridRecord) -> Option<Figure> {
    let mut all: Vec<ChartSeries> = Vec::new();
    for entry in &record.table {
        let perplexity = entry.mean_perplexity.filter(is_drawable);
        let Some(point) = entry.sparsity.zip(perplexity) else {
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
    let dense: Vec<f64> = record.dense_perplexity.into_iter().filter(is_drawable).collect();
    let caption = "Mean perplexity of the pruned models over seeds, over the share of their weights that is zero, one line per method \
         and one point per pattern; the dashed line is the dense model.";
    draw(all, &dense, caption.to_string())
}

/// Draws series and dense perplexities; `None` without a point.
fn draw(mut series: Vec<ChartSeries>, dense: &[f64], caption: String) -> Option<Figure> {
    let description = describe(&series, dense);
    let points: Vec<_> = series.iter().flat_map(|series| series.points.iter().copied()).collect();
    let (least, sparsest) = range(points.iter().map(|point| point.0))?;
    let perplexities = points.iter().map(|point| point.1).chain(dense.iter().copied());
    let (lowest, highest) = range(perplexities)?;
    let (y, y_name) = axis(lowest, highest);
    series.extend(dense.iter().map(|&dense| {
        ChartSeries::new(format!("dense: {dense:.4}"), SeriesForm::Level, [(least, dense)])
    }));
    let svg = Chart {
        title: "Perplexity against sparsity",
        y_name,
        x_name: "sparsity reached (zeros / weights)",
        description: &description,
        x: Axis::around(least, sparsest, 6),
        y,
        series,
    }
    .draw();
    Some(Figure { name: "perplexity".into(), caption, svg })
}

/// The axis of perplexities, and its name.
pub(super) fn axis(lowest: f64, highest: f64) -> (Axis, &'static str) {
    if highest / lowest > WIDE {
        (Axis::logarithmic(lowest, highest), "perplexity, logarithmic (lower is better)")
    } else {
        (Axis::around(lowest, highest, 5), "perplexity (lower is better)")
    }
}

fn describe(series: &[ChartSeries], dense: &[f64]) -> String {
    let of_series = series.iter().map(|series| {
        let points = series.points.iter();
        let points = points.map(|(sparsity, of)| format!("{of:.2} at {sparsity:.3}"));
        format!("{}: {}", series.label, points.collect::<Vec<_>>().join(", "))
    });
    let dense = dense.iter().map(|dense| format!("dense: {dense:.2}"));
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
        let comparison = RunComparison::of(&runs);
        assert_eq!(comparison.groups.len(), 1);
        figure(&comparison.groups[0]).unwrap()
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
