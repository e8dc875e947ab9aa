//! `--semantics peft` on made-up adapters: its record, what it refuses, and runs that were cut off.

use std::fs;
use std::path::Path;

use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use super::{combined_adapter, merge, pair, write_adapter};
use crate::support::{Place, ran, refuses_command};

const Q: &str = "model.layers.0.self_attn.q_proj";
const UP: &str = "model.layers.1.mlp.up_proj";

/// A model `m` of two layers, and its adapters `a` and `b` of rank 2 and `c` of rank 3.
fn place() -> Place {
    let place = Place::new();
    let intermediate = RandomCheckpoint::default().intermediate_size;
    for (name, rank) in [("a", 2), ("b", 2), ("c", 3)] {
        let mut tensors = pair(Q, rank, 64, 64);
        tensors.extend(pair(UP, rank, intermediate, 64));
        let config = json!({"peft_type": "LORA", "r": rank, "lora_alpha": 4});
        write_adapter(&place, name, &config, &tensors);
    }
    place
}

const DARE: &str = "--base m --model m+a --model m+b --semantics peft --method dare_ties --density 0.5 --weight 0.7,0.4";

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON")
}

#[test]
fn the_record_names_semantics_seed_and_the_adapter() {
    let place = place();
    merge(&place, &format!("{DARE} --majority-sign frequency --seed 9 --save out"));
    let record = json_of(&place.path("out/run.json"))["merge"].clone();
    let published = json_of(&place.path("out/model/merging.json"));
    for (report, folder) in [(&record, "out/adapter"), (&published, "adapter")] {
        assert_eq!(report["semantics"], "peft");
        assert_eq!(report["method"], "dare_ties");
        assert_eq!(report["seed"], 9);
        let adapter = &report["combined_adapter"];
        assert_eq!(adapter["folder"], folder);
        assert_eq!(adapter["majority_sign"], "frequency");
        let files = adapter["files"].as_array().expect("files");
        let names: Vec<&Value> = files.iter().map(|file| &file["file"]).collect();
        assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    }
    let names = place.names("out/adapter");
    assert_eq!(names.len(), 2, "{names:?}");
    let config = json_of(&place.path("out/adapter/adapter_config.json"));
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(2), &json!(2)));
    assert_eq!(config["target_modules"], json!([Q, UP]));
    // Folding the combined adapter gives the merged model.
    merge(&place, "--base m --model m+out/adapter --method linear --save folded");
    let weights = |run: &str| fs::read(place.path(run).join("model/model.safetensors"));
    assert_eq!(weights("folded").expect("a file"), weights("out").expect("a file"));
}

#[test]
fn threads_and_pieces_change_no_bit_and_seeds_do() {
    let place = place();
    merge(&place, &format!("{DARE} --save one --threads 1"));
    let weights =
        |run: &str| fs::read(place.path(run).join("model/model.safetensors")).expect("a file");
    for (run, flags) in
        [("two", "--threads 2 --piece-elements 1"), ("three", "--threads 1 --piece-elements 1000")]
    {
        merge(&place, &format!("{DARE} --save {run} {flags}"));
        assert!(weights(run) == weights("one"), "{run}");
    }
    merge(&place, &format!("{DARE} --save other --seed 1"));
    assert_ne!(combined_adapter(&place, "other"), combined_adapter(&place, "one"));
}

/// The process is killed at every third file operation, and the same command continues.
#[test]
fn a_merge_that_was_killed_continues_with_the_same_adapter() {
    let place = place();
    let line = format!("merge {DARE} --save out");
    merge(&place, &format!("{DARE} --save whole"));
    let files = [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "model/model.safetensors",
    ];
    let read = |run: &str| files.map(|file| fs::read(place.path(run).join(file)).expect("a file"));
    let expected = read("whole");
    let mut killed = 0;
    for at in (1..).step_by(3) {
        let mut command = place.command(&line);
        let output = command.env("PRUNE_FAULT", format!("kill:{at}")).output();
        if output.expect("the binary").status.code() == Some(0) {
            break;
        }
        killed += 1;
        let again = ran(&mut place.command(&line));
        // A kill in the last step leaves a run that is finished.
        assert!(
            again.code == 0 || again.stderr.contains("holds a finished run"),
            "{at}: {}",
            again.stderr
        );
        assert!(read("out") == expected, "killed at operation {at}");
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    assert!(killed > 5, "{killed} kills");
}

#[test]
fn an_unfinished_merge_is_not_continued_with_another_election() {
    let place = place();
    let line = format!("merge {DARE} --save out");
    let mut command = place.command(&line);
    let killed = command.env("PRUNE_FAULT", "kill:25").output();
    assert_ne!(killed.expect("the binary").status.code(), Some(0));
    let other = place.run(&format!("{line} --majority-sign frequency"));
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(other.stderr.contains("majority-sign: total there, frequency now"), "{}", other.stderr);
}

#[test]
fn methods_belong_to_their_semantics() {
    let place = place();
    let models = "--base m --model m+a --model m+b --save out";
    for (flags, first, hint) in [
        (
            "--method cat",
            "error: the method `cat` combines the factors of adapters, as peft does",
            "hint: add --semantics peft",
        ),
        (
            "--method magnitude_prune --density 0.5 --semantics paper",
            "error: the method `magnitude_prune` combines the factors of adapters, as peft does",
            "hint: add --semantics peft",
        ),
        (
            "--method slerp --t 0.5 --semantics peft",
            "error: peft has no combination called `slerp`",
            "hint: leave --semantics peft out, or choose one of these methods",
        ),
        (
            "--method ties_svd --semantics peft",
            "error: the method `ties_svd` does not exist in this version",
            "",
        ),
        (
            "--method linear --semantics peft --density 0.5",
            "error: the method `linear` has no parameter `density`",
            "hint: leave --density out",
        ),
        (
            "--method ties --majority-sign total",
            "error: --majority-sign has a meaning for --semantics peft only",
            "",
        ),
        (
            "--method linear --semantics peft --majority-sign total",
            "error: --majority-sign has no meaning for the method `linear` with --semantics peft",
            "hint: leave --majority-sign out",
        ),
        (
            "--method ties --semantics peft --trim-scope model",
            "error: --trim-scope has no meaning for the method `ties` with --semantics peft",
            "hint: leave --trim-scope out",
        ),
    ] {
        refuses_command(&place, &format!("merge {models} {flags}"), 2, first, hint);
    }
}

#[test]
fn every_model_is_the_base_with_an_adapter() {
    let place = place();
    place.checkpoint("other", &RandomCheckpoint::default());
    let hint = "hint: write m+ADAPTER for every model, and m for the base";
    for (models, code, first, hint) in [
        (
            "--base m --model m+a --model other",
            2,
            "error: `other` has no adapter, and --semantics peft combines adapters",
            hint,
        ),
        (
            "--base m --model m+a --model m",
            2,
            "error: `m` has no adapter, and --semantics peft combines adapters",
            hint,
        ),
        (
            "--base m --model m+a --model other+b",
            2,
            "error: `other+b` is no adapter of the base `m`",
            hint,
        ),
        ("--base m+c --model m+a --model m+b", 2, "error: the base `m+c` has an adapter", hint),
        (
            "--model m+a --model m+b",
            2,
            "error: the method `linear` needs a base model",
            "hint: add --base MODEL",
        ),
        (
            "--base m --model m+a --model m+c",
            1,
            "error: the adapters' factors of `model.layers.0.self_attn.q_proj.weight` differ in rank or shape",
            "hint: combine adapters of unequal ranks by `cat`, or merge them as models: --semantics mergekit",
        ),
    ] {
        let line = format!("merge {models} --method linear --semantics peft --save out");
        refuses_command(&place, &line, code, first, hint);
    }
    // Another spelling of the base's folder is the same base.
    merge(&place, "--base m --model ./m+a --model m+c --method cat --semantics peft --save out");
    let config = json_of(&place.path("out/adapter/adapter_config.json"));
    assert_eq!(config["r"], 5);
}

#[test]
fn a_recipe_with_slices_is_refused_with_its_line() {
    let place = place();
    let source = |adapter: &str| {
        format!("      - {{model: m+{adapter}, layer_range: [0, 2], parameters: {{weight: 1}}}}\n")
    };
    let recipe = format!(
        "merge_method: cat\nbase_model: m\nslices:\n  - sources:\n{}{}      - {{model: m, layer_range: [0, 2]}}\n",
        source("a"),
        source("b")
    );
    fs::write(place.path("cat.yml"), recipe).expect("a new file");
    refuses_command(
        &place,
        "merge cat.yml --semantics peft --save out",
        1,
        "error: `cat.yml` line 4: adapters are combined whole: `slices` have no meaning for --semantics peft",
        "hint: list the models under `models`",
    );
    refuses_command(
        &place,
        "merge cat.yml --save out",
        2,
        "error: the method `cat` combines the factors of adapters, as peft does",
        "hint: add --semantics peft",
    );
}

#[test]
fn an_adapter_that_is_there_is_replaced_by_force_alone() {
    let place = place();
    fs::create_dir_all(place.path("out/adapter")).expect("a new folder");
    fs::write(place.path("out/adapter/notes.txt"), "mine").expect("a new file");
    refuses_command(
        &place,
        &format!("merge {DARE} --save out"),
        1,
        "error: `out/adapter` is not an empty folder, and the combined adapter belongs there",
        "hint: choose another --save folder, or replace the adapter with --force",
    );
    merge(&place, &format!("{DARE} --save out --force"));
    assert_eq!(place.names("out/adapter").len(), 3, "other files stay");
    // An adapter that is read is never written to.
    let line = "merge --base m --model m+a --model m+out/adapter --method cat --semantics peft --save out --force";
    refuses_command(
        &place,
        line,
        1,
        "error: the output folder `out/adapter` is the model's folder",
        "hint: choose another folder with --save or --save-model",
    );
    refuses_command(
        &place,
        &format!("merge {DARE} --save-model other"),
        2,
        "error: --semantics peft needs a run folder for the combined adapter",
        "hint: add --save DIR; the adapter becomes DIR/adapter",
    );
    refuses_command(
        &place,
        &format!("merge {DARE} --save other --save-model other"),
        2,
        "error: the model's folder and that of the combined adapter, `other/adapter`, lie in one another",
        "hint: choose another --save-model folder",
    );
}
