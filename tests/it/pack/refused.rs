//! Folders that `pack` and `unpack` refuse, each with a command that works.

use std::fs;

use prune::synthetic::RandomCheckpoint;

use super::{change, keep_half, pack, unpack};
use crate::resume::{assert_same, outcome};
use crate::support::{Place, edit_json, refuses, refuses_command};

#[test]
fn what_cannot_be_packed_or_unpacked_is_refused_with_a_command() {
    let place = Place::new();
    let ran = refuses_command(
        &place,
        "pack m --save p",
        1,
        "error: packing makes no matrix of `m` smaller",
        "hint: prune it first: prune --model m --sparsity-ratio 0.5 --save OUT, then: prune pack OUT/model --save OUT-packed",
    );
    let numbers = "of the 92160 weights of its decoder linears are zero (0.00 %)";
    assert!(ran.stderr.contains(numbers), "{}", ran.stderr);
    keep_half(&place.path("m"));
    refuses_command(
        &place,
        "unpack m --save back",
        1,
        "error: `m` is not packed",
        "hint: this packs it: prune pack m --save OUT",
    );
    pack(&place, "m --save p");
    refuses_command(
        &place,
        "pack p --save again",
        1,
        "error: `p` is packed already",
        "hint: restore its dense checkpoint: prune unpack p --save OUT",
    );
    let hint = "hint: restore the dense checkpoint, and prune that: prune unpack p --save OUT";
    for more in ["", "--drop-layers 1 --sparsity-ratio -", "--prune-method magnitude"] {
        let line = format!("--model p {more}");
        refuses(&place, &line, 1, "error: `p` is packed, and its weights cannot be pruned", hint);
    }
    let ran = place.run("quantize --to nf4 m --save q");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    refuses_command(
        &place,
        "pack q --save again",
        1,
        "error: `q` is quantised already",
        "hint: name the unquantised checkpoint: prune pack DENSE --save OUT",
    );
    // An output folder with a model in it, until --force; never the source's own folder.
    let hint = "hint: choose another --save folder, or replace its model files with --force";
    for line in ["pack m --save p", "quantize m --to nf4 --save p", "unpack p --save q"] {
        let ran = place.run(line);
        assert!(ran.code == 1 && ran.stderr.contains(hint), "{line}: {}", ran.stderr);
    }
    assert_eq!(place.run("pack m --save p --force").code, 0);
    assert_eq!(place.run("pack m --save m --force").code, 1);
    assert_eq!(place.run("unpack p --save p --force").code, 1);
    assert_eq!(place.run("unpack p --save q").code, 1);
    unpack(&place, "p --save q --force");
    assert_same(&outcome(&place.path("q")), &outcome(&place.path("m")), "with --force");
}

#[test]
fn changed_folders_are_not_restored_under_a_final_name() {
    let place = Place::new();
    keep_half(&place.path("m"));
    let expected = outcome(&place.path("m"));
    pack(&place, "m --save p");
    let good = outcome(&place.path("p"));
    // A stored weight.
    let path = place.path("p/model.safetensors");
    let mut bytes = fs::read(&path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).expect("written");
    let ran = place.run("unpack p --save back");
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    let names = place.names("back");
    assert!(!names.contains("model.safetensors") && !names.contains("config.json"), "{names:?}");
    // Repaired, the same command works.
    fs::write(&path, &good["model.safetensors"]).expect("written");
    let ran = place.run("unpack p --save back");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_same(&outcome(&place.path("back")), &expected, "after repair");
    // A file beside the weights, and a text of the record.
    fs::write(place.path("p/tokenizer.json"), "{}").expect("written");
    let ran = place.run("unpack p --save other");
    let message = "error: `tokenizer.json` would not be the file that was packed";
    assert!(ran.code == 1 && ran.stderr.contains(message), "{}", ran.stderr);
    fs::write(place.path("p/tokenizer.json"), &good["tokenizer.json"]).expect("written");
    edit_json(&place.path("p/packed.json"), |record| {
        record["texts"]["config.json"] = "{}".into();
    });
    let ran = place.run("unpack p --save other");
    assert!(ran.stderr.contains("error: `config.json` would not be"), "{}", ran.stderr);
    assert!(!place.path("other").exists());
}

#[test]
fn another_version_of_the_record_is_refused() {
    let place = Place::new();
    keep_half(&place.path("m"));
    pack(&place, "m --save p");
    let good = fs::read(place.path("p/packed.json")).expect("a file");
    for (key, value, why) in [
        ("format", serde_json::json!(2), "its format is 2, this program reads 1"),
        ("later", serde_json::json!(1), "unknown field `later`"),
    ] {
        fs::write(place.path("p/packed.json"), &good).expect("written");
        edit_json(&place.path("p/packed.json"), |record| record[key] = value.clone());
        for line in ["inspect p", "unpack p --save back"] {
            let ran = place.run(line);
            assert_eq!(ran.code, 1);
            assert!(ran.stderr.contains(why), "{line}: {}", ran.stderr);
            assert!(ran.stderr.contains("packed.json"), "{}", ran.stderr);
        }
    }
}

#[test]
fn files_that_are_no_part_of_a_model_are_named() {
    let place = Place::with(&RandomCheckpoint::default());
    keep_half(&place.path("m"));
    fs::create_dir(place.path("m/original")).expect("a new folder");
    fs::write(place.path("m/consolidated.safetensors"), "x").expect("a new file");
    fs::write(place.path("m/SHA256SUMS"), "0  x\n").expect("a new file");
    let ran = place.run("pack m --save p");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stdout.contains("left out    consolidated.safetensors, original/"),
        "{}",
        ran.stdout
    );
    unpack(&place, "p --save back");
    let sums = fs::read(place.path("back/SHA256SUMS")).expect("it is restored");
    assert_eq!(sums, b"0  x\n");
    let mut expected = outcome(&place.path("m"));
    expected.remove("consolidated.safetensors");
    assert_same(&outcome(&place.path("back")), &expected, "without them");
}

#[test]
fn too_little_memory_is_refused_before_anything_is_written() {
    let place = Place::new();
    keep_half(&place.path("m"));
    let flag_of = |line: &str, name: &str| {
        let ran = place.run(&format!("{line} --max-memory 4MiB"));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        let message = format!("this {name} does not fit into 4.00 MiB");
        assert!(ran.stderr.contains(&message), "{}", ran.stderr);
        let hint = ran.stderr.lines().find(|line| line.starts_with("hint: "));
        hint.and_then(|hint| hint.split("use ").nth(1)).expect("a flag to type").to_string()
    };
    for (line, name, out) in
        [("pack m --save p", "packing", "p"), ("unpack p --save back", "unpacking", "back")]
    {
        let flag = flag_of(line, name);
        assert!(!place.path(out).exists());
        let ran = place.run(&format!("{line} {flag}"));
        assert_eq!(ran.code, 0, "{flag}\n{}", ran.stderr);
        assert!(ran.stdout.contains("peak memory"), "{}", ran.stdout);
    }
}

#[test]
fn a_matrix_that_changes_while_it_is_packed_is_an_error() {
    // The counts are of an earlier process, and the weights of a later one: only the fingerprint sees them, if at all.
    let place = Place::new();
    keep_half(&place.path("m"));
    let is_counted = |at: usize| {
        assert!(place.with_fault("pack m --save p", &format!("kill:{at}")).is_none());
        let state = fs::read_to_string(place.path("p/unfinished.json")).unwrap_or_default();
        state.contains("scanned")
    };
    assert!((5..30).any(is_counted));
    change(&place.path("m"), |name, _, _, bytes| {
        if name.contains("layers.1.mlp.up_proj") {
            // Beyond the bytes of the fingerprint.
            let at = bytes.len() / 4;
            bytes[at..at + 400].fill(7);
        }
    });
    let ran = place.run("pack m --save p");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("changed while it was packed"), "{}", ran.stderr);
}
