//! `prune recover` on small random checkpoints: every way lowers its loss and keeps zeros, a training that is killed anywhere leaves the
//! files of an undisturbed one, and bad input is refused.

mod closing;
mod devices;
mod diverged;
mod killed;
mod limits;
mod refused;
mod students;

use std::path::Path;

use prune::adapter::Adapter;
use prune::linalg::StoredDtype;
use prune::run::Manifest;
use prune::run::plan::PartKind;
use prune::synthetic::RandomCheckpoint;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::Place;

/// A dense model `m` of two layers, and a pruned one in `pruned/model`.
pub(crate) fn pruned(dtype: StoredDtype, pattern: &str) -> Place {
    let place = Place::with(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() });
    place.prune(&format!("--model m {pattern} --eval none --save pruned"));
    place
}

/// Flags that every training here shares.
pub(crate) const COMMON: &str = "recover --model pruned/model --dataset train.txt \
    --eval-dataset test.txt --seqlen 64 --eval-windows 3 --steps 6 --schedule constant";

/// Flags of each way.
const WAYS: [&str; 9] = [
    "--how full --lr 3e-3",
    "--how full --lr 3e-3 --train-norms --optim paged-adamw8bit --hidden-states disk --held-out 0",
    "--how lora --lr 3e-3 --rank 4 --alpha 8 --target-modules q_proj,down_proj --save-adapter",
    "--how lora --lr 3e-3 --base-quant nf4-double --optim paged-adamw32bit --eval-every 2",
    "--how lora --lr 3e-3 --teacher m --keep-activations 1",
    "--how full --lr 3e-3 --teacher m --distill-weight 0.25 --keep-activations 9",
    "--how blocks --lr 3e-3 --teacher m --nsamples 16",
    "--how blocks --lr 3e-3 --teacher m --nsamples 16 --train factors --rank 4",
    "--how blocks --lr 1 --teacher m --nsamples 16 --train-norms --optim sgd --momentum 0.5",
];

/// Elements of every matrix of the decoder, in f32, by name.
fn matrices(model: &Path) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(model.join("model.safetensors")).expect("a model");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let mut names: Vec<String> = file.names().into_iter().map(String::from).collect();
    names.retain(|name| name.contains("_proj"));
    names.sort();
    let values = |name: &String| {
        let tensor = file.tensor(name).expect("listed");
        let values: Vec<f32> = match tensor.dtype() {
            safetensors::Dtype::F32 => bytemuck::pod_collect_to_vec(tensor.data()),
            safetensors::Dtype::BF16 => tensor
                .data()
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&half| half::bf16::from_le_bytes(half).to_f32())
                .collect(),
            other => panic!("{other:?}"),
        };
        values
    };
    names.iter().map(|name| (name.clone(), values(name))).collect()
}

/// Checks that what is zero in `before` is +0 in `after`, and returns the number of weights that changed.
fn changed(before: &Path, after: &Path, when: &str) -> usize {
    let mut changed = 0;
    for ((name, before), (other, after)) in matrices(before).iter().zip(matrices(after)) {
        assert_eq!(*name, other);
        for (before, after) in before.iter().zip(after) {
            assert!(*before != 0.0 || after.to_bits() == 0, "{name}: {when}");
            changed += usize::from(*before != after);
        }
    }
    changed
}

/// The first and the last loss.
fn losses(manifest: &Manifest) -> (f64, f64) {
    let recovery = manifest.recovery.as_ref().expect("a training");
    match (recovery.steps.first(), recovery.steps.last()) {
        (Some(first), Some(last)) => (first.loss, last.loss),
        _ => {
            let layer = manifest.layers.last().and_then(|layer| layer.training.as_ref());
            let layer = layer.expect("a layer that was trained");
            (layer.first, layer.last)
        }
    }
}

#[test]
fn a_planned_training_is_the_plan_of_the_run() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let planned =
        place.run("plan pruned/model --recover --seqlen 64 --rank 8 --batch-size 3 --json");
    assert_eq!(planned.code, 0, "{}", planned.stderr);
    let rows: Vec<Value> = serde_json::from_str(&planned.stdout).expect("a list");
    assert_eq!(rows.len(), 7);
    // Ids and flags of the examples of 200 steps, less those of one.
    let tokens = 199 * 3 * 64 * 5;
    for row in rows {
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        let (how, optim, quant) = (text("how"), text("optimizer"), text("base_quant"));
        if how == "blocks" {
            continue;
        }
        let quant = match quant {
            "" => String::new(),
            format => format!("--base-quant {format}"),
        };
        let ran = place.run(&format!(
            "recover --model pruned/model --dataset train.txt --seqlen 64 --steps 1 --eval none \
             --rank 8 --batch-size 3 --how {how} --optim {optim} {quant} --save out --force"
        ));
        assert_eq!(ran.code, 0, "{row}: {}", ran.stderr);
        let plan = place.manifest("out").plan.expect("a plan");
        let mut phases = plan.phases.iter();
        let phase = phases.find(|one| one.phase.to_string() == text("peak_phase"));
        let phase = phase.expect("the phase of the row");
        // Both layers stay in memory. The row is for a run in which none stays, and one is read ahead.
        let mut frozen = phase.parts.iter();
        let frozen = frozen.find(|part| part.kind == PartKind::FrozenLayers);
        let frozen = frozen.map_or(0, |part| part.bytes.0);
        assert_eq!(
            row["peak"].as_u64(),
            Some(phase.bytes.0 - frozen / 2 + tokens),
            "{row}: {phase:?}"
        );
    }
}

#[test]
fn every_way_lowers_its_loss_and_keeps_zeros() {
    for (dtype, pattern) in
        [(StoredDtype::F32, "--sparsity-ratio 0.5"), (StoredDtype::Bf16, "--sparsity-type 2:4")]
    {
        let place = pruned(dtype, pattern);
        let before = place.path("pruned/model");
        for way in WAYS {
            let ran = place.run(&format!("{COMMON} {way} --save out --force"));
            let when = format!("{way} of {}", dtype.name());
            assert_eq!(ran.code, 0, "{when}: {}", ran.stderr);
            let count = changed(&before, &place.path("out/model"), &when);
            assert!(count > 1000, "{when}: {count} weights changed");
            let manifest = place.manifest("out");
            let (first, last) = losses(&manifest);
            assert!(last < first, "{when}: {first} then {last}");
            assert!(!place.path("out/training.state").exists(), "{when}");
            let dense = manifest.perplexity.dense.expect("measured").perplexity;
            let recovered = manifest.perplexity.pruned.expect("measured").perplexity;
            assert!(dense != recovered, "{when}: {dense}");
            if dtype == StoredDtype::F32 {
                assert_eq!(manifest.recovery.expect("a training").new_zeros, 0, "{when}");
            }
            if way.contains("--save-adapter") {
                let adapter = Adapter::open(&place.path("out/adapter")).expect("an adapter");
                // peft's automatic loader reads the base from there.
                let base = place.path("pruned/model").canonicalize().expect("a folder");
                assert_eq!(adapter.base_model_name(), base.to_str(), "{when}");
                // Two matrices of both layers.
                assert_eq!(adapter.changed().count(), 4, "{when}");
                let card = std::fs::read_to_string(place.path("out/adapter/README.md"));
                let card = card.expect("a card");
                assert!(card.contains("rank 4, alpha 8, q_proj, down_proj"), "{card}");
            }
            for name in ["recovery.json", "pruning.json", "README.md"] {
                assert!(place.path("out/model").join(name).exists(), "{when}: {name}");
            }
        }
    }
}

#[test]
fn threads_places_and_pages_change_no_bit() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    for way in [
        "--how lora --lr 3e-3 --rank 4",
        "--how full --lr 3e-3",
        "--how blocks --lr 3e-3 --teacher m --nsamples 16",
    ] {
        let model = |more: &str| {
            let ran = place.run(&format!("{COMMON} {way} --eval none --save out --force {more}"));
            assert_eq!(ran.code, 0, "{way} {more}: {}", ran.stderr);
            matrices(&place.path("out/model"))
        };
        let first = model("--threads 1");
        for more in [
            "--threads 3",
            "--hidden-states disk",
            "--optim paged-adamw32bit",
            "--max-memory cpu=1GiB",
            r#"--memory-settings {"mlp_tokens":7,"logits_bytes":4096,"head_rows":100,"prefetch":false}"#,
        ] {
            assert!(model(more) == first, "{way} {more}");
        }
    }
}

#[test]
fn the_best_state_is_written_and_patience_ends_a_training() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    // Random texts have nothing to learn: with such a rate the held-out loss soon rises.
    let flags = "--how full --held-out 4 --eval-every 1 --patience 2 --steps 40 --lr 0.02";
    let line = COMMON.replace("--steps 6", "");
    let ran = place.run(&format!("{line} {flags} --save out"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let recovery = place.manifest("out").recovery.expect("a training");
    let best = recovery.best_step.expect("measured");
    assert_eq!(recovery.steps.len() as u64, best + 2, "{:?}", recovery.held_out);
    assert!(recovery.steps.len() < 40);
    let lowest = recovery.held_out.iter().min_by(|a, b| a.loss.total_cmp(&b.loss));
    assert_eq!(lowest.expect("measured").step, best);
}
