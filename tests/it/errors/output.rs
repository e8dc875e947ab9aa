//! Refusals of output folders.

use std::fs;

use super::refuses_at_once;
use crate::support::{Place, arguments, refuses};

#[test]
fn the_models_own_folder_is_no_output() {
    let place = Place::new();
    let hint = "hint: choose another folder with --save";
    let of_model = "hint: choose another folder with --save-model";
    for (flags, hint) in [("--save - --save-model m", of_model), ("--save m", hint)] {
        let first = "error: the output folder `m` is the model's folder";
        refuses_at_once(&place, flags, 1, first, hint);
    }
    refuses_at_once(
        &place,
        "--save m/out",
        1,
        "error: the output folder `m/out` lies inside the model's folder",
        hint,
    );
}

/// `--force` deleted `m/config.json` and the weights before the writer refused the folder.
#[test]
fn force_does_not_delete_the_model_it_is_to_read() {
    let place = Place::new();
    refuses_at_once(
        &place,
        "--save - --save-model m --force",
        1,
        "error: the output folder `m` is the model's folder",
        "hint: choose another folder with --save-model",
    );
    // The way it happens: prune again what was pruned, into the same run.
    fs::create_dir(place.path("out")).unwrap();
    fs::rename(place.path("m"), place.path("out/model")).unwrap();
    refuses_at_once(
        &place,
        "--model out/model --force",
        1,
        "error: the output folder `out/model` is the model's folder",
        "hint: choose another folder with --save",
    );
}

#[test]
fn a_model_folder_that_holds_something_is_refused() {
    let place = Place::new();
    fs::create_dir_all(place.path("out/model")).unwrap();
    fs::write(place.path("out/model/notes.txt"), "mine").unwrap();
    refuses_at_once(
        &place,
        "",
        1,
        "error: the model folder `out/model` is not empty: it holds `notes.txt`",
        "hint: choose another --save folder, or replace its model files with --force",
    );
}

#[test]
fn a_finished_run_is_refused_without_force() {
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.5 --eval none --save out");
    refuses_at_once(
        &place,
        "",
        1,
        "error: `out` holds a finished run",
        "hint: choose another --save folder, or replace it with --force",
    );
}

#[test]
fn force_does_not_leave_a_model_beside_the_record_of_another() {
    let place = Place::new();
    let ran = place.run(&arguments("--eval none"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    refuses(
        &place,
        "--force --no-save-model --eval none",
        1,
        "error: `out` holds a finished run and its model, and this one writes no model",
        "hint: choose another --save folder, or remove that one first",
    );
}

#[test]
fn a_file_is_no_run_folder() {
    let place = Place::new();
    for flag in ["--save", "--save-model"] {
        refuses_at_once(
            &place,
            &format!("{flag} test.txt"),
            1,
            "error: `test.txt` is a file; results go into a folder",
            &format!("hint: choose another {flag} folder"),
        );
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_refused() {
    // Below a file no folder can be made, whoever asks; permissions would not stop root.
    refuses_at_once(
        &Place::new(),
        "--save test.txt/out",
        1,
        "error: `test.txt` is a file; results go into a folder",
        "hint: choose another --save folder",
    );
}
