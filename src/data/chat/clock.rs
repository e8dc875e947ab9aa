//! The date that templates print through `strftime_now`: today in UTC, or the moment of `SOURCE_DATE_EPOCH`.
//!
//! A text with a date differs from day to day, and so do its token ids. The variable, known from reproducible builds, fixes the date.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use minijinja::{Error, ErrorKind};

/// The variable that fixes the date, in seconds since 1970.
const VARIABLE: &str = "SOURCE_DATE_EPOCH";

/// Seconds since 1970.
pub(super) fn now() -> i64 {
    let fixed = std::env::var(VARIABLE).ok().and_then(|text| text.trim().parse().ok());
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map(|time| time.as_secs() as i64);
    fixed.unwrap_or_else(|| clock().unwrap_or_default())
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
