//! Random trims: the share of entries that is kept, and the mean of many masks.

use std::fs;

use serde_json::Value;

use super::tensors;
use crate::support::{self, Place};

/// Cases of mergekit with their densities, of the wiki expert and of the stories expert.
const CASES: [(&str, [f64; 2]); 5] = [
    ("dare-linear", [0.5, 0.3]),
    ("dare-linear-norescale", [0.5, 0.3]),
    ("dare-ties", [0.3, 0.3]),
    ("della", [0.5, 0.6]),
    ("della-linear", [0.5, 0.6]),
];

/// Standard deviations that a share may be off.
const DEVIATIONS: f64 = 4.0;

#[test]
fn a_random_trim_keeps_the_density() {
    let Some(shared) = support::shared() else {
        return;
    };
    let place = Place::empty();
    for (case, densities) in CASES {
        let out = place.path(case);
        let ran = support::ran(
            place
                .command(&format!("merge goldens/merge/configs/{case}.yml --seed 42 --save"))
                .arg(&out)
                .current_dir(&shared),
        );
        assert_eq!(ran.code, 0, "{case}\n{}", ran.stderr);
        let report = place.manifest(case).merge.expect("a merge");
        for tensor in &report.tensors {
            let elements: usize = tensor.shape.iter().product();
            for (kept, density) in tensor.kept.iter().zip(densities) {
                let share = *kept as f64 / elements as f64;
                let deviation = (density * (1.0 - density) / elements as f64).sqrt();
                assert!(
                    (share - density).abs() < DEVIATIONS * deviation,
                    "{case}, {}: {share} of the entries are kept, the density is {density}",
                    tensor.name
                );
            }
            assert_eq!(tensor.kept.len(), 2, "{case}, {}", tensor.name);
        }
        if case.ends_with("norescale") {
            continue;
        }
        // With the norms matched, the merged difference has about the size that mergekit's has.
        let golden = fs::read(shared.join(format!("goldens/merge/{case}.json"))).expect("a golden");
        let golden: Value = serde_json::from_slice(&golden).expect("JSON");
        let theirs = &golden["statistics"]["merged_minus_base"]["lm_head.weight"]["l1"];
        let theirs = theirs.as_f64().expect("a number");
        let base = tensors(&shared.join("models/stories260k/model.safetensors"));
        let ours = tensors(&out.join("model/model.safetensors"));
        let pairs = ours["lm_head.weight"].1.iter();
        let pairs = pairs.zip(&base["lm_head.weight"].1);
        let l1: f64 = pairs.map(|(a, b)| (a - b).abs()).sum();
        assert!((l1 / theirs - 1.0).abs() < 0.03, "{case}: {l1}, mergekit has {theirs}");
    }
}

#[test]
fn the_mean_of_many_masks_is_the_whole_difference() {
    let Some(shared) = support::shared() else {
        return;
    };
    let place = Place::empty();
    const SEEDS: usize = 50;
    let base = tensors(&shared.join("models/stories260k/model.safetensors"));
    let expert = shared.join("models/stories260k-experts/expert-wiki/model.safetensors");
    let expert = tensors(&expert);
    let (mut along, mut square) = (0.0, 0.0);
    for seed in 0..SEEDS {
        let ran = support::ran(
            place
                .command(&format!(
                    "merge --base models/stories260k --model models/stories260k-experts/expert-wiki \
                     --method dare_linear --density 0.3 --semantics paper --seed {seed} --force --save"
                ))
                .arg(place.path("out"))
                .current_dir(&shared),
        );
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        for (name, (_, merged)) in tensors(&place.path("out/model/model.safetensors")) {
            let entries = merged.iter().zip(&base[&name].1).zip(&expert[&name].1);
            for ((merged, base), expert) in entries {
                let difference = expert - base;
                along += (merged - base) * difference;
                square += difference * difference;
            }
        }
    }
    let ratio = along / square;
    assert!((ratio - 1.0).abs() < 0.01, "⟨mean, D⟩ / ⟨D, D⟩ is {ratio}");
}
