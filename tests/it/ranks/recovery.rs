//! Trainings on several ranks give the bits of one process: every way, with steps that do not divide, and continued by other ranks.

use std::fs;

use prune::job;
use prune::ranks::{Ranks, threads};
use prune::run::{Manifest, Silent};
use serde_json::Value;

use super::{files, place};
use crate::support::{Place, recover_settings_of};

/// Ways of training from half of the weights: whole and by layers, weights and factors, with a teacher, with masks that close, in memory
/// and in files.
const WAYS: [&str; 6] = [
    "--how full --batch-size 5 --held-out 3 --eval-every 2",
    "--how full --batch-size 3 --optim paged-adamw8bit --train-norms --accumulate 2 --max-grad-norm 0.5",
    "--how full --batch-size 4 --teacher m --close-to 0.8 --close-by 0.5 --keep-activations 1",
    "--how lora --rank 4 --batch-size 2 --teacher m --save-adapter --base-quant nf4 --no-save-model",
    "--how blocks --teacher m --nsamples 7 --batch-size 4 --train-norms",
    "--how blocks --teacher m --nsamples 7 --batch-size 3 --close-to 0.7 --hidden-states disk",
];

/// A pruned model beside the dense model.
fn pruned() -> Place {
    let place = place();
    let ran = place.run(
        "--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --use-cpu --save pruned",
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    place
}

/// A command line with the paths of a place.
fn line(place: &Place, way: &str, save: &str) -> String {
    let path = |name: &str| place.path(name).display().to_string();
    let usual = [("--steps", "4"), ("--eval", "both")];
    let usual = usual.map(|(flag, value)| match way.contains(&format!("{flag} ")) {
        true => String::new(),
        false => format!("{flag} {value}"),
    });
    let way = way.replace("--teacher m", &format!("--teacher {}", path("m")));
    format!(
        "--model {} --dataset {} --eval-dataset {} --text-cache {} --offload-folder {} --seqlen 48 \
         --eval-windows 5 --lr 3e-3 --use-cpu {way} {} --save {}",
        path("pruned/model"),
        path("train.txt"),
        path("test.txt"),
        path("cache"),
        path("."),
        usual.join(" "),
        path(save)
    )
}

fn train(ranks: &Ranks, line: &str) -> anyhow::Result<Manifest> {
    let done = job::recover_on(ranks, recover_settings_of(line)?, &Silent);
    if let Err(error) = &done {
        ranks.leave(Some(error.to_string()));
    }
    done
}

/// Everything of a record that must not depend on the ranks.
fn outcome(manifest: &Manifest) -> Value {
    let mut recovery = serde_json::to_value(&manifest.recovery).expect("a record");
    recovery["adapter"] = Value::Null;
    serde_json::json!([recovery, manifest.perplexity])
}

/// The files of the model and of the adapter.
fn written(place: &Place, save: &str) -> Vec<Vec<u8>> {
    let adapter = place.path(save).join("adapter/adapter_model.safetensors");
    let of_model = match place.path(save).join("model").exists() {
        true => files(place, save).into_values().collect(),
        false => Vec::new(),
    };
    of_model.into_iter().chain(fs::read(adapter)).collect()
}

#[test]
fn every_way_of_training_gives_the_same_bits_on_any_number_of_ranks() {
    let place = pruned();
    for (number, way) in WAYS.into_iter().enumerate() {
        let alone = train(&Ranks::alone(), &line(&place, way, &format!("{number}-1"))).unwrap();
        let expected = written(&place, &format!("{number}-1"));
        assert!(!expected.is_empty(), "{way}");
        for size in [2, 3, 8] {
            let save = format!("{number}-{size}");
            let line = line(&place, way, &save);
            for manifest in threads::run(size, |ranks| train(ranks, &line)) {
                let manifest = manifest.unwrap();
                assert_eq!(outcome(&manifest), outcome(&alone), "{way} on {size}");
                assert_eq!(manifest.ranks.len(), size);
            }
            assert!(written(&place, &save) == expected, "{way} on {size}");
        }
    }
}

/// Stops at a step, as a signal does.
struct StopAt {
    step: u64,
    is_stopped: std::sync::atomic::AtomicBool,
}

impl prune::run::Events for StopAt {
    fn emit(&self, event: prune::run::Event) {
        use std::sync::atomic::Ordering;
        if matches!(event, prune::run::Event::TrainingStep { step, .. } if step == self.step) {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
    }

    fn is_stopping(&self) -> bool {
        self.is_stopped.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[test]
fn a_stopped_training_is_continued_by_another_number_of_ranks() {
    let place = pruned();
    let way = "--how full --batch-size 4 --steps 6 --held-out 2 --eval-every 2 --close-to 0.8";
    let alone = train(&Ranks::alone(), &line(&place, way, "whole")).unwrap();
    let expected = written(&place, "whole");
    let line = line(&place, way, "out");
    for (before, after) in [(2, 3), (3, 1), (1, 2)] {
        let _ = fs::remove_dir_all(place.path("out"));
        // The last rank is asked to stop, and the first saves the steps that are done.
        let stopped = threads::run(before, |ranks| {
            let step = if ranks.rank() + 1 == before { 3 } else { 100 };
            let events = StopAt { step, is_stopped: false.into() };
            let done = job::recover_on(ranks, recover_settings_of(&line)?, &events);
            if done.is_err() {
                ranks.leave(None);
            }
            done
        });
        assert!(stopped.iter().all(Result::is_err), "{before} ranks");
        assert!(place.path("out/training.state").exists(), "{before} ranks");
        let steps = std::sync::Mutex::new(Vec::new());
        let continued = threads::run(after, |ranks| {
            let events = Steps(&steps);
            job::recover_on(ranks, recover_settings_of(&line)?, &events)
        });
        for manifest in continued {
            assert_eq!(outcome(&manifest.unwrap()), outcome(&alone), "{before}, then {after}");
        }
        assert!(written(&place, "out") == expected, "{before}, then {after}");
        let steps = steps.into_inner().expect("no panic");
        assert!(steps.iter().all(|step| *step > 3), "saved steps are repeated: {steps:?}");
        assert_eq!(steps.len(), 3 * after, "{before}, then {after}");
    }
}

/// Collects the numbers of the steps of all ranks.
struct Steps<'a>(&'a std::sync::Mutex<Vec<u64>>);

impl prune::run::Events for Steps<'_> {
    fn emit(&self, event: prune::run::Event) {
        if let prune::run::Event::TrainingStep { step, .. } = event {
            self.0.lock().expect("no panic").push(step);
        }
    }
}

#[test]
fn a_rank_sends_gradients_and_numbers_alone() {
    let place = pruned();
    let line = line(&place, "--how full --batch-size 5 --eval none", "out");
    let manifest = threads::run(2, |ranks| train(ranks, &line)).remove(0).unwrap();
    // Rank 1 has examples 1 and 3: the halves of two gradients that rank 0 owns, and its half of the sum, in each of four steps.
    let parameters = manifest.recovery.as_ref().expect("a training").parameters as f64;
    let expected = 4.0 * 3.0 * 4.0 * parameters / 2.0;
    let sent = manifest.ranks[1].bytes_sent as f64;
    assert!(sent > 0.99 * expected && sent < 1.02 * expected + 4000.0, "{sent}, {expected}");
}
