//! An unfinished run and a run with other settings, another arithmetic or another output.

use std::fs;

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;

use super::{MAGNITUDE, WANDA, command, interrupted, outcome, place, with_fault};
use crate::support::edit_sealed;

#[test]
fn a_model_folder_of_another_run_is_left_alone() {
    let place = place();
    let flags = |save: &str, ratio: &str| {
        format!("--model m --sparsity-ratio {ratio} --eval none --save {save} --save-model shared")
    };
    let run = |save: &str, ratio: &str| command(&flags(save, ratio));
    assert!(with_fault(&place, &flags("a", "0.5"), "kill:60").is_none());
    let before = outcome(&place.path("shared"));
    let ran = place.run(&run("b", "0.6"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("the model folder `shared` is not empty"), "{}", ran.stderr);
    let mut after = outcome(&place.path("shared"));
    for files in [&mut after, &mut before.clone()] {
        files.remove("prune.lock");
    }
    assert!(before.iter().filter(|(name, _)| *name != "prune.lock").eq(&after));

    // By force it is the other run's, and the first one does not take it back.
    let forced = format!("{} --force", run("b", "0.6"));
    assert_eq!(place.run(&forced).code, 0);
    let finished = outcome(&place.path("shared"));
    let ran = place.run(&run("a", "0.5"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("the model folder `shared` is not empty"), "{}", ran.stderr);
    assert_eq!(outcome(&place.path("shared")), finished);
}

#[test]
fn without_a_model_an_unfinished_run_is_not_replaced() {
    let place = place();
    interrupted(&place, &command(WANDA));
    let ran = place.run(&command("--model m --sparsity-ratio 0.5 --no-save-model --save out"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("`out` holds an unfinished run"), "{}", ran.stderr);
    assert_eq!(place.run(&command(WANDA)).code, 0);
}

#[test]
fn other_settings_are_refused_with_the_difference() {
    let place = place();
    interrupted(&place, &command(WANDA));
    let other = |from: &str, to: &str| -> String {
        let line = command(WANDA);
        let words = line.split(' ').map(|word| if word == from { to } else { word });
        words.collect::<Vec<_>>().join(" ")
    };
    for (from, to, difference) in [
        ("0.5", "0.6", "sparsity-ratio: 0.5 there, 0.6 now"),
        ("both", "pruned", "eval: both there, pruned now"),
        ("4", "3", "nsamples: 4 there, 3 now"),
        ("5", "4", "evaluation tokens: "),
        ("--save-masks", "--profile", "save-masks: true there, false now"),
    ] {
        let ran = place.run(&other(from, to));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert!(
            ran.stderr.contains("holds an unfinished run with other settings"),
            "{}",
            ran.stderr
        );
        assert!(ran.stderr.contains(difference), "{difference}\n{}", ran.stderr);
        assert!(
            ran.stderr.contains("hint: continue with `") && ran.stderr.contains("--force"),
            "{}",
            ran.stderr
        );
    }
    // Another model of the same shape.
    place.checkpoint(
        "other",
        &RandomCheckpoint {
            num_hidden_layers: 3,
            dtype: StoredDtype::Bf16,
            max_shard: ByteSize(150_000),
            seed: 9,
            ..RandomCheckpoint::default()
        },
    );
    let ran = place.run(&other("m", "other"));
    assert!(ran.stderr.contains("source: "), "{}", ran.stderr);
    // The unfinished run still continues from its finished layers.
    let ran = place.run(&command(WANDA));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("2 of 3 layers are finished"), "{}", ran.stderr);
}

#[test]
fn a_flag_that_is_left_out_is_a_difference() {
    let place = place();
    fs::write(place.path("ratios.json"), "[0.4, 0.5, 0.6]").expect("written");
    for more in ["--drop-layers 1", "--drop-width 0.5", "--layer-ratios ratios.json"] {
        let first = format!("{WANDA} {more}");
        let begun = (20..400).step_by(20).any(|at| {
            let _ = fs::remove_dir_all(place.path("out"));
            assert!(with_fault(&place, &first, &format!("kill:{at}")).is_none(), "{more}");
            place.path("out/unfinished.json").exists()
        });
        assert!(begun, "{more}");
        let ran = place.run(&command(WANDA));
        assert_eq!(ran.code, 1, "{more}: {}", ran.stderr);
        assert!(ran.stderr.contains(" there, none now"), "{more}: {}", ran.stderr);
        let ran = place.run(&command(&first));
        assert_eq!(ran.code, 0, "{more}: {}", ran.stderr);
    }
}

#[test]
fn another_arithmetic_is_refused_with_the_flag_that_is_common() {
    let place = place();
    let in_f32 = format!("{WANDA} --dtype f32");
    interrupted(&place, &command(&in_f32));
    let ran = place.run(&command(WANDA));
    if !ran.stderr.contains("arithmetic: ") {
        eprintln!("skipped: this CPU has no bf16 products, all is f32 here");
        return;
    }
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("was begun with another arithmetic"), "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: add --dtype f32"), "{}", ran.stderr);
    let ran = place.run(&command(&in_f32));
    assert_eq!(ran.code, 0, "{}", ran.stderr);

    fs::remove_dir_all(place.path("out")).expect("removed");
    interrupted(&place, &command(WANDA));
    let ran = place.run(&command(&in_f32));
    assert!(ran.stderr.contains("hint: add --dtype bf16 --use-cpu"), "{}", ran.stderr);
    // Another CPU's, as far as this one can tell.
    let state = place.path("out/unfinished.json");
    let text = fs::read_to_string(&state).expect("a state");
    edit_sealed(&state, |text| {
        let other = text.replace("bf16 by bf16 products", "bf16 by other products");
        assert_ne!(text, other);
        other
    });
    let ran = place.run(&command(&in_f32));
    assert!(ran.stderr.contains("--force --dtype f32"), "{}", ran.stderr);
    fs::write(&state, text).expect("a file of ours");
    let in_bf16 = format!("{WANDA} --dtype bf16");
    let ran = place.run(&command(&in_bf16));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn force_starts_over_only_with_other_settings() {
    let place = place();
    interrupted(&place, &command(WANDA));
    let forced = format!("{WANDA} --force");
    let ran = place.run(&command(&forced));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("2 of 3 layers are finished"), "{}", ran.stderr);

    fs::remove_dir_all(place.path("out")).expect("removed");
    interrupted(&place, &command(WANDA));
    let ran = place.run(&format!("{MAGNITUDE} --force"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!ran.stderr.contains("continuing"), "{}", ran.stderr);
    assert!(
        !place.path("out/unfinished.json").exists()
            && !place.path("out/masks.safetensors.partial").exists()
    );
    assert_eq!(place.manifest("out").pruning.unwrap().method, "magnitude");
}

#[test]
fn resume_needs_something_to_go_on_with() {
    let place = place();
    let resume = format!("{WANDA} --resume");
    let ran = place.run(&command(&resume));
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("--resume: there is no unfinished run in `out`"), "{}", ran.stderr);
    assert!(!place.path("out").exists(), "nothing was made");
    interrupted(&place, &command(WANDA));
    let ran = place.run(&command(&resume));
    assert_eq!(ran.code, 0, "{}", ran.stderr);

    let ran =
        place.run("--model m --sparsity-ratio 0.5 --eval none --resume --prune-method magnitude");
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: add --save DIR"), "{}", ran.stderr);
}

#[test]
fn evaluating_into_an_unfinished_run_is_refused() {
    let place = place();
    interrupted(&place, &command(WANDA));
    let ran = place.run("eval --model m --eval-dataset test.txt --seqlen 64 --save out");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("`out` holds an unfinished run"), "{}", ran.stderr);
}
