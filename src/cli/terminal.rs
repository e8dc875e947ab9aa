//! The terminal as the bars see it.
//!
//! `indicatif` fills every line with spaces up to the terminal's width and lets the terminal begin the next line. The `^C` that a
//! terminal writes when somebody interrupts then stands on a line below the bars. So the erasing starts a line too low, and the first
//! bar stays. Here a line feed ends each line instead, and nothing follows the last line.
//!
//! Most terminals break lines anew when they become narrower. The bars then stand on more lines than were drawn, and the lines below
//! the first of each are erased here. `xterm`, `screen` and the console of Linux cut lines off instead.

use std::env;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use console::{Term, measure_text_width};
use indicatif::{ProgressDrawTarget, TermLike};

/// Drawings per second, at most.
const RATE: u8 = 20;

/// Erases from the cursor to the end of its line (ECMA-48, EL).
const ERASE_REST: &str = "\x1b[K";

/// Standard error, whose lines end where their text does.
#[derive(Debug)]
struct Unfilled {
    term: Term,
    /// A line was written and the next line has not begun.
    at_end: AtomicBool,
    drawing: Mutex<Drawing>,
}

/// The lines on the screen.
#[derive(Debug, Default)]
struct Drawing {
    /// Columns of each line.
    widths: Vec<usize>,
    /// Columns of the terminal when the drawing was done; `None` before that.
    done_in: Option<usize>,
}

impl Drawing {
    /// Lines that a terminal of `columns` shows in addition to the lines that were drawn.
    fn more_lines(&self, columns: usize) -> usize {
        let lines = |columns: usize| -> usize {
            self.widths.iter().map(|width| width.div_ceil(columns.max(1)).max(1)).sum()
        };
        let drawn = self.done_in.map_or(0, lines);
        lines(columns).saturating_sub(drawn)
    }
}

/// The target of the bars.
pub(super) fn target() -> ProgressDrawTarget {
    let unfilled = Unfilled {
        term: Term::buffered_stderr(),
        at_end: AtomicBool::new(false),
        drawing: Mutex::default(),
    };
    ProgressDrawTarget::term_like_with_hz(Box::new(unfilled), RATE)
}

/// Columns there are.
pub(super) fn columns() -> u16 {
    Term::stderr().size().1
}

/// Columns of the terminal that shows results.
pub(super) fn columns_of_results() -> usize {
    Term::stdout().size().1.into()
}

impl Unfilled {
    /// The cursor goes elsewhere, or the drawing is done.
    fn leave(&self) {
        self.at_end.store(false, Ordering::Relaxed);
    }

    fn drawing(&self) -> MutexGuard<'_, Drawing> {
        self.drawing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Erases the lines that a narrower terminal has added, where a drawing is about to be replaced.
    fn erase_added(&self) -> io::Result<()> {
        let done = {
            let mut drawing = self.drawing();
            if drawing.done_in.is_none() {
                return Ok(());
            }
            std::mem::take(&mut *drawing)
        };
        if !breaks_lines_anew() {
            return Ok(());
        }
        for _ in 0..done.more_lines(self.width().into()) {
            self.term.clear_line()?;
            self.term.move_cursor_up(1)?;
        }
        Ok(())
    }
}

/// Returns false for terminals that cut lines off when they become narrower.
fn breaks_lines_anew() -> bool {
    let cuts = ["XTERM_VERSION", "STY"].iter().any(|name| env::var_os(name).is_some());
    !cuts && env::var_os("TERM").is_none_or(|term| term != "linux")
}

impl TermLike for Unfilled {
    fn width(&self) -> u16 {
        self.term.size().1
    }

    fn height(&self) -> u16 {
        self.term.size().0
    }

    fn move_cursor_up(&self, lines: usize) -> io::Result<()> {
        self.leave();
        self.erase_added()?;
        self.term.move_cursor_up(lines)
    }

    fn move_cursor_down(&self, lines: usize) -> io::Result<()> {
        self.leave();
        self.term.move_cursor_down(lines)
    }

    fn move_cursor_right(&self, columns: usize) -> io::Result<()> {
        self.leave();
        self.term.move_cursor_right(columns)
    }

    fn move_cursor_left(&self, columns: usize) -> io::Result<()> {
        self.leave();
        self.term.move_cursor_left(columns)
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.leave();
        self.term.write_line(text)
    }

    /// Text as it is; only spaces, or nothing, are what fills up a line. A line that is full already has no rest to erase.
    fn write_str(&self, text: &str) -> io::Result<()> {
        if text.bytes().all(|byte| byte == b' ') {
            self.at_end.store(true, Ordering::Relaxed);
            return match text {
                "" => Ok(()),
                _ => self.term.write_str(ERASE_REST),
            };
        }
        if self.at_end.swap(false, Ordering::Relaxed) && text != "\r" {
            self.term.write_line("")?;
        }
        if text != "\r" {
            self.drawing().widths.push(measure_text_width(text));
        }
        self.term.write_str(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.leave();
        self.term.clear_line()
    }

    fn flush(&self) -> io::Result<()> {
        self.leave();
        self.drawing().done_in = Some(self.width().into());
        self.term.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrower_terminal_shows_a_line_on_several() {
        let drawing = Drawing { widths: vec![78, 60, 3], done_in: Some(80) };
        assert_eq!(
            [80, 78, 60, 40, 30].map(|columns| drawing.more_lines(columns)),
            [0, 0, 1, 2, 3]
        );
    }
}
