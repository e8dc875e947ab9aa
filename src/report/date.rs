//! Moments as people write them, in UTC.

/// `2025-12-28T00:15:30`, UTC. Days are turned into a date by Howard Hinnant's `civil_from_days`
/// (<https://howardhinnant.github.io/date_algorithms.html>): years begin in March, so that the leap day comes last.
pub(super) fn timestamp(unix_seconds: u64) -> String {
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Days since 1 March of the year 0; an era has 400 years.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}",
        seconds / 3600,
        seconds % 3600 / 60,
        seconds % 60
    )
}

/// `2025-12-28 00:15 UTC`.
pub(super) fn minute(unix_seconds: u64) -> String {
    let timestamp = timestamp(unix_seconds);
    let (date, time) = timestamp.split_once('T').unwrap_or((&timestamp, ""));
    let minute = time.rsplit_once(':').map_or(time, |(minute, _)| minute);
    format!("{date} {minute} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_dates() {
        // date -u -d @951782400 and so on.
        assert_eq!(timestamp(0), "1970-01-01T00:00:00");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00");
        assert_eq!(timestamp(1_766_880_930), "2025-12-28T00:15:30");
        assert_eq!(timestamp(4_107_542_399), "2100-02-28T23:59:59");
        assert_eq!(timestamp(4_107_542_400), "2100-03-01T00:00:00");
    }

    #[test]
    fn minutes_leave_the_seconds_out() {
        // date -u -d @1767225599 and so on.
        assert_eq!(minute(0), "1970-01-01 00:00 UTC");
        assert_eq!(minute(1_767_225_599), "2025-12-31 23:59 UTC");
        assert_eq!(minute(1_772_368_440), "2026-03-01 12:34 UTC");
    }
}
