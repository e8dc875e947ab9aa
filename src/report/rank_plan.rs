//! The table of `prune plan --ranks`.

use serde::Serialize;

use super::format::{Table, duration};
use crate::bytes::ByteSize;

/// A run on a number of ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankRow {
    /// The number of ranks.
    pub ranks: usize,
    /// The time of the run.
    pub seconds: f64,
    /// The time of one rank over the time of all ranks added up.
    pub efficiency: f64,
    /// Bytes that a rank sends to all others.
    pub bytes_sent: u64,
    /// The memory of a rank.
    pub peak: ByteSize,
}

/// The table, in lines of `columns` or in Markdown; ends in a newline.
pub fn table(rows: &[RankRow], columns: Option<usize>) -> String {
    let records = rows.iter().map(|row| {
        [
            ("ranks", row.ranks.to_string()),
            ("time", duration(row.seconds)),
            ("efficiency", format!("{:.0} %", 100.0 * row.efficiency)),
            ("sent per rank", ByteSize(row.bytes_sent).to_string()),
            ("memory per rank", row.peak.to_string()),
        ]
    });
    Table::of(records).shown(columns)
}
