//! Merges that are ended at every file operation, at random moments, by a signal, and by a second command.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use super::place;
#[cfg(unix)]
use crate::resume::signal;
use crate::resume::{assert_same, outcome};
use crate::support::Place;

/// A merge with a group over the whole model, into several files.
const TIES: &str = "merge --base m --model e1 --model e2 --method ties --density 0.4 \
    --trim-scope model --out-shard-size 120KB --save out";

/// Operations in a row without a consequence, after which none follows.
const WITHOUT_CONSEQUENCE: usize = 4;

/// Number of tensors that no later process merges again; 0 where the record says that the run is finished.
fn saved_tensors(place: &Place) -> usize {
    let state = fs::read(place.path("out/unfinished.json")).unwrap_or_default();
    let state: Value = serde_json::from_slice(&state).unwrap_or_default();
    match place.path("out/run.json").exists() {
        true => 0,
        false => state["merged"].as_array().map_or(0, Vec::len),
    }
}

/// Ends a merge by each fault of a kind in turn, continues it, and compares. Returns the number of faults.
fn at_every_operation(what: &str) -> usize {
    let place = place(2);
    assert_eq!(place.run(TIES).code, 0);
    let expected = outcome(&place.path("out"));
    let (mut times, mut without) = (0, 0);
    for at in 1.. {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let fault = format!("{what}:{at}");
        let first = place.command(TIES).env("PRUNE_FAULT", &fault).output();
        let first = first.expect("the binary");
        let stderr = String::from_utf8_lossy(&first.stderr);
        let is_finished = first.status.code() == Some(0);
        if is_finished {
            without += 1;
        } else {
            (times, without) = (times + 1, 0);
            if what == "fail" {
                assert_eq!(first.status.code(), Some(1), "{fault}\n{stderr}");
                let errors = stderr.lines().filter(|line| line.starts_with("error: "));
                assert_eq!(errors.count(), 1, "{fault}\n{stderr}");
            }
            // A model that loads has its record, and the run's record or its state are there.
            let model = place.path("out/model");
            assert!(
                !model.join("config.json").exists() || model.join("merging.json").exists(),
                "{fault}"
            );
            let saved = saved_tensors(&place);
            let second = place.run(TIES);
            assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
            let continues = format!("continuing an unfinished merge: {saved} of ");
            assert!(
                saved == 0 || second.stderr.contains(&continues),
                "{saved} tensors were saved, after {fault}\n{}",
                second.stderr
            );
        }
        assert_same(&outcome(&place.path("out")), &expected, &format!("after {fault}"));
        if without == WITHOUT_CONSEQUENCE {
            return times;
        }
    }
    times
}

#[test]
fn killed_at_every_file_operation_a_merge_goes_on_to_the_same_end() {
    let times = at_every_operation("kill");
    assert!(times >= 50, "{times} kills");
}

#[test]
fn every_operation_that_fails_once_is_one_error_and_the_merge_goes_on() {
    let times = at_every_operation("fail");
    assert!(times >= 40, "{times} failures");
}

#[test]
fn what_a_merge_has_not_synced_may_be_lost() {
    let times = at_every_operation("forget");
    assert!(times >= 40, "{times} power cuts");
}

/// Models that take a while to merge.
fn slow() -> Place {
    let place = Place::empty();
    for (name, seed) in [("m", 0), ("e1", 1), ("e2", 2)] {
        place.checkpoint(
            name,
            &RandomCheckpoint {
                hidden_size: 192,
                intermediate_size: 512,
                num_hidden_layers: 4,
                dtype: StoredDtype::Bf16,
                seed,
                ..RandomCheckpoint::default()
            },
        );
    }
    place
}

/// Linears that a merge with `--progress json --verbose` finished, and tensors that it found finished.
fn work(stderr: &str) -> (usize, Option<usize>) {
    let merged = stderr.lines().filter(|line| line.contains(r#""event":"matrix_merged""#));
    let note = stderr.split("continuing an unfinished merge: ").nth(1);
    let found = note.and_then(|rest| rest.split(' ').next()?.parse().ok());
    (merged.count(), found)
}

/// Signals at random moments, also while files are published. `PRUNE_KILLS` sets their number.
#[cfg(unix)]
#[test]
#[expect(clippy::print_stdout, reason = "the counts of a run by hand")]
fn ended_at_any_time_a_merge_goes_on_to_the_same_end() {
    const LINEARS: usize = 4 * 7;
    const TENSORS: usize = LINEARS + 4 * 2 + 3;
    let moments = std::env::var("PRUNE_KILLS").map_or(16, |of| of.parse().expect("a number"));
    let line = "merge --base m --model e1 --model e2 --method della --density 0.5 --threads 1 --progress json --verbose --save out";
    let place = slow();
    let began = Instant::now();
    assert_eq!(place.run(line).code, 0);
    let whole = began.elapsed();
    let expected = outcome(&place.path("out"));
    let (mut ended, mut continued, mut published, mut random) = (0, 0, 0, 1u32);
    let (mut finished, mut repeated) = (0, 0);
    for moment in 0..moments {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let log = place.path("log");
        let mut command = place.command(line);
        let mut child = command
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).expect("a new file"))
            .spawn()
            .expect("the binary");
        // A moment in the moment-th part of the run.
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let part = f64::from(moment) + f64::from(random >> 8) / f64::from(1u32 << 24);
        std::thread::sleep(whole.mul_f64(part / f64::from(moments)).min(Duration::from_secs(60)));
        signal(&child, if moment % 2 == 0 { "KILL" } else { "TERM" });
        let status = child.wait().expect("a child");
        ended += u32::from(status.code() != Some(0));
        let is_finished = place.path("out/run.json").exists();
        if !is_finished || place.path("out/unfinished.json").exists() {
            let (first, _) = work(&fs::read_to_string(&log).expect("a log"));
            let second = place.run(line);
            assert_eq!(second.code, 0, "{}", second.stderr);
            let (again, found) = work(&second.stderr);
            finished += first;
            repeated += (first + again).saturating_sub(LINEARS);
            continued += u32::from(found.is_some());
            if found == Some(TENSORS) {
                published += 1;
                assert_eq!(again, 0, "moment {moment}: publishing merges nothing");
            }
        } else {
            // The locks go last. One that a killed process left is stale, and the next run here takes it over.
            for lock in ["out/prune.lock", "out/model/prune.lock"] {
                let _ = fs::remove_file(place.path(lock));
            }
        }
        assert_same(&outcome(&place.path("out")), &expected, &format!("after moment {moment}"));
    }
    println!(
        "{ended} of {moments} ended, {continued} continued, {published} of them in publishing; {repeated} of {finished} linears twice"
    );
    // A busy disk may take longer for a record than the merge for all linears, so one moment may repeat everything. A merge that saved
    // nothing would repeat everything at all moments.
    assert!(
        2 * repeated <= finished,
        "{repeated} of {finished} finished linears were merged twice"
    );
    assert!(ended >= moments / 2, "{ended} of {moments} came in time");
    assert!(continued > 0, "no merge was continued");
}

/// The end of a merge, operation by operation: all tensors are recorded, and none is merged again.
#[test]
fn killed_while_it_publishes_a_merge_starts_over_without_computing() {
    let place = place(1);
    let line = format!("{TIES} --progress json --verbose");
    assert_eq!(place.run(&line).code, 0);
    let expected = outcome(&place.path("out"));
    let mut killed = 0;
    for at in (1..2000).step_by(3) {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let first = place.command(&line).env("PRUNE_FAULT", format!("kill:{at}")).output();
        let first = first.expect("the binary");
        if first.status.code() == Some(0) {
            break;
        }
        let second = place.run(&line);
        assert_eq!(second.code, 0, "{}", second.stderr);
        let (again, found) = work(&second.stderr);
        if found == Some(7 + 2 + 3) {
            killed += 1;
            assert_eq!(again, 0, "operation {at}");
        }
        assert_same(&outcome(&place.path("out")), &expected, &format!("after operation {at}"));
    }
    assert!(killed >= 5, "{killed} kills after the last tensor");
}

#[test]
fn a_merge_of_other_models_is_not_continued() {
    let place = place(2);
    let killed = place.command(TIES).env("PRUNE_FAULT", "kill:60").output();
    assert!(killed.expect("the binary").status.code().is_none());
    assert!(place.path("out/unfinished.json").exists());
    for (from, to, what) in [
        ("--density 0.4", "--density 0.5", "recipe"),
        ("--model e2", "--model m", "recipe"),
        ("--trim-scope model", "--trim-scope layer", "trim-scope"),
    ] {
        let ran = place.run(&TIES.replace(from, to));
        assert_eq!(ran.code, 1, "{to}\n{}", ran.stderr);
        assert!(ran.stderr.contains(what), "{to}\n{}", ran.stderr);
        assert!(ran.stderr.contains("--force"), "{to}\n{}", ran.stderr);
    }
    let ran = place.run(&format!("{TIES} --resume"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = place.run(&format!("{TIES} --resume"));
    assert_ne!(ran.code, 0, "a finished run is not continued");
}
