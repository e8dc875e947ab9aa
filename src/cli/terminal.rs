//! The terminal as the bars see it.
//!
//! `indicatif` fills every line with spaces up to the terminal's width and lets the terminal begin the next line. The `^C` that a
//! terminal writes when somebody interrupts then stands on a line below the bars. So the erasing starts a line too low, and the first
//! bar stays. Here a line feed ends each line instead, and nothing follows the last line.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use console::Term;
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
}

/// The target of the bars.
pub(super) fn target() -> ProgressDrawTarget {
    let unfilled = Unfilled { term: Term::buffered_stderr(), at_end: AtomicBool::new(false) };
    ProgressDrawTarget::term_like_with_hz(Box::new(unfilled), RATE)
}

/// Columns there are.
pub(super) fn columns() -> u16 {
    Term::stderr().size().1
}

impl Unfilled {
    /// The cursor goes elsewhere, or the drawing is done.
    fn leave(&self) {
        self.at_end.store(false, Ordering::Relaxed);
    }
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
        self.term.write_str(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.leave();
        self.term.clear_line()
    }

    fn flush(&self) -> io::Result<()> {
        self.leave();
        self.term.flush()
    }
}
