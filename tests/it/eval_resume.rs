//! An evaluation that was interrupted continues after the layers that it has passed, with the numbers of an uninterrupted evaluation.

use std::collections::BTreeSet;
use std::fs;

use crate::support::{Place, Ran};

/// Two models, windows and a task.
const LINE: &str = "eval other/model --against m --tasks own=own.jsonl --save out --eval-dataset test.txt --seqlen 64 --use-cpu";

fn place() -> Place {
    let place = Place::new();
    place.write_questions();
    place.prune("--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save other");
    place
}

/// Everything that the evaluation in `out` has measured.
fn measured(place: &Place) -> String {
    let manifest = place.manifest("out");
    let against = manifest.against.as_ref().map(|of| of.perplexity);
    serde_json::to_string(&(&manifest.perplexity, against, &manifest.tasks)).expect("a record")
}

fn states(place: &Place) -> Vec<String> {
    let names = place.names("out").into_iter();
    names.filter(|name| name.ends_with(".state")).collect()
}

/// The layers that an earlier process had passed, of each model that says so.
fn continued(ran: &Ran) -> Vec<usize> {
    let lines = ran.stderr.lines();
    let of_line = |line: &str| {
        let rest = line.strip_prefix("continuing an unfinished evaluation: ")?;
        rest.split(' ').next()?.parse().ok()
    };
    lines.filter_map(of_line).collect()
}

/// The layers that a process passed, of both models, where the system tells the memory after each.
fn passed(ran: &Ran) -> usize {
    ran.stderr.lines().filter(|line| line.contains("memory at layer_")).count()
}

#[test]
fn a_killed_evaluation_continues_with_the_same_numbers() {
    let place = place();
    for (more, step) in [("", 7), ("--hidden-states disk", 13)] {
        let line = format!("{LINE} {more} -v");
        let _ = fs::remove_dir_all(place.path("out"));
        let whole = place.run(&line);
        assert_eq!(whole.code, 0, "{}", whole.stderr);
        assert!(continued(&whole).is_empty() && states(&place).is_empty());
        let (expected, all) = (measured(&place), passed(&whole));
        assert_eq!(all, if cfg!(target_os = "linux") { 4 } else { 0 }, "{}", whole.stderr);
        let mut found: BTreeSet<Vec<usize>> = BTreeSet::new();
        for at in (6..).step_by(step) {
            fs::remove_dir_all(place.path("out")).expect("removed");
            if place.with_fault(&line, &format!("kill:{at}")).is_some() {
                break;
            }
            let had = states(&place);
            let ran = place.run(&line);
            if ran.code != 0 {
                // Only the removal of the states was left.
                assert!(ran.stderr.contains("holds a finished run"), "kill:{at}: {}", ran.stderr);
                continue;
            }
            assert_eq!(measured(&place), expected, "kill:{at}");
            assert!(states(&place).is_empty(), "kill:{at}");
            let layers = continued(&ran);
            let repeated = all.saturating_sub(layers.iter().sum());
            assert_eq!(passed(&ran), repeated, "kill:{at}: {layers:?}");
            assert_eq!(layers.len(), had.len(), "kill:{at}: {had:?}, {}", ran.stderr);
            found.insert(layers);
        }
        let both = found.iter().filter(|layers| layers.len() == 2).count();
        assert!(found.contains(&vec![]) && both > 0, "{more}: {found:?}");
        let last = found.iter().flatten().max();
        assert_eq!(last, Some(&2), "all layers of a model: {found:?}");
    }
}

#[test]
fn the_folder_of_an_unfinished_run_names_the_command_that_continues_it() {
    let place = Place::new();
    let line =
        "--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save half --use-cpu";
    let is_unfinished = || {
        let folders = ["half", "half/model"];
        folders.iter().any(|folder| place.path(folder).join("unfinished.json").is_file())
    };
    let killed =
        (4..).find(|at| place.with_fault(line, &format!("kill:{at}")).is_some() || is_unfinished());
    assert!(killed.is_some() && is_unfinished());
    let ran = place.run("eval half --eval-dataset test.txt --seqlen 64 --use-cpu");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("the run in `half` is not finished"), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("its command continues it: ") && ran.stderr.contains(line),
        "{}",
        ran.stderr
    );
}

#[test]
fn states_of_another_evaluation_and_damaged_states_are_not_used() {
    let place = place();
    let line = LINE.to_string();
    assert_eq!(place.run(&line).code, 0);
    let expected = measured(&place);
    let interrupted = || {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let at = (16..).step_by(4).find(|at| {
            let _ = fs::remove_dir_all(place.path("out"));
            assert!(place.with_fault(&line, &format!("kill:{at}")).is_none(), "never saved");
            states(&place).len() == 2
        });
        at.expect("a kill after the first save of the second model");
    };
    interrupted();
    let other = place.run(&line.replace("--seqlen 64", "--seqlen 32"));
    assert_eq!(other.code, 0, "{}", other.stderr);
    assert!(continued(&other).is_empty(), "{}", other.stderr);
    assert_ne!(measured(&place), expected);
    interrupted();
    for name in states(&place) {
        let path = place.path("out").join(name);
        let mut bytes = fs::read(&path).expect("written");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).expect("written");
    }
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(continued(&ran).is_empty(), "{}", ran.stderr);
    assert!(ran.stderr.contains("and the evaluation begins again"), "{}", ran.stderr);
    assert_eq!(measured(&place), expected);
}

#[test]
fn an_evaluation_goes_on_where_its_states_have_no_room() {
    let place = place();
    let line = LINE.to_string();
    let ran = place.with_fault(&line, "room:4096").expect("it ends by itself");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let warning = "an interruption would repeat this evaluation: its states are not saved";
    assert!(ran.stderr.contains(warning), "{}", ran.stderr);
    assert!(states(&place).is_empty());
    assert!(measured(&place).contains("kl_mean"));
}
