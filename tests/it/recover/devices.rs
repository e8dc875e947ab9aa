//! Trainings on simulated GPUs, which compute what the CPU computes: the same bits, whatever units are refused.

use prune::linalg::StoredDtype;
use prune::run::fallback::FallbackOutcome;

use super::{COMMON, matrices, pruned};

const ONE: &str = r#"{"gpus":["2GiB"]}"#;

/// Ways of training.
const WAYS: [&str; 4] = [
    "--how full --lr 3e-3 --train-norms --batch-size 1 --accumulate 2",
    "--how lora --lr 3e-3 --rank 4 --teacher m",
    "--how blocks --lr 3e-3 --teacher m --nsamples 8",
    "--how blocks --lr 3e-3 --teacher m --nsamples 8 --train factors --rank 4",
];

#[test]
fn a_training_on_a_device_has_the_bits_of_the_cpu() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    std::fs::write(place.path("map.json"), r#"{"": 0, "model.layers.1": "cpu"}"#)
        .expect("a writable folder");
    for way in WAYS {
        let run = |flags: &str| {
            let ran = place.run(&format!("{COMMON} {way} --save out --force {flags}"));
            assert_eq!(ran.code, 0, "{way} {flags}: {}", ran.stderr);
            (matrices(&place.path("out/model")), place.manifest("out"))
        };
        let (on_cpu, _) = run("--use-cpu");
        for flags in [
            format!("--simulate {ONE}"),
            format!("--simulate {ONE} --device cuda --hidden-states disk"),
            format!("--simulate {ONE} --device-map map.json"),
        ] {
            let (found, manifest) = run(&flags);
            assert!(found == on_cpu, "{way} {flags}");
            assert!(manifest.fallbacks.is_empty(), "{:?}", manifest.fallbacks);
            let [device] = manifest.devices.as_slice() else {
                panic!("{way} {flags}: {:?}", manifest.devices);
            };
            let plan = manifest.plan.as_ref().expect("planned");
            let mut planned = plan.devices.iter();
            let planned = planned.find(|plan| plan.device == device.device);
            let planned = planned.expect("planned").peak;
            assert!(
                device.units > 100 && device.reserved_by_plan <= planned,
                "{way} {flags}: {device:?}, {planned} planned"
            );
        }
    }
}

#[test]
fn a_refused_unit_of_a_training_is_done_on_the_cpu() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    for way in ["--how lora --lr 3e-3 --rank 4 --held-out 0", WAYS[2]] {
        let run = |flags: &str| {
            let ran = place.run(&format!("{COMMON} {way} --eval none --save out --force {flags}"));
            assert_eq!(ran.code, 0, "{way} {flags}: {}", ran.stderr);
            (matrices(&place.path("out/model")), place.manifest("out"))
        };
        let (on_cpu, _) = run("--use-cpu");
        let mut backwards = 0;
        for unit in (0..70).step_by(3) {
            let refused = format!(r#"--simulate {{"gpus":["2GiB"],"refuse":"{unit}"}}"#);
            let (found, manifest) = run(&refused);
            assert!(found == on_cpu, "{way}, unit {unit}");
            let [fall] = manifest.fallbacks.as_slice() else {
                panic!("{way}, unit {unit}: {:?}", manifest.fallbacks);
            };
            assert_eq!(fall.outcome, FallbackOutcome::Cpu, "{fall:?}");
            backwards += usize::from(fall.unit.contains("backward"));
        }
        assert!(backwards > 1, "{way}: {backwards} of the backward pass");
        let (found, _) = run(r#"--simulate {"gpus":["2GiB"],"refuse":"all"}"#);
        assert!(found == on_cpu, "{way}, all refused");
        // The context, a layer, and less than a sample: pieces become smaller.
        let (found, manifest) = run(r#"--simulate {"gpus":["2GiB"],"capacity":"513MiB"}"#);
        assert!(found == on_cpu && !manifest.fallbacks.is_empty(), "{way}");
    }
}
