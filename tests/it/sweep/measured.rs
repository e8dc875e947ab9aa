//! Divergences and tasks in a sweep: the columns of the table, the gates, and the final states of the dense model that cells share.

use std::fs;

use super::table;
use crate::support::{Place, Ran, TEXTS, refuses_command};

/// Two cells with a task of two questions.
const GRID: &str =
    "sweep --model m --methods wanda,magnitude --ratios 0.5 --save out --tasks own=own.jsonl";

fn place() -> Place {
    let place = Place::new();
    place.write_questions();
    place
}

fn sweep(place: &Place, more: &str) -> Ran {
    place.run(&format!("{GRID} {TEXTS} {more}"))
}

/// The files in `dense/` that hold final states.
fn states(place: &Place) -> Vec<String> {
    let names = place.names("out/dense");
    names.into_iter().filter(|name| name.starts_with("final_states")).collect()
}

#[test]
fn the_table_has_the_metrics_that_were_asked_for() {
    let place = place();
    let ran = sweep(&place, "--metrics kl,accuracy,own,perplexity");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let json = table(&place);
    assert_eq!(json["metrics"], serde_json::json!(["kl", "accuracy", "own", "perplexity"]));
    let manifest = place.manifest("out/wanda-0.5-seed0");
    let divergence = manifest.perplexity.divergence.expect("measured");
    let tasks = manifest.tasks.expect("measured");
    let accuracy = tasks.of_result()[0].acc.value;
    let entry = &json["table"][0];
    assert_eq!(entry["metrics"]["kl"]["mean"], serde_json::json!(divergence.kl_mean.value));
    assert_eq!(entry["metrics"]["same_top"]["mean"], serde_json::json!(divergence.same_top.value));
    assert_eq!(entry["metrics"]["own"]["mean"], serde_json::json!(accuracy));
    let dense = place.manifest("out/dense").tasks.expect("measured");
    let dense = dense.dense[0].acc.value;
    assert_eq!(json["dense_metrics"]["accuracy"], serde_json::json!(dense));
    let kl = format!("wanda      {:.6}", divergence.kl_mean.value);
    for text in
        ["\nmean KL\n\nmethod ", "\nmean accuracy\n\nmethod ", "\nown accuracy\n\nmethod ", &kl]
    {
        assert!(ran.stdout.contains(text), "{text}: {}", ran.stdout);
    }
    assert!(ran.stdout.contains(&format!("dense own accuracy: {dense:.4}")), "{}", ran.stdout);
    let page = fs::read_to_string(place.path("out/report.html")).expect("written");
    for title in ["Mean KL against sparsity", "Mean accuracy against sparsity"] {
        assert!(page.contains(title), "{title}");
    }
    // The metrics of the last table are kept; the flag replaces them.
    let again = place.run("sweep --table out");
    assert!(again.stdout.contains("\nmean KL\n"), "{}", again.stdout);
    let other = place.run("sweep --table out --metrics same_top");
    assert!(other.stdout.contains("\nsame top token\n"), "{}", other.stdout);
    assert!(!other.stdout.contains("\nmean KL\n"), "{}", other.stdout);
    let missing = "error: --metrics names `piqa`, which no cell has measured";
    let measured = "hint: the cells have: accuracy, kl, own, perplexity, same_top";
    refuses_command(&place, "sweep --table out --metrics piqa", 2, missing, measured);
}

#[test]
fn metrics_that_no_cell_measures_are_refused() {
    let place = place();
    let line = format!("{GRID} {TEXTS}");
    for (flags, metric, hint) in [
        ("--metrics kl --eval pruned", "kl", "hint: use --eval both"),
        (
            "--metrics perplexity,piqa",
            "piqa",
            "hint: metrics are perplexity, kl, same_top, accuracy and the tasks of --tasks; for the task `piqa` add --tasks piqa",
        ),
    ] {
        let message =
            format!("error: --metrics names `{metric}`, which this sweep does not measure");
        refuses_command(&place, &format!("{line} {flags}"), 2, &message, hint);
    }
    refuses_command(
        &place,
        &format!("{line} --metrics ''"),
        2,
        "error: --metrics is empty",
        "hint: write values separated by commas, like --metrics perplexity,kl,accuracy",
    );
}

#[test]
fn gates_hold_for_divergences_and_tasks() {
    let place = place();
    assert_eq!(sweep(&place, "").code, 0);
    let ran = sweep(&place, "--max-kl 0.000001 --min-accuracy 1.1");
    assert_eq!(ran.code, 2, "no accuracy is above 1: {}", ran.stderr);
    let ran = sweep(&place, "--max-kl 0.000001");
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    let both = "wanda-0.5-seed0, magnitude-0.5-seed0";
    let missed = format!("gate missed: --max-kl 0.000001 is not met by {both}");
    assert!(ran.stderr.contains(&missed), "{}", ran.stderr);
    let ran = sweep(&place, "--min-accuracy 0.6");
    assert_eq!(ran.code, 4, "half of the answers are right: {}", ran.stderr);
    let missed = format!("gate missed: --min-accuracy 0.6 is not met by {both}");
    assert!(ran.stderr.contains(&missed), "{}", ran.stderr);
    let met = sweep(&place, "--max-kl 1000 --min-accuracy 0.5");
    assert_eq!(met.code, 0, "{}", met.stderr);
}

#[test]
fn the_dense_model_passes_once_and_its_states_go_with_the_last_cell() {
    let place = place();
    let full = sweep(&place, "");
    assert_eq!(full.code, 0, "{}", full.stderr);
    let (expected, dense) =
        (table(&place), fs::read(place.path("out/dense/run.json")).expect("written"));
    assert!(states(&place).is_empty());
    // All cells are finished: nothing passes again.
    assert_eq!(sweep(&place, "").code, 0);
    assert_eq!(fs::read(place.path("out/dense/run.json")).expect("kept"), dense);
    // The states of an interrupted sweep are there for its second process.
    fs::remove_dir_all(place.path("out")).expect("removed");
    let line = format!("{GRID} {TEXTS} --shard 1/2");
    assert_eq!(place.run(&line).code, 0);
    assert_eq!(states(&place), ["final_states"]);
    let dense = fs::read(place.path("out/dense/run.json")).expect("written");
    assert_eq!(sweep(&place, "--shard 2/2").code, 0);
    assert_eq!(fs::read(place.path("out/dense/run.json")).expect("kept"), dense, "measured again");
    assert_eq!(table(&place), expected);
    assert!(states(&place).is_empty());
    // A cell that is missing needs them again.
    fs::remove_dir_all(place.path("out/wanda-0.5-seed0")).expect("removed");
    assert_eq!(sweep(&place, "").code, 0);
    assert_eq!(table(&place), expected);
    assert!(states(&place).is_empty());
    // A cell fails where the file is damaged, and the error names the fix.
    fs::remove_dir_all(place.path("out/wanda-0.5-seed0")).expect("removed");
    fs::write(place.path("out/dense/final_states"), "short").expect("written");
    let ran = sweep(&place, "");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    for text in ["it has 5 bytes, not ", "hint: remove the file if it is still there"] {
        assert!(ran.stderr.contains(text), "{text}: {}", ran.stderr);
    }
    assert_eq!(sweep(&place, "").code, 0);
    assert_eq!(table(&place), expected);
}
