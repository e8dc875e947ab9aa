//! Lines over two axes, with markers, dashed levels and a legend: memory over time, perplexity against sparsity.

use anyhow::Result;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;

use super::canvas::{
    self, Anchor, Area, GRID, HEADER, INK, MUTED, SERIES, TEXT, WIDTH, broken, letters, write,
};
use super::scale::Axis;

/// Height of the part between the legend and the axis' name.
const PLOT: u32 = 270;
const LEGEND_ROW: u32 = 22;
/// Room for the numbers of the vertical axis: eight characters.
const Y_NUMBERS: u32 = 64;
const X_NUMBERS: u32 = 26;
const X_NAME: u32 = 26;
/// Legend entries of at most this many characters stand in two columns.
const SHORT: usize = 24;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChartLine {
    /// Its name in the legend.
    pub(super) label: String,
    /// Its points, in the order of the line.
    pub(super) points: Vec<(f64, f64)>,
    pub(super) is_marked: bool,
}

/// A dashed horizontal line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChartLevel {
    /// Its name in the legend.
    pub(super) label: String,
    /// Its height.
    pub(super) value: f64,
}

pub(super) struct Chart<'a> {
    /// The first line above the chart.
    pub(super) title: &'a str,
    /// The second line: the vertical axis and its unit.
    pub(super) y_name: &'a str,
    /// The name of the horizontal axis, with its unit.
    pub(super) x_name: &'a str,
    /// The description for screen readers.
    pub(super) description: &'a str,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) x_label: &'a dyn Fn(f64) -> String,
    pub(super) y_label: &'a dyn Fn(f64) -> String,
    pub(super) lines: Vec<ChartLine>,
    pub(super) levels: Vec<ChartLevel>,
}

/// Linear between its ends, labelled at its ticks and nowhere else.
impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (low, high): (i32, i32)) -> i32 {
        let share = (value - self.from) / (self.to - self.from);
        // A value far off the axis, as in a damaged record, must fit the integers of plotters.
        low + (share.clamp(-1.0, 2.0) * f64::from(high - low)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.from..self.to
    }
}

impl Chart<'_> {
    pub(super) fn draw(&self) -> Result<String> {
        let entries = self.lines.len() + self.levels.len();
        let columns = if self.labels().all(|label| label.chars().count() <= SHORT) { 2 } else { 1 };
        let top = HEADER + LEGEND_ROW * entries.div_ceil(columns) as u32 + 8;
        let height = top + PLOT + X_NAME;
        canvas::draw(height, self.title, self.description, |area| {
            canvas::header(area, self.title, self.y_name)?;
            self.legend(area, columns)?;
            let bottom = height as i32 - 13;
            let middle = (Y_NUMBERS + (WIDTH - Y_NUMBERS) / 2) as i32;
            write(area, self.x_name, &letters(TEXT, MUTED, Anchor::Middle), (middle, bottom))?;
            self.plot(area, top)
        })
    }

    fn labels(&self) -> impl Iterator<Item = &str> {
        let lines = self.lines.iter().map(|line| line.label.as_str());
        lines.chain(self.levels.iter().map(|level| level.label.as_str()))
    }

    fn legend(&self, area: &Area<'_>, columns: usize) -> Result<()> {
        for (entry, label) in self.labels().enumerate() {
            let x = 8 + (entry % columns) as i32 * (WIDTH as i32 / 2);
            let y = (HEADER + LEGEND_ROW * (entry / columns) as u32 + LEGEND_ROW / 2) as i32;
            if let Some(line) = self.lines.get(entry) {
                let style = SERIES[entry % SERIES.len()].stroke_width(2);
                area.draw(&PathElement::new([(x, y), (x + 24, y)], style)).map_err(broken)?;
                if line.is_marked {
                    canvas::mark(area, entry, (x + 12, y))?;
                }
            } else {
                for dash in [0, 10, 20] {
                    let dash = [(x + dash, y), (x + dash + 5, y)];
                    area.draw(&PathElement::new(dash, INK.stroke_width(2))).map_err(broken)?;
                }
            }
            write(area, label, &letters(TEXT, INK, Anchor::Start), (x + 32, y))?;
        }
        Ok(())
    }

    fn plot(&self, area: &Area<'_>, top: u32) -> Result<()> {
        let mut chart = ChartBuilder::on(area)
            .margin_top(top)
            .margin_right(16)
            .margin_bottom(X_NAME)
            .x_label_area_size(X_NUMBERS)
            .y_label_area_size(Y_NUMBERS)
            .build_cartesian_2d(self.x.clone(), self.y.clone())
            .map_err(broken)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(MUTED)
            .label_style(letters(TEXT, INK, Anchor::Middle))
            .x_label_formatter(&|value| (self.x_label)(*value))
            .y_label_formatter(&|value| (self.y_label)(*value))
            .draw()
            .map_err(broken)?;
        for level in &self.levels {
            let ends = [(self.x.from, level.value), (self.x.to, level.value)];
            chart
                .draw_series(DashedLineSeries::new(ends, 5, 5, INK.stroke_width(2)))
                .map_err(broken)?;
        }
        for (index, line) in self.lines.iter().enumerate() {
            let style = SERIES[index % SERIES.len()].stroke_width(2);
            if line.points.len() > 1 {
                chart
                    .draw_series(LineSeries::new(line.points.iter().copied(), style))
                    .map_err(broken)?;
            }
            for point in line.points.iter().filter(|_| line.is_marked) {
                canvas::mark(area, index, chart.backend_coord(point))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::plots::scale::label;

    fn chart(labels: [&str; 2]) -> String {
        Chart {
            title: "t",
            y_name: "u",
            x_name: "x",
            description: "d",
            x: Axis::up_to(0.0, 1.0, 5),
            y: Axis::up_to(0.0, 2.0, 5),
            x_label: &label,
            y_label: &label,
            lines: labels
                .map(|label| ChartLine {
                    label: label.into(),
                    points: vec![(0.0, 0.0), (1.0, 2.0)],
                    is_marked: true,
                })
                .to_vec(),
            levels: vec![ChartLevel { label: "dense".into(), value: 1.0 }],
        }
        .draw()
        .unwrap()
    }

    #[test]
    fn points_stand_where_their_numbers_say() {
        let svg = chart(["one", "two"]);
        // Two rows of legend: the plot begins at 52 + 44 + 8 and ends 26 above the axis' name, 270 − 26 lower.
        let at = |x: &str, y: &str| svg.contains(&format!("<circle cx=\"{x}\" cy=\"{y}\""));
        assert!(at("64", "347") || at("64", "348"), "{svg}");
        assert!(at("463", "104") || at("464", "104"), "{svg}");
    }

    #[test]
    fn values_off_an_axis_are_drawn_near_it() {
        let axis = Axis::up_to(0.0, 1.0, 5);
        let at = |value: f64| axis.map(&value, (64, 464));
        assert_eq!([at(0.0), at(0.5), at(1.0)], [64, 264, 464]);
        assert_eq!([at(-1e308), at(1e308)], [64 - 400, 464 + 400]);
        assert_eq!([at(f64::NEG_INFINITY), at(f64::INFINITY)], [-336, 864]);
        assert_eq!(at(f64::NAN), 64);
    }

    #[test]
    fn long_names_get_a_legend_of_one_column() {
        let height = |svg: String| -> u32 {
            let text = svg.split("height=\"").nth(1).unwrap();
            text.split('"').next().unwrap().parse().unwrap()
        };
        let long = "wanda, variant, 12 of 35 matrices";
        assert_eq!(height(chart(["one", long])), height(chart(["one", "two"])) + LEGEND_ROW);
    }
}
