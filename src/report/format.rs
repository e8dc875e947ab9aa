//! Text as reports show it: tables, escaped for HTML and SVG, names, numbers, durations, and moments in UTC.

use chrono::DateTime;
use minijinja::HtmlEscape;
use serde::Serialize;

use crate::failure::printable;
use crate::run::TextProtocol;
use crate::run::metric::Metric;

/// A table with a header row. The first column holds names.
#[derive(Debug, Serialize)]
pub(super) struct Table {
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    /// A table of records, each with the columns' names.
    pub(super) fn of<const N: usize>(
        records: impl Iterator<Item = [(&'static str, String); N]>,
    ) -> Self {
        let mut table = Self { columns: Vec::new(), rows: Vec::new() };
        for record in records {
            table.columns = record.iter().map(|(column, _)| column.to_string()).collect();
            table.rows.push(record.map(|(_, cell)| cell).to_vec());
        }
        table
    }

    /// The table without these columns where they have no value.
    pub(super) fn without_empty(mut self, columns: &[&str]) -> Self {
        for at in (0..self.columns.len()).rev() {
            let is_empty = self.rows.iter().all(|row| row[at] == DASH);
            if is_empty && columns.contains(&self.columns[at].as_str()) {
                self.columns.remove(at);
                self.rows.iter_mut().for_each(|row| drop(row.remove(at)));
            }
        }
        self
    }

    /// The table as text for a terminal of `columns`, and as Markdown elsewhere.
    pub(super) fn shown(&self, columns: Option<usize>) -> String {
        match columns {
            Some(columns) => self.text(columns).trim_start_matches('\n').to_string(),
            None => self.markdown(),
        }
    }

    /// The table as text in lines of `columns`, with an empty line before each block of columns; ends in a newline.
    pub(super) fn text(&self, columns: usize) -> String {
        let rows: Vec<&Vec<String>> = std::iter::once(&self.columns).chain(&self.rows).collect();
        let width = |column: usize| -> usize {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let mut text = String::new();
        for block in blocks(self.columns.len(), columns, &width) {
            text.push('\n');
            for row in &rows {
                let cells = block.iter().map(|&column| {
                    let (cell, width) = (&row[column], width(column));
                    format!("{cell:<width$}")
                });
                text += cells.collect::<Vec<_>>().join("  ").trim_end();
                text.push('\n');
            }
        }
        text
    }

    /// The table as Markdown, ending in a newline.
    pub(super) fn markdown(&self) -> String {
        let rule = vec!["---".to_string(); self.columns.len()];
        let row = |cells: &[String]| {
            format!(
                "| {} |\n",
                cells.iter().map(|cell| markdown(cell)).collect::<Vec<_>>().join(" | ")
            )
        };
        let head = [row(&self.columns), row(&rule)];
        head.into_iter().chain(self.rows.iter().map(|cells| row(cells))).collect()
    }
}

/// Divides the columns into blocks that fit a line, where they can. Each block begins with the first column.
fn blocks(columns: usize, line: usize, width: &dyn Fn(usize) -> usize) -> Vec<Vec<usize>> {
    let mut blocks = vec![vec![0]];
    let mut used = width(0);
    for column in 1..columns {
        let more = 2 + width(column);
        if used + more > line && used > width(0) {
            blocks.push(vec![0]);
            used = width(0);
        }
        used += more;
        if let Some(block) = blocks.last_mut() {
            block.push(column);
        }
    }
    blocks
}

/// Text for Markdown, also for the cell of a table: on a single line and without markup.
pub(super) fn markdown(text: &str) -> String {
    printable(text).replace('&', "&amp;").replace('<', "&lt;").replace('|', "\\|")
}

/// The cell of a missing value.
const DASH: &str = "–";

/// A value in a table that may lack it.
pub(super) fn or_dash<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| DASH.to_string(), text)
}

/// Six decimals, for shares and errors in tables.
pub(super) fn six_digits(value: f64) -> String {
    format!("{value:.6}")
}

/// Text for HTML, SVG and attribute values: markup is escaped, and a control character is shown as its escape sequence.
pub(super) fn escape(text: &str) -> String {
    HtmlEscape(&printable(text)).to_string()
}

/// Text of several lines as an element of HTML that keeps the lines.
pub(super) fn preformatted(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(escape).collect();
    format!("<pre>{}</pre>", lines.join("\n"))
}

/// A linear's short name: `q` of `model.layers.0.self_attn.q_proj`.
pub(super) fn short_name(name: &str) -> &str {
    let last = name.rsplit('.').next().unwrap_or(name);
    last.strip_suffix("_proj").unwrap_or(last)
}

/// A perplexity with four digits.
pub(super) fn finite(value: f64) -> String {
    if value.is_finite() { format!("{value:.4}") } else { "not finite".to_string() }
}

/// A value of a metric: divergences have six digits, everything else four.
pub(super) fn measured(metric: &Metric, value: f64) -> String {
    match metric {
        Metric::Kl if value.is_finite() => format!("{value:.6}"),
        _ => finite(value),
    }
}

/// A share in percent, with as many digits as it has, at most four.
pub(super) fn percent(ratio: f64) -> String {
    format!("{} %", trimmed(100.0 * ratio))
}

/// `35 ms`, `4.1 s`, `12 min 05 s`, `3 h 07 min`.
pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0 if seconds < 0.1 => format!("{:.0} ms", seconds * 1e3),
        0..100 => format!("{seconds:.1} s"),
        100..6000 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

/// Weights in millions: `1235.8 M`, `0.922 M`. Small models show what a drop has removed.
pub fn millions(weights: u64) -> String {
    match weights as f64 / 1e6 {
        few @ ..10.0 => format!("{few:.3} M"),
        many => format!("{many:.1} M"),
    }
}

/// At most four decimals: `0.6`, `0.5951`.
pub fn trimmed(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// A number of things: `1 model`, `2 models`.
pub fn count(number: usize, of: &str) -> String {
    match number {
        1 => format!("1 {of}"),
        _ => format!("{number} {of}s"),
    }
}

/// The name of a text: the names of its files where it has no name of its own.
pub(super) fn text_name(text: &TextProtocol) -> String {
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_string();
    if !["text", "documents"].contains(&text.dataset.as_str()) {
        return text.dataset.clone();
    }
    let mut paths = text.path.split(", ").filter(|path| !path.is_empty());
    match (paths.next(), paths.count()) {
        (None, _) => text.dataset.clone(),
        (Some(first), 0) => name(first),
        (Some(first), more) => format!("{} and {more} more", name(first)),
    }
}

/// The seed of a text's samples, after a comma; empty for a text that is read from its beginning.
pub(super) fn with_seed(text: &TextProtocol) -> String {
    text.seed.map_or(String::new(), |seed| format!(", seed {seed}"))
}

/// Three significant digits, without an exponent.
pub fn three_digits(number: f64) -> String {
    let digits = match number {
        _ if number >= 100.0 => 0,
        _ if number >= 10.0 => 1,
        _ => 2,
    };
    format!("{number:.digits$}")
}

/// `2025-12-28T00:15:30`, UTC.
pub(super) fn timestamp(unix_seconds: u64) -> String {
    moment(unix_seconds, "%Y-%m-%dT%H:%M:%S")
}

/// `2025-12-28 00:15 UTC`.
pub(super) fn minute(unix_seconds: u64) -> String {
    moment(unix_seconds, "%Y-%m-%d %H:%M UTC")
}

/// A moment in chrono's `format`. Beyond chrono's years, which only damaged records reach, the number of seconds.
fn moment(unix_seconds: u64, format: &str) -> String {
    let seconds = i64::try_from(unix_seconds).ok();
    match seconds.and_then(|seconds| DateTime::from_timestamp(seconds, 0)) {
        Some(moment) => moment.format(format).to_string(),
        None => format!("{unix_seconds} s after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup_or_hold_control_characters() {
        assert_eq!(
            escape("<b a=\"1\" c='2'>&\u{1}\u{9b}\u{202e}\u{ffff}"),
            "&lt;b a=&quot;1&quot; c=&#x27;2&#x27;&gt;&amp;\\u{1}\\u{9b}\\u{202e}\\u{ffff}"
        );
    }

    #[test]
    fn preformatted_text_keeps_its_lines_and_nothing_else_that_acts_on_a_page() {
        assert_eq!(
            preformatted("a:\n  - \"<b>\"\r\n\u{1b}\n"),
            "<pre>a:\n  - &quot;&lt;b&gt;&quot;\n\\u{1b}</pre>"
        );
    }

    #[test]
    fn durations_are_in_the_unit_a_person_would_choose() {
        let texts = [0.0, 0.0354, 0.3, 99.0, 725.0, 11_220.0].map(duration);
        assert_eq!(texts, ["0 ms", "35 ms", "0.3 s", "99.0 s", "12 min 05 s", "3 h 07 min"]);
    }

    #[test]
    fn a_percentage_has_no_more_digits_than_it_needs() {
        let shown = [0.5, 1.0 / 3.0, 0.0, 1.0].map(percent);
        assert_eq!(shown, ["50 %", "33.3333 %", "0 %", "100 %"]);
    }

    #[test]
    fn small_models_have_more_digits() {
        let texts = [921_600, 293_120, 1_235_800_000].map(millions);
        assert_eq!(texts, ["0.922 M", "0.293 M", "1235.8 M"]);
        assert_eq!([count(1, "model"), count(2, "model")], ["1 model", "2 models"]);
    }

    #[test]
    fn a_text_without_a_name_is_called_by_its_file() {
        let name = |dataset: &str, path: &str| {
            let (dataset, path) = (dataset.to_string(), path.to_string());
            text_name(&TextProtocol { dataset, path, ..TextProtocol::default() })
        };
        assert_eq!(name("text", "data/mine.txt"), "mine.txt");
        assert_eq!(name("documents", "a/x.parquet, a/y.parquet"), "x.parquet and 1 more");
        assert_eq!(name("wikitext2", "a/test.parquet"), "wikitext2");
        assert_eq!(name("text", ""), "text");
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [1234.5, 100.0, 99.94, 9.994, 0.014].map(three_digits),
            ["1234", "100", "99.9", "9.99", "0.01"]
        );
    }

    #[test]
    fn moments_are_dates_in_utc() {
        // date -u -d @951782400 and so on.
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00");
        assert_eq!(timestamp(1_766_880_930), "2025-12-28T00:15:30");
        assert_eq!(minute(1_767_225_599), "2025-12-31 23:59 UTC");
        assert_eq!(minute(u64::MAX), "18446744073709551615 s after 1970");
    }
}
