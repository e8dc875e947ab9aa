//! Tests of the room as a whole: samples and windows against the reference's, and what several tests need.

mod datasets;
mod documents;
mod loss_tokens;
mod pieces;
mod special_tokens;
mod streams;
mod training;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::Result;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::testing::shared;
use super::*;
use crate::bytes::ByteSize;
use crate::run::{Events, Silent};

/// A tokenizer with an id for each letter of a small alphabet, "a" = 0: counts can be done by hand.
fn letters(folder: &Path) -> Tokenizer {
    let vocab: serde_json::Map<String, Value> =
        ('a'..='z').chain([' ']).enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    let model = json!({ "type": "BPE", "vocab": vocab, "merges": [], "dropout": null, "unk_token": null, "fuse_unk": false, "byte_fallback": false });
    let file = json!({ "version": "1.0", "added_tokens": [], "model": model });
    fs::write(folder.join("tokenizer.json"), file.to_string()).expect("write");
    Tokenizer::load(folder).expect("load")
}

fn spec(text: &str) -> DatasetSpec {
    text.parse().expect("a dataset")
}

// The room's functions with files found first.

fn check(spec: &DatasetSpec, role: Role) -> Result<()> {
    Source::find(spec, role)?.check()
}

fn calibration(
    spec: &DatasetSpec,
    tokenizer: &Tokenizer,
    nsamples: usize,
    seqlen: usize,
    seed: u64,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<Calibration> {
    let source = Source::find(spec, Role::Calibration)?;
    let draw = Draw { nsamples, seqlen, seed };
    super::calibration(&source, tokenizer, draw, cache, events)
}

fn evaluation(
    spec: &DatasetSpec,
    tokenizer: &Tokenizer,
    seqlen: usize,
    max_windows: Option<usize>,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<Evaluation> {
    let source = Source::find(spec, Role::Evaluation)?;
    source.evaluation(tokenizer, seqlen, max_windows, cache, events)
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("must fail").to_string()
}

fn gzip(path: &Path, members: &[&str]) {
    let mut file = File::create(path).expect("create");
    for member in members {
        let mut encoder = GzEncoder::new(&mut file, Compression::fast());
        encoder.write_all(member.as_bytes()).expect("write");
        encoder.finish().expect("finish");
    }
}

#[test]
fn texts_that_are_too_short_say_how_long_they_are() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let path = folder.path().join("a.txt");
    fs::write(&path, "abcdefghij").expect("write");
    let dataset = spec(&path.display().to_string());
    let none = TextCache::disabled();
    let error = message(calibration(&dataset, &tokenizer, 1, 10, 0, &none, &Silent));
    assert!(error.contains("has 10 tokens") && error.contains("name a longer text"), "{error}");
    // A text needs seqlen + 1 tokens; with exactly as many, n = 1, and 0 is the only start.
    assert_eq!(
        calibration(&dataset, &tokenizer, 2, 9, 0, &none, &Silent)
            .expect("calibration")
            .protocol
            .starts,
        [0, 0]
    );
    let error = message(evaluation(&dataset, &tokenizer, 11, None, &none, &Silent));
    assert!(error.contains("has 10 tokens") && error.contains("name a longer text"), "{error}");
    let windows = evaluation(&dataset, &tokenizer, 3, None, &none, &Silent).expect("evaluation");
    assert_eq!((windows.windows, &windows.tokens[..]), (3, &[0, 1, 2, 3, 4, 5, 6, 7, 8][..]));
    assert_eq!(
        evaluation(&dataset, &tokenizer, 3, Some(2), &none, &Silent)
            .expect("evaluation")
            .tokens
            .len(),
        6
    );
    for (nsamples, seqlen) in [(0, 4), (4, 0), (usize::MAX, 2)] {
        assert!(calibration(&dataset, &tokenizer, nsamples, seqlen, 0, &none, &Silent).is_err());
    }
    assert!(evaluation(&dataset, &tokenizer, 0, None, &none, &Silent).is_err());
    assert!(evaluation(&dataset, &tokenizer, 3, Some(0), &none, &Silent).is_err());
    fs::write(&path, b"ab\xffc").expect("write");
    assert!(message(check(&dataset, Role::Calibration)).contains("offset 2"));
    fs::write(&path, b"").expect("write");
    assert!(message(check(&dataset, Role::Calibration)).contains("is empty"));
}

/// Every golden run of the reference that used this arithmetic-free part: its starts and the hash of its calibration ids.
#[test]
fn calibration_reproduces_the_samples_of_the_reference() {
    for folder in ["stories260k", "wikitext-llama-8m", "stories260k-on-stories"] {
        let Some(goldens) = shared(&format!("goldens/{folder}")) else {
            return;
        };
        let cache_folder = tempfile::tempdir().expect("a temporary folder");
        let cache = TextCache::open(Some(cache_folder.path().to_path_buf()));
        let mut compared = 0;
        for entry in fs::read_dir(goldens).expect("list") {
            let path = entry.expect("entry").path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let golden: Value =
                serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
            let settings = &golden["settings"];
            let text = |key: &str| settings[key].as_str().expect("a string").to_owned();
            let number = |key: &str| settings[key].as_u64().expect("a number");
            // Magnitude runs draw no samples.
            let Some(sha256) = golden["calibration_tokens_sha256_int32le"].as_str() else {
                continue;
            };
            let train = text("train");
            let kind = if train.starts_with("wiki") { "wikitext2" } else { "stories" };
            let (Some(train), Some(model)) = (
                shared(&format!("data/{kind}/{train}")),
                shared(&format!("models/{}", text("model"))),
            ) else {
                return;
            };
            let tokenizer = Tokenizer::load(&model).expect("load");
            let dataset = spec(&format!("wikitext2:{}", train.display()));
            check(&dataset, Role::Calibration).expect("check");
            let (nsamples, seqlen) = (number("nsamples") as usize, number("seqlen") as usize);
            let drawn = calibration(
                &dataset,
                &tokenizer,
                nsamples,
                seqlen,
                number("seed"),
                &cache,
                &Silent,
            )
            .expect("calibration");
            let starts: Vec<u64> =
                serde_json::from_value(golden["calibration_starts"].clone()).expect("starts");
            assert_eq!(drawn.protocol.starts, starts, "{}", path.display());
            assert_eq!(drawn.protocol.tokens_sha256, sha256, "{}", path.display());
            assert_eq!(drawn.tokens.len(), nsamples * seqlen);
            compared += 1;
        }
        assert!(compared > 0, "no golden in {folder} has calibration samples");
    }
}

#[test]
fn wikitext2_test_has_166_windows_with_the_llama2_tokenizer() {
    let (Some(texts), Some(folder)) = (shared("data/wikitext2"), shared("data/tokenizers/llama2"))
    else {
        return;
    };
    let tokenizer = Tokenizer::load(&folder).expect("load");
    let dataset = spec(&format!("wikitext2:{}", texts.display()));
    let result = evaluation(&dataset, &tokenizer, 2048, None, &TextCache::disabled(), &Silent)
        .expect("evaluation");
    // 341,469 tokens: the count quoted for Llama-2 in the reference's threads; 166 = floor(341469 / 2048).
    assert_eq!(
        (result.protocol.total_tokens, result.windows, result.protocol.tokens_used),
        (341_469, 166, 166 * 2048)
    );
    assert_eq!(result.tokens[0], 1, "one <s> at the very start");
    assert_eq!(result.tokens.iter().filter(|id| **id == 1).count(), 1);
}

#[test]
fn the_outlook_tells_size_and_cache_without_tokenizing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokenizer = letters(folder.path());
    let cache = TextCache::open(Some(folder.path().join("cache")));
    let path = folder.path().join("a.txt");
    fs::write(&path, "abc def").expect("write");
    let dataset = spec(&path.display().to_string());
    let outlook = |dataset: &DatasetSpec, cache: &TextCache| {
        Source::find(dataset, Role::Evaluation)
            .and_then(|source| source.outlook(folder.path(), cache))
            .expect("outlook")
    };
    let look = |cache: &TextCache| outlook(&dataset, cache);
    let expected = |is_cached| TextOutlook { text: Some(ByteSize(7)), is_cached };
    assert_eq!(look(&cache), expected(false));
    evaluation(&dataset, &tokenizer, 2, None, &cache, &Silent).expect("evaluation");
    assert_eq!(look(&cache), expected(true));
    assert_eq!(look(&TextCache::disabled()), expected(false));
    fs::write(&path, "abc deg").expect("write");
    assert_eq!(look(&cache), expected(false));
    let documents = folder.path().join("a.jsonl");
    fs::write(&documents, "{\"text\": \"a\"}\n").expect("write");
    let seen = outlook(&spec(&documents.display().to_string()), &cache);
    assert_eq!(seen, TextOutlook { text: None, is_cached: false });
}
