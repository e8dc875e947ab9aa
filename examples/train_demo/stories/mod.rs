//! The generator of the demo's stories. It computes with integers only, so every machine makes the same text.
//!
//! Each story is one line. The three parts have separate random streams: the model of `prune demo` is trained on the first;
//! the program contains the other two (`src/data/assets`), for `--dataset demo` and `--eval-dataset demo`. A test compares the
//! assets with this generator.

mod plots;
mod random;
mod words;

use random::StoryRandom;

/// The parts of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The training text of the embedded model.
    Train,
    /// The text of `--dataset demo`.
    Calibration,
    /// The text of `--eval-dataset demo`.
    Test,
}

impl Part {
    /// Number of stories.
    pub(crate) fn stories(self) -> usize {
        match self {
            Self::Train => 16_000,
            Self::Calibration => 1_200,
            Self::Test => 250,
        }
    }

    /// Seed of the random stream.
    fn seed(self) -> u64 {
        match self {
            Self::Train => 1,
            Self::Calibration => 2,
            Self::Test => 3,
        }
    }

    /// The whole text. Every story ends with a newline.
    pub(crate) fn text(self) -> String {
        let mut random = StoryRandom::new(self.seed());
        let mut text = String::new();
        for _ in 0..self.stories() {
            text += &plots::tell(&mut random);
            text.push('\n');
        }
        text
    }
}
