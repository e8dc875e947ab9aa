//! The text of `--dataset demo`: simple stories, told by a generator with integers only, so that every machine has the
//! same text without a file. SHA-256 of each part is pinned by a test; docs/datasets.md repeats them.
//!
//! Each story stands on a line of its own. The three parts are streams of their own: the embedded model of `prune demo`
//! was trained on the first (`examples/train_demo`), calibration reads the second, evaluation the third.

mod plots;
mod random;
mod words;

use random::StoryRandom;

/// Which stories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// What the embedded model was trained on.
    Train,
    /// What `--dataset demo` reads.
    Calibration,
    /// What `--eval-dataset demo` reads.
    Test,
}

impl Part {
    /// How many stories it has.
    pub fn stories(self) -> usize {
        match self {
            Self::Train => 16_000,
            Self::Calibration => 1_200,
            Self::Test => 250,
        }
    }

    /// Its stream of random numbers.
    fn seed(self) -> u64 {
        match self {
            Self::Train => 1,
            Self::Calibration => 2,
            Self::Test => 3,
        }
    }

    /// The whole text, every story ended by a newline.
    pub fn text(self) -> String {
        let mut random = StoryRandom::new(self.seed());
        let mut text = String::new();
        for _ in 0..self.stories() {
            text += &plots::tell(&mut random);
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::data::digest;

    #[test]
    fn every_machine_tells_the_same_stories() {
        let hash = |part: Part| digest::of_bytes(part.text().as_bytes());
        assert_eq!(
            hash(Part::Train),
            "d40f79861edcfeb7fe5dbbbd4bfe6526a982b3bc726f2b3b1e997cbbfe020391"
        );
        assert_eq!(
            hash(Part::Calibration),
            "2c4cd412d6c4150b42cd2b098ef82984427b45e1c3d3d6e0247563504804d2ee"
        );
        assert_eq!(
            hash(Part::Test),
            "67e8746647f19b97e14d54462e62c301d13a87246c85e0c33c6e6d28623cfa6a"
        );
    }

    #[test]
    fn no_story_of_the_test_is_one_the_model_was_trained_on() {
        let train = Part::Train.text();
        let seen: BTreeSet<&str> = train.lines().collect();
        for part in [Part::Calibration, Part::Test] {
            let text = part.text();
            assert_eq!(text.lines().count(), part.stories());
            let known = text.lines().filter(|story| seen.contains(story)).count();
            assert_eq!(known, 0, "{part:?}");
        }
    }

    #[test]
    fn stories_are_sentences() {
        let text = Part::Test.text();
        assert!(text.is_ascii() && !text.contains("  ") && !text.contains(" a a"));
        for story in text.lines() {
            assert!(story.starts_with(|first: char| first.is_ascii_uppercase() || first == '"'));
            assert!(story.ends_with(['.', '!', '"']), "{story}");
            assert!(!story.contains('{'), "{story}");
        }
    }
}
