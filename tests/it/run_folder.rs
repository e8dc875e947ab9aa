//! Run folders: results that a run would replace, and one folder in two spellings.

use std::fs;

use crate::support::{Place, arguments, refuses};

/// Files of a run folder without a record, as the Python original leaves them.
const RESULTS: [&str; 4] = [
    "log_magnitude.txt",
    "log_wanda.txt",
    "masks.safetensors",
    "memory_log.csv",
];

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
        "hint: use wikitext2:PATH, c4:PATH, or the path of a file (text, .jsonl, .jsonl.gz, .parquet)",
    );
    let ran = place.run(&arguments("--force --eval none"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(
        place.names("out"),
        ["log_wanda.txt", "model", "run.json"]
            .map(String::from)
            .into()
    );
    let log = fs::read_to_string(place.path("out/log_wanda.txt")).expect("written by the run");
    assert!(log.starts_with("method\t"), "{log}");
}
