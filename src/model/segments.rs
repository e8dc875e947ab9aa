//! Sequences that share a sample: their rows follow each other, and each sees only its own rows and the rows of the sequence that it
//! continues.
//!
//! Products, norms and the MLP treat every row alike. Each sequence has positions and attention of its own, so a row has the result that it
//! has in a sample of its own.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The rows of a sequence in a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The rows of the sequence that it continues; empty for a sequence of its own. They precede its own rows.
    pub after: Range<usize>,
    /// Its own rows.
    pub rows: Range<usize>,
}

impl Segment {
    /// A sequence of its own.
    pub fn alone(rows: Range<usize>) -> Self {
        Self { after: rows.start..rows.start, rows }
    }

    /// The position of its first row.
    pub fn position(&self) -> usize {
        self.after.len()
    }

    /// Rows that its last row sees.
    pub fn positions(&self) -> usize {
        self.after.len() + self.rows.len()
    }
}

/// Tokens of a sample with these sequences.
pub fn tokens(segments: &[Segment]) -> usize {
    segments.last().map_or(0, |last| last.rows.end)
}

/// Returns whether the sequences follow each other, from the first of `tokens` rows to the last, and continue earlier rows only.
pub fn are_rows_of(segments: &[Segment], tokens: usize) -> bool {
    let mut next = 0;
    let in_order = segments.iter().all(|of| {
        let is_next = of.rows.start == next && of.rows.end >= next && of.after.end <= next;
        next = of.rows.end;
        is_next
    });
    in_order && next == tokens
}
