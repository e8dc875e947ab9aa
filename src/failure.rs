//! The form of all errors for users: the failure and its object, the numbers, and a fix to type.
//!
//! Library code returns `anyhow::Result`. An error with a known remedy is a [`Failure`] inside the `anyhow::Error`; `cli` finds it
//! there and prints
//!
//! ```text
//! error: <message>
//!   <detail>
//! hint: <hint>
//! ```
//!
//! A message may quote an untrusted file. So no line of a failure holds a character that moves a terminal's cursor or begins a new
//! line, and a long quotation is cut.
//!
//! Some file formats are read by library code that panics where it should return an error. [`blaming`] runs such a reader and turns
//! the panic into a failure that names the file.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Characters of a message or detail that are shown: half from its beginning, half from its end, which states what was expected.
const LONGEST_LINE: usize = 1000;

/// Characters of a hint that are shown. A hint holds a command to type, which is useless without its middle.
const LONGEST_HINT: usize = 1 << 16;

/// An error with a remedy. Build it with [`Failure::new`], add [`Failure::detail`] lines and a [`Failure::hint`], and
/// return it through `?` or `.into()`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The failure and its object: a line in lower case, without a final period.
    pub message: String,
    /// The numbers, a line each.
    pub details: Vec<String>,
    /// A fix to type, if known.
    pub hint: Option<String>,
    /// The command line itself is wrong (exit code 2 instead of 1).
    pub is_usage: bool,
    /// The same command fails again until its input changes, so no message may say that it continues.
    pub is_lasting: bool,
}

impl Failure {
    /// A failure of the run: exit code 1.
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: shown(message.into(), LONGEST_LINE),
            details: Vec::new(),
            hint: None,
            is_usage: false,
            is_lasting: false,
        }
    }

    /// A mistake on the command line: exit code 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { is_usage: true, ..Self::new(message) }
    }

    /// Adds a line of numbers or places under the message.
    #[must_use]
    pub fn detail(mut self, line: impl Into<String>) -> Self {
        self.details.push(shown(line.into(), LONGEST_LINE));
        self
    }

    /// States that the same command fails again until its input changes.
    #[must_use]
    pub fn lasting(self) -> Self {
        Self { is_lasting: true, ..self }
    }

    /// Sets the fix to type.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(shown(hint.into(), LONGEST_HINT));
        self
    }

    /// Sets the fix to type, if there is none yet.
    #[must_use]
    pub fn or_hint(self, hint: impl Into<String>) -> Self {
        match self.hint {
            Some(_) => self,
            None => self.hint(hint),
        }
    }
}

/// Text without characters that a terminal or a page acts on: control characters, marks that turn the direction of text, and
/// code points that XML cannot hold. Each becomes its escape sequence, such as `\u{1b}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| {
        !c.is_control()
            && !matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}')
    };
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(2 * text.len());
    for c in text.chars() {
        if is_plain(c) {
            escaped.push(c);
        } else {
            escaped.extend(c.escape_default());
        }
    }
    Cow::Owned(escaped)
}

/// A printable line of about `longest` characters; a longer line loses its middle.
fn shown(line: String, longest: usize) -> String {
    let line = printable(&line).into_owned();
    let count = line.chars().count();
    if count <= longest {
        return line;
    }
    let half = longest / 2;
    let begin: String = line.chars().take(half).collect();
    let end: String = line.chars().skip(count - half).collect();
    format!("{begin} … {end}")
}

thread_local! {
    /// The failure that a panic on this thread means now.
    static BLAMED: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// Runs `read`, library code over a file, and turns its panic into `failure`.
///
/// In tests, panics unwind and the failure is returned. In the program, a panic ends the process; the panic hook finds the failure
/// through [`blamed`] and prints it.
///
/// # Errors
/// Fails with `failure` when `read` panics.
pub fn blaming<T>(failure: Failure, read: impl FnOnce() -> T) -> Result<T, Failure> {
    let outer = BLAMED.replace(Some(failure));
    // The state that `read` worked on is not used again.
    let result = catch_unwind(AssertUnwindSafe(read));
    let failure = BLAMED.replace(outer);
    // It was stored above, and only a panic hook that ends the program removes it.
    result.map_err(|_| failure.unwrap_or_else(|| Failure::new("a file cannot be read")))
}

/// Takes the failure that a panic on this thread means, if a file causes the panic.
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

/// An error as a person reads it: the failure's own message first, where it happened below, the hint last.
pub fn describe(error: &anyhow::Error) -> String {
    let places: Vec<String> = error.chain().map(ToString::to_string).collect();
    let Some(failure) = error.downcast_ref::<Failure>() else {
        let mut text = format!("error: {}", places[0]);
        for cause in places.iter().skip(1) {
            text += &format!("\n  because: {cause}");
        }
        return text;
    };
    let mut text = format!("error: {}", failure.message);
    for detail in &failure.details {
        text += &format!("\n  {detail}");
    }
    let own = failure.to_string();
    for place in places.iter().filter(|place| **place != own) {
        text += &format!("\n  {place}");
    }
    if let Some(hint) = &failure.hint {
        text += &format!("\nhint: {hint}");
    }
    text
}

/// The nearest candidates that `given` may be a misspelling of. One of `letters` letters may be wrong, from 1 to 3 in all, but no digit: a
/// number decides the meaning of a name.
pub fn meant<'a>(
    given: &str,
    candidates: impl IntoIterator<Item = &'a str>,
    letters: usize,
) -> Vec<&'a str> {
    // The distance of long words costs their product.
    if given.len() > 64 {
        return Vec::new();
    }
    let digits = |text: &str| -> String { text.chars().filter(char::is_ascii_digit).collect() };
    let given = given.to_lowercase();
    let wrong_at_most = (given.trim_start_matches('-').chars().count() / letters).clamp(1, 3);
    let near: Vec<(usize, &str)> = candidates
        .into_iter()
        .filter(|candidate| digits(candidate) == digits(&given))
        .map(|candidate| (strsim::osa_distance(&given, &candidate.to_lowercase()), candidate))
        .filter(|(wrong, _)| *wrong <= wrong_at_most)
        .collect();
    let least = near.iter().map(|(wrong, _)| *wrong).min();
    near.into_iter()
        .filter(|(wrong, _)| Some(*wrong) == least)
        .map(|(_, candidate)| candidate)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_prints_message_details_and_hint() {
        let failure =
            Failure::new("cannot read `x`").detail("needs 3 bytes, has 2").hint("copy it again");
        assert_eq!(
            failure.to_string(),
            "cannot read `x`\n  needs 3 bytes, has 2\nhint: copy it again"
        );
    }

    #[test]
    fn quotations_cannot_move_the_cursor_begin_a_line_or_fill_the_screen() {
        let failure = Failure::new("tensor `\u{1b}]0;x\u{7}\nhint: run me\u{202e}`")
            .detail("é→".repeat(1000));
        assert_eq!(failure.message, "tensor `\\u{1b}]0;x\\u{7}\\nhint: run me\\u{202e}`");
        let detail = &failure.details[0];
        assert_eq!(detail.chars().count(), LONGEST_LINE + 3);
        assert!(detail.contains(" … "));
    }

    #[test]
    fn a_hint_keeps_the_middle_of_a_long_command() {
        let command = format!("run {} --force", "--exclude x ".repeat(300));
        let hint = Failure::new("x").hint(command.clone()).hint;
        assert_eq!(hint, Some(command));
    }

    #[test]
    fn a_panic_in_a_reader_becomes_the_failure_of_its_file() {
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
        assert!(error.downcast_ref::<Failure>().is_some_and(|failure| failure.is_usage));
    }

    #[test]
    fn an_error_reads_message_place_hint() {
        let error = anyhow::Error::from(Failure::new("a is 3").detail("b is 4").hint("say --c"))
            .context("in `config.json`");
        assert_eq!(describe(&error), "error: a is 3\n  b is 4\n  in `config.json`\nhint: say --c");
        assert_eq!(describe(&anyhow::anyhow!("x").context("y")), "error: y\n  because: x");
    }
}
