//! Training examples of whole files: line ends, packing, and what is refused.

use std::path::Path;

use crate::data::testing::{RecordedEvents, shared};
use crate::data::{ExampleRequest, Examples, Packing, Role, Source, TextCache, Tokenizer};
use crate::failure::Failure;

const REQUEST: ExampleRequest =
    ExampleRequest { seqlen: 8, packing: Packing::Packed, at_least: 1, held_out: 0, at_most: None };

/// The examples of a `.jsonl` file with this content; `None` where the reference's tokenizer is absent.
fn of(content: &str, request: ExampleRequest) -> Option<anyhow::Result<Examples>> {
    let tokenizer = Tokenizer::load(&shared("models/stories260k")?).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("train.jsonl");
    std::fs::write(&file, content).unwrap();
    Some(read(&file, &tokenizer, request))
}

fn read(file: &Path, tokenizer: &Tokenizer, request: ExampleRequest) -> anyhow::Result<Examples> {
    let spec = format!("jsonl:{}", file.display()).parse().unwrap();
    let source = Source::find(&spec, Role::Calibration)?;
    let cache = TextCache::open(file.parent().map(|folder| folder.join("cache")));
    let events = RecordedEvents::default();
    source.examples(tokenizer, request, &cache, &events)
}

/// The tokens of all examples.
fn tokens(examples: &Examples) -> Vec<u32> {
    let all = 0..examples.len();
    all.flat_map(|example| examples.tokens_of(example).to_vec()).collect()
}

const LINES: &str = "{\"text\": \"Once upon a time there was a small cat.\"}\n{\"text\": \"The cat had a red ball, and a friend.\"}\n";

#[test]
fn marks_line_ends_and_blank_lines_change_nothing() {
    let Some(plain) = of(LINES, REQUEST) else {
        return;
    };
    let plain = plain.unwrap();
    assert!(plain.len() > 1);
    let other = format!("\u{feff}{}\r\n\r\n", LINES.replace('\n', "\r\n\r\n"));
    let other = of(&other, REQUEST).unwrap().unwrap();
    assert_eq!(tokens(&other), tokens(&plain));
    assert_eq!(other.total_predicted(), plain.total_predicted());
    // The first token of an example follows none.
    assert_eq!(plain.total_predicted(), plain.len() * 7);
}

#[test]
fn documents_are_packed_into_rows_or_cut_and_padded() {
    let Some(packed) = of(LINES, REQUEST) else {
        return;
    };
    let packed = packed.unwrap();
    let request = ExampleRequest { packing: Packing::PerDocument, ..REQUEST };
    let lines = format!("{LINES}{{\"text\": \"A cat.\"}}\n");
    let apart = of(&lines, request).unwrap().unwrap();
    assert_eq!(apart.len(), 3);
    // The first two documents are longer than a row, and the third is shorter.
    assert_eq!((apart.length_of(0), apart.length_of(1)), (8, 8));
    let last = apart.length_of(2);
    assert!((2..8).contains(&last), "{last}");
    let row = apart.tokens_of(2);
    assert!(row[last..].iter().all(|token| *token == row[last - 1]));
    assert_eq!(apart.predicted(2), last - 1);
    assert_eq!(apart.targets_of(2)[last - 1..], vec![None; 9 - last]);
    // Both begin with the first document.
    assert_eq!(packed.tokens_of(0), apart.tokens_of(0));
}

#[test]
fn bad_lines_have_their_number_and_short_texts_the_numbers() {
    let failure = |content: &str, request| {
        let error = of(content, request)?.unwrap_err();
        Some(error.downcast_ref::<Failure>().expect("a failure").clone())
    };
    let Some(bad) = failure(&format!("{LINES}{{\"text\": \"x\n"), REQUEST) else {
        return;
    };
    assert!(bad.message.contains("line 3"), "{bad:?}");
    let many = ExampleRequest { at_least: 500, ..REQUEST };
    let short = failure(LINES, many).unwrap();
    assert!(short.message.contains("examples of 8 tokens, and 500 are needed"), "{short:?}");
    assert!(short.hint.as_ref().is_some_and(|hint| hint.contains("--dataset")), "{short:?}");
}
