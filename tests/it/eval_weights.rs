//! `prune eval --weights`: the perplexity with matrices in memory without their zeros, and its memory.

use prune::linalg::StoredDtype;
use prune::run::{Manifest, Plan};
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::support::{Place, shared};

const HALF: &str = "--sparsity-ratio 0.5";
const TEXT: &str = "--eval-dataset test.txt --seqlen 64 --use-cpu";

/// The model of the shape as `m`, and half-empty as `out/model`.
fn pruned(shape: &RandomCheckpoint, sparsity: &str) -> Place {
    let place = Place::with(shape);
    let line = format!("--model m --prune-method magnitude {sparsity} --use-cpu --eval none");
    let ran = place.run(&format!("{line} --save out --quiet"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    place
}

/// The record of an evaluation, and its messages.
fn eval(place: &Place, line: &str) -> (Manifest, String) {
    let ran = place.run(&format!("eval {line} --json"));
    assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
    (serde_json::from_str(&ran.stdout).expect("a record"), ran.stderr)
}

fn perplexity(of: &Manifest) -> f64 {
    of.perplexity.dense.as_ref().expect("the model as it is").perplexity
}

#[test]
fn zeros_that_are_not_stored_change_no_bit_of_the_perplexity() {
    for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
        let shape = RandomCheckpoint { dtype, ..RandomCheckpoint::default() };
        for sparsity in [HALF, "--sparsity-ratio 0.5 --sparsity-type 2:4"] {
            let place = pruned(&shape, sparsity);
            let of = |model: &str, more: &str| eval(&place, &format!("{model} {TEXT} {more}"));
            let (dense, _) = of("out/model", "--weights dense");
            let (compact, told) = of("out/model", "--weights compact --threads 1");
            assert_eq!(perplexity(&dense), perplexity(&compact), "{dtype:?} {sparsity}");
            assert!(told.contains("weights      compact: layers take "), "{told}");
            assert_eq!(compact.settings["weights"], "compact");
            let (_, told) = of("m", "--weights compact");
            assert!(told.contains("weights      dense: 0 % of the weights are 0"), "{told}");
        }
    }
}

#[test]
fn eight_bit_weights_cost_half_a_percent_of_perplexity_at_most() {
    let Some(shared) = shared() else { return };
    for (model, text) in [
        ("stories260k", "stories/stories.test.txt"),
        ("wikitext-llama-8m", "wikitext2/wiki.test.raw"),
    ] {
        let place = Place::empty();
        let folder = shared.join("models").join(model);
        let line = format!("--prune-method magnitude {HALF} --use-cpu --eval none");
        let ran = place.run(&format!("--model {} {line} --save out --quiet", folder.display()));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let text = shared.join("data").join(text).display().to_string();
        let text = format!("--eval-dataset {text} --eval-windows 16 --seqlen 256 --use-cpu");
        let of = |more: &str| perplexity(&eval(&place, &format!("out/model {text} {more}")).0);
        let stored = of("--weights dense");
        let coded = ["f32", "int8"].map(|by| of(&format!("--weights int8 --activations {by}")));
        assert!(coded[0] != stored && coded[0] != coded[1], "{stored} {coded:?}");
        for coded in coded {
            let apart = coded / stored - 1.0;
            assert!(apart.abs() < 0.005, "{model}: {stored} {coded}");
        }
    }
}

/// A bf16 model whose layers are most of its memory.
fn with_large_layers() -> RandomCheckpoint {
    RandomCheckpoint {
        dtype: StoredDtype::Bf16,
        hidden_size: 1024,
        intermediate_size: 2816,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        ..RandomCheckpoint::default()
    }
}

#[test]
fn the_memory_of_compact_layers_is_as_planned_and_less_than_of_dense_layers() {
    let place = pruned(&with_large_layers(), "--sparsity-ratio 0.7");
    // With a single window, a layer may have passed before the next one is read: then only one is in memory.
    let of = |more: &str| eval(&place, &format!("out/model {TEXT} --eval-windows 8 {more}")).0;
    let peak = |of: &Manifest| of.plan.as_ref().and_then(Plan::cpu).expect("a plan").peak.0 as f64;
    let dense = peak(&of("--weights dense"));
    for form in ["compact", "int8"] {
        let of = of(&format!("--weights {form}"));
        assert!(peak(&of) < 0.9 * dense, "{form}: {} of {dense}", peak(&of));
        if let Some(measured) = of.peak_anonymous {
            let ratio = measured.0 as f64 / peak(&of);
            assert!((0.75..=1.0).contains(&ratio), "{form}: {ratio} of the plan");
        }
    }
}

#[test]
fn layers_become_compact_where_no_dense_layer_fits() {
    let place = pruned(&with_large_layers(), "--sparsity-ratio 0.9");
    let line = format!("out/model {TEXT} --eval-windows 1");
    let (free, told) = eval(&place, &line);
    assert!(!told.contains("weights  "), "{told}");
    let (tight, told) = eval(&place, &format!("{line} --max-memory 30MiB"));
    assert!(told.contains("weights      compact: layers take "), "{told}");
    assert_eq!(perplexity(&free), perplexity(&tight));
    let (dense, _) = eval(&place, &format!("{line} --max-memory 30MiB --weights dense"));
    let from = |of: &Manifest| of.plan.as_ref().expect("a plan").memory_settings.weights;
    assert!(from(&dense) != from(&tight), "a dense layer does not fit");
}

#[test]
fn gpus_have_dense_matrices_only() {
    let place = pruned(&RandomCheckpoint::default(), HALF);
    let line = r#"eval out/model --eval-dataset test.txt --seqlen 64 --simulate {"gpus":["2GiB"]}"#;
    let ran = place.run(&format!("{line} --weights compact"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("--weights: GPUs compute with dense matrices only"),
        "{}",
        ran.stderr
    );
}

#[test]
fn matrices_that_stay_on_the_disk_are_dense() {
    let place = pruned(&RandomCheckpoint::default(), HALF);
    let line = format!(r#"out/model {TEXT} --memory-settings {{"weights":"matrix"}}"#);
    let by_matrix = perplexity(&eval(&place, &line).0);
    assert_eq!(by_matrix, perplexity(&eval(&place, &format!("out/model {TEXT}")).0));
    let ran = place.run(&format!("eval {line} --weights compact"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("--weights: matrices that stay on the disk"), "{}", ran.stderr);
}

#[test]
fn the_codes_of_a_packed_folder_are_used_as_they_are() {
    let place =
        pruned(&RandomCheckpoint { dtype: StoredDtype::Bf16, ..RandomCheckpoint::default() }, HALF);
    let ran = place.run("pack out/model --values int8 --save packed --quiet");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let write = |more: &str| {
        let ran = place
            .run(&format!("generate packed --prompt a --max-tokens 3 --use-cpu --json {more}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let report: Value = serde_json::from_str(&ran.stdout).expect("a record");
        (report["weights"].clone(), report["ids"].clone())
    };
    assert_eq!(write("").0, "int8");
    assert_eq!(write(""), write("--weights int8"));
    // The codes are the weights, so rounding them again changes nothing.
    let (forms, ids) = write("--weights dense");
    assert_eq!(forms, "dense");
    assert_eq!(ids, write("--weights int8 --activations f32").1);
}

#[test]
fn plans_of_generation_have_a_row_for_every_form() {
    let place = pruned(&with_large_layers(), HALF);
    let rows = |line: &str| -> Vec<Value> {
        let ran = place.run(&format!("plan {line} --generate --json"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        serde_json::from_str(&ran.stdout).expect("rows")
    };
    let of_folder = rows("out/model --seqlen 64");
    for (row, form) in of_folder.iter().zip(["dense", "compact", "int8"]) {
        let line =
            format!("generate out/model --prompt a --max-tokens 63 --weights {form} --use-cpu");
        let ran = place.run(&format!("{line} --json --quiet"));
        let report: Value = serde_json::from_str(&ran.stdout).expect("a record");
        let [planned, settled] =
            [&row["peak"], &report["predicted"]].map(|of| of.as_f64().unwrap());
        assert!((planned / settled - 1.0).abs() < 0.1, "{form}: {planned} {settled}");
        assert_eq!(row["form"], form);
    }
    // 7B, half empty: 1.125 and 0.641 of 2 bytes per weight, and the head.
    let of_shape = rows("--shape llama-2-7b --sparsity-ratio 0.5");
    let gb = |row: &Value| row["weights"].as_f64().unwrap() / 1e9;
    for (row, expected) in of_shape.iter().zip([13.2, 7.55, 4.43]) {
        assert!((gb(row) / expected - 1.0).abs() < 0.01, "{} of {expected}", gb(row));
    }
    // The limit counts, as it does for text: 12.55 GiB dense, 7.2 compact, and keys and values of 1 GiB.
    let of_limit = rows("--shape llama-2-7b --sparsity-ratio 0.5 --max-memory cpu=10GiB");
    let streamed: Vec<_> = of_limit.iter().map(|row| row["streamed"].as_u64()).collect();
    assert!(streamed[0] > Some(0) && streamed[1..] == [Some(0); 2], "{streamed:?}");
    let told = place.run("plan --generate").stdout;
    assert!(told.starts_with("| model | --weights | zeros |"), "{told}");
}
