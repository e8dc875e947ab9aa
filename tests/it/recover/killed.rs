//! A training that is killed or stopped anywhere: the same command leaves the files of an undisturbed one, and repeats no step that was saved.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use prune::linalg::StoredDtype;
use serde_json::Value;

use super::{COMMON, pruned};
use crate::resume::{assert_same, outcome, saved_layers, signal};
use crate::support::{Place, Ran, Work};

/// The number of random signals per way; 4 without the variable. Set it to 30 by hand.
const SIGNALS: &str = "PRUNE_TEST_SIGNALS";

/// A way with the steps between two saved states, if it saves steps.
const KILLED: [(&str, Option<u64>); 6] = [
    (
        "--how full --lr 3e-3 --optim paged-adamw8bit --save-every 1 --held-out 2 --eval-every 2",
        Some(1),
    ),
    ("--how lora --lr 3e-3 --rank 4 --save-every 2", Some(2)),
    ("--how blocks --lr 3e-3 --teacher m --nsamples 16", None),
    // Masks close in steps 1, 2 and 3, and in steps 1 to 4.
    (
        "--how full --lr 3e-3 --close-to 0.8 --close-by 0.5 --save-every 1 --held-out 2 --eval-every 2",
        Some(1),
    ),
    ("--how full --lr 3e-3 --close-to 0.7 --optim paged-adamw32bit --save-every 1", Some(1)),
    ("--how blocks --lr 3e-3 --close-to 0.8 --teacher m --nsamples 16", None),
];

/// Layers of the model.
const LAYERS: usize = 2;

fn files(place: &Place) -> BTreeMap<String, Vec<u8>> {
    outcome(&place.path("out"))
}

/// The steps in the saved state of a training of the whole model.
fn saved_steps(place: &Place) -> u64 {
    let Ok(bytes) = fs::read(place.path("out/training.state")) else {
        return 0;
    };
    // The seal comes first.
    let line = bytes.split(|byte| *byte == b'\n').nth(1);
    let head: Value = serde_json::from_slice(line.expect("a head")).expect("JSON");
    head["steps"].as_array().expect("a list").len() as u64
}

/// Continues a run to its end, and checks that it repeats nothing that was saved.
fn continued(place: &Place, command: &str, saves_steps: bool, when: &str) -> Ran {
    let is_finished = place.path("out/run.json").exists();
    let (steps, layers) = (saved_steps(place), saved_layers(place, LAYERS));
    let ran = place.run(command);
    assert_eq!(ran.code, 0, "{when}: {}", ran.stderr);
    let work = Work::of(&ran.stderr);
    work.assert_layers_after(layers, LAYERS, when);
    if saves_steps && !is_finished {
        let expected: Vec<u64> = (steps + 1..=6).collect();
        assert_eq!(work.steps, expected, "{steps} steps were saved, {when}");
    }
    ran
}

#[test]
fn a_killed_training_leaves_the_same_bytes_and_repeats_no_saved_step() {
    let place = pruned(StoredDtype::Bf16, "--sparsity-ratio 0.5");
    for (way, every) in KILLED {
        let command = format!("{COMMON} {way} --save out --progress json");
        let ran = place.run(&command);
        assert_eq!(ran.code, 0, "{way}: {}", ran.stderr);
        let undisturbed = files(&place);
        let (mut killed, mut with_steps) = (0, 0);
        for at in (4..400).step_by(9) {
            fs::remove_dir_all(place.path("out")).expect("removed");
            if place.with_fault(&command, &format!("kill:{at}")).is_some() {
                break;
            }
            killed += 1;
            with_steps += usize::from(saved_steps(&place) > 0);
            let when = format!("{way}, killed at {at}");
            continued(&place, &command, every.is_some(), &when);
            assert_same(&files(&place), &undisturbed, &when);
        }
        assert!(killed > 5, "{way}: {killed} kills");
        assert!(every.is_none() || with_steps > 3, "{way}: {with_steps}");
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

/// Kills and signals at random moments, from the start to the end of publishing.
#[test]
#[cfg(unix)]
fn a_training_that_gets_signals_at_any_time_repeats_at_most_the_steps_since_it_was_saved() {
    let signals: u32 = std::env::var(SIGNALS).map_or(4, |count| count.parse().expect("a number"));
    let place = pruned(StoredDtype::Bf16, "--sparsity-ratio 0.5");
    let mut random = 1u32;
    for (way, every) in KILLED {
        let command = format!("{COMMON} {way} --save out --progress json");
        let began = Instant::now();
        assert_eq!(place.run(&command).code, 0, "{way}");
        let whole = began.elapsed();
        let undisturbed = files(&place);
        let mut hit = 0;
        for number in 0..signals {
            fs::remove_dir_all(place.path("out")).expect("removed");
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // A moment in the number-th part of the run.
            let part = f64::from(number) + f64::from(random >> 8) / f64::from(1u32 << 24);
            let name = ["KILL", "TERM", "INT", "KILL", "USR1"][random as usize % 5];
            let log = fs::File::create(place.path("first.log")).expect("a new file");
            let mut first = place.command(&command);
            let mut child =
                first.stdout(std::process::Stdio::null()).stderr(log).spawn().expect("the binary");
            std::thread::sleep(
                whole.mul_f64(part / f64::from(signals)).min(Duration::from_secs(60)),
            );
            if child.try_wait().expect("a child").is_none() {
                signal(&child, name);
            }
            let ended = child.wait().expect("a child");
            hit += u32::from(ended.code() != Some(0));
            let text = fs::read_to_string(place.path("first.log")).expect("a log");
            let done = Work::of(&text).steps.last().copied().unwrap_or(0);
            let when = format!("{way}, SIG{name} number {number}");
            if ended.code() == Some(0) && !place.path("out/unfinished.json").exists() {
                continue;
            }
            let saved = saved_steps(&place);
            let is_recorded = place.path("out/run.json").exists();
            if let Some(every) = every.filter(|_| !is_recorded) {
                assert!(done <= saved + every, "{done} done, {saved} saved: {when}");
            }
            continued(&place, &command, every.is_some(), &when);
            assert_same(&files(&place), &undisturbed, &when);
        }
        assert!(hit > 0, "{way}: no signal came in time");
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

#[test]
fn a_full_disk_ends_with_an_error_and_the_same_command_continues() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let command =
        format!("{COMMON} --how lora --lr 3e-3 --rank 4 --save-every 1 --save out --progress json");
    assert_eq!(place.run(&command).code, 0);
    let undisturbed = files(&place);
    let mut failed = 0;
    for at in [8, 14, 20, 26, 40] {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let ran = place.with_fault(&command, &format!("full:{at}")).expect("no signal");
        if ran.code == 0 {
            continue;
        }
        failed += 1;
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert!(ran.stderr.contains("error"), "{}", ran.stderr);
        continued(&place, &command, true, &format!("full at {at}"));
        assert_same(&files(&place), &undisturbed, &format!("full at {at}"));
    }
    assert!(failed > 1, "{failed} runs failed");
}

#[test]
fn a_training_with_other_settings_is_not_continued() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let command = format!("{COMMON} --how full --lr 3e-3 --save-every 1 --save out");
    assert!(place.with_fault(&command, "kill:24").is_none());
    let other = place.run(&command.replace("--lr 3e-3", "--lr 4e-3"));
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(other.stderr.contains("lr: 0.003 there, 0.004 now"), "{}", other.stderr);
    let other = place.run(&command.replace("--how full", "--how lora"));
    assert_eq!(other.code, 1, "{}", other.stderr);
    let other = place.run(&command.replace("--dataset train.txt", "--dataset test.txt"));
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(other.stderr.contains("training tokens: "), "{}", other.stderr);
    // A flag that is left out is a difference, too, and nothing of the first training is lost.
    let closing = command.replace("--save out", "--close-to 0.8 --close-by 0.9 --save closed");
    assert!(place.with_fault(&closing, "kill:24").is_none());
    // A killed process leaves its locks.
    let left = || {
        let mut files = outcome(&place.path("closed"));
        files.retain(|name, _| !name.ends_with("prune.lock"));
        files
    };
    let before = left();
    for (flags, name) in
        [("--close-to 0.8 --close-by 0.9", "close-to: 0.8"), ("--close-by 0.9", "close-by: 0.9")]
    {
        let other = place.run(&closing.replace(flags, ""));
        assert_eq!(other.code, 1, "{}", other.stderr);
        assert!(other.stderr.contains(&format!("{name} there, none now")), "{}", other.stderr);
        assert_same(&left(), &before, flags);
    }
}
