//! Quantisations that are ended at every file operation and continued: the files are those of an undisturbed one, and finished matrices
//! are not quantised again.

use std::fs;

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::run::state::RunState;
use prune::synthetic::RandomCheckpoint;

use crate::resume::{assert_same, outcome};
use crate::support::Place;

/// Two layers in several files.
fn place() -> Place {
    Place::with(&RandomCheckpoint {
        num_hidden_layers: 2,
        dtype: StoredDtype::Bf16,
        max_shard: ByteSize(150_000),
        ..RandomCheckpoint::default()
    })
}

fn line(format: &str) -> String {
    format!("quantize --to {format} m --save out")
}

/// The state of an unfinished quantisation; `None` where there is none.
fn state(place: &Place) -> Option<RunState> {
    let text = fs::read(place.path("out/unfinished.json")).ok()?;
    Some(serde_json::from_slice(&text).expect("a state is whole at any moment"))
}

/// Ends a quantisation by each fault of a kind in turn, continues it, and compares. Returns the numbers of faults, and of faults after
/// which finished tensors were kept.
fn at_every_operation(what: &str, format: &str) -> (usize, usize) {
    let (place, line) = (place(), line(format));
    assert_eq!(place.run(&line).code, 0);
    let expected = outcome(&place.path("out"));
    let (mut times, mut kept, mut without) = (0, 0, 0);
    for at in 1.. {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let fault = format!("{what}:{at}");
        let first = place.with_fault(&line, &fault);
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
            let second = place.run(&line);
            assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
            let tensors = left.map_or(0, |state| state.tensors.len());
            if tensors > 0 {
                kept += 1;
                let note = format!("continuing an unfinished quantisation: {tensors} of ");
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
fn killed_at_every_file_operation_a_quantisation_continues_with_the_next_matrix() {
    for format in ["nf4", "nf4-double"] {
        let (times, kept) = at_every_operation("kill", format);
        assert!(times >= 60 && kept >= 40, "{format}: {times} kills, {kept} kept work");
    }
}

#[test]
fn every_operation_that_fails_once_is_one_error_and_the_quantisation_continues() {
    let (times, kept) = at_every_operation("fail", "nf4-double");
    assert!(times >= 50 && kept >= 30, "{times} failures, {kept} kept work");
}

#[test]
fn what_was_not_synced_is_quantised_again() {
    let (times, _) = at_every_operation("forget", "nf4-double");
    assert!(times >= 50, "{times} power cuts");
}

#[test]
fn measured_scales_are_not_read_again() {
    let (place, line) = (place(), line("nf4-double"));
    // The first matrices are measured before a file exists.
    let mut measured = 0;
    for at in 1..20 {
        assert!(place.with_fault(&line, &format!("kill:{at}")).is_none());
        let known = state(&place).map_or(0, |state| state.quantized.len());
        // Each process resumes with what the killed process had measured.
        assert!(known >= measured, "{known} after {measured}");
        measured = known;
    }
    assert!(measured >= 2, "{measured}");
    assert_eq!(place.run(&line).code, 0);
}

#[test]
fn a_damaged_part_is_written_again_and_other_settings_are_refused() {
    let (place, line) = (place(), line("nf4-double"));
    assert_eq!(place.run(&line).code, 0);
    let expected = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    // The last matrix is written, and nothing is published.
    let mut at = 60;
    let partial = loop {
        fs::remove_dir_all(place.path("out")).ok();
        assert!(place.with_fault(&line, &format!("kill:{at}")).is_none());
        let names = place.names("out");
        let partial = names.into_iter().find(|name| name.ends_with(".partial"));
        if let Some(partial) = partial
            && state(&place).is_some_and(|state| state.tensors.len() > 20)
        {
            break partial;
        }
        at += 1;
    };
    let other = place.run("quantize --to nf4 m --save out");
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(other.stderr.contains("to: nf4-double there, nf4 now"), "{}", other.stderr);
    let path = place.path("out").join(partial);
    let mut bytes = fs::read(&path).expect("a file");
    let last = bytes.len() - 1;
    // A byte in the middle of the data.
    bytes[last / 2] ^= 1;
    fs::write(&path, bytes).expect("written");
    let again = place.run(&line);
    assert_eq!(again.code, 0, "{}", again.stderr);
    assert_same(&outcome(&place.path("out")), &expected, "after damage");
}

#[test]
fn a_disk_without_room_and_too_little_memory_are_refused_before_anything_is_written() {
    let place = place();
    let ran = place.run("quantize --to nf4 m --save out --max-memory 4MiB");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("does not fit into 4.00 MiB"), "{}", ran.stderr);
    let hint = ran.stderr.lines().find(|line| line.starts_with("hint: "));
    let flag = hint.and_then(|hint| hint.split("use ").nth(1)).expect("a flag to type");
    assert!(!place.path("out").exists());
    let ran = place.run(&format!("quantize --to nf4 m --save out {flag}"));
    assert_eq!(ran.code, 0, "{flag}\n{}", ran.stderr);
    assert!(ran.stdout.contains("peak memory"), "{}", ran.stdout);
}

#[test]
fn a_folder_that_was_being_published_by_an_older_version_is_written_again() {
    let place = place();
    let line = line("nf4");
    assert_eq!(place.run(&line).code, 0);
    let expected = outcome(&place.path("out"));
    // What a version without a state left when it was killed over the list of hashes.
    for gone in ["config.json", "SHA256SUMS"] {
        fs::remove_file(place.path("out").join(gone)).expect("removed");
    }
    let refused = place.run(&line);
    assert_eq!(refused.code, 1, "weights without a sign of ours stay\n{}", refused.stderr);
    fs::write(place.path("out/.SHA256SUMS.30826.tmp"), b"").expect("written");
    let again = place.run(&line);
    assert_eq!(again.code, 0, "{}", again.stderr);
    assert_same(&outcome(&place.path("out")), &expected, "after the older version");
}
