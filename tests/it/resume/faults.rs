//! Faults at every file operation: a kill, an error, a power cut, a full disk.

use std::fs;

use super::{
    MAGNITUDE, WANDA, WITHOUT_PERPLEXITY, assert_same, command, does_not_load, of_layers, outcome,
    place, saved_layers, undisturbed, with_fault,
};
use crate::support::Work;

/// Runs without a consequence, one after the other, after which no later fault is expected to have any.
const WITHOUT_CONSEQUENCE: usize = 4;

/// Flags of a run that makes the model narrower first.
const NARROWER: &str = "--model m --sparsity-ratio 0.5 --drop-width 0.3 --eval none --save out";

/// Ends a run by each fault of the kind `what` in turn, continues it, and compares. Returns the number of faults.
fn at_every_operation(what: &str, flags: &str) -> usize {
    const LAYERS: usize = 2;
    let place = of_layers(LAYERS);
    let expected = undisturbed(&place, flags);
    let (mut times, mut without) = (0, 0);
    for at in 1.. {
        let fault = format!("{what}:{at}");
        let first = with_fault(&place, flags, &fault);
        match &first {
            // The fault came too late, or nothing depends on what failed.
            Some(ran) if ran.code == 0 => without += 1,
            Some(ran) => {
                assert_eq!(ran.code, 1, "{fault}\n{}", ran.stderr);
                let errors = ran.stderr.lines().filter(|line| line.starts_with("error: "));
                assert_eq!(errors.count(), 1, "{fault}\n{}", ran.stderr);
                assert!(!ran.stderr.contains("bug in prune"), "{fault}\n{}", ran.stderr);
                (times, without) = (times + 1, 0);
            }
            None => {
                assert!(what == "kill" || what == "forget", "{fault} ended it");
                (times, without) = (times + 1, 0);
            }
        }
        does_not_load(&place, &fault);
        if without == 0 {
            let saved = saved_layers(&place, LAYERS);
            let second = place.run(&command(flags));
            assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
            Work::of(&second.stderr).assert_layers_after(saved, LAYERS, &fault);
        }
        assert_same(&outcome(&place.path("out")), &expected, &format!("after {fault}"));
        if without == WITHOUT_CONSEQUENCE {
            break;
        }
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    times
}

#[test]
fn killed_at_every_file_operation_a_wanda_run_goes_on_to_the_same_end() {
    let times = at_every_operation("kill", WANDA);
    assert!(times >= 50, "{times} kills");
}

#[test]
fn killed_at_every_file_operation_a_magnitude_run_goes_on_to_the_same_end() {
    let times = at_every_operation("kill", MAGNITUDE);
    assert!(times >= 40, "{times} kills");
}

#[test]
fn every_operation_that_fails_once_is_one_error_and_the_run_goes_on() {
    let times = at_every_operation("fail", WITHOUT_PERPLEXITY);
    assert!(times >= 50, "{times} failures");
}

#[test]
fn what_was_not_synced_may_be_lost() {
    let times = at_every_operation("forget", WITHOUT_PERPLEXITY);
    assert!(times >= 50, "{times} power cuts");
}

#[test]
fn a_disk_that_fills_midway_stops_the_run_and_it_goes_on_when_there_is_room() {
    let place = of_layers(2);
    let expected = undisturbed(&place, WITHOUT_PERPLEXITY);
    let mut full = 0;
    for at in (1..).step_by(5) {
        let fault = format!("full:{at}");
        let ran = with_fault(&place, WITHOUT_PERPLEXITY, &fault).expect("an exit code");
        if ran.code == 0 {
            break;
        }
        assert_eq!(ran.code, 1, "{fault}\n{}", ran.stderr);
        assert!(ran.stderr.contains("hint: free some space"), "{fault}\n{}", ran.stderr);
        full += 1;
        let saved = saved_layers(&place, 2);
        let second = place.run(&command(WITHOUT_PERPLEXITY));
        assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
        Work::of(&second.stderr).assert_layers_after(saved, 2, &fault);
        assert_same(&outcome(&place.path("out")), &expected, &format!("after {fault}"));
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    assert!(full >= 10, "{full} full disks");
}

#[test]
fn too_little_room_is_refused_before_anything_is_written() {
    let place = of_layers(2);
    let ran = with_fault(&place, WANDA, "room:100000").expect("an exit code");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("has too little room") && ran.stderr.contains("97.66 KiB are free"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("the masks "), "{}", ran.stderr);
    assert!(!place.path("out").exists());
    // The files of the replaced run make room for the files of this one.
    place.prune(WANDA);
    let forced = format!("{WANDA} --force");
    let ran = with_fault(&place, &forced, "room:100000").expect("an exit code");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn room_for_narrower_matrices_is_needed_before_they_are_written() {
    let place = of_layers(2);
    let ran = with_fault(&place, NARROWER, "room:100000").expect("an exit code");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("has too little room")
            && ran.stderr.contains("the narrower matrices ")
            && ran.stderr.contains("the model "),
        "{}",
        ran.stderr
    );
    assert!(!place.path("out/narrower").exists());
}

#[test]
fn a_run_that_is_killed_again_and_again_gets_on_every_time() {
    let place = place();
    let expected = undisturbed(&place, WANDA);
    let mut kills = 0;
    // Enough operations for a layer and the way back to it.
    while with_fault(&place, WANDA, "kill:85").is_none() {
        kills += 1;
        assert!(kills < 20, "it does not get on");
    }
    assert!(kills >= 2, "{kills}");
    assert_same(&outcome(&place.path("out")), &expected, "after many kills");
    let sessions = place.manifest("out").sessions;
    assert_eq!(sessions.len(), kills + 1, "{sessions:?}");
    assert!(sessions.is_sorted_by_key(|session| session.first_layer));
}
