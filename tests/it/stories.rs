//! The demo's text and the generator in `examples/train_demo` that made it.

use std::collections::BTreeSet;
use std::io::Read;

use flate2::read::GzDecoder;

use generator::Part;

#[path = "../../examples/train_demo/stories/mod.rs"]
mod generator;

#[test]
fn the_generator_makes_the_texts_that_the_program_contains() {
    for (part, packed) in [
        (Part::Calibration, &include_bytes!("../../src/data/assets/calibration.txt.gz")[..]),
        (Part::Test, include_bytes!("../../src/data/assets/test.txt.gz")),
    ] {
        let mut text = String::new();
        GzDecoder::new(packed).read_to_string(&mut text).unwrap();
        assert!(text == part.text(), "{part:?}");
    }
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
