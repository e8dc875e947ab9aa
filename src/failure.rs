//! The one error shape a user meets: what failed, on what, the numbers, and the fix as something to type.
//!
//! Library code returns `anyhow::Result`; where it knows the remedy it returns a [`Failure`], which travels inside the
//! `anyhow::Error` unchanged. `cli` finds it again and prints
//!
//! ```text
//! error: <message>
//!   <detail>
//! hint: <hint>
//! ```
//!
//! What a message quotes may come from a file of anybody's. So no line of a failure holds a character that moves a terminal's cursor
//! or begins a line of its own, and a quotation of megabytes is cut.
//!
//! Files of other people's formats are read by other people's code, which may panic where it should refuse. [`blaming`] runs such a
//! reader and says whose fault that is: the file's.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Characters of a line that are shown; half of them from its end, which says what was expected, or where.
const LONGEST_LINE: usize = 1000;

/// An error with a remedy. Build it with [`Failure::new`], add [`Failure::detail`] lines and a [`Failure::hint`], and
/// return it through `?` or `.into()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What failed, on what: one line, lower case, no final period.
    pub message: String,
    /// The numbers behind it, one line each.
    pub details: Vec<String>,
    /// What to type instead, where we know it.
    pub hint: Option<String>,
    /// True where the command line itself is wrong (exit code 2 instead of 1).
    pub is_usage: bool,
}

impl Failure {
    /// A failure of the run: exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: shown(message.into()),
            details: Vec::new(),
            hint: None,
            is_usage: false,
        }
    }

    /// A mistake on the command line: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self {
            is_usage: true,
            ..Self::new(message)
        }
    }

    /// Adds one line of numbers or places under the message.
    #[must_use]
    pub fn detail(mut self, line: impl Into<String>) -> Self {
        self.details.push(shown(line.into()));
        self
    }

    /// Sets the remedy, as something to type.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(shown(hint.into()));
        self
    }
}

/// A line as it may be printed: without control characters and marks that turn the direction of text, and no longer than a screen.
fn shown(line: String) -> String {
    let is_plain = |c: char| {
        !c.is_control() && !matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let line = if line.chars().all(is_plain) {
        line
    } else {
        line.chars()
            .map(|c| {
                if is_plain(c) {
                    c.to_string()
                } else {
                    c.escape_default().to_string()
                }
            })
            .collect()
    };
    let count = line.chars().count();
    if count <= LONGEST_LINE {
        return line;
    }
    let half = LONGEST_LINE / 2;
    let begin: String = line.chars().take(half).collect();
    let end: String = line.chars().skip(count - half).collect();
    format!("{begin} … {end}")
}

thread_local! {
    /// What a panic on this thread means at the moment.
    static BLAMED: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// Runs `read`, other people's code over a file; a panic in it is `failure`, as it would be had the code refused the file.
///
/// Where panics unwind, in tests, the failure is returned. Where they end the program, its panic hook finds the failure by
/// [`blamed`] and prints it.
///
/// # Errors
/// Fails with `failure` when `read` panics.
pub fn blaming<T>(failure: Failure, read: impl FnOnce() -> T) -> Result<T, Failure> {
    let outer = BLAMED.replace(Some(failure));
    // `read` is left where it broke off: what it was working on is not looked at again.
    let result = catch_unwind(AssertUnwindSafe(read));
    let failure = BLAMED.replace(outer);
    // It was put there above, and only a panic hook that ends the program takes it out.
    result.map_err(|_| failure.unwrap_or_else(|| Failure::new("a file cannot be read")))
}

/// What a panic on this thread means, if it is a file's fault.
pub fn blamed() -> Option<Failure> {
    BLAMED.take()
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        for line in &self.details {
            write!(f, "\n  {line}")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_prints_message_details_and_hint() {
        let failure = Failure::new("cannot read `x`")
            .detail("needs 3 bytes, has 2")
            .hint("copy it again");
        assert_eq!(
            failure.to_string(),
            "cannot read `x`\n  needs 3 bytes, has 2\nhint: copy it again"
        );
    }

    #[test]
    fn what_is_quoted_cannot_move_the_cursor_begin_a_line_or_fill_the_screen() {
        let failure = Failure::new("tensor `\u{1b}]0;x\u{7}\nhint: run me\u{202e}`")
            .detail("é→".repeat(1000));
        assert_eq!(
            failure.message,
            "tensor `\\u{1b}]0;x\\u{7}\\nhint: run me\\u{202e}`"
        );
        let detail = &failure.details[0];
        assert_eq!(detail.chars().count(), LONGEST_LINE + 3);
        assert!(detail.contains(" … "));
    }

    #[test]
    fn a_panic_in_a_reader_is_the_files_fault_and_nobody_elses() {
        assert_eq!(blaming(Failure::new("a"), || 3), Ok(3));
        assert_eq!(blamed(), None);
        let outer = blaming(Failure::new("a"), || {
            let inner = blaming(Failure::new("b"), || -> u8 { std::panic::panic_any(0) });
            assert_eq!(inner, Err(Failure::new("b")));
            std::panic::panic_any(0)
        });
        assert_eq!(outer, Err::<(), _>(Failure::new("a")));
        assert_eq!(blamed(), None);
    }

    #[test]
    fn failure_survives_anyhow() {
        let error = anyhow::Error::from(Failure::usage("no")).context("outer");
        assert!(
            error
                .downcast_ref::<Failure>()
                .is_some_and(|failure| failure.is_usage)
        );
    }
}
