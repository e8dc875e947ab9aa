//! The bars of a terminal: one for the current phase and one for the run.
//!
//! A line is laid out when it is drawn, for the columns that the terminal has then. A line that is too long first loses columns of its
//! bar, then the end of its title, and at last the end of its numbers. So it never wraps, and the next drawing finds its beginning.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use console::{measure_text_width, truncate_str};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use super::plain_text::visible;
use super::progress::Progress;
use super::terminal;

/// Columns of a bar: no fewer, and no more.
const BAR: [usize; 2] = [5, 40];
/// Room for a common title.
const TITLE: usize = 28;
/// Columns of a title before its numbers are cut.
const LEAST_TITLE: usize = 12;
/// Room for common numbers, like "166/166 | 11.3 windows/s | ETA 12m05s".
const NUMBERS: usize = 38;
/// Brackets of a bar, and the spaces around them.
const BRACKETS: usize = 4;
/// Columns that stay free, for the `^C` that a terminal writes.
const FREE: usize = 2;

/// A line of the screen.
#[derive(Debug, Clone, Default)]
struct BarLine {
    title: String,
    numbers: String,
    /// The finished share in [0, 1]; `None` where it is unknown.
    share: Option<f64>,
}

/// Columns that titles and numbers have had. They only grow, so that bars stay in their place.
#[derive(Debug, Clone, Copy, Default)]
struct SeenWidths {
    title: usize,
    numbers: usize,
}

/// The lines that are shown.
#[derive(Debug, Default)]
struct BarLines {
    phase: BarLine,
    run: BarLine,
    seen: SeenWidths,
}

impl BarLines {
    fn see(&mut self) {
        let width = |of: fn(&BarLine) -> &str| {
            measure_text_width(of(&self.phase)).max(measure_text_width(of(&self.run)))
        };
        let (title, numbers) = (width(|line| &line.title), width(|line| &line.numbers));
        self.seen.title = self.seen.title.max(title);
        self.seen.numbers = self.seen.numbers.max(numbers);
    }
}

/// The bars of a terminal. Both are lines of a single `indicatif` bar, so that a drawing never has lines for different widths.
#[derive(Debug)]
pub(super) struct Bars {
    lines: Arc<Mutex<BarLines>>,
    shown: Option<ProgressBar>,
}

impl Bars {
    /// None yet.
    pub(super) fn new() -> Self {
        Self { lines: Arc::default(), shown: None }
    }

    /// Bars for what `progress` says.
    pub(super) fn start(&mut self, progress: &Progress) {
        let template = if progress.run().is_some() { "{phase}\n{run}" } else { "{phase}" };
        self.set_lines(progress);
        self.show(template);
    }

    /// Moves them.
    pub(super) fn update(&self, progress: &Progress) {
        self.set_lines(progress);
        if let Some(bar) = &self.shown {
            // A call draws unless a drawing is just over.
            bar.tick();
        }
    }

    fn set_lines(&self, progress: &Progress) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let line = |title: &str, numbers: &str, share| BarLine {
            title: visible(title).into_owned(),
            numbers: visible(numbers).into_owned(),
            share,
        };
        lines.phase = line(progress.phase(), &progress.numbers(), progress.share());
        lines.run = match progress.run() {
            Some((share, _)) => line("run", &progress.run_text().unwrap_or_default(), Some(share)),
            None => BarLine::default(),
        };
        lines.see();
    }

    /// Draws the lines of a template.
    fn show(&mut self, template: &str) {
        let new = || ProgressBar::with_draw_target(Some(1), terminal::target());
        let bar = self.shown.get_or_insert_with(new);
        if let Ok(style) = ProgressStyle::with_template(template) {
            let style = style.with_key("phase", drawing(&self.lines, |lines| &lines.phase));
            bar.set_style(style.with_key("run", drawing(&self.lines, |lines| &lines.run)));
        }
        bar.tick();
    }

    /// Takes the phase's bar away; the run's stays during the sweep.
    pub(super) fn end_phase(&mut self, progress: &Progress) {
        match progress.run() {
            Some(_) => self.show("{run}"),
            None => self.clear(),
        }
    }

    /// Takes all of them away.
    pub(super) fn clear(&mut self) {
        if let Some(bar) = self.shown.take() {
            bar.finish_and_clear();
        }
    }

    /// Runs `print` with the bars out of the way.
    pub(super) fn suspend(&self, print: impl FnOnce()) {
        match &self.shown {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

/// Writes the line that `of` chooses, for the columns that the terminal has now.
fn drawing(
    lines: &Arc<Mutex<BarLines>>,
    of: fn(&BarLines) -> &BarLine,
) -> impl Fn(&ProgressState, &mut dyn std::fmt::Write) + Clone + Send + Sync + 'static {
    let lines = Arc::clone(lines);
    move |_, out| {
        let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
        let text = laid_out(of(&lines), lines.seen, terminal::columns().into());
        // Writing to a String cannot fail.
        let _ = out.write_str(&text);
    }
}

/// A line for a terminal of `columns`, at most that long.
fn laid_out(line: &BarLine, seen: SeenWidths, columns: usize) -> String {
    let all = columns.saturating_sub(FREE);
    if all == 0 {
        return String::new();
    }
    let title = seen.title.max(TITLE.min(all / 3));
    let numbers = seen.numbers.max(NUMBERS.min(all / 2));
    let bar = all.saturating_sub(title + BRACKETS + numbers).min(BAR[1]);
    let mut text = String::new();
    if bar >= BAR[0] {
        let name = truncate_str(&line.title, title, "…");
        let fill = " ".repeat(title.saturating_sub(measure_text_width(&name)));
        let inner = drawn(line.share, bar);
        let _ = write!(text, "{name}{fill} {inner} {}", line.numbers);
    } else {
        let title = title.min(all.saturating_sub(1 + seen.numbers)).max(LEAST_TITLE);
        let name = truncate_str(&line.title, title, "…");
        let fill = " ".repeat(title.saturating_sub(measure_text_width(&name)));
        let _ = write!(text, "{name}{fill} {}", line.numbers);
    }
    truncate_str(text.trim_end(), all, "…").into_owned()
}

/// `[===>    ]` of `bar` columns between the brackets; empty space where the share is unknown.
fn drawn(share: Option<f64>, bar: usize) -> String {
    let Some(share) = share else {
        return " ".repeat(bar + 2);
    };
    let filled = ((share.clamp(0.0, 1.0) * bar as f64) as usize).min(bar);
    let head = if filled < bar { ">" } else { "" };
    format!("[{:<bar$}]", "=".repeat(filled) + head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(title: &str, numbers: &str, share: Option<f64>) -> BarLine {
        BarLine { title: title.to_string(), numbers: numbers.to_string(), share }
    }

    #[test]
    fn no_line_is_longer_than_the_terminal_whatever_it_says() {
        let titles =
            ["run", "train full", "6/8: layer 4 of 0-4: evaluate pruned", "Größe 世界 世界"];
        let numbers = [
            "",
            "2/20 | loss 3.3844 | 1955 tokens/s | ETA 9s",
            "1000000/1000000 | 0.01 windows/s | ETA 4d03h",
        ];
        for columns in 0..200 {
            let mut lines = BarLines::default();
            for (title, numbers) in titles.iter().flat_map(|title| numbers.map(|of| (title, of))) {
                for share in [None, Some(0.0), Some(0.4), Some(1.0)] {
                    lines.phase = line(title, numbers, share);
                    lines.see();
                    let text = laid_out(&lines.phase, lines.seen, columns);
                    let width = measure_text_width(&text);
                    assert!(width <= columns.saturating_sub(FREE), "{columns}: {width}: {text}");
                }
            }
        }
    }

    #[test]
    fn the_bar_gives_way_first_then_the_title() {
        let mut lines = BarLines {
            phase: line(
                "layer 4 of 0-4: evaluate pruned",
                "7/10 | 205 windows/s | ETA 0s",
                Some(0.7),
            ),
            run: line("run", "37 %, 15s left", Some(0.37)),
            ..BarLines::default()
        };
        lines.see();
        let at =
            |columns| [&lines.phase, &lines.run].map(|line| laid_out(line, lines.seen, columns));
        assert_eq!(
            at(100),
            [
                "layer 4 of 0-4: evaluate pruned [=================>       ] 7/10 | 205 windows/s | ETA 0s",
                "run                             [=========>               ] 37 %, 15s left",
            ]
        );
        assert_eq!(
            at(80),
            [
                "layer 4 of 0-4: evaluate pruned [===> ] 7/10 | 205 windows/s | ETA 0s",
                "run                             [=>   ] 37 %, 15s left",
            ]
        );
        assert_eq!(
            at(60),
            [
                "layer 4 of 0-4: evaluate pr… 7/10 | 205 windows/s | ETA 0s",
                "run                          37 %, 15s left",
            ]
        );
        assert_eq!(at(40)[0], "layer 4 of … 7/10 | 205 windows/s | E…");
    }
}
