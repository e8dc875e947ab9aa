//! A training whose loss explodes: the best state becomes the model, the exit code is 1, and another learning rate continues from there.

use std::fs;

use prune::linalg::StoredDtype;

use super::{COMMON, changed, pruned};
use crate::support::{Place, Work};

/// Twelve steps with a held-out loss after each. The momentum of `sgd` makes each change ten times as large as the one before: with a large
/// rate weights overflow after some steps, with a small one after many more.
fn line(rate: &str, more: &str) -> String {
    let common = COMMON.replace("--steps 6", "--steps 12");
    format!(
        "{common} --how full --optim sgd --momentum 10 --max-grad-norm 0 --held-out 4 --eval-every 1 \
         --lr {rate} --save out {more}"
    )
}

/// A rate with which the training has a good measurement and diverges later.
fn diverging(place: &Place, more: &str) -> (String, crate::support::Ran) {
    for rate in ["1e12", "1e15", "1e9"] {
        let _ = fs::remove_dir_all(place.path("out"));
        let ran = place.run(&line(rate, more));
        if ran.code == 1 && place.path("out/run.json").exists() {
            return (rate.to_string(), ran);
        }
    }
    panic!("no rate diverges after a good measurement");
}

#[test]
fn the_best_state_is_the_model_and_another_rate_continues_from_it() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    for more in ["", "--hidden-states disk"] {
        let (rate, ran) = diverging(&place, more);
        let manifest = place.manifest("out");
        let recovery = manifest.recovery.expect("a training");
        let divergence = recovery.divergence.expect("it diverged");
        let best = recovery.best_step.expect("measured");
        assert_eq!(divergence.best_step, best);
        assert!(divergence.step > best, "{divergence:?}");
        assert_eq!(recovery.steps.len() as u64, best);
        let message = format!("error: the training diverged: {}", divergence.what);
        assert!(ran.stderr.contains(&message), "{}", ran.stderr);
        assert!(ran.stderr.contains(&format!(" in step {}", divergence.step)), "{}", ran.stderr);
        assert!(
            ran.stderr.contains("hint: repeat the command with another rate"),
            "{}",
            ran.stderr
        );
        let model = place.path("out/model");
        let found = fs::read(model.join("model.safetensors")).expect("a model");
        assert!(changed(&place.path("pruned/model"), &model, more) > 0);

        // The same command changes nothing, and says the same.
        let again = place.run(&line(&rate, more));
        assert_eq!(again.code, 1, "{}", again.stderr);
        assert!(again.stderr.contains(&message), "{}", again.stderr);
        assert_eq!(fs::read(model.join("model.safetensors")).expect("a model"), found);

        // Another setting is another run.
        let other = place.run(&line(&rate, &format!("{more} --seed 7")));
        assert_eq!(other.code, 1, "{}", other.stderr);
        assert!(other.stderr.contains("seed: 0 there, 7 now"), "{}", other.stderr);

        let smaller = place.run(&line("1e-12", &format!("{more} --progress json")));
        assert_eq!(smaller.code, 0, "{}", smaller.stderr);
        let steps = Work::of(&smaller.stderr).steps;
        assert_eq!(steps, (best + 1..=12).collect::<Vec<u64>>());
        let recovery = place.manifest("out").recovery.expect("a training");
        assert_eq!((recovery.divergence, recovery.steps.len()), (None, 12));
        assert_eq!(recovery.rate, 1e-12);
        for name in ["training.state", "unfinished.json"] {
            assert!(!place.path("out").join(name).exists(), "{name}");
        }
    }
}

/// The process is killed while the continued training replaces the model of the first rate.
#[test]
fn a_continued_training_that_is_killed_continues_with_the_same_bytes() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    diverging(&place, "");
    copy(&place, "out", "before");
    let smaller = line("1e-12", "--save-every 5");
    assert_eq!(place.run(&smaller).code, 0);
    let expected = fs::read(place.path("out/model/model.safetensors")).expect("a model");
    for at in (1..60).step_by(7) {
        fs::remove_dir_all(place.path("out")).expect("removed");
        copy(&place, "before", "out");
        let killed = place.with_fault(&smaller, &format!("kill:{at}"));
        assert!(killed.is_none(), "{at}");
        let ran = place.run(&smaller);
        assert_eq!(ran.code, 0, "{at}: {}", ran.stderr);
        let found = fs::read(place.path("out/model/model.safetensors")).expect("a model");
        assert!(found == expected, "{at}");
    }
}

/// Copies a run folder with its model.
fn copy(place: &Place, from: &str, to: &str) {
    for folder in ["", "model"] {
        let (from, to) = (place.path(from).join(folder), place.path(to).join(folder));
        fs::create_dir_all(&to).expect("a folder");
        for entry in fs::read_dir(from).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_file() {
                let name = path.file_name().expect("a name");
                fs::copy(&path, to.join(name)).expect("a copy");
            }
        }
    }
}

#[test]
fn a_training_without_a_good_measurement_names_a_command_that_works() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let wild = format!("{COMMON} --how full --max-grad-norm 0 --held-out 0 --save out");
    let ran = place.run(&format!("{wild} --lr 1e30"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("in step 2"), "{}", ran.stderr);
    assert!(ran.stderr.contains("leave --lr 1e30 out and add --force"), "{}", ran.stderr);
    assert!(!ran.stderr.contains("continues the run"), "it fails again: {}", ran.stderr);
    let ran = place.run(&format!("{wild} --force"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}
