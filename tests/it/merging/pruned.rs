//! Merges of pruned models: zeros that every model has stay with `--keep-zeros`, under an adapter, too.

use std::path::Path;

use serde_json::json;

use super::tensors;
use crate::adapters::{self, Tensor};
use crate::support::Place;

const MATRICES: [&str; 2] = ["self_attn.q_proj", "mlp.down_proj"];

/// A pruned model `p/model` and an adapter `a` of two of its matrices in every layer.
fn place() -> Place {
    let place = Place::new();
    let ran =
        place.run("--model m --prune-method magnitude --sparsity-ratio 0.6 --eval none --save p");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let factors: Vec<(String, Tensor)> = (0..2)
        .flat_map(|layer| {
            [(MATRICES[0], 64, 64), (MATRICES[1], 64, 176)].map(|(name, rows, columns)| {
                adapters::pair(&format!("model.layers.{layer}.{name}"), 2, rows, columns)
            })
        })
        .flatten()
        .collect();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    adapters::write_adapter(&place, "a", &config, &factors);
    place
}

fn weights(folder: &Path) -> std::collections::BTreeMap<String, (Vec<usize>, Vec<f64>)> {
    tensors(&folder.join("model.safetensors"))
}

#[test]
fn an_adapter_on_a_pruned_base_keeps_its_zeros_where_asked() {
    let place = place();
    let base = weights(&place.path("p/model"));
    let dense = |line: &str| {
        let ran = place.run(&format!("merge {line} --force --save dense"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        (weights(&place.path("dense/model")), ran.stderr)
    };
    for line in [
        "--model p/model+a --method linear",
        "--base p/model --model p/model+a --method task_arithmetic",
        "--base p/model --model p/model+a --method linear --semantics peft",
    ] {
        let (filled, warned) = dense(line);
        assert!(warned.contains("--keep-zeros keeps them"), "{line}\n{warned}");
        let ran = place.run(&format!("merge {line} --keep-zeros --force --save out"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(!ran.stderr.contains("fills its zeros"), "{}", ran.stderr);
        let kept = weights(&place.path("out/model"));
        let mut changed = 0;
        for (name, (_, values)) in &kept {
            let (base, filled) = (&base[name].1, &filled[name].1);
            for ((found, base), filled) in values.iter().zip(base).zip(filled) {
                // The fold, masked.
                let expected = if *base == 0.0 { 0.0 } else { *filled };
                assert_eq!(*found, expected, "{line}: {name}");
                changed += usize::from(found != base);
            }
        }
        assert!(changed > 1000, "{line}: {changed} weights changed");
        let zeros =
            |of: &(Vec<usize>, Vec<f64>)| of.1.iter().filter(|value| **value == 0.0).count();
        for name in MATRICES {
            let name = format!("model.layers.1.{name}.weight");
            assert!(zeros(&filled[&name]) < 10, "{line}: {name} is filled");
            assert_eq!(zeros(&kept[&name]), zeros(&base[&name]), "{line}: {name}");
        }
        let manifest = place.manifest("out").merge.expect("a merge");
        let counted: u64 = manifest.tensors.iter().filter_map(|of| of.kept_zeros).sum();
        let all: usize = base.values().map(zeros).sum();
        assert_eq!(counted, all as u64, "{line}");
    }
}

#[test]
fn only_zeros_of_all_models_are_kept() {
    let place = place();
    let ran = place.run(
        "merge --base p/model --model m --model p/model+a --method task_arithmetic --keep-zeros --save out",
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let (kept, dense) = (weights(&place.path("out/model")), weights(&place.path("m")));
    let zeros = kept.iter().filter(|(name, (_, values))| {
        let dense = &dense[*name].1;
        values.iter().zip(dense).any(|(kept, dense)| *kept == 0.0 && *dense != 0.0)
    });
    assert_eq!(zeros.count(), 0, "the dense model has weights there");
}

#[test]
fn a_dense_base_gives_no_warning_and_a_saved_module_no_mask() {
    let place = Place::new();
    let mut embedding =
        weights(&place.path("m")).remove("model.embed_tokens.weight").expect("there");
    embedding.1.iter_mut().for_each(|value| *value += 1.0);
    let tensor = adapters::tensor(&embedding.0, embedding.1.iter().map(|of| *of as f32).collect());
    let mut all = adapters::pair("model.layers.0.self_attn.q_proj", 2, 64, 64);
    all.push(("base_model.model.model.embed_tokens.weight".to_string(), tensor));
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4});
    adapters::write_adapter(&place, "a", &config, &all);
    let ran = place.run("merge --model m+a --method linear --keep-zeros --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!ran.stderr.contains("pruned"), "{}", ran.stderr);
    let found = weights(&place.path("out/model"));
    let found = &found["model.embed_tokens.weight"].1;
    assert!(found.iter().zip(&embedding.1).all(|(a, b)| (a - b).abs() < 1e-6));
}
