//! Packings and unpackings that are ended at every file operation and continued: the files equal the files of an undisturbed run, and finished
//! matrices are not written again.

use std::fs;

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::run::state::RunState;
use prune::synthetic::RandomCheckpoint;

use super::{keep_half, pack};
use crate::resume::{assert_same, outcome};
use crate::support::Place;

/// One layer in several files, packed as `p`.
fn place() -> Place {
    let place = Place::with(&RandomCheckpoint {
        num_hidden_layers: 1,
        dtype: StoredDtype::Bf16,
        max_shard: ByteSize(100_000),
        ..RandomCheckpoint::default()
    });
    keep_half(&place.path("m"));
    pack(&place, "m --save p");
    place
}

/// The state of an unfinished run; `None` where there is none.
fn state(place: &Place) -> Option<RunState> {
    let text = fs::read(place.path("out/unfinished.json")).ok()?;
    Some(serde_json::from_slice(&text).expect("a state is whole at any moment"))
}

/// Ends a run by each fault of a kind in turn, continues it, and compares. Returns the numbers of faults, and of faults after which
/// finished tensors were kept.
fn at_every_operation(what: &str, line: &str, work: &str) -> (usize, usize) {
    let place = place();
    assert_eq!(place.run(line).code, 0);
    let expected = outcome(&place.path("out"));
    let (mut times, mut kept, mut without) = (0, 0, 0);
    for at in 1.. {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let fault = format!("{what}:{at}");
        let first = place.with_fault(line, &fault);
        if first.as_ref().is_some_and(|ran| ran.code == 0) {
            without += 1;
        } else {
            (times, without) = (times + 1, 0);
            if let Some(ran) = first {
                assert_eq!(ran.code, 1, "{fault}\n{}", ran.stderr);
                let errors = ran.stderr.lines();
                let errors = errors.filter(|line| line.starts_with("error: "));
                assert_eq!(errors.count(), 1, "{fault}\n{}", ran.stderr);
            }
            let left = state(&place);
            let is_published = place.path("out/config.json").exists();
            assert!(!is_published || left.is_some(), "{fault}");
            let second = place.run(line);
            assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
            let tensors = left.map_or(0, |state| state.tensors.len());
            if tensors > 0 {
                kept += 1;
                let note = format!("continuing an unfinished {work}: {tensors} of ");
                assert!(second.stderr.contains(&note), "{fault}\n{}", second.stderr);
            }
        }
        assert_same(&outcome(&place.path("out")), &expected, &format!("after {fault}"));
        // A fault may have no consequence.
        if without == 4 {
            return (times, kept);
        }
    }
    (times, kept)
}

#[test]
fn killed_at_every_file_operation_a_packing_continues_with_the_next_matrix() {
    let (times, kept) = at_every_operation("kill", "pack m --save out", "packing");
    assert!(times >= 50 && kept >= 20, "{times} kills, {kept} kept work");
}

#[test]
fn every_operation_that_fails_once_is_one_error_and_the_packing_continues() {
    let (times, kept) = at_every_operation("fail", "pack m --save out", "packing");
    assert!(times >= 40 && kept >= 15, "{times} failures, {kept} kept work");
}

#[test]
fn killed_at_every_file_operation_an_unpacking_continues_with_the_next_matrix() {
    let (times, kept) = at_every_operation("kill", "unpack p --save out", "unpacking");
    assert!(times >= 40 && kept >= 15, "{times} kills, {kept} kept work");
}

#[test]
fn what_was_not_synced_is_restored_again() {
    let (times, _) = at_every_operation("forget", "unpack p --save out", "unpacking");
    assert!(times >= 40, "{times} power cuts");
}

#[test]
fn counted_files_are_not_counted_again_and_other_settings_are_refused() {
    let place = place();
    let mut counted = 0;
    for at in 1..14 {
        assert!(place.with_fault("pack m --save out", &format!("kill:{at}")).is_none());
        let known = state(&place).map_or(0, |state| state.scanned.len());
        // Each process begins with the files that the killed process had counted.
        assert!(known >= counted, "{known} after {counted}");
        counted = known;
    }
    assert!(counted >= 2, "{counted}");
    let other = place.run("pack m --save out --values int8");
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(other.stderr.contains("values: exact there, int8 now"), "{}", other.stderr);
    assert_eq!(place.run("pack m --save out").code, 0);
    assert_same(&outcome(&place.path("out")), &outcome(&place.path("p")), "after kills");
}
