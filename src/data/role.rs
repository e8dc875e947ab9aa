//! The purpose of a text.

/// The purpose of a text. It decides the split, the way rows are joined, and the flag that messages name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Text that statistics are computed from: the train split, `--dataset`.
    Calibration,
    /// Text that perplexity is measured on: the test split, `--eval-dataset`.
    Evaluation,
}

impl Role {
    /// The flag that names the text.
    pub fn flag(self) -> &'static str {
        match self {
            Self::Calibration => "--dataset",
            Self::Evaluation => "--eval-dataset",
        }
    }
}
