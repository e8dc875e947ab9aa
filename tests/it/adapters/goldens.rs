//! What peft computed: adapters folded into their base, and combinations.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::{Tensor, combined_adapter, merge, merged, tensors};
use crate::support::{self, Place};

/// The largest difference of an element, as a share of the largest element of its tensor: the order of sums in f32.
const TOLERANCE: f64 = 1e-6;

struct Goldens {
    shared: PathBuf,
    base: BTreeMap<String, Tensor>,
}

impl Goldens {
    fn open() -> Option<Self> {
        let shared = support::shared()?;
        let shared = fs::canonicalize(shared).expect("it is there");
        let base = tensors(&shared.join("models/stories260k"), "model.safetensors");
        Some(Self { shared, base })
    }

    fn folder(&self) -> PathBuf {
        self.shared.join("goldens/merge")
    }

    fn read(&self, case: &str) -> Value {
        let text = fs::read(self.folder().join(format!("{case}.json"))).expect("a golden");
        serde_json::from_slice(&text).expect("a golden is JSON")
    }

    /// Flags for the base and these adapters.
    fn models(&self, adapters: &[&str]) -> String {
        let base = self.shared.join("models/stories260k");
        let base = base.display();
        let mut flags = format!("--base {base}");
        for adapter in adapters {
            let adapter = self.adapter(adapter);
            flags += &format!(" --model {base}+{}", adapter.display());
        }
        flags
    }

    fn adapter(&self, name: &str) -> PathBuf {
        self.shared.join("models/stories260k-experts").join(name)
    }

    /// Compares a merged model with a case, and returns how many tensors have the same hash.
    #[track_caller]
    fn check(&self, case: &str, golden: &Value, merged: &BTreeMap<String, Tensor>) -> usize {
        let expected = golden["tensors"].as_object().expect("tensors");
        let names: Vec<&String> = merged.keys().collect();
        assert_eq!(names, expected.keys().collect::<Vec<_>>(), "{case}");
        let mut equal = 0;
        for (name, of) in expected {
            let (tensor, base) = (&merged[name], &self.base[name]);
            let shape: Vec<usize> = serde_json::from_value(of["shape"].clone()).expect("a shape");
            assert_eq!(tensor.shape, shape, "{case} {name}");
            let is_equal = of["sha256"] == tensor.sha256();
            equal += usize::from(is_equal);
            if of["sha256"] == base.sha256() {
                assert!(is_equal, "{case}: {name} is the base's");
            }
            let limit = TOLERANCE * tensor.largest();
            let count = tensor.values.len();
            let samples = of["samples"].as_array().expect("samples").iter();
            for (at, sample) in samples.enumerate() {
                let found = f64::from(tensor.values[at * count / 64]);
                let difference = (found - sample.as_f64().expect("a number")).abs();
                assert!(difference <= limit, "{case} {name} {at}: {difference:e}");
            }
            let l1: f64 = tensor.values.iter().map(|v| f64::from(v.abs())).sum();
            let difference = (l1 - of["l1"].as_f64().expect("a number")).abs();
            assert!(difference <= limit * count as f64, "{case} {name}: l1 {l1}");
        }
        if let Some(file) = golden["tensors_file"].as_str() {
            close(case, merged, &tensors(&self.folder(), file));
        }
        equal
    }
}

/// Compares all elements.
#[track_caller]
fn close(case: &str, found: &BTreeMap<String, Tensor>, expected: &BTreeMap<String, Tensor>) {
    let names: Vec<&String> = found.keys().collect();
    assert_eq!(names, expected.keys().collect::<Vec<_>>(), "{case}");
    for (name, expected) in expected {
        let found = &found[name];
        assert_eq!(found.shape, expected.shape, "{case} {name}");
        let limit = TOLERANCE * expected.largest();
        for (at, (found, expected)) in found.values.iter().zip(&expected.values).enumerate() {
            let difference = f64::from((found - expected).abs());
            assert!(difference <= limit, "{case} {name} {at}: {difference:e}");
        }
    }
}

/// Adapters that peft folded into their base.
const FOLDED: [&str; 6] =
    ["lora-wiki", "lora-stories", "lora-stories-all", "dora-wiki", "embed-wiki", "pattern-wiki"];

#[test]
fn folded_adapters_give_the_weights_of_peft() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    for adapter in FOLDED {
        let case = format!("peft-{adapter}");
        merge(&place, &format!("{} --method linear --save {case}", goldens.models(&[adapter])));
        let golden = goldens.read(&case);
        let equal = goldens.check(&case, &golden, &merged(&place, &case));
        eprintln!("{case}: {equal} of {} hashes", goldens.base.len());
    }
}

/// The flags of a golden's call.
fn flags(goldens: &Goldens, call: &Value) -> String {
    let adapters: Vec<&str> =
        call["adapters"].as_array().expect("adapters").iter().filter_map(Value::as_str).collect();
    let weights: Vec<String> =
        call["weights"].as_array().expect("weights").iter().map(Value::to_string).collect();
    let mut flags = format!(
        "{} --semantics peft --method {} --weight={}",
        goldens.models(&adapters),
        call["combination_type"].as_str().expect("a name"),
        weights.join(",")
    );
    if let Some(density) = call["density"].as_f64() {
        flags += &format!(" --density {density}");
    }
    if let Some(majority) = call["majority_sign_method"].as_str() {
        flags += &format!(" --majority-sign {majority}");
    }
    flags
}

/// The deterministic combinations, and whether the golden holds the combined factors.
const COMBINED: [(&str, bool); 6] = [
    ("linear", true),
    ("cat", false),
    ("magnitude-prune", false),
    ("ties", true),
    ("ties-frequency", true),
    ("ties-negative", true),
];

#[test]
fn combined_adapters_have_the_factors_and_weights_of_peft() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    for (name, has_factors) in COMBINED {
        let case = format!("peft-weighted-{name}");
        let golden = goldens.read(&case);
        let flags = flags(&goldens, &golden["call"]);
        merge(&place, &format!("{flags} --save {case}"));
        let equal = goldens.check(&case, &golden, &merged(&place, &case));
        eprintln!("{case}: {equal} of {} hashes", goldens.base.len());
        let factors = combined_adapter(&place, &case);
        let file = format!("{case}.adapter.safetensors");
        assert_eq!(goldens.folder().join(&file).is_file(), has_factors);
        if has_factors {
            // Products, roots and sums of two are rounded once each, in peft too.
            assert!(factors == tensors(&goldens.folder(), &file), "{case}");
        }
    }
}

/// A recipe in YAML gives the files of the flags.
#[test]
fn a_recipe_combines_as_flags_do() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    let call = &goldens.read("peft-weighted-ties-frequency")["call"];
    merge(&place, &format!("{} --save by-flags", flags(&goldens, call)));
    let base = goldens.shared.join("models/stories260k");
    let model = |name: &str| {
        format!(
            "  - model: {}+{}\n    parameters: {{weight: 1}}\n",
            base.display(),
            goldens.adapter(name).display()
        )
    };
    let recipe = format!(
        "merge_method: ties\nbase_model: {}\nmodels:\n{}{}parameters: {{density: 0.3}}\n",
        base.display(),
        model("lora-wiki"),
        model("lora-stories-all")
    );
    fs::write(place.path("ties.yml"), recipe).expect("a new file");
    merge(&place, "ties.yml --semantics peft --majority-sign frequency --save by-file");
    assert_eq!(merged(&place, "by-file"), merged(&place, "by-flags"));
    assert_eq!(combined_adapter(&place, "by-file"), combined_adapter(&place, "by-flags"));
}

#[test]
fn svd_forms_are_refused_by_name() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    for name in ["svd", "ties-svd"] {
        let golden = goldens.read(&format!("peft-weighted-{name}"));
        let flags = flags(&goldens, &golden["call"]);
        let method = name.replace('-', "_");
        let ran = support::refuses_command(
            &place,
            &format!("merge {flags} --save out"),
            2,
            &format!("error: the method `{method}` does not exist in this version"),
            "",
        );
        assert!(ran.stderr.contains("`magnitude_prune`"), "{}", ran.stderr);
    }
}

const RANDOM: [&str; 2] = ["lora-wiki", "lora-stories-all"];

/// Checks the share of elements that are not zero in every factor.
#[track_caller]
fn check_shares(factors: &BTreeMap<String, Tensor>, adapter: &BTreeMap<String, Tensor>, p: f64) {
    for (name, tensor) in factors {
        let count = tensor.values.len() as f64;
        let original = &adapter[name];
        assert!(original.values.iter().all(|value| *value != 0.0), "{name}");
        let kept = tensor.values.iter().filter(|value| **value != 0.0).count();
        let off = (kept as f64 / count - p).abs();
        assert!(off < 4.0 * (p * (1.0 - p) / count).sqrt(), "{name}: {kept}");
        // s = 2, so that a kept element is √2 a / p.
        for (value, original) in tensor.values.iter().zip(&original.values) {
            let expected = 2f64.sqrt() * f64::from(*original) / p;
            let difference = (f64::from(*value) - expected).abs();
            assert!(*value == 0.0 || difference <= 1e-6 * expected.abs(), "{name}");
        }
    }
}

/// With the weight 0 for one adapter, the factors of `dare_linear` are the other's, after drops.
#[test]
fn random_drops_keep_the_density_and_serve_both_methods() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    let models = goldens.models(&RANDOM);
    let factors = |method: &str, weights: &str, density: f64, seed: u64| {
        let run = format!("{method}-{weights}-{density}-{seed}");
        merge(
            &place,
            &format!(
                "{models} --semantics peft --method {method} --weight {weights} --density {density} --seed {seed} --save {run}"
            ),
        );
        combined_adapter(&place, &run)
    };
    for (density, seed) in [(0.5, 42), (0.2, 7)] {
        let first = factors("dare_linear", "1,0", density, seed);
        let second = factors("dare_linear", "0,1", density, seed);
        for (factors, adapter) in [(&first, RANDOM[0]), (&second, RANDOM[1])] {
            let adapter = tensors(&goldens.adapter(adapter), "adapter_model.safetensors");
            check_shares(factors, &adapter, density);
        }
        let linear = factors("dare_linear", "0.7,0.4", density, seed);
        let ties = factors("dare_ties", "0.7,0.4", density, seed);
        let (mut sums, mut means) = (linear.clone(), ties.clone());
        let roots = [0.7f32.sqrt(), 0.4f32.sqrt()];
        for (name, one) in &first {
            for (at, (one, two)) in one.values.iter().zip(&second[name].values).enumerate() {
                let (weighted_one, weighted_two) = (roots[0] * one, roots[1] * two);
                sums.get_mut(name).expect("the same names").values[at] =
                    weighted_one + weighted_two;
                let elected = if one + two >= 0.0 { 1.0 } else { -1.0 };
                let agrees = |value: f32| value * elected > 0.0;
                let mean = match (agrees(*one), agrees(*two)) {
                    (true, true) => (weighted_one + weighted_two) / 2.0,
                    (true, false) => weighted_one,
                    (false, true) => weighted_two,
                    (false, false) => 0.0,
                };
                means.get_mut(name).expect("the same names").values[at] = mean;
            }
        }
        close("dare_linear", &linear, &sums);
        close("dare_ties", &ties, &means);
    }
}

/// The L1 norm of the random merges' difference from the base is that of peft's up to the draws: over the model within 3 %.
#[test]
fn random_combinations_change_as_much_as_those_of_peft() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    for name in ["dare-linear", "dare-ties"] {
        let case = format!("peft-weighted-{name}");
        let golden = goldens.read(&case);
        let flags = flags(&goldens, &golden["call"]);
        merge(&place, &format!("{flags} --save {case}"));
        let (mut ours, mut theirs) = (0.0, 0.0);
        for (name, tensor) in merged(&place, &case) {
            let of = &golden["merged_minus_base"][&name];
            let base = &goldens.base[&name];
            let differences = tensor.values.iter().zip(&base.values);
            let l1: f64 = differences.map(|(a, b)| f64::from((a - b).abs())).sum();
            let expected = of["l1"].as_f64().expect("a number");
            assert_eq!(l1 == 0.0, expected == 0.0, "{case} {name}");
            ours += l1;
            theirs += expected;
        }
        let off = ours / theirs - 1.0;
        eprintln!("{case}: L1 {ours:.1}, peft's {theirs:.1}");
        assert!(off.abs() < 0.03, "{case}: {ours} and {theirs}");
    }
}

/// Recipes of flags do not average the base, unless `--model` repeats it.
#[test]
fn the_base_is_averaged_only_where_it_is_a_model() {
    let Some(goldens) = Goldens::open() else {
        return;
    };
    let place = Place::empty();
    let base = goldens.shared.join("models/stories260k");
    let models = goldens.models(&["lora-wiki"]);
    merge(&place, &format!("{models} --model {} --method linear --save half", base.display()));
    merge(&place, &format!("{models} --method linear --save whole"));
    let (half, whole) = (merged(&place, "half"), merged(&place, "whole"));
    for (name, base) in &goldens.base {
        for (at, base) in base.values.iter().enumerate() {
            let mean = (base + whole[name].values[at]) / 2.0;
            assert_eq!(half[name].values[at], mean, "{name}");
        }
    }
}
