//! Merges on simulated GPUs: linears that a GPU has no memory for, whichever they are, and the bits of the CPU in every case.
//!
//! The scenarios are those of the tool whose fallbacks this command covers: all fits, and one linear does not. Its second scenario and its
//! third are about calibration; `saliency` has them. Its fourth is an expert that does not fit beside another: here no expert is ever
//! whole in memory.

use std::collections::BTreeMap;
use std::fs;

use prune::run::Manifest;
use prune::run::fallback::FallbackOutcome;

use super::place;
use crate::support::{Place, Ran};

/// 14 linears of one piece each.
const LINEARS: u64 = 14;

fn run(place: &Place, flags: &str) -> Ran {
    place.run(&format!(
        "merge --base m --model e1 --model e2 --method ties --density 0.5 --force --save out {flags}"
    ))
}

/// The weights and the record of a merge on the GPUs of a simulation.
fn merged(place: &Place, flags: &str) -> (BTreeMap<String, Vec<u8>>, Manifest, String) {
    let ran = run(place, flags);
    assert_eq!(ran.code, 0, "{flags}\n{}", ran.stderr);
    let files = place.names("out/model").into_iter();
    let weights = files
        .filter(|name| name.ends_with(".safetensors"))
        .map(|name| {
            let bytes = fs::read(place.path("out/model").join(&name)).expect("listed above");
            (name, bytes)
        })
        .collect();
    (weights, place.manifest("out"), ran.stderr)
}

fn simulation(more: &str) -> String {
    format!(r#"--device cuda --simulate {{"gpus":["2GiB"]{more}}}"#)
}

#[test]
fn a_gpu_computes_every_linear_if_all_fits() {
    let place = place(2);
    let (cpu, manifest, _) = merged(&place, "");
    assert!(manifest.devices.is_empty() && manifest.arithmetic.device == "cpu");
    // Without the flag, GPUs are left alone.
    let (_, manifest, _) = merged(&place, r#"--simulate {"gpus":["2GiB"]}"#);
    assert!(manifest.devices.is_empty());
    let (weights, manifest, stderr) = merged(&place, &simulation(""));
    assert!(weights == cpu, "the GPU writes other weights");
    assert_eq!(manifest.arithmetic.device, "cuda:0");
    assert_eq!(manifest.devices[0].units, LINEARS);
    assert!(manifest.fallbacks.is_empty() && manifest.warnings.is_empty());
    // Workers finish in any order.
    assert!(stderr.contains("[14/14] model.layers."), "{stderr}");
    let two = r#"--device cuda --simulate {"gpus":["2GiB","2GiB"]}"#;
    let (weights, manifest, _) = merged(&place, two);
    assert!(weights == cpu, "two GPUs write other weights");
    let units = manifest.devices.iter().map(|device| device.units);
    assert_eq!(units.sum::<u64>(), LINEARS);
    let ran = run(&place, r#"--device cuda:1 --simulate {"gpus":["2GiB"]}"#);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("cuda:1 is not there"), "{}", ran.stderr);
}

#[test]
fn a_gpu_too_small_for_calibration_leaves_it_to_the_cpu() {
    let place = place(2);
    let measuring = "--saliency base --dataset train.txt --nsamples 4 --seqlen 64";
    // Each merge measures anew.
    let merged = |flags: &str| {
        let _ = fs::remove_dir_all(place.path("out"));
        merged(&place, flags)
    };
    let (cpu, ..) = merged(measuring);
    let small = format!(r#"{measuring} --device cuda --simulate {{"gpus":["513MiB"]}}"#);
    let (weights, _, stderr) = merged(&small);
    assert!(weights == cpu, "other weights");
    assert!(stderr.contains("a GPU has too little memory for calibration"), "{stderr}");
    let large = format!(r#"{measuring} --device cuda --simulate {{"gpus":["2GiB"]}}"#);
    let (weights, _, stderr) = merged(&large);
    assert!(weights == cpu && !stderr.contains("too little memory"), "{stderr}");
}

#[test]
fn a_merge_of_which_gpus_computed_nothing_is_recorded_as_the_cpus() {
    let place = place(2);
    let (_, manifest, _) = merged(&place, &simulation(""));
    assert_eq!(manifest.arithmetic.device, "cuda:0");
    // Its memory is the context's, so no linear has room.
    let (_, manifest, stderr) = merged(&place, r#"--device cuda --simulate {"gpus":["513MiB"]}"#);
    assert_eq!(manifest.fallbacks.len() as u64, LINEARS, "{stderr}");
    assert_eq!(manifest.arithmetic.device, "cpu");
}

#[test]
fn a_linear_that_is_refused_is_merged_on_the_cpu_whichever_it_is() {
    let place = place(2);
    let (cpu, ..) = merged(&place, "");
    for unit in 0..LINEARS {
        let (weights, manifest, stderr) =
            merged(&place, &simulation(&format!(r#","refuse":"{unit}""#)));
        assert!(weights == cpu, "unit {unit}");
        let [fall] = manifest.fallbacks.as_slice() else {
            panic!("unit {unit}: {:?}", manifest.fallbacks);
        };
        assert_eq!(fall.outcome, FallbackOutcome::Cpu, "unit {unit}");
        assert!(fall.unit.starts_with("model.layers."), "{fall:?}");
        let line = format!("GPU out of memory on {}, using CPU", fall.unit);
        assert!(stderr.contains(&line), "{line}\n{stderr}");
        assert!(manifest.warnings.iter().any(|warning| warning.starts_with(&line)));
    }
}

#[test]
fn the_ladder_of_a_linear_has_its_rungs_in_order() {
    let place = place(2);
    let (cpu, ..) = merged(&place, "");
    for (refuse, outcome) in [
        ("3x1", FallbackOutcome::Retried),
        ("3x2", FallbackOutcome::Smaller),
        ("3x4", FallbackOutcome::Smaller),
        ("3", FallbackOutcome::Cpu),
    ] {
        let (weights, manifest, _) =
            merged(&place, &simulation(&format!(r#","refuse":"{refuse}""#)));
        assert!(weights == cpu, "{refuse}");
        let outcomes: Vec<_> = manifest.fallbacks.iter().map(|fall| fall.outcome).collect();
        assert_eq!(outcomes, [outcome], "{refuse}");
        let halved = manifest.warnings.iter().any(|line| line.contains("in a row"));
        assert!(!halved, "{:?}", manifest.warnings);
    }
    let (weights, manifest, _) = merged(&place, &simulation(r#","refuse":"2,3,4""#));
    assert!(weights == cpu);
    assert_eq!(manifest.fallbacks.len(), 3);
    let halved = "cuda:0: 3 linears in a row were out of memory: the next ones are computed 32768 elements at a time";
    assert!(manifest.warnings.iter().any(|line| line == halved), "{:?}", manifest.warnings);
    let (weights, manifest, _) = merged(&place, &simulation(r#","refuse":"all""#));
    assert!(weights == cpu);
    assert_eq!(manifest.fallbacks.len() as u64, LINEARS);
}

#[test]
fn a_gpu_with_less_memory_than_it_said_gets_smaller_pieces() {
    let place = place(2);
    let (cpu, ..) = merged(&place, "");
    // The context has 512 MiB; what is left holds a few rows.
    let (weights, manifest, _) = merged(&place, &simulation(r#","capacity":"524388KiB""#));
    assert!(weights == cpu);
    let outcomes = manifest.fallbacks.iter().map(|fall| fall.outcome);
    assert!(
        !manifest.fallbacks.is_empty()
            && outcomes.clone().all(|outcome| outcome == FallbackOutcome::Smaller),
        "{:?}",
        manifest.fallbacks
    );
}
