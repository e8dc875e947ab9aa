//! Simulated GPUs: placement by plan and map, and the steps after an out-of-memory, at every unit of work. A simulated GPU computes
//! what the CPU computes, so the masks must equal those of the CPU.

use prune::linalg::StoredDtype;
use prune::run::Manifest;
use prune::run::fallback::FallbackOutcome;
use prune::synthetic::RandomCheckpoint;

use crate::support::{Place, Ran};

fn place() -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        vocab_size: 523,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    })
}

fn run(place: &Place, flags: &str) -> Ran {
    place.run(&format!(
        "--model m --eval both --dataset train.txt --eval-dataset test.txt --nsamples 3 \
         --seqlen 100 --eval-windows 2 --sparsity-ratio 0.5 --force --save out {flags}"
    ))
}

fn manifest(place: &Place, flags: &str) -> Manifest {
    let ran = run(place, flags);
    assert_eq!(ran.code, 0, "{flags:?}\n{}", ran.stderr);
    place.manifest("out")
}

/// Results that are equal on every device: masks, and perplexities to the bit.
fn results(manifest: &Manifest) -> (Vec<Option<String>>, Vec<f64>) {
    let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
    let reports = manifest.perplexity.dense.iter().chain(&manifest.perplexity.pruned);
    let masks: Vec<_> = matrices.map(|matrix| matrix.mask_sha256.clone()).collect();
    assert_eq!(masks.iter().flatten().count(), 3 * 7, "every layer is pruned");
    (masks, reports.map(|report| report.perplexity).collect())
}

fn devices(manifest: &Manifest) -> Vec<String> {
    let plan = manifest.plan.as_ref().expect("runs are planned");
    let layers = plan.layers.iter();
    layers.map(|run| format!("{}-{} {}", run.first, run.last, run.devices.join("+"))).collect()
}

const ONE: &str = r#"{"gpus":["2GiB"]}"#;
const TWO: &str = r#"{"gpus":["2GiB","2GiB"]}"#;

#[test]
fn devices_compute_what_the_cpu_does_wherever_the_plan_puts_layers() {
    let place = place();
    let cpu = manifest(&place, "--use-cpu");
    assert!(cpu.devices.is_empty() && cpu.arithmetic.device == "cpu");
    std::fs::write(
        place.path("map.json"),
        r#"{"": 0, "model.layers.1": "cpu", "model.layers.2": 1}"#,
    )
    .expect("a writable folder");
    for (flags, expected) in [
        (format!("--simulate {ONE}"), &["0-2 cuda:0"][..]),
        (format!("--simulate {ONE} --device cuda"), &["0-2 cuda:0"]),
        (format!("--simulate {TWO}"), &["0-2 cuda:0+cuda:1"]),
        (format!("--simulate {TWO} --device cuda:1"), &["0-2 cuda:1"]),
        (format!("--simulate {TWO} --device-map balanced"), &["0-1 cuda:0", "2-2 cuda:1"]),
        (
            format!("--simulate {TWO} --device-map map.json"),
            &["0-0 cuda:0", "1-1 cpu", "2-2 cuda:1"],
        ),
        (
            format!("--simulate {TWO} --hidden-states disk --offload-folder spill"),
            &["0-2 cuda:0+cuda:1"],
        ),
        (format!("--simulate {ONE} --use-cpu"), &["0-2 cpu"]),
        (format!("--simulate {ONE} --device cpu"), &["0-2 cpu"]),
    ] {
        let run = manifest(&place, &flags);
        assert_eq!(devices(&run), expected, "{flags:?}");
        assert_eq!(results(&run), results(&cpu), "{flags:?}");
        assert!(run.fallbacks.is_empty(), "{flags:?}: {:?}", run.fallbacks);
        assert_eq!(
            run.devices.is_empty(),
            expected == ["0-2 cpu"],
            "devices that computed are in the record"
        );
        for device in &run.devices {
            let plan = run.plan.as_ref().expect("planned");
            let planned = plan.devices.iter().find(|plan| plan.device == device.device);
            let planned = planned.expect("planned").peak;
            assert!(device.units > 0);
            assert!(device.reserved_by_plan <= planned, "{device:?} was to take {planned} at most");
        }
    }
}

#[test]
fn a_unit_that_is_refused_is_done_on_the_cpu_whichever_it_is() {
    let place = place();
    let whole = manifest(&place, &format!("--simulate {ONE}"));
    let units = whole.devices[0].units;
    // Per layer: norms and 7 matrices; 7 choices of weights, 7 pruned matrices, and their products before and after; 2 + 2 windows, 3
    // samples twice but for the last layer. Then the head for both.
    let expected = 3 * (8 + 7 * 4 + 4 + 6) - 3 + 2 * (1 + 2);
    // The head is the same for both sides and is copied once.
    assert_eq!(units, expected - 1, "every unit has a number");
    for unit in 0..units {
        let simulation = format!(r#"{{"gpus":["2GiB"],"refuse":"{unit}"}}"#);
        let run = manifest(&place, &format!("--simulate {simulation}"));
        assert_eq!(results(&run), results(&whole), "unit {unit}");
        let [fall] = run.fallbacks.as_slice() else {
            panic!("unit {unit}: {:?}", run.fallbacks);
        };
        assert_eq!((fall.device.as_str(), fall.outcome), ("cuda:0", FallbackOutcome::Cpu));
        assert!(
            fall.unit.starts_with("model.layers.") || fall.unit.starts_with("lm_head"),
            "{fall:?}"
        );
        assert!(run.warnings.iter().any(|warning| *warning == fall.to_string()));
    }
}

#[test]
fn a_method_without_work_for_a_gpu_is_recorded_as_computed_on_the_cpu() {
    let place = place();
    let line = format!(
        "--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save out --device cuda --simulate {ONE}"
    );
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("no GPU is used: the method has no work"), "{}", ran.stderr);
    let manifest = place.manifest("out");
    assert_eq!(manifest.arithmetic.device, "cpu");
    assert!(manifest.devices.iter().all(|device| device.units == 0));
}

#[test]
fn gram_matrices_have_the_bits_of_the_cpu_on_any_number_of_devices() {
    let place = place();
    let masks = |flags: &str| {
        // Blocks of two samples and of one.
        let ran = place.run(&format!(
            "--model m --prune-method sparsegpt --eval none --dataset train.txt --nsamples 40 --seqlen 24 \
             --sparsity-ratio 0.5 --force --save out {flags}"
        ));
        assert_eq!(ran.code, 0, "{flags}\n{}", ran.stderr);
        let run = place.manifest("out");
        (results(&run).0, run.fallbacks.len())
    };
    let (cpu, _) = masks("--use-cpu");
    let gpus = |count: usize| vec!["\"2GiB\""; count].join(",");
    for (count, refuse) in
        [(1, ""), (2, ""), (3, ""), (1, "12,30x1"), (2, "10x2,15,40"), (2, "all")]
    {
        let simulation = format!(r#"{{"gpus":[{}],"refuse":"{refuse}"}}"#, gpus(count));
        let (ours, fallbacks) = masks(&format!("--simulate {simulation}"));
        assert!(ours == cpu, "{count} GPUs, refused: {refuse}");
        assert_eq!(fallbacks == 0, refuse.is_empty(), "{count} GPUs, refused: {refuse}");
    }
}

#[test]
fn the_ladder_has_its_rungs_in_order() {
    let place = place();
    let cpu = manifest(&place, "--use-cpu");
    // Units 0 to 7 copy layer 0, 8 and 9 are its dense windows, 10 to 12 its samples.
    for (refuse, unit, outcome) in [
        ("10x1", "model.layers.0 (calibrate, sample 0)", FallbackOutcome::Retried),
        ("10x2", "model.layers.0 (calibrate, sample 0)", FallbackOutcome::Smaller),
        ("10x4", "model.layers.0 (calibrate, sample 0)", FallbackOutcome::Smaller),
        ("11", "model.layers.0 (calibrate, sample 1)", FallbackOutcome::Cpu),
        ("6x1", "model.layers.0.mlp.up_proj (upload)", FallbackOutcome::Retried),
        // A matrix is not cut: the CPU computes the layer.
        ("6x2", "model.layers.0.mlp.up_proj (upload)", FallbackOutcome::Cpu),
    ] {
        let simulation = format!(r#"{{"gpus":["2GiB"],"refuse":"{refuse}"}}"#);
        let ran = run(&place, &format!("--simulate {simulation}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let run = place.manifest("out");
        let falls: Vec<_> =
            run.fallbacks.iter().map(|fall| (fall.unit.as_str(), fall.outcome)).collect();
        assert_eq!(falls[0], (unit, outcome), "{refuse}");
        assert_eq!(results(&run), results(&cpu), "{refuse}");
        let warning = format!("warning: GPU out of memory on {unit}, ");
        assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
        assert!(ran.stdout.contains("out of memory"), "{}", ran.stdout);
    }
}

#[test]
fn a_device_that_has_less_than_it_said_works_with_what_it_has() {
    let place = place();
    let cpu = manifest(&place, "--use-cpu");
    for (capacity, on_cpu) in [
        // The context takes 512 MiB, hidden states 175 KiB, a layer 121 KiB in f32, a sample 517 KiB, and 306 once it is cut.
        ("525007KiB", false),
        ("512MiB", true),
    ] {
        let simulation = format!(r#"{{"gpus":["2GiB"],"capacity":"{capacity}"}}"#);
        let ran = run(&place, &format!("--simulate {simulation}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let run = place.manifest("out");
        assert_eq!(results(&run), results(&cpu), "{capacity}");
        let outcomes: Vec<_> = run.fallbacks.iter().map(|fall| fall.outcome).collect();
        let expected = if on_cpu { FallbackOutcome::Cpu } else { FallbackOutcome::Smaller };
        assert!(
            !outcomes.is_empty() && outcomes.iter().all(|of| *of == expected),
            "{capacity}: {outcomes:?}"
        );
    }
    // Everything refused: after three samples in a row a device is left alone until the next layer.
    let simulation = r#"{"gpus":["2GiB"],"refuse":"all"}"#;
    let run = manifest(&place, &format!("--simulate {simulation}"));
    assert_eq!(results(&run), results(&cpu));
}

#[test]
fn a_gpu_that_is_not_there_or_too_small_is_refused_with_the_fix() {
    let place = place();
    for (flags, code, says) in [
        (format!("--simulate {ONE} --device cuda:1"), 2, &["cuda:1 is not there", "cuda:0"][..]),
        (r#"--simulate {"gpus":[]} --device cuda"#.into(), 1, &["no GPU can be used", "--use-cpu"]),
        (
            format!("--simulate {ONE} --device cuda --max-memory cuda:0=400MiB"),
            1,
            &["does not fit into", "cuda:0", "context", "short"],
        ),
        ("--device cuda:0 --use-cpu".into(), 2, &["contradict each other"]),
    ] {
        let ran = run(&place, &flags);
        assert_eq!(ran.code, code, "{flags:?}: {}", ran.stderr);
        for words in says {
            assert!(ran.stderr.contains(words), "{flags:?}: {}", ran.stderr);
        }
    }
    if !cfg!(feature = "cuda") {
        let ran = run(&place, "--device cuda:0");
        assert_eq!(ran.code, 2);
        assert!(ran.stderr.contains("this build has no CUDA"), "{}", ran.stderr);
        assert!(ran.stderr.contains("docs/install.md"), "{}", ran.stderr);
    }
    // A card that is too small is no reason to stop where the CPU will do; the plan says so.
    let small = manifest(&place, r#"--simulate {"gpus":["400MiB"]}"#);
    assert_eq!(devices(&small), ["0-2 cpu"]);
    let notes = &small.plan.as_ref().expect("planned").notes;
    assert!(notes.iter().any(|note| note.contains("cuda:0 is not used")), "{notes:?}");
}
