//! Run folders: results that a run would replace, one folder in two spellings, and the time of the check of written files.

use std::fs;

use prune::bytes::ByteSize;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::support::{Place, arguments, refuses, refuses_command};

/// Files of a run folder without a record, as the Python original leaves them.
const RESULTS: [&str; 4] =
    ["log_magnitude.txt", "log_wanda.txt", "masks.safetensors", "memory_log.csv"];
const HINT: &str = "hint: choose another --save folder, or replace these files with --force";

/// A place whose folder `out` holds these files.
fn with_results(names: &[&str]) -> Place {
    let place = Place::new();
    fs::create_dir(place.path("out")).expect("a new folder");
    for name in names {
        fs::write(place.path("out").join(name), "of the original").expect("a new file");
    }
    place
}

#[test]
fn results_without_a_record_are_named_and_not_replaced() {
    let eval = "eval --model m --eval-dataset test.txt --seqlen 64 --eval-windows 2 --save out";
    for name in RESULTS {
        let place = with_results(&[name]);
        let first = format!("error: `out` holds results of another run: {name}");
        for more in ["", "--no-save-model --eval none", "--save-model elsewhere"] {
            refuses(&place, more, 1, &first, HINT);
        }
        refuses_command(&place, eval, 1, &first, HINT);
    }
    let place = with_results(&RESULTS);
    let first = format!("error: `out` holds results of another run: {}", RESULTS.join(", "));
    refuses(&place, "--save-masks --log-memory", 1, &first, HINT);
}

#[test]
fn other_files_in_a_run_folder_are_not_in_the_way() {
    let place = with_results(&["notes.txt", "log_of_my_own.csv"]);
    let ran = place.run(&arguments("--eval none"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(place.path("out/notes.txt").exists());
}

#[test]
fn forced_results_are_replaced_only_by_a_run_that_begins() {
    let place = with_results(&RESULTS);
    let first = "error: no such file or folder for --dataset: `nowhere.txt`";
    refuses(
        &place,
        "--force --dataset nowhere.txt",
        1,
        first,
        "hint: use wikitext2:PATH, c4:PATH, hub:OWNER/NAME, or the path of a folder or file (text, .jsonl, .json, .gz, .parquet, .arrow)",
    );
    let ran = place.run(&arguments("--force --eval none"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(place.names("out"), ["log_wanda.txt", "model", "run.json"].map(String::from).into());
    let log = fs::read_to_string(place.path("out/log_wanda.txt")).expect("written by the run");
    assert!(log.starts_with("method\t"), "{log}");
}

#[test]
fn one_folder_in_two_spellings_is_one_folder() {
    for model in ["./out", "out/.", "absent/../out"] {
        let place = Place::new();
        let ran = place.run(&arguments(&format!("--eval none --save-model {model}")));
        assert_eq!(ran.code, 0, "{model}: {}", ran.stderr);
        assert!(place.path("out/run.json").exists(), "{model}");
        assert!(place.path("out/config.json").exists(), "{model}");
        assert!(!place.path("absent").exists());
    }
}

#[test]
#[cfg(unix)]
fn a_folder_and_a_link_to_it_are_one_folder() {
    let place = Place::new();
    fs::create_dir(place.path("real")).expect("a new folder");
    std::os::unix::fs::symlink("real", place.path("link")).expect("a new link");
    let ran = place.run(&arguments("--eval none --save link --save-model real"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(place.path("real/run.json").exists() && place.path("real/config.json").exists());
}

/// The MiB that a run announces to verify at its end.
fn verified_at_the_end(place: &Place, more: &str) -> u64 {
    let ran = place.run(&format!(
        "--model m --sparsity-ratio 0.5 --dataset train.txt --nsamples 64 --seqlen 64 --eval none --use-cpu --save out --force --progress json {more}"
    ));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let mut events = ran.stderr.lines().filter_map(|line| serde_json::from_str(line).ok());
    let verify = events.find(|event: &Value| event["phase"] == "verify").expect("a verification");
    verify["steps"].as_u64().expect("a number")
}

#[test]
fn whole_files_are_checked_while_later_layers_are_computed() {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 256,
        intermediate_size: 704,
        num_hidden_layers: 6,
        max_shard: ByteSize(2 << 20),
        ..RandomCheckpoint::default()
    });
    // A full verification compares with the source, at the end.
    let whole = verified_at_the_end(&place, "--verify full");
    let rest = verified_at_the_end(&place, "");
    assert!(whole >= 18 && rest < whole, "{rest} of {whole} MiB are left to the end");
}
