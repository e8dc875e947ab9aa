//! Recipes as people bring them: several in a file, keys that a method ignores, slices without layers, layers of several kinds.
//!
//! The inputs of `cases/merge` are real examples; `support::shared` finds them. Every kind has a second example here.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;

use super::tensors;
use crate::support::{Place, Ran, shared};

/// Tensors by name: shape and elements.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

/// A base `m` and two experts, of f32 and one layer each, in one file.
fn place() -> Place {
    let place = Place::empty();
    for (name, seed) in [("m", 0), ("e1", 1), ("e2", 2)] {
        let shape = RandomCheckpoint {
            num_hidden_layers: 1,
            dtype: StoredDtype::F32,
            seed,
            ..RandomCheckpoint::default()
        };
        place.checkpoint(name, &shape);
    }
    place
}

/// A place where the models have the names of `cases/merge`.
fn cases() -> Option<(Place, std::path::PathBuf)> {
    let shared = shared()?;
    if !shared.join("cases/merge").is_dir() {
        return None;
    }
    let place = Place::empty();
    for (name, target) in [
        ("base", "models/stories260k"),
        ("wiki", "models/stories260k-experts/expert-wiki"),
        ("tales", "models/stories260k-experts/expert-stories"),
        ("lora-stories-all", "models/stories260k-experts/lora-stories-all"),
        ("qwen3-moe", "models/families/qwen3-moe"),
        ("cases", "cases/merge"),
    ] {
        symlink(shared.join(target), place.path(name)).expect("a link");
    }
    Some((place, shared))
}

fn run(place: &Place, recipe: &str) -> Ran {
    fs::write(place.path("r.yml"), recipe).expect("a new file");
    place.run("merge r.yml --save out --force")
}

#[track_caller]
fn model(place: &Place, folder: &str) -> Tensors {
    tensors(&place.path(folder).join("model.safetensors"))
}

#[track_caller]
fn succeeded(ran: &Ran) {
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

/// Compares every element with mergekit's element, within 1e-6 of the largest element of its tensor.
#[track_caller]
fn assert_near(ours: &Tensors, theirs: &Tensors, case: &str) {
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{case}");
    for (name, (shape, expected)) in theirs {
        let (own, found) = &ours[name];
        assert_eq!(own, shape, "{case}, {name}");
        let largest = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
        let far = found
            .iter()
            .zip(expected)
            .filter(|(one, other)| (*one - *other).abs() > 1e-6 * largest);
        assert_eq!(far.count(), 0, "{case}, {name}");
    }
}

#[test]
fn methods_on_a_real_model_are_those_of_mergekit() {
    let Some((place, shared)) = cases() else { return };
    for case in ["nuslerp", "multislerp", "sce", "arcee-fusion", "nearswap"] {
        succeeded(&place.run(&format!("merge cases/methods/{case}.yml --save {case}")));
        let theirs = tensors(&shared.join(format!("cases/merge/methods/{case}.safetensors")));
        assert_near(&model(&place, &format!("{case}/model")), &theirs, case);
    }
}

#[test]
fn cases_of_recipes_merge_as_their_readme_says() {
    let Some((place, _)) = cases() else { return };
    let ran = place.run("merge cases/ignored-parameters/slerp-normalize.yml --save slerp");
    succeeded(&ran);
    assert!(
        ran.stderr.contains("line 8: the method `slerp` ignores `normalize`"),
        "{}",
        ran.stderr
    );
    let ran = place.run("merge cases/ignored-parameters/model-stock-weight.yml --save stock");
    succeeded(&ran);
    assert_eq!(ran.stderr.matches("ignores `weight`").count(), 3, "{}", ran.stderr);
    succeeded(&place.run("merge cases/name-key/recipe.yml --save named"));
    assert_eq!(model(&place, "named/model"), model(&place, "stock/model"));
    succeeded(&place.run("merge cases/zero-length-slice/recipe.yml --save zero"));
    let (found, wiki) = (model(&place, "zero/model"), model(&place, "wiki"));
    for name in ["model.norm.weight", "lm_head.weight"] {
        assert_eq!(found[name], wiki[name], "{name}");
    }
    assert_ne!(found["model.embed_tokens.weight"], wiki["model.embed_tokens.weight"]);
    succeeded(&place.run("merge cases/hybrid-moe/recipe.yml --save moe"));
    assert_eq!(model(&place, "moe/model"), model(&place, "qwen3-moe"));
    succeeded(&place.run("merge cases/multi-document/two.yml --save two"));
    assert!(place.path("two/merges/4kmerge-v2/model/config.json").is_file());
    assert_ne!(model(&place, "two/model"), model(&place, "two/merges/4kmerge-v2/model"));
}

const TWO: &str = "name: half
merge_method: linear
models:
- {model: m, parameters: {weight: 0.5}}
- {model: e1, parameters: {weight: 0.5}}
---
merge_method: task_arithmetic
base_model: half
models:
- {model: e2, parameters: {weight: 1}}
";

#[test]
fn a_file_of_two_recipes_is_two_merges() {
    let place = place();
    succeeded(&run(&place, TWO));
    let last = model(&place, "out/model");
    // The same merges, one at a time.
    let (first, second) = TWO.split_once("---\n").expect("two recipes");
    fs::write(place.path("one.yml"), first).expect("a new file");
    succeeded(&place.run("merge one.yml --save half"));
    fs::write(place.path("two.yml"), second.replace("half", "half/model")).expect("a new file");
    succeeded(&place.run("merge two.yml --save alone"));
    assert_eq!(model(&place, "out/merges/half/model"), model(&place, "half/model"));
    assert_eq!(last, model(&place, "alone/model"));
    // An interrupted file resumes after the merges that are finished.
    fs::remove_dir_all(place.path("out/model")).expect("it was there");
    fs::remove_file(place.path("out/run.json")).expect("it was there");
    let again = place.run("merge r.yml --save out --force").stderr;
    assert!(!again.contains("is finished already"), "{again}");
    let line = "merge r.yml --save other";
    succeeded(&place.run(line));
    fs::remove_dir_all(place.path("other/model")).expect("it was there");
    fs::remove_file(place.path("other/run.json")).expect("it was there");
    let ran = place.run(line);
    succeeded(&ran);
    assert!(ran.stderr.contains("is finished already"), "{}", ran.stderr);
    assert_eq!(model(&place, "other/model"), last);
}

#[test]
fn a_slice_without_layers_at_the_beginning_chooses_the_embedding() {
    let place = place();
    let ran = run(
        &place,
        "merge_method: passthrough
slices:
- sources: [{model: e1, layer_range: [0, 0]}]
- sources: [{model: m, layer_range: [0, 1]}]
",
    );
    succeeded(&ran);
    let (found, base, other) =
        (model(&place, "out/model"), model(&place, "m"), model(&place, "e1"));
    for (name, tensor) in &found {
        let source = if name == "model.embed_tokens.weight" { &other } else { &base };
        assert_eq!(tensor, &source[name], "{name}");
    }
}

#[test]
fn layers_of_two_kinds_merge_at_matching_depths() {
    let Some((place, _)) = cases() else { return };
    let stack = |ranges: [&str; 2]| {
        format!(
            "merge_method: passthrough\nslices:\n- sources: [{{model: qwen3-moe, layer_range: {}}}]\n- sources: [{{model: qwen3-moe, layer_range: {}}}]\n",
            ranges[0], ranges[1]
        )
    };
    // Layer 1 is dense, and it is the third layer of the stack, too.
    succeeded(&run(&place, &stack(["[0, 2]", "[1, 3]"])));
    let config = fs::read_to_string(place.path("out/model/config.json")).expect("a config");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    assert_eq!(config["mlp_only_layers"], serde_json::json!([1, 2]));
    // A dense layer is not averaged with a layer of experts.
    let ran = run(
        &place,
        "merge_method: linear
slices:
- sources: [{model: qwen3-moe, layer_range: [0, 1]}, {model: {model: {path: ./qwen3-moe}}, layer_range: [1, 2]}]
parameters: {weight: 1}
",
    );
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("has no `model.layers."), "{}", ran.stderr);
}

#[test]
fn typos_stay_refused_and_known_keys_of_other_methods_warn() {
    let place = place();
    let recipe = |parameters: &str| {
        format!(
            "merge_method: ties\nbase_model: m\nmodels:\n- model: e1\n  parameters: {{weight: 1}}\nparameters: {parameters}\n"
        )
    };
    let ran = run(&place, &recipe("{lamda: 1}"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: write `lambda`"), "{}", ran.stderr);
    let ran = run(&place, &recipe("{t: 0.5, select_topk: 0.1}"));
    succeeded(&ran);
    for key in ["t", "select_topk"] {
        let warning = format!("line 6: the method `ties` ignores `{key}`");
        assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
    }
    let written = fs::read_to_string(place.path("out/model/merge_config.yml")).expect("a recipe");
    assert!(!written.contains("select_topk"), "{written}");
    assert!(Path::new(&place.path("out/model/config.json")).is_file());
}

/// Each refusal of the command line names a flag to type.
#[test]
fn flags_that_do_not_fit_are_refused_with_a_fix() {
    let place = place();
    let wide = RandomCheckpoint {
        num_hidden_layers: 1,
        hidden_size: 128,
        dtype: StoredDtype::F32,
        ..RandomCheckpoint::default()
    };
    place.checkpoint("wide", &wide);
    let ties = "--base m --model e1 --model e2 --method ties";
    for (flags, code, says) in [
        (
            format!("{ties} --density 5"),
            2,
            ["error: --density is 5; it lies between 0 and 1", "use a value like --density 0.5"],
        ),
        (
            "--base m --model e1 --method slerp --t 2".to_string(),
            2,
            ["error: --t is 2; it lies between 0 and 1", "use a value like --t 0.5"],
        ),
        (
            "--model e1 --model e1 --method linear".to_string(),
            2,
            ["error: `e1` is merged with itself", "name each model once"],
        ),
        (
            "--model e1 --model e2 --method linear --density 0.5".to_string(),
            2,
            ["the method `linear` has no parameter `density`", "leave --density out"],
        ),
        (
            "--model m --model wide --method linear".to_string(),
            1,
            ["`wide`: hidden_size 128", "merge models with the shape of one base"],
        ),
    ] {
        let ran = place.run(&format!("merge {flags} --save out"));
        assert_eq!(ran.code, code, "{flags}: {}", ran.stderr);
        for text in says {
            assert!(ran.stderr.contains(text), "{flags}: {}", ran.stderr);
        }
    }
}
