//! The memory of trainings: plans count the examples that there are, no peak is above `--max-memory`, and what does not fit is refused.

use std::fs;

use prune::linalg::StoredDtype;
use prune::run::Manifest;
use prune::synthetic::RandomCheckpoint;

use super::{COMMON, pruned};
use crate::support::{Place, words};

/// The bytes that a plan has for token ids in the phase of its peak and elsewhere, at most.
fn planned_tokens(manifest: &Manifest) -> u64 {
    let plan = manifest.plan.as_ref().expect("a plan");
    let parts = plan.phases.iter().flat_map(|phase| &phase.parts);
    let tokens = parts.filter(|part| part.kind == prune::run::plan::PartKind::TokenIds);
    tokens.map(|part| part.bytes.0).max().expect("a text")
}

#[test]
fn a_plan_counts_the_examples_that_there_are() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let lines = words(3, 900);
    fs::write(place.path("short.txt"), &lines).expect("a new file");
    let json = |text: &str| format!("{}\n", serde_json::json!({ "text": text }));
    let documents: String = lines.lines().map(json).collect();
    fs::write(place.path("short.jsonl"), documents).expect("a new file");
    // 12 lines are fewer examples than a training of 100000 steps asks for.
    let common = "recover --model pruned/model --how lora --rank 2 --held-out 2 --eval none --batch-size 1 \
        --max-memory cpu=64MiB --save out --force";
    for text in [
        "--dataset short.txt --seqlen 64 --epochs 1",
        "--dataset short.txt --seqlen 64 --epochs 3",
        "--dataset jsonl:short.jsonl --per-document --seqlen 16 --epochs 1",
        "--dataset jsonl:short.jsonl --seqlen 64 --steps 100000 --patience 1 --eval-every 1 --lr 1e-12",
    ] {
        for how in ["lora", "full"] {
            let line = common.replace("lora --rank 2", how);
            let ran = place.run(&format!("{line} {text}"));
            assert_eq!(ran.code, 0, "{how} {text}: {}", ran.stderr);
            let manifest = place.manifest("out");
            let recovery = manifest.recovery.as_ref().expect("a training");
            let [trained, held] = recovery.examples;
            let seqlen = manifest.settings["seqlen"].as_u64().expect("a number");
            let expected = (trained + held) as u64 * seqlen * 5;
            assert_eq!(planned_tokens(&manifest), expected, "{how} {text}");
            if text.contains("--epochs 3") {
                assert_eq!(recovery.steps.len(), 3 * trained, "{how} {text}");
            }
        }
    }
}

/// Wide enough that layers, not the program, decide.
fn wide() -> Place {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 512,
        intermediate_size: 1408,
        num_hidden_layers: 3,
        vocab_size: 4000,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    });
    let ran = place
        .run("--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save pruned");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    place
}

/// The least MiB that work, as the refusal of a run with 1 MiB names it.
fn least(place: &Place, line: &str) -> u64 {
    let ran = place.run(&format!("{line} --max-memory cpu=1MiB"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let (_, hint) = ran
        .stderr
        .split_once("--max-memory cpu=")
        .unwrap_or_else(|| panic!("no budget: {}", ran.stderr));
    let (number, _) = hint.split_once("MiB").expect("a unit");
    number.parse().expect("a number")
}

#[test]
#[cfg(target_os = "linux")]
fn no_peak_of_a_training_is_above_its_limit() {
    let place = wide();
    for way in [
        "blocks --teacher m --nsamples 8",
        "lora --nsamples 12 --held-out 2",
        "full --nsamples 12 --held-out 2",
        "full --nsamples 12 --held-out 2 --close-to 0.8 --mask-every 1",
    ] {
        for threads in [1, 2] {
            let line = format!(
                "recover --model pruned/model --how {way} --dataset train.txt --optim paged-adamw8bit \
                 --batch-size 2 --seqlen 128 --steps 2 --threads {threads} --eval none --save out --force"
            );
            let least = least(&place, &line);
            for limit in [least, 2 * least] {
                let ran = place.run(&format!("{line} --max-memory cpu={limit}MiB"));
                assert_eq!(ran.code, 0, "{way}: {}", ran.stderr);
                let manifest = place.manifest("out");
                let measured = manifest.peak_anonymous.expect("measured").0;
                let limit = limit << 20;
                assert!(measured <= limit, "{way}, {threads}: {measured} of {limit}");
                assert_eq!(manifest.exceeded_plan(), Vec::<String>::new());
            }
            // With the ids from the cache, nothing is tokenized, and less is enough.
            fs::remove_dir_all(place.path(".cache")).expect("removed");
            let below = format!("{line} --max-memory cpu={}MiB", least - 1);
            assert_eq!(place.run(&below).code, 1, "{way}");
        }
    }
}

#[test]
fn a_peak_above_the_limit_is_a_warning_of_any_size() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let ran = place.run(&format!("{COMMON} --how lora --rank 4 --eval none --save out"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let mut manifest = place.manifest("out");
    assert_eq!(manifest.exceeded_plan(), Vec::<String>::new());
    let plan = manifest.plan.as_mut().expect("a plan");
    let cpu = plan.devices.last_mut().expect("the CPU");
    let peak = manifest.peak_anonymous.expect("measured");
    cpu.budget = Some(prune::bytes::ByteSize(peak.0 - 1));
    cpu.peak = peak;
    let warnings = manifest.exceeded_plan();
    assert!(matches!(&warnings[..], [one] if one.contains("are allowed")), "{warnings:?}");
}
