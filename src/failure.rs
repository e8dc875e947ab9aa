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

use std::fmt;

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
            message: message.into(),
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
        self.details.push(line.into());
        self
    }

    /// Sets the remedy, as something to type.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
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
    fn failure_survives_anyhow() {
        let error = anyhow::Error::from(Failure::usage("no")).context("outer");
        assert!(
            error
                .downcast_ref::<Failure>()
                .is_some_and(|failure| failure.is_usage)
        );
    }
}
