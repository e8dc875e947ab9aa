//! Charts: lines over two axes, with markers, dashed levels and a legend; and horizontal bars with names and numbers.

use super::scale::{Axis, label};
use super::sheet::{GRID, HEADER, INK, Letters, MUTED, SERIES, Sheet, WIDTH, letters};

/// Height of the part between the axes.
const PLOT: i32 = 244;
const LEGEND_ROW: i32 = 22;
/// Room for the numbers of the vertical axis: eight characters.
const Y_NUMBERS: i32 = 64;
/// Room for the numbers of the horizontal axis, and for its name.
const X_TEXTS: i32 = 52;
/// Legend entries of at most this many characters stand in two columns.
const SHORT: usize = 26;
/// Characters of a legend's row in one column.
const LONG: usize = 54;

/// Height of a bar with the space around it.
const ROW: i32 = 26;
/// Room for names before the bars.
const NAMES: i32 = 132;
/// Room for numbers after the longest bar: `59 min 59 s · 100 %`.
const NUMBERS: i32 = 152;

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
    /// The series; levels are the last.
    pub(super) series: Vec<ChartSeries>,
}

pub(super) struct ChartSeries {
    /// Its name in the legend.
    pub(super) label: String,
    pub(super) form: SeriesForm,
    /// Its points, in the order of the line.
    pub(super) points: Vec<(f64, f64)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SeriesForm {
    Line,
    /// A line with a marker at every point.
    Marked,
    /// A dashed horizontal line over the whole width, at the height of its point.
    Level,
}

impl Chart<'_> {
    pub(super) fn draw(&self) -> String {
        let is_short = |series: &ChartSeries| series.label.chars().count() <= SHORT;
        let columns = if self.series.iter().all(is_short) { 2 } else { 1 };
        let entries: Vec<Vec<String>> =
            self.series.iter().map(|series| wrapped(&series.label)).collect();
        // Entries that stand in two columns have one row each.
        let rows = match columns {
            1 => entries.iter().map(Vec::len).sum(),
            _ => entries.len().div_ceil(columns),
        };
        let top = HEADER + LEGEND_ROW * rows as i32 + 8;
        let (left, right, bottom) = (Y_NUMBERS, WIDTH - 16, top + PLOT);
        let across = |value: f64| self.x.place(value, [left, right]);
        let up = |value: f64| self.y.place(value, [bottom, top]);
        let mut sheet = Sheet::new(self.title, self.y_name);
        for &tick in &self.x.ticks {
            let x = across(tick);
            sheet.line(GRID, "", &[[x, top], [x, bottom]]);
            sheet.line(MUTED, "", &[[x, bottom], [x, bottom + 5]]);
            sheet.text(&label(tick), [x, bottom + 14], letters("middle"));
        }
        for &tick in &self.y.ticks {
            let y = up(tick);
            sheet.line(GRID, "", &[[left, y], [right, y]]);
            sheet.line(MUTED, "", &[[left - 5, y], [left, y]]);
            sheet.text(&label(tick), [left - 8, y], letters("end"));
        }
        sheet.line(MUTED, "", &[[left, top], [left, bottom], [right, bottom]]);
        let name = Letters { color: MUTED, ..letters("middle") };
        sheet.text(self.x_name, [(left + WIDTH) / 2, bottom + X_TEXTS - 13], name);
        let mut row = 0;
        for (index, (series, entry)) in self.series.iter().zip(&entries).enumerate() {
            let column = index % columns;
            let [x, y] =
                [8 + column as i32 * WIDTH / 2, HEADER + LEGEND_ROW * row + LEGEND_ROW / 2];
            series.trace(&mut sheet, index, &[[x, y], [x + 24, y]], &[[x + 12, y]]);
            for (line, text) in (0..).zip(entry) {
                sheet.text(text, [x + 32, y + LEGEND_ROW * line], letters("start"));
            }
            if column + 1 == columns {
                row += entry.len() as i32;
            }
            let points = series.points.iter();
            let points: Vec<_> = match series.form {
                SeriesForm::Level => {
                    points.flat_map(|point| [left, right].map(|x| [x, up(point.1)])).collect()
                }
                _ => points.map(|&(x, y)| [across(x), up(y)]).collect(),
            };
            series.trace(&mut sheet, index, &points, &points);
        }
        sheet.finish(bottom + X_TEXTS, self.title, self.description)
    }
}

/// A legend's entry in rows of at most [`LONG`] characters, at least one. A longer word is cut.
fn wrapped(label: &str) -> Vec<String> {
    let mut rows: Vec<String> = vec![String::new()];
    let length = |text: &str| text.chars().count();
    for word in label.split_whitespace() {
        let word = cut(word);
        match rows.last_mut() {
            Some(row) if row.is_empty() => *row = word,
            Some(row) if length(row) + 1 + length(&word) <= LONG => *row += &format!(" {word}"),
            _ => rows.push(word),
        }
    }
    rows
}

/// A word that fits a row of the legend.
fn cut(word: &str) -> String {
    match word.chars().count() {
        ..=LONG => word.to_string(),
        _ => word.chars().take(LONG - 1).chain(['…']).collect(),
    }
}

impl ChartSeries {
    pub(super) fn new(
        label: impl Into<String>,
        form: SeriesForm,
        points: impl IntoIterator<Item = (f64, f64)>,
    ) -> Self {
        Self { label: label.into(), form, points: points.into_iter().collect() }
    }

    /// Draws the line through `points` and the markers at `marks`, as the form has them.
    fn trace(&self, sheet: &mut Sheet, index: usize, points: &[[i32; 2]], marks: &[[i32; 2]]) {
        let (color, more) = match self.form {
            SeriesForm::Level => (INK, r#"stroke-width="2" stroke-dasharray="5" "#),
            _ => (SERIES[index % SERIES.len()], r#"stroke-width="2" "#),
        };
        if points.len() > 1 {
            sheet.line(color, more, points);
        }
        for &at in marks.iter().filter(|_| self.form == SeriesForm::Marked) {
            sheet.mark(index, at);
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bar {
    /// The name in front of the bar.
    pub(super) name: String,
    /// Its length, at least 0.
    pub(super) value: f64,
    /// The number written after the bar.
    pub(super) label: String,
}

/// Draws the bars from top to bottom in the colour of a series; the longest fills the width. `None` without bars.
pub(super) fn bars(title: &str, unit: &str, series: usize, bars: &[Bar]) -> Option<String> {
    let longest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let room = f64::from(WIDTH - NAMES - NUMBERS);
    let mut sheet = Sheet::new(title, unit);
    let mut described = Vec::new();
    let mut top = HEADER;
    for bar in bars {
        // The smallest value still gets a line of 1 pixel.
        let length = ((bar.value / longest * room).round() as i32).max(1);
        sheet.text(&bar.name, [NAMES - 8, top + ROW / 2], letters("end"));
        sheet.fill(SERIES[series], [NAMES, top + 4], [length, ROW - 8]);
        sheet.text(&bar.label, [NAMES + length + 6, top + ROW / 2], letters("start"));
        described.push(format!("{}: {}", bar.name, bar.label));
        top += ROW;
    }
    (!bars.is_empty()).then(|| sheet.finish(top + 8, title, &described.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(labels: [&str; 2]) -> String {
        let points = [(0.0, 0.0), (1.0, 2.0)];
        let [one, two] = labels.map(|label| ChartSeries::new(label, SeriesForm::Marked, points));
        let dense = ChartSeries::new("dense", SeriesForm::Level, [(0.0, 1.0)]);
        Chart {
            title: "t",
            y_name: "u",
            x_name: "x",
            description: "d",
            x: Axis::up_to(0.0, 1.0, 5),
            y: Axis::up_to(0.0, 2.0, 5),
            series: vec![one, two, dense],
        }
        .draw()
    }

    #[test]
    fn points_stand_where_their_numbers_say() {
        let svg = chart(["one", "two"]);
        // Two rows of legend: the plot begins at 52 + 44 + 8 and is 244 high.
        let at = |x: &str, y: &str| svg.contains(&format!("<circle cx=\"{x}\" cy=\"{y}\""));
        assert!(at("64", "348") && at("464", "104"), "{svg}");
        assert!(svg.contains("points=\"64,226 464,226\""), "{svg}");
    }

    fn height(svg: String) -> i32 {
        let text = svg.split("height=\"").nth(1).unwrap();
        text.split('"').next().unwrap().parse().unwrap()
    }

    #[test]
    fn an_entry_that_is_longer_than_a_row_goes_on_in_the_next() {
        let long = "wanda 2:4, ratios per layer, 12 of 35 matrices, 128 × 2048, seed 7";
        let svg = chart([long, "two"]);
        // Two rows for the long entry, a row for each of the others: the plot begins at 52 + 88 + 8.
        let text = |x: i32, y: i32, text: &str| {
            let start = format!("<text x=\"{x}\" y=\"{y}\" ");
            svg.lines()
                .any(|line| line.starts_with(&start) && line.ends_with(&format!(">{text}</text>")))
        };
        assert!(text(40, 63, "wanda 2:4, ratios per layer, 12 of 35 matrices, 128 ×"), "{svg}");
        assert!(text(40, 85, "2048, seed 7"), "{svg}");
        assert!(text(40, 107, "two") && text(40, 129, "dense"), "{svg}");
        assert!(svg.contains("points=\"64,270 464,270\""), "{svg}");
        assert_eq!(wrapped(&"x".repeat(60)), [format!("{}…", "x".repeat(53))]);
        assert_eq!(wrapped(""), [""]);
    }

    #[test]
    fn long_names_get_a_legend_of_one_column() {
        let long = "wanda, variant, 12 of 35 matrices";
        assert_eq!(height(chart(["one", long])), height(chart(["one", "two"])) + LEGEND_ROW);
    }

    #[test]
    fn bars_are_as_long_as_their_values_say() {
        let bar = |name: &str, value| Bar { name: name.into(), value, label: format!("{value} s") };
        let svg = bars("t", "s", 0, &[bar("a", 4.0), bar("b", 1.0), bar("c", 0.0)]).unwrap();
        let widths: Vec<&str> = svg
            .lines()
            .filter(|line| line.starts_with("<rect") && line.contains(SERIES[0]))
            .filter_map(|line| line.split("width=\"").nth(1)?.split('"').next())
            .collect();
        // 480 − 132 − 152 pixels for the longest.
        assert_eq!(widths, ["196", "49", "1"], "{svg}");
    }
}
