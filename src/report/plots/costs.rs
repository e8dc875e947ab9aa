//! A metric against the cost of a model: its bytes, and the speed of decoding. A name per run, and the dense model.

use super::Figure;
use super::chart::{Chart, ChartSeries, SeriesForm};
use super::metrics::{axis, capital, number};
use super::scale::{Axis, range};
use crate::bytes::ByteSize;
use crate::report::costs::{ComparableCosts, ModelCost};
use crate::run::metric::Metric;

/// Units of an axis of bytes, the largest first.
const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// The words of a picture.
struct CostTexts<'a> {
    /// The last word of the file's name and of the title.
    cost: &'static str,
    x_name: &'a str,
    caption: String,
}

/// Draws a metric over bytes, with the zeros and without them; `None` for fewer than two models.
pub fn bytes(metric: &Metric, group: &ComparableCosts) -> Option<Figure> {
    let sizes = group.models.iter().filter_map(|model| model.bytes);
    let largest = sizes.max()?;
    let (unit, each) = UNITS.into_iter().find(|(_, each)| largest.0 >= *each)?;
    let in_units = |bytes: ByteSize| bytes.0 as f64 / each as f64;
    let of_model = |model: &ModelCost| -> Vec<f64> {
        let sizes = model.without_zeros.into_iter().chain(model.bytes);
        sizes.map(in_units).collect()
    };
    let texts = CostTexts {
        cost: "bytes",
        x_name: &format!("bytes of all tensors, {unit} (less is better)"),
        caption: format!(
            "{} over the bytes of each model's tensors. The right end of a line is the model with its zeros, the left end \
             without them: a bit per weight takes their place. `prune pack` adds the places of rows. All measured on {}.",
            capital(&metric.title()),
            group.description
        ),
    };
    draw((metric, group), of_model, texts)
}

/// Draws a metric over tokens per second; `None` for fewer than two models with a measured speed.
pub fn speed(metric: &Metric, group: &ComparableCosts) -> Option<Figure> {
    let texts = CostTexts {
        cost: "speed",
        x_name: "tokens/s of decoding (more is better)",
        caption: format!(
            "{} over tokens per second, from the speed.json of each run. Speeds are comparable if the same machine measured \
             them. Everything else was measured on {}.",
            capital(&metric.title()),
            group.description
        ),
    };
    draw((metric, group), |model| model.tokens_per_second.into_iter().collect(), texts)
}

/// Draws the models that have a cost; `None` for fewer than two.
fn draw(
    (metric, group): (&Metric, &ComparableCosts),
    costs: impl Fn(&ModelCost) -> Vec<f64>,
    texts: CostTexts<'_>,
) -> Option<Figure> {
    let series = group.models.iter().map(|model| {
        let points = costs(model).into_iter().map(|cost| (cost, model.value));
        ChartSeries::new(&model.name, SeriesForm::Marked, points)
    });
    let series: Vec<ChartSeries> = series.filter(|series| !series.points.is_empty()).collect();
    let points = series.iter().flat_map(|series| &series.points);
    let (_, largest) = range(points.clone().map(|point| point.0))?;
    let (lowest, highest) = range(points.map(|point| point.1))?;
    let (y, y_name) = axis(metric, lowest, highest);
    let CostTexts { cost, x_name, caption } = texts;
    let title = capital(&metric.title());
    let chart = Chart {
        title: &format!("{title} against {cost}"),
        y_name: &y_name,
        x_name,
        description: &describe(&title, &series, x_name),
        x: Axis::up_to(0.0, largest, 6),
        y,
        series,
    };
    let name = format!("{metric}-{cost}");
    (chart.series.len() > 1).then(|| Figure { name, caption, svg: chart.draw() })
}

fn describe(title: &str, series: &[ChartSeries], x_name: &str) -> String {
    let of_series = series.iter().map(|series| {
        let points = series.points.iter();
        let points = points.map(|(cost, of)| format!("{} at {cost:.3}", number(*of)));
        format!("{}: {}", series.label, points.collect::<Vec<_>>().join(", "))
    });
    format!("{title} and {x_name}. {}", of_series.collect::<Vec<_>>().join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::comparison::NamedRun;
    use crate::report::made_up;

    /// The group of a run per ratio; a speed of 20, 40, … tokens per second, and 10 of the dense model.
    fn group(ratios: &[f64], is_timed: bool) -> ComparableCosts {
        let runs = ratios.iter().enumerate().map(|(at, &ratio)| {
            let mut manifest = made_up::manifest("wanda", ratio);
            made_up::evaluated(&mut manifest, 10.0, 10.0 + 5.0 * ratio);
            let speed = made_up::speed("x", 20.0 * (at + 1) as f64, Some(("m", 10.0)));
            NamedRun { name: format!("run {at}"), manifest, speed: is_timed.then_some(speed) }
        });
        ComparableCosts::of(&runs.collect::<Vec<_>>(), &Metric::Perplexity).remove(0)
    }

    fn has(svg: &str, part: &str) {
        assert!(svg.contains(part), "no `{part}` in {svg}");
    }

    #[test]
    fn a_line_goes_from_the_bytes_without_zeros_to_all_bytes() {
        let figure = bytes(&Metric::Perplexity, &group(&[0.5, 0.75], false)).unwrap();
        let svg = &figure.svg;
        // 5600 bytes, and 2975 and 1575 of them: 5.47, 2.91 and 1.54 KiB.
        has(
            svg,
            "run 0: 12.50 at 2.905, 12.50 at 5.469; run 1: 13.75 at 1.538, 13.75 at 5.469; dense: 10.00 at 5.469",
        );
        has(svg, "bytes of all tensors, KiB (less is better)");
        // The axis ends at 6 KiB: 64 + 400 × 5.469 / 6.
        has(svg, "<circle cx=\"429\"");
        for name in ["run 0", "run 1", "dense"] {
            has(svg, &format!(">{name}</text>"));
        }
        assert_eq!(figure.name, "perplexity-bytes");
    }

    #[test]
    fn a_point_stands_where_the_measured_speed_says() {
        let svg = speed(&Metric::Perplexity, &group(&[0.5, 0.75], true)).unwrap().svg;
        has(&svg, "run 0: 12.50 at 20.000; run 1: 13.75 at 40.000; dense: 10.00 at 10.000");
        // The axis ends at 40 tokens/s.
        has(&svg, "<circle cx=\"264\"");
    }

    #[test]
    fn fewer_than_two_points_are_no_picture() {
        assert!(speed(&Metric::Perplexity, &group(&[0.5, 0.75], false)).is_none());
        let mut alone = group(&[0.5], true);
        alone.models.truncate(1);
        assert!(
            bytes(&Metric::Perplexity, &alone).is_none()
                && speed(&Metric::Perplexity, &alone).is_none()
        );
    }
}
