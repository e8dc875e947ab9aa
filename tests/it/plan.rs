//! `prune plan`, and runs that keep their plan: budgets, refusals with flags that work, device maps that can be read again.

use std::fs;
use std::time::Instant;

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::linalg::product::Kernel;
use prune::run::{HiddenStatesStorage, Plan};
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};

use crate::support::{Place, Ran, edit_json};

fn record(ran: &Ran) -> Value {
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("--json prints one object")
}

fn plan_of(ran: &Ran) -> Plan {
    serde_json::from_value(record(ran)).expect("the object holds a plan")
}

#[test]
fn a_shape_is_planned_without_a_checkpoint() {
    let place = Place::empty();
    let base = "plan --shape llama-2-7b --threads 4 --json";
    let roomy = plan_of(&place.run(&format!("{base} --max-memory cpu=24GiB")));
    assert_eq!((roomy.layers[0].first, roomy.layers[0].last), (0, 31));
    assert_eq!(roomy.hidden_states.storage, HiddenStatesStorage::Ram);
    let tight = plan_of(&place.run(&format!("{base} --max-memory cpu=2GiB")));
    assert_eq!(tight.hidden_states.storage, HiddenStatesStorage::Disk);
    let cpu = tight.cpu().expect("the CPU is in every plan");
    assert!(cpu.peak <= ByteSize(2 << 30) && cpu.budget == Some(ByteSize(2 << 30)));
    assert!(tight.time.seconds > roomy.time.seconds);
    let text = place.run("plan --shape llama-2-7b --max-memory cpu=24GiB").stdout;
    for part in ["6.74 billion parameters", "hidden states", "calibrate", "head", "about "] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_plan_names_a_dtype_that_is_much_faster_on_this_cpu() {
    let place = Place::empty();
    let plan = |flags: &str| {
        let base = "plan --shape llama-2-7b --threads 2 --max-memory cpu=24GiB --json";
        plan_of(&place.run(&format!("{base} {flags}")))
    };
    let names = |plan: &Plan| plan.notes.iter().any(|note| note.contains("--dtype bf16 takes"));
    let has_bf16 = Kernel::best_bf16().is_some();
    let automatic = plan("");
    assert_eq!(names(&automatic), has_bf16, "{:?}", automatic.notes);
    assert!(!names(&plan("--dtype f32")), "f32 was asked for");
    fs::write(place.path("machine.json"), r#"{"cpu": {"memory": "24GiB", "threads": 2}}"#).unwrap();
    let elsewhere = place.run("plan --shape llama-2-7b --inventory machine.json --json");
    assert!(!names(&plan_of(&elsewhere)), "the CPU of a described machine is unknown");
    if has_bf16 {
        let in_bf16 = plan("--dtype bf16");
        assert!(!names(&in_bf16) && automatic.time.seconds > 1.5 * in_bf16.time.seconds);
    }
}

#[test]
fn the_table_has_every_shape_and_what_is_the_least_for_it() {
    let place = Place::empty();
    let table = place.run("plan --table").stdout;
    for name in [
        "tinyllama-1.1b",
        "llama-3.2-1b",
        "llama-2-7b",
        "mistral-7b",
        "llama-3.1-8b",
        "llama-30b",
        "llama-3.1-405b",
    ] {
        assert!(table.contains(&format!("| {name} |")), "{table}");
    }
    let rows: Vec<Value> =
        serde_json::from_str(&place.run("plan --table --json").stdout).expect("a list");
    for row in &rows {
        let shape = row["model"].as_str().expect("a name");
        let least = row["smallest_ram"].as_u64().expect("bytes");
        assert!(least < row["peak"].as_u64().expect("bytes"), "{row}");
        // The least really is what is refused one MiB below.
        let with = |bytes: u64| {
            let budget = format!("cpu={}MiB", bytes / (1 << 20));
            place.run(&format!("plan --shape {shape} --use-cpu --max-memory {budget}")).code
        };
        assert_eq!((with(least + (1 << 20)), with(least - (1 << 20))), (0, 1), "{shape}");
    }
}

#[test]
fn another_machine_is_planned_for_and_its_map_can_be_read_again() {
    let place = Place::empty();
    let machine = json!({"cpu": {"memory": "64GiB", "threads": 8}, "gpus": [{"name": "A", "memory": "24GiB"}, {"memory": "24GiB"}]});
    fs::write(place.path("machine.json"), machine.to_string()).expect("a new file");
    let base = "plan --shape llama-2-13b --inventory machine.json";
    let ran = place.run(&format!("{base} --device-map balanced --json"));
    let found = record(&ran);
    fs::write(place.path("map.json"), found["device_map"].to_string()).expect("a new file");
    let again = record(&place.run(&format!("{base} --device-map map.json --json")));
    assert_eq!(found["layers"], again["layers"]);
    assert_eq!(found["layers"][1]["devices"], json!(["cuda:1"]));
    let text = place.run(base).stdout;
    assert!(text.contains("cuda:0 and cuda:1") && text.contains("gpu-results.md"), "{text}");
    let cpu = place.run(&format!("{base} --use-cpu")).stdout;
    assert!(!cpu.contains("cuda"), "{cpu}");
}

#[test]
fn what_cannot_be_planned_is_refused_with_the_reason() {
    let place = Place::empty();
    for (arguments, code, reason) in [
        ("plan", 2, "no model is named"),
        ("plan --shape llama-9", 2, "llama-2-7b"),
        ("plan m --shape llama-2-7b", 2, "cannot be used with"),
        ("plan --table --shape llama-2-7b", 2, "cannot be used with"),
        ("plan --shape llama-2-7b --max-memory cpu=24Gb", 2, "bits"),
        ("plan --shape llama-2-7b --max-memory cuda:0=10GiB", 2, "cuda:0 is not there"),
        ("plan --shape llama-2-7b --device-map none.json", 1, "none.json"),
        ("plan --shape llama-2-7b --inventory none.json", 1, "none.json"),
        ("plan --shape llama-30b --seqlen 4096", 2, "2048 positions"),
        ("plan --model nowhere", 1, "nowhere"),
    ] {
        let ran = place.run(arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(reason), "{arguments:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

/// A checkpoint whose run takes about 200 MiB, two thirds of it hidden states.
fn sizeable() -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 512,
        intermediate_size: 1376,
        num_hidden_layers: 2,
        num_attention_heads: 8,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    })
}

/// 128 samples of 256 tokens: 64 MiB of hidden states, and as much again for the windows.
const RUN: &str = "--model m --sparsity-ratio 0.5 --dataset train.txt --eval-dataset train.txt \
    --nsamples 128 --seqlen 256 --threads 2";

#[test]
fn a_budget_is_kept_and_changes_no_result() {
    let place = sizeable();
    let run = |save: &str, more: &str| {
        let ran = place.run(&format!("{RUN} --save {save} {more}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        place.manifest(save)
    };
    let free = run("free", "--max-memory cpu=8GiB");
    let planned = free.plan.as_ref().and_then(Plan::cpu).expect("every run has a plan").peak;
    let limit = planned.0 * 6 / 10;
    let tight = run("tight", &format!("--max-memory cpu={}KiB", limit >> 10));
    assert_eq!(tight.hidden_states, HiddenStatesStorage::Disk);
    if let Some(peak) = tight.peak_anonymous {
        assert!(peak.0 <= limit, "{peak} of {}", ByteSize(limit));
        let free = free.peak_anonymous.expect("the same system");
        assert!(peak < free, "{peak}, {free} without a limit");
    }
    let masks = |run: &prune::run::Manifest| -> Vec<Option<String>> {
        let matrices = run.layers.iter().flat_map(|layer| &layer.matrices);
        matrices.map(|matrix| matrix.mask_sha256.clone()).collect()
    };
    assert_eq!(masks(&free), masks(&tight));
    let perplexity =
        |run: &prune::run::Manifest| run.perplexity.pruned.expect("it was measured").perplexity;
    assert!((perplexity(&free) / perplexity(&tight) - 1.0).abs() < 1e-8);
}

#[test]
fn a_tokenizer_whose_texts_cannot_be_cut_is_part_of_the_plan() {
    let place = Place::new();
    fs::write(place.path("long.txt"), "ab cd ".repeat(200_000)).unwrap();
    let eval = "eval --model m --eval-dataset long.txt --eval-windows 2 --seqlen 64 --threads 2 --max-memory cpu=64MiB";
    let ran = place.run(eval);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    // With a normalizer no cut is proven safe. 1.2 MB of text in one call take 120 bytes each: 137 MiB.
    edit_json(&place.path("m/tokenizer.json"), |json| {
        json["normalizer"] = json!({"type": "Lowercase"});
    });
    let ran = place.run(eval);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let needed = "\"tokenize\" needs at least 14";
    assert!(ran.stderr.contains(needed), "{}", ran.stderr);
}

#[test]
fn an_impossible_budget_is_refused_at_once_with_flags_that_work() {
    let place = sizeable();
    let start = Instant::now();
    let refused = place.run(&format!("{RUN} --save out --max-memory cpu=14MiB"));
    assert_eq!(refused.code, 1, "{}", refused.stderr);
    // A fraction of a second by itself; other tests share the processors.
    assert!(start.elapsed().as_secs_f64() < 10.0, "{:?}", start.elapsed());
    assert!(refused.stderr.contains("does not fit into 14.00 MiB of cpu"), "{}", refused.stderr);
    assert!(!place.path("out").exists(), "nothing was written");
    let hint =
        refused.stderr.lines().find_map(|line| line.strip_prefix("hint: use ")).expect("a hint");
    let advice: Vec<&str> = hint.split(", or ").collect();
    assert!(advice[0].starts_with("--max-memory cpu="), "{hint}");
    for (index, flags) in advice.iter().enumerate() {
        let mut words: Vec<&str> = RUN.split(' ').collect();
        for flag in flags.split(' ') {
            // A flag of the advice replaces the one that stands already.
            if let Some(at) = words.iter().position(|other| *other == flag) {
                words.drain(at..at + 2);
            }
        }
        let budget = if flags.contains("--max-memory") { "" } else { "--max-memory cpu=14MiB" };
        let ran = place.run(&format!("{} {flags} --save out{index} {budget}", words.join(" ")));
        assert_eq!(ran.code, 0, "{flags}: {}", ran.stderr);
    }
}

#[test]
fn a_plan_says_what_run_it_assumes() {
    let place = Place::empty();
    let assumed = |flags: &str| {
        let text = place.run(&format!("plan --shape llama-2-7b --use-cpu {flags}")).stdout;
        text.lines().find_map(|line| line.strip_prefix("assumes        ")).map(str::to_string)
    };
    assert_eq!(
        assumed("").as_deref(),
        Some("wanda, any ratio; 128 samples, 166 windows of WikiText-2; 2048 tokens each")
    );
    assert_eq!(
        assumed("--prune-method magnitude --eval-windows 8 --seqlen 512").as_deref(),
        Some("magnitude, any ratio; no samples, 8 windows; 512 tokens each")
    );
}
