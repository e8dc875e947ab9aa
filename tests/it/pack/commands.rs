//! Commands that read models: a packed folder gives the results of its dense folder.

use std::fs;

use prune::linalg::StoredDtype;
use prune::run::Inspection;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use super::{dense_tensors, keep, keep_half, pack};
use crate::resume::outcome;
use crate::support::{Place, edit_json};

/// A pruned model as `m`, and packed as `p`.
fn place(dtype: StoredDtype) -> Place {
    let place = Place::with(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() });
    keep_half(&place.path("m"));
    pack(&place, "m --save p");
    place
}

/// The output of a command on `m` and on `p`. `{}` of the line is the model.
fn both(place: &Place, line: &str) -> [String; 2] {
    ["m", "p"].map(|model| {
        let line = line.replace("{}", model);
        let ran = place.run(&line);
        assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
        ran.stdout
    })
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("a record")
}

#[test]
fn evaluation_and_generation_are_those_of_the_dense_folder() {
    for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
        let place = place(dtype);
        let line = "eval {} --eval-dataset test.txt --seqlen 64 --eval-windows 5 --json";
        let [m, p] = both(&place, line).map(|text| json(&text));
        assert_eq!(m["perplexity"]["dense"], p["perplexity"]["dense"]);
        assert!(m["perplexity"]["dense"]["perplexity"].is_f64());
        assert_eq!(m["model"]["parameters"], p["model"]["parameters"]);
        let [m, p] = both(&place, "generate {} --prompt \"a b\" --max-tokens 8 --ignore-eos");
        assert_eq!(m, p);
        let [m, p] = both(&place, "plan --model {} --json").map(|text| json(&text));
        assert_eq!(m["phases"], p["phases"]);
    }
}

#[test]
fn weights_that_stay_on_the_disk_are_read_there() {
    let place = place(StoredDtype::Bf16);
    let line = "generate {} --prompt \"a b\" --max-tokens 4 --ignore-eos --max-memory 40MiB";
    let [m, p] = both(&place, line);
    assert_eq!(m, p);
}

#[test]
fn inspection_tells_what_is_packed() {
    let place = place(StoredDtype::Bf16);
    let [m, p] = both(&place, "inspect {} --json")
        .map(|text| serde_json::from_str::<Inspection>(&text).expect("a record"));
    assert_eq!((&m.layers, &m.other, &m.patterns), (&p.layers, &p.other, &p.patterns));
    assert_eq!((m.parameters, m.sparsity), (p.parameters, p.sparsity));
    let packed = p.packed.expect("it is packed");
    assert_eq!((packed.dense_bytes, packed.matrices, m.packed), (m.bytes, 14, None));
    assert!(p.bytes < m.bytes);
    let ran = place.run("inspect p --against m");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let shown = "packed      14 matrices, sparse-bitmask, exact values; ";
    assert!(ran.stdout.contains(shown), "{}", ran.stdout);
    assert_eq!(place.run("inspect m --against p").code, 0);
    // Rounded weights are no pruned copy, and are called lossy.
    pack(&place, "m --save r --values int8");
    let ran = place.run("inspect r --against m");
    assert_eq!(ran.code, 1);
    assert!(ran.stdout.contains("prune-bitmask, int8 values, lossy; "), "{}", ran.stdout);
    assert!(ran.stderr.contains("rounded to 8 bits"), "{}", ran.stderr);
}

#[test]
fn merges_and_quantisations_are_those_of_the_dense_folder() {
    let place = place(StoredDtype::Bf16);
    place.checkpoint(
        "other",
        &RandomCheckpoint { dtype: StoredDtype::Bf16, seed: 5, ..RandomCheckpoint::default() },
    );
    both(&place, "merge --model {} --model other --method linear --save merged-{}");
    let merged = ["m", "p"].map(|model| place.path(&format!("merged-{model}/model")));
    let [m, p] = merged.each_ref().map(|folder| dense_tensors(folder));
    assert!(m == p && !m.is_empty());
    let [m, p] = merged.map(|folder| super::json_of(&folder.join("config.json")));
    assert_eq!(m, p);
    both(&place, "quantize --to nf4-double {} --save four-{}");
    let [m, p] = ["m", "p"].map(|model| outcome(&place.path(&format!("four-{model}"))));
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(m[name] == p[name], "{name}");
    }
    let names = |files: &std::collections::BTreeMap<String, Vec<u8>>| -> Vec<String> {
        files.keys().cloned().collect()
    };
    assert_eq!(names(&m), names(&p));
}

#[test]
fn recoveries_are_those_of_the_dense_folder() {
    let place = place(StoredDtype::F32);
    place.checkpoint("teacher", &RandomCheckpoint { seed: 9, ..RandomCheckpoint::default() });
    let texts = "--dataset train.txt --seqlen 64 --steps 2 --eval none";
    for how in ["full", "lora --rank 4"] {
        both(&place, &format!("recover --model {{}} {texts} --how {how} --save out-{{}} --force"));
        let folders = ["m", "p"].map(|model| place.path(&format!("out-{model}/model")));
        let [m, p] = folders.each_ref().map(|folder| dense_tensors(folder));
        assert!(m == p && !m.is_empty(), "{how}");
        let [m, p] = folders.map(|folder| fs::read(folder.join("config.json")).expect("a file"));
        assert!(m == p, "{how}");
        assert!(!place.path("out-p/model/packed.json").exists());
    }
    // As a teacher.
    pack_teacher(&place);
    for teacher in ["teacher", "packed-teacher"] {
        let line = format!(
            "recover --model p --teacher {teacher} {texts} --how blocks --save by-{teacher}"
        );
        let ran = place.run(&line);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
    }
    let [one, two] = ["teacher", "packed-teacher"]
        .map(|teacher| dense_tensors(&place.path(&format!("by-{teacher}/model"))));
    assert!(one == two);
}

fn pack_teacher(place: &Place) {
    keep(&place.path("teacher"), 7, 8);
    pack(place, "teacher --save packed-teacher");
}

#[test]
fn a_broken_matrix_is_named_by_every_command() {
    let place = place(StoredDtype::Bf16);
    let name = "model.layers.1.self_attn.q_proj";
    let good = fs::read(place.path("p/model.safetensors")).expect("a file");
    let files = prune::checkpoint::Checkpoint::open(&place.path("p")).expect("a good checkpoint");
    let offset = |part: &str| {
        let entry = prune::checkpoint::WeightSource::entry(&files, &format!("{name}.{part}"));
        entry.expect("a part").offset as usize
    };
    let at = [offset("bitmask"), offset("row_offsets") + 8, offset("shape")];
    for (at, why) in at.into_iter().zip([
        "the mask of row 0 keeps",
        "the mask of row 0 keeps",
        "`packed.json` says [64, 64]",
    ]) {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        fs::write(place.path("p/model.safetensors"), bytes).expect("written");
        for line in [
            "inspect p",
            "unpack p --save back --force",
            "generate p --prompt a --max-tokens 1",
            "quantize --to nf4 p --save q --force",
        ] {
            let ran = place.run(line);
            assert_eq!(ran.code, 1, "{line}");
            let message = format!("the packed matrix `{name}.weight` is broken");
            assert!(ran.stderr.contains(&message), "{line}: {}", ran.stderr);
            assert!(ran.stderr.contains(why), "{line}: {}", ran.stderr);
            assert!(ran.stderr.contains("prune pack DENSE --save OUT"), "{}", ran.stderr);
        }
    }
    fs::write(place.path("p/model.safetensors"), good).expect("written");
    // A matrix that the record does not know would be read as some other tensor.
    edit_json(&place.path("p/packed.json"), |record| {
        let matrices = record["matrices"].as_object_mut().expect("an object");
        matrices.remove(&format!("{name}.weight"));
    });
    let ran = place.run("inspect p");
    assert!(ran.stderr.contains("is not the checkpoint of its `packed.json`"), "{}", ran.stderr);
}
