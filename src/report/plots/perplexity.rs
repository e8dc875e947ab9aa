//! Perplexity against sparsity: one line per method, the dense perplexity as a dashed level.

use anyhow::Result;

use super::Figure;
use super::chart::{Chart, ChartLevel, ChartLine};
use super::scale::{Axis, label};
use crate::report::comparison::ComparableRuns;

/// The ratio of the largest to the smallest perplexity from which the axis is logarithmic.
const WIDE: f64 = 4.0;

/// Draws a group of comparable runs; `None` without a pruned perplexity.
pub fn figure(group: &ComparableRuns<'_>) -> Result<Option<Figure>> {
    let points = || group.series.iter().flat_map(|series| &series.points);
    if points().next().is_none() {
        return Ok(None);
    }
    let perplexities = || {
        let pruned = points().map(|point| point.perplexity);
        pruned.chain(group.dense.iter().copied())
    };
    let lowest = perplexities().fold(f64::INFINITY, f64::min);
    let highest = perplexities().fold(f64::NEG_INFINITY, f64::max);
    let is_logarithmic = highest / lowest > WIDE;
    let (y, name) = if is_logarithmic {
        (
            Axis::logarithmic(lowest, highest),
            "perplexity, logarithmic (lower is better)",
        )
    } else {
        (
            Axis::around(lowest, highest, 5),
            "perplexity (lower is better)",
        )
    };
    let height = |perplexity: f64| {
        if is_logarithmic {
            perplexity.log10()
        } else {
            perplexity
        }
    };
    let y_label = |value: f64| {
        label(if is_logarithmic {
            10f64.powf(value)
        } else {
            value
        })
    };
    let sparsest = points()
        .map(|point| point.sparsity)
        .fold(f64::NEG_INFINITY, f64::max);
    let least = points()
        .map(|point| point.sparsity)
        .fold(f64::INFINITY, f64::min);
    let lines = group.series.iter().map(|series| ChartLine {
        label: series.label.clone(),
        points: series
            .points
            .iter()
            .map(|point| (point.sparsity, height(point.perplexity)))
            .collect(),
        is_marked: true,
    });
    let levels = group.dense.iter().map(|&dense| ChartLevel {
        label: format!("dense: {dense:.4}"),
        value: height(dense),
    });
    let svg = Chart {
        title: "Perplexity against sparsity",
        y_name: name,
        x_name: "sparsity reached (zeros / weights)",
        description: &describe(group),
        x: Axis::around(least, sparsest, 6),
        y,
        x_label: &label,
        y_label: &y_label,
        lines: lines.collect(),
        levels: levels.collect(),
    }
    .draw()?;
    Ok(Some(Figure {
        name: "perplexity".into(),
        caption: format!(
            "Perplexity of the pruned models over the share of their weights that is zero, one line per method; the dashed line \
             is the dense model. All measured on {}.",
            group.protocol.description
        ),
        svg,
    }))
}

fn describe(group: &ComparableRuns<'_>) -> String {
    let mut sentences: Vec<String> = group
        .series
        .iter()
        .map(|series| {
            let points: Vec<String> = series
                .points
                .iter()
                .map(|point| format!("{:.2} at {:.3}", point.perplexity, point.sparsity))
                .collect();
            format!("{}: {}", series.label, points.join(", "))
        })
        .collect();
    sentences.extend(group.dense.iter().map(|dense| format!("dense: {dense:.2}")));
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
                NamedRun {
                    name: format!("run {index}"),
                    manifest,
                }
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
        // One marker in the legend, one in the plot.
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
    }
}
