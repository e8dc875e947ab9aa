//! A training that is killed or stopped anywhere: the same command leaves the files of an undisturbed run.

use std::collections::BTreeMap;
use std::fs;

use prune::linalg::StoredDtype;

use super::{COMMON, pruned};
use crate::resume::{assert_same, outcome};
use crate::support::Place;

/// A way, and the operations at which it is killed.
const KILLED: [&str; 3] = [
    "--how full --lr 3e-3 --optim paged-adamw8bit --save-every 1 --held-out 2 --eval-every 2",
    "--how lora --lr 3e-3 --rank 4 --save-every 2",
    "--how blocks --lr 3e-3 --teacher m --nsamples 16",
];

fn files(place: &Place) -> BTreeMap<String, Vec<u8>> {
    outcome(&place.path("out"))
}

#[test]
fn a_killed_training_leaves_the_same_bytes() {
    let place = pruned(StoredDtype::Bf16, "--sparsity-ratio 0.5");
    for way in KILLED {
        let command = format!("{COMMON} {way} --save out");
        let ran = place.run(&command);
        assert_eq!(ran.code, 0, "{way}: {}", ran.stderr);
        let undisturbed = files(&place);
        let mut killed = 0;
        for at in (4..400).step_by(9) {
            fs::remove_dir_all(place.path("out")).expect("removed");
            if place.with_fault(&command, &format!("kill:{at}")).is_some() {
                break;
            }
            killed += 1;
            let ran = place.run(&command);
            assert_eq!(ran.code, 0, "{way}, killed at {at}: {}", ran.stderr);
            assert_same(
                &files(&place),
                &undisturbed,
                &format!("{way}, killed at {at}"),
            );
        }
        assert!(killed > 5, "{way}: {killed} kills");
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

#[test]
fn a_full_disk_ends_with_an_error_and_the_same_command_continues() {
    let place = pruned(StoredDtype::F32, "--sparsity-ratio 0.5");
    let command = format!("{COMMON} --how lora --lr 3e-3 --rank 4 --save-every 1 --save out");
    assert_eq!(place.run(&command).code, 0);
    let undisturbed = files(&place);
    let mut failed = 0;
    for at in [8, 14, 20, 26, 40] {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let ran = place
            .with_fault(&command, &format!("full:{at}"))
            .expect("no signal");
        if ran.code == 0 {
            continue;
        }
        failed += 1;
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert!(ran.stderr.contains("error: "), "{}", ran.stderr);
        let ran = place.run(&command);
        assert_eq!(ran.code, 0, "full at {at}: {}", ran.stderr);
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
    assert!(
        other.stderr.contains("lr: 0.003 there, 0.004 now"),
        "{}",
        other.stderr
    );
    let other = place.run(&command.replace("--how full", "--how lora"));
    assert_eq!(other.code, 1, "{}", other.stderr);
    let other = place.run(&command.replace("--dataset train.txt", "--dataset test.txt"));
    assert_eq!(other.code, 1, "{}", other.stderr);
    assert!(
        other.stderr.contains("training tokens: "),
        "{}",
        other.stderr
    );
}
