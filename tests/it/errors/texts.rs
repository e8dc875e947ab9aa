//! Refusals of calibration and evaluation texts.

use std::fs;

use super::refuses_at_once;
use crate::support::{Place, refuses, refuses_command};

#[test]
fn a_calibration_text_that_is_missing_is_asked_for() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--dataset -",
        1,
        "error: `wikitext-2-raw-v1/train-00000-of-00001.parquet` of the dataset `Salesforce/wikitext` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give the text's path; or use --dataset wikitext2:PATH for a text on disk",
    );
    refuses_at_once(
        &place,
        "--dataset wikitext2:nowhere",
        1,
        "error: no such file or folder for --dataset: `nowhere`",
        "hint: check the path after the colon",
    );
    refuses_at_once(
        &place,
        "--dataset nowhere.txt",
        1,
        "error: no such file or folder for --dataset: `nowhere.txt`",
        "hint: use wikitext2:PATH, c4:PATH, hub:OWNER/NAME, or the path of a folder or file (text, .jsonl, .json, .gz, .parquet, .arrow)",
    );
}

#[test]
fn an_evaluation_text_that_is_missing_can_be_left_out() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--eval-dataset -",
        1,
        "error: `wikitext-2-raw-v1/test-00000-of-00001.parquet` of the dataset `Salesforce/wikitext` (revision `main`) is not in the cache, and HF_HUB_OFFLINE forbids to download it",
        "hint: run once without HF_HUB_OFFLINE where there is a network, name the right cache with --cache-dir, or give the text's path; or use --eval-dataset wikitext2:PATH for a text on disk, or prune with --eval none",
    );
    refuses_at_once(
        &place,
        "--eval-dataset c4:nowhere",
        1,
        "error: no such file or folder for --eval-dataset: `nowhere`",
        "hint: check the path after the colon, or prune with --eval none",
    );
}

#[test]
fn a_text_without_content_is_refused() {
    let place = Place::new();
    fs::write(place.path("empty.txt"), "").unwrap();
    for (flag, or) in [("--dataset", ""), ("--eval-dataset", ", or prune with --eval none")] {
        refuses_at_once(
            &place,
            &format!("{flag} empty.txt"),
            1,
            "error: `empty.txt` is empty",
            &format!("hint: name another text with {flag}{or}"),
        );
    }
    fs::write(place.path("latin1.txt"), b"caf\xe9 ole").unwrap();
    refuses_at_once(
        &place,
        "--dataset latin1.txt",
        1,
        "error: `latin1.txt` is not UTF-8 text",
        "hint: convert it (iconv -f latin1 -t utf-8 'latin1.txt' > text.txt), or check that it is text at all",
    );
}

#[test]
fn a_text_too_short_for_one_sample_is_refused_with_a_length_that_fits() {
    let place = Place::new();
    // 40 bytes and <s> are 41 tokens.
    fs::write(place.path("short.txt"), "x".repeat(40)).unwrap();
    let ran = refuses(
        &place,
        "--dataset short.txt",
        1,
        "error: the calibration text is too short for one sample of 64 tokens",
        "hint: use --seqlen 32, or name a longer text with --dataset",
    );
    assert!(
        ran.stderr.contains("\n  `short.txt` has 41 tokens, one more than a sample is needed\n"),
        "{}",
        ran.stderr
    );
    refuses(
        &place,
        "--eval-dataset short.txt",
        1,
        "error: the evaluation text is too short for one window of 64 tokens",
        "hint: use --seqlen 32, or name a longer text with --eval-dataset, or prune with --eval none",
    );
}

/// Samples of 2 tokens were proposed, which nothing can be learned from.
#[test]
fn a_text_too_short_for_any_sample_is_refused_without_a_length() {
    let place = Place::new();
    fs::write(place.path("short.txt"), "a b c d").unwrap();
    refuses(
        &place,
        "--dataset short.txt",
        1,
        "error: the calibration text is too short for one sample of 64 tokens",
        "hint: name a longer text with --dataset",
    );
}

#[test]
fn an_evaluation_is_not_told_to_prune_without_one() {
    let place = Place::new();
    refuses_command(
        &place,
        "eval m --eval-dataset c4:nowhere",
        1,
        "error: no such file or folder for --eval-dataset: `nowhere`",
        "hint: check the path after the colon",
    );
}

#[test]
fn sequences_longer_than_the_model_are_refused() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--seqlen 513",
        2,
        "error: --seqlen 513 is longer than the model's 512 positions",
        "hint: use --seqlen 512 or less",
    );
    refuses_at_once(
        &place,
        "--seqlen 1",
        2,
        "error: --seqlen is 1; at least 2 tokens are needed to predict one",
        "hint: use --seqlen 512, or leave it out",
    );
}

#[test]
fn an_unknown_dataset_is_refused() {
    let place = Place::new();
    for dataset in ["imdb", "imdb:here"] {
        refuses_at_once(
            &place,
            &format!("--dataset {dataset}"),
            1,
            &format!("error: no such file or folder for --dataset: `{dataset}`"),
            "hint: use wikitext2:PATH, c4:PATH, hub:OWNER/NAME, or the path of a folder or file (text, .jsonl, .json, .gz, .parquet, .arrow)",
        );
    }
    fs::write(place.path("text.zst"), "x").unwrap();
    refuses_at_once(
        &place,
        "--dataset text.zst",
        1,
        "error: cannot read a `.zst` file: `text.zst`",
        "hint: unpack it first; text, .jsonl, .json, .gz of these, .parquet and .arrow are read",
    );
    refuses_at_once(
        &place,
        "--dataset wikitext2:",
        2,
        "error: invalid value 'wikitext2:' for '--dataset <TEXT>': `wikitext2:` has no path after the colon",
        "hint: write it like wikitext2:PATH, c4:PATH, demo or the path of a text file",
    );
}
