//! The date that templates print through `strftime_now`: the beginning of the run in UTC, or the moment of `SOURCE_DATE_EPOCH`.
//!
//! A text with a date differs from day to day, and so do its token ids. A run that continues has the date of its first process, and the
//! variable, known from reproducible builds, fixes the date of any run.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use minijinja::{Error, ErrorKind};

/// The variable that fixes the date, in seconds since 1970.
const VARIABLE: &str = "SOURCE_DATE_EPOCH";

/// The beginning of the run, in seconds since 1970; 0 before a run has begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Lets templates print the date on which a run began, in seconds since 1970.
pub fn begin_run(seconds: u64) {
    BEGUN.store(seconds, Ordering::Relaxed);
}

/// The moment of templates, in seconds since 1970.
pub(super) fn moment() -> i64 {
    let fixed = std::env::var(VARIABLE).ok().and_then(|text| text.trim().parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map(|time| time.as_secs());
    let begun = || match BEGUN.load(Ordering::Relaxed) {
        0 => now().unwrap_or_default() as i64,
        begun => begun as i64,
    };
    fixed.unwrap_or_else(begun)
}

/// A moment in the format of C's `strftime`.
///
/// # Errors
/// Fails for a format that does not exist.
pub(super) fn shown(seconds: i64, format: &str) -> Result<String, Error> {
    let wrong = || {
        let why = format!("strftime_now has no format `{format}`");
        Error::new(ErrorKind::InvalidOperation, why)
    };
    let moment = DateTime::from_timestamp(seconds, 0).ok_or_else(wrong)?;
    let mut text = String::new();
    write!(text, "{}", moment.format(format)).map_err(|_| wrong())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_strftime_writes_them() {
        // datetime.fromtimestamp(1721952000, UTC).strftime(…)
        assert_eq!(shown(1_721_952_000, "%d %b %Y").unwrap(), "26 Jul 2024");
        assert_eq!(shown(1_721_952_000, "%B %-d, %H:%M").unwrap(), "July 26, 00:00");
        assert!(shown(0, "%!").is_err());
    }
}
