//! Merges of real models that mergekit 0.1.5, or the formulas of a paper in f64, have computed: tensor by tensor, and perplexities.
//!
//! A trim keeps a number of entries, and of equal magnitudes at its edge mergekit keeps those that PyTorch's unstable sort happens to
//! put first. Here they are the first in the tensor. So tensors with such entries have a tolerance of their own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::tensors;
use crate::support::{self, Place};

/// Largest difference of an element, relative to the largest element of its tensor.
const ELEMENT: f64 = 1e-6;
/// Relative difference of Σ|w| of a tensor.
const L1: f64 = 1e-6;
/// Rounding to bf16: half a step.
const BF16: f64 = 1.0 / 256.0;

/// Recipes whose results are numbers that can be compared.
const EXACT: [&str; 32] = [
    "breadcrumbs",
    "breadcrumbs-ties",
    "karcher",
    "linear",
    "linear-nonorm-gradient",
    "model-stock",
    "multislerp",
    "nuslerp",
    "passthrough-stack",
    "sce",
    "slerp",
    "slerp-gradient",
    "task-arithmetic",
    "task-arithmetic-lambda",
    "ties-bf16",
    "ties-d0.2",
    "ties-d0.5",
    "ties-f32-out-bf16",
    "ties-int8-mask",
    "ties-lambda-gradient",
    "ties-lora",
    "ties-negative-weight",
    "ties-negative-weight-nonorm",
    "ties-nonorm",
    "ties-rescale",
    "ties-slices",
    "paper-ties-k20",
    "paper-ties-k50-lambda",
    "vocab-base",
    "vocab-tokens-force",
    "vocab-truncate",
    "vocab-union",
];

/// Largest difference of an element, and of Σ|w|, where entries at an edge are kept or not.
const AT_AN_EDGE: f64 = 1e-4;

/// Tensors with equal magnitudes at an edge of a trim: 18 and 30 entries of 32,768.
const EQUAL_AT_AN_EDGE: [(&str, &str); 2] =
    [("breadcrumbs", "lm_head.weight"), ("ties-slices", "lm_head.weight")];

fn golden(shared: &Path, case: &str) -> Value {
    let path = shared.join(format!("goldens/merge/{case}.json"));
    serde_json::from_slice(&fs::read(&path).expect("a golden")).expect("JSON")
}

/// The command line of a case. Cases of the papers have no recipe that mergekit could read, so they are flags.
fn line(shared: &Path, case: &str) -> String {
    if case == "vocab-truncate" {
        return "goldens/merge/configs/vocab-mismatch-plain.yml --unsafe-truncate-embeddings"
            .into();
    }
    let recipe = format!("goldens/merge/configs/{case}.yml");
    if shared.join(&recipe).exists() {
        return recipe;
    }
    let path = shared.join(format!("goldens/merge/configs/{case}.json"));
    let config: Value = serde_json::from_slice(&fs::read(path).expect("a case")).expect("JSON");
    let models = config["models"].as_array().expect("models");
    let flags: String = models
        .iter()
        .map(|model| format!(" --model {}", model["model"].as_str().expect("a path")))
        .collect();
    let base = config["base_model"].as_str().expect("a path");
    assert_eq!(config["merge_method"], "paper-ties");
    format!(
        "--method ties --semantics paper --base {base}{flags} --density {} --lambda {}",
        models[0]["density"], config["lambda"]
    )
}

/// Runs a case, and returns the folder of the merged model.
fn merged(place: &Place, shared: &Path, case: &str, flags: &str) -> PathBuf {
    let out = place.path(case);
    let ran = support::ran(
        place
            .command(&format!("merge {} {flags} --save", line(shared, case)))
            .arg(&out)
            .current_dir(shared),
    );
    assert_eq!(ran.code, 0, "{case}\n{}", ran.stderr);
    out.join("model")
}

/// The entries of a tensor whose difference in bf16 has the magnitude of its expert's edge, in the recipe of `ties-bf16`.
fn at_an_edge(shared: &Path) -> BTreeMap<String, Vec<bool>> {
    const DENSITY: f64 = 0.5;
    let model = |path: &str| tensors(&shared.join("models").join(path).join("model.safetensors"));
    let round = |value: f64| f64::from(half::bf16::from_f64(value));
    let base = model("stories260k");
    let mut edges: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    for expert in ["expert-wiki", "expert-stories"] {
        for (name, (_, expert)) in model(&format!("stories260k-experts/{expert}")) {
            let pairs = expert.iter().zip(&base[&name].1);
            let sizes: Vec<f64> =
                pairs.map(|(expert, base)| round(round(*expert) - round(*base)).abs()).collect();
            let mut sorted = sizes.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let edge = sorted[(DENSITY * sizes.len() as f64) as usize - 1];
            let flags = edges.entry(name).or_insert_with(|| vec![false; sizes.len()]);
            for (flag, size) in flags.iter_mut().zip(&sizes) {
                // A difference of zero changes nothing, kept or not.
                *flag |= *size == edge && edge > 0.0;
            }
        }
    }
    edges
}

/// Compares a merged tensor with the golden's 64 samples and its sum of magnitudes; `is_open` says which elements have no one value.
fn compare(
    case: &str,
    name: &str,
    ours: &(Vec<usize>, Vec<f64>),
    golden: &Value,
    is_open: impl Fn(usize) -> bool,
) {
    let (shape, elements) = ours;
    assert_eq!(serde_json::json!(shape), golden["shape"], "{case}, {name}");
    let largest = elements.iter().fold(0.0f64, |most, value| most.max(value.abs()));
    let samples = golden["samples"].as_array().expect("samples");
    let (element, sum) = match case {
        // Every expert has many equal magnitudes in bf16.
        "ties-bf16" => (BF16, 1e-2),
        _ if EQUAL_AT_AN_EDGE.contains(&(case, name)) => (AT_AN_EDGE, AT_AN_EDGE),
        _ => (ELEMENT, L1),
    };
    let mut compared = 0;
    for (number, sample) in samples.iter().enumerate() {
        let at = number * elements.len() / samples.len();
        if is_open(at) {
            continue;
        }
        let theirs = sample.as_f64().expect("a number");
        let difference = (elements[at] - theirs).abs();
        assert!(
            difference <= element * largest,
            "{case}, {name}[{at}]: {} and {theirs}",
            elements[at]
        );
        compared += 1;
    }
    assert!(3 * compared > samples.len(), "{case}, {name}: {compared} samples are compared");
    let l1: f64 = elements.iter().map(|value| value.abs()).sum();
    let theirs = golden["l1"].as_f64().expect("a number");
    assert!(
        (l1 - theirs).abs() <= sum * theirs,
        "{case}, {name}: Σ|w| is {l1}, the golden's {theirs}"
    );
}

/// SHA-256 of every tensor's bytes.
fn hashes(file: &Path) -> BTreeMap<String, String> {
    let bytes = fs::read(file).expect("a model");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a model");
    let tensors = file.tensors().into_iter();
    tensors
        .map(|(name, view)| {
            let hash = Sha256::digest(view.data());
            (name, hash.iter().map(|byte| format!("{byte:02x}")).collect())
        })
        .collect()
}

#[test]
fn every_tensor_is_that_of_the_reference() {
    let Some(shared) = support::shared() else {
        return;
    };
    let place = Place::empty();
    let edges = at_an_edge(&shared);
    for case in EXACT {
        let golden = golden(&shared, case);
        let file = merged(&place, &shared, case, "").join("model.safetensors");
        let (ours, hashes) = (tensors(&file), hashes(&file));
        let theirs = golden["tensors"].as_object().expect("tensors");
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{case}");
        let mut equal = 0;
        for (name, golden) in theirs {
            if golden["sha256"] == hashes[name].as_str() {
                equal += 1;
            }
            let is_open = |at| case == "ties-bf16" && edges[name][at];
            compare(case, name, &ours[name], golden, is_open);
        }
        eprintln!("{case}: {equal} of {} tensors are equal to the bit", theirs.len());
        if let Some(full) = golden["tensors_file"].as_str() {
            let full = tensors(&shared.join("goldens/merge").join(full));
            compare_all(case, &ours, &full);
        }
        check_config(case, &golden, &place.path(case).join("model/config.json"));
    }
}

/// Compares every element.
fn compare_all(
    case: &str,
    ours: &BTreeMap<String, (Vec<usize>, Vec<f64>)>,
    golden: &BTreeMap<String, (Vec<usize>, Vec<f64>)>,
) {
    for (name, (_, golden)) in golden {
        let largest = golden.iter().fold(0.0f64, |most, value| most.max(value.abs()));
        let pairs = ours[name].1.iter().zip(golden);
        let worst = pairs.fold(0.0f64, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(
            worst <= ELEMENT * largest,
            "{case}, {name}: an element differs by {worst}, the largest is {largest}"
        );
    }
}

/// Compares the facts that the golden has of the output's configuration.
fn check_config(case: &str, golden: &Value, ours: &Path) {
    let ours: Value = serde_json::from_slice(&fs::read(ours).expect("config.json")).expect("JSON");
    for (name, value) in golden["config_json"].as_object().expect("facts") {
        let own = match (name.as_str(), ours.get(name)) {
            ("dtype", None) => &ours["torch_dtype"],
            // Absent is false.
            ("tie_word_embeddings", None) => &Value::Bool(false),
            (_, own) => own.unwrap_or(&Value::Null),
        };
        assert_eq!(own, value, "{case}, {name}");
    }
}

/// Relative difference of a perplexity. The order of sums in f32 makes at most 2e-7.
const PERPLEXITY: f64 = 1e-6;

/// The same where PyTorch's unstable sort keeps other equal entries.
const PERPLEXITY_OF_OTHER_ENTRIES: f64 = 1e-3;

/// Evaluation texts of the goldens.
const TEXTS: [(&str, &str); 2] = [
    ("stories", "data/stories/stories.test.txt"),
    ("wiki", "data/wikitext2/wiki.test.head1000.raw"),
];

/// The perplexity of a model over the first 64 windows of a text.
fn perplexity(place: &Place, shared: &Path, model: &Path, text: &str) -> f64 {
    // On CPUs that multiply bf16, models of bf16 have less exact perplexities by default.
    let line = format!(
        "eval --dtype f32 --seqlen 512 --eval-windows 64 --eval-dataset wikitext2:{text} --json --model"
    );
    let ran = support::ran(place.command(&line).arg(model).current_dir(shared));
    assert_eq!(ran.code, 0, "{}\n{}", model.display(), ran.stderr);
    let manifest: Value = serde_json::from_str(&ran.stdout).expect("--json prints JSON");
    let perplexity = manifest["perplexity"]["dense"]["perplexity"].as_f64();
    perplexity.expect("measured")
}

#[test]
fn perplexities_of_merged_models_are_those_of_the_reference() {
    let Some(shared) = support::shared() else {
        return;
    };
    let place = Place::empty();
    for case in EXACT {
        let model = merged(&place, &shared, case, "");
        let golden = golden(&shared, case);
        let tolerance = match case {
            "ties-bf16" => PERPLEXITY_OF_OTHER_ENTRIES,
            _ => PERPLEXITY,
        };
        // The tensors of every recipe are compared above; a second text for the recipes with a tolerance of their own is enough.
        let texts = match case {
            "linear" | "ties-bf16" | "vocab-union" => &TEXTS[..],
            _ => &TEXTS[..1],
        };
        for (name, text) in texts {
            let theirs = golden["perplexity_first_64_windows"][name].as_f64();
            let theirs = theirs.expect("measured");
            let ours = perplexity(&place, &shared, &model, text);
            let difference = ours / theirs - 1.0;
            eprintln!(
                "{case}, {name}: {ours:.4}, the reference has {theirs:.4}: {difference:+.1e}"
            );
            assert!(
                difference.abs() < tolerance,
                "{case}, {name}: {ours}, the reference has {theirs}"
            );
        }
    }
}
