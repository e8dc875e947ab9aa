//! The memory of a long line, and the longest line that a memory budget allows.
//!
//! A line is whole in memory while it becomes tokens, so a file of one line would decide the memory of a run. L = bytes of the line,
//! P = bytes of its longest part without a place to cut:
//!
//! ```text
//! line  = REST + tokenizer + PER_BYTE · L
//! piece = REST + tokenizer + PER_UNCUT · P
//! ```
//!
//! A byte of a line takes up to 2 bytes in the buffer that grows with the line, 1 byte in its text, 4 to 8 bytes as a token id (a token
//! has at least 1 byte, and a growing list is half empty), and 1 byte in the flags of a training. Measured with the tokenizer of
//! stories260k: 5 bytes per byte for a line of 40.5 MiB of words (204.8 MiB in all), and 138 to 141 for 1, 2 and 3 MiB of a repeated
//! letter.

use std::path::Path;

use super::footprint::{self, TokenizerSize};
use crate::bytes::ByteSize;
use crate::failure::Failure;

/// The longest line that is read. No document is longer, but a file without line ends may be.
pub(super) const LONGEST_LINE: u64 = 64 << 20;
/// Bytes of memory per byte of a line.
const PER_BYTE: u64 = 10;
/// Bytes of memory per byte of a text that is encoded in one call.
const PER_UNCUT: u64 = 140;
/// A part that the plan of every text covers.
const PLANNED_UNCUT: u64 = 64 << 10;
/// A line that the plan of every text covers.
const PLANNED: u64 = 1 << 20;
/// The program, and the index of a file of lines.
const REST: ByteSize = ByteSize(20 << 20);

/// The bound of a line's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineMemory {
    rest: ByteSize,
    budget: Option<ByteSize>,
    per_byte: u64,
}

impl LineMemory {
    /// No bound but the largest line that is read at all.
    pub const UNBOUNDED: Self = Self { rest: ByteSize::ZERO, budget: None, per_byte: PER_BYTE };

    /// Lines that become tokens within `budget`.
    pub fn within(budget: ByteSize, tokenizer: TokenizerSize, threads: usize) -> Self {
        let tokenizer = footprint::kept(tokenizer) + footprint::retained(tokenizer, threads);
        Self { rest: REST + tokenizer, budget: Some(budget), per_byte: PER_BYTE }
    }

    /// The bound for a tokenizer whose texts cannot be cut.
    #[must_use]
    pub fn in_one_call(self) -> Self {
        Self { per_byte: PER_UNCUT, ..self }
    }

    /// The longest part of a text without a place to cut, in bytes; at most `most`.
    pub fn longest_uncut(self, most: usize) -> usize {
        let Some(budget) = self.budget else {
            return most;
        };
        let room = budget.0.saturating_sub(self.rest.0) / PER_UNCUT;
        most.min(room.max(PLANNED_UNCUT) as usize)
    }

    /// The longest line in bytes.
    pub(super) fn longest(self) -> u64 {
        let Some(budget) = self.budget else {
            return LONGEST_LINE;
        };
        let room = budget.0.saturating_sub(self.rest.0) / self.per_byte;
        room.clamp(PLANNED, LONGEST_LINE)
    }

    /// Checks the longest line of a file.
    pub(super) fn check(self, path: &Path, bytes: u64) -> Result<(), Failure> {
        if bytes <= self.longest() {
            return Ok(());
        }
        let needed = ByteSize(self.rest.0 + bytes * self.per_byte);
        let longest = ByteSize(self.longest());
        let least = needed.0.div_ceil(1 << 20);
        Err(Failure::new(format!(
            "a line of `{}` has {}, too long for the memory budget",
            path.display(),
            ByteSize(bytes)
        ))
        .detail(format!(
            "it becomes tokens as a whole, which takes up to {needed}; the budget allows lines of {longest}"
        ))
        .hint(format!(
            "use --max-memory cpu={least}MiB, or divide the line into several documents"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_bounds_a_line_and_the_named_one_is_enough() {
        let tokenizer = TokenizerSize {
            json: ByteSize(1 << 20),
            entries: 10_000,
            has_pairs: true,
            has_pattern: false,
        };
        let path = Path::new("long.jsonl");
        let within = |mib: u64| LineMemory::within(ByteSize(mib << 20), tokenizer, 2);
        assert_eq!(LineMemory::UNBOUNDED.longest(), LONGEST_LINE);
        // Lines of a MiB are part of every plan; no budget allows more than is read at all.
        assert_eq!(within(1).longest(), PLANNED);
        assert_eq!(within(1 << 20).longest(), LONGEST_LINE);
        let long = 42 << 20;
        let hint = within(60).check(path, long).unwrap_err().hint.unwrap();
        let named = hint.split("cpu=").nth(1).unwrap().split("MiB").next();
        let named: u64 = named.unwrap().parse().unwrap();
        assert_eq!(within(named).check(path, long), Ok(()));
        assert!(within(named - 1).check(path, long).is_err());
        // A text that cannot be cut takes more.
        assert_eq!(LineMemory::UNBOUNDED.longest_uncut(99), 99);
        assert!(within(60).longest_uncut(usize::MAX) < 1 << 19);
        assert!(within(600).in_one_call().longest() < within(600).longest());
    }
}
