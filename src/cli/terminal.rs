//! The terminal as the bars see it: four columns narrower than it is.
//!
//! `indicatif` fills the last line up to the terminal's width. The `^C` that a terminal writes when somebody interrupts would go to
//! the next line then, every line would be taken away one too low, and the first bar would stay. So the last columns are kept free.

use std::io;

use console::Term;
use indicatif::{ProgressDrawTarget, TermLike};

/// Columns kept free: `^C` twice.
const FREE: u16 = 4;

/// Drawings per second, at most.
const RATE: u8 = 20;

/// Standard error, narrower.
#[derive(Debug)]
struct Narrow(Term);

/// Where bars are drawn.
pub(super) fn target() -> ProgressDrawTarget {
    ProgressDrawTarget::term_like_with_hz(Box::new(Narrow(Term::buffered_stderr())), RATE)
}

/// Columns that may be drawn in.
pub(super) fn columns() -> u16 {
    TermLike::width(&Narrow(Term::stderr()))
}

impl TermLike for Narrow {
    fn width(&self) -> u16 {
        self.0.size().1.saturating_sub(FREE)
    }

    fn height(&self) -> u16 {
        self.0.size().0
    }

    fn move_cursor_up(&self, lines: usize) -> io::Result<()> {
        self.0.move_cursor_up(lines)
    }

    fn move_cursor_down(&self, lines: usize) -> io::Result<()> {
        self.0.move_cursor_down(lines)
    }

    fn move_cursor_right(&self, columns: usize) -> io::Result<()> {
        self.0.move_cursor_right(columns)
    }

    fn move_cursor_left(&self, columns: usize) -> io::Result<()> {
        self.0.move_cursor_left(columns)
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.0.write_line(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.0.write_str(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.0.clear_line()
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
}
