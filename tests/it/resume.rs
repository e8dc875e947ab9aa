//! A run ends where it must not, and the same command goes on: killed at every file operation, refused by the disk, cut off from
//! power, interrupted by signals. What is there in the end is what a run leaves that nobody disturbed.
//!
//! `PRUNE_FAULT` is the program's own way of ending at its n-th file operation; see `src/disk/faults.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use prune::bytes::ByteSize;
use prune::demo::RandomCheckpoint;
use prune::linalg::StoredDtype;
use prune::run::Manifest;
use serde_json::Value;

use crate::cli::{Place, Ran, TEXTS, ran};

/// Wanda, both perplexities and masks: everything a run can leave.
const WANDA: [&str; 9] = [
    "--model",
    "m",
    "--sparsity-ratio",
    "0.5",
    "--eval",
    "both",
    "--save-masks",
    "--save",
    "out",
];

/// The same files, sooner.
const WITHOUT_PERPLEXITY: [&str; 9] = [
    "--model",
    "m",
    "--sparsity-ratio",
    "0.5",
    "--eval",
    "none",
    "--save-masks",
    "--save",
    "out",
];

/// No statistics, no samples.
const MAGNITUDE: [&str; 12] = [
    "--model",
    "m",
    "--prune-method",
    "magnitude",
    "--sparsity-type",
    "2:4",
    "--eval",
    "none",
    "--verify",
    "full",
    "--save",
    "out",
];

/// Three layers in two files.
fn place() -> Place {
    of_layers(3)
}

fn of_layers(layers: usize) -> Place {
    Place::with(&RandomCheckpoint {
        num_hidden_layers: layers,
        dtype: StoredDtype::Bf16,
        max_shard: ByteSize(150_000),
        ..RandomCheckpoint::default()
    })
}

fn command<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    flags.iter().chain(&TEXTS).copied().collect()
}

/// Runs with a fault; `None` where a signal ended it.
fn with_fault(place: &Place, flags: &[&str], fault: &str) -> Option<Ran> {
    let mut command = place.command(&command(flags));
    let output = command
        .env("PRUNE_FAULT", fault)
        .output()
        .expect("the binary");
    Some(Ran {
        code: output.status.code()?,
        stdout: String::from_utf8(output.stdout).expect("results are UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("messages are UTF-8"),
    })
}

/// Every file below a folder, by its path in it; of `run.json` what does not depend on times, nor on how much memory was free.
fn outcome(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fn collect(folder: &Path, below: &str, files: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let entry = entry.expect("an entry");
            let name = format!("{below}{}", entry.file_name().to_string_lossy());
            if entry.path().is_dir() {
                collect(&entry.path(), &format!("{name}/"), files);
            } else {
                files.insert(name, fs::read(entry.path()).expect("a file"));
            }
        }
    }
    let mut files = BTreeMap::new();
    collect(folder, "", &mut files);
    if let Some(manifest) = files.get_mut("run.json") {
        let mut json: Value = serde_json::from_slice(manifest).expect("a manifest");
        let fields = json.as_object_mut().expect("an object");
        for name in [
            "started_unix_seconds",
            "seconds",
            "sessions",
            "phases",
            "memory",
            "peak_anonymous",
            "profile",
            "plan",
        ] {
            fields.remove(name).expect(name);
        }
        for layer in fields["layers"].as_array_mut().expect("a list") {
            layer.as_object_mut().expect("a layer").remove("seconds");
        }
        *manifest = serde_json::to_vec_pretty(&json).expect("JSON");
    }
    files
}

/// What an undisturbed run leaves; the folder is removed again.
fn undisturbed(place: &Place, flags: &[&str]) -> BTreeMap<String, Vec<u8>> {
    place.prune(flags);
    let outcome = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    outcome
}

fn assert_same(
    found: &BTreeMap<String, Vec<u8>>,
    expected: &BTreeMap<String, Vec<u8>>,
    when: &str,
) {
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{when}");
    for (name, bytes) in found {
        if *bytes != expected[name] {
            let text = |bytes: &[u8]| {
                String::from_utf8_lossy(&bytes[..bytes.len().min(4000)]).into_owned()
            };
            assert_eq!(text(bytes), text(&expected[name]), "`{name}` {when}");
            panic!("`{name}` differs {when}");
        }
    }
}

/// A model folder that loads although its run is not finished would be the worst of all.
fn does_not_load(place: &Place, when: &str) {
    let run = place.path("out");
    assert!(
        run.join("run.json").exists() || !run.join("model/config.json").exists() || {
            // All was published, and only the record is missing.
            run.join("unfinished.json").exists()
                && fs::read_dir(run.join("model"))
                    .expect("a folder")
                    .all(|entry| {
                        !entry
                            .expect("an entry")
                            .path()
                            .to_string_lossy()
                            .ends_with("partial")
                    })
        },
        "{when}"
    );
}

/// Runs without a consequence, one after the other, after which no later fault is expected to have any.
const WITHOUT_CONSEQUENCE: usize = 4;

/// Ends a run by each `what` in turn, goes on, and compares. Returns how often.
fn at_every_operation(what: &str, flags: &[&str]) -> usize {
    let place = of_layers(2);
    let expected = undisturbed(&place, flags);
    let (mut times, mut without) = (0, 0);
    for at in 1.. {
        let fault = format!("{what}:{at}");
        let first = with_fault(&place, flags, &fault);
        match &first {
            // The fault came too late, or nothing depends on what failed.
            Some(ran) if ran.code == 0 => without += 1,
            Some(ran) => {
                assert_eq!(ran.code, 1, "{fault}\n{}", ran.stderr);
                let errors = ran
                    .stderr
                    .lines()
                    .filter(|line| line.starts_with("error: "));
                assert_eq!(errors.count(), 1, "{fault}\n{}", ran.stderr);
                assert!(
                    !ran.stderr.contains("bug in prune"),
                    "{fault}\n{}",
                    ran.stderr
                );
                (times, without) = (times + 1, 0);
            }
            None => {
                assert!(what == "kill" || what == "forget", "{fault} ended it");
                (times, without) = (times + 1, 0);
            }
        }
        does_not_load(&place, &fault);
        if without == 0 {
            let second = place.run(&command(flags));
            assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
        }
        assert_same(
            &outcome(&place.path("out")),
            &expected,
            &format!("after {fault}"),
        );
        if without == WITHOUT_CONSEQUENCE {
            break;
        }
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    times
}

#[test]
fn killed_at_every_file_operation_a_wanda_run_goes_on_to_the_same_end() {
    let times = at_every_operation("kill", &WANDA);
    assert!(times >= 50, "{times} kills");
}

#[test]
fn killed_at_every_file_operation_a_magnitude_run_goes_on_to_the_same_end() {
    let times = at_every_operation("kill", &MAGNITUDE);
    assert!(times >= 40, "{times} kills");
}

#[test]
fn every_operation_that_fails_once_is_one_error_and_the_run_goes_on() {
    let times = at_every_operation("fail", &WITHOUT_PERPLEXITY);
    assert!(times >= 50, "{times} failures");
}

#[test]
fn what_was_not_synced_may_be_lost() {
    let times = at_every_operation("forget", &WITHOUT_PERPLEXITY);
    assert!(times >= 50, "{times} power cuts");
}

#[test]
fn a_disk_that_fills_midway_stops_the_run_and_it_goes_on_when_there_is_room() {
    let place = of_layers(2);
    let expected = undisturbed(&place, &WITHOUT_PERPLEXITY);
    let mut full = 0;
    for at in (1..).step_by(5) {
        let fault = format!("full:{at}");
        let ran = with_fault(&place, &WITHOUT_PERPLEXITY, &fault).expect("an exit code");
        if ran.code == 0 {
            break;
        }
        assert_eq!(ran.code, 1, "{fault}\n{}", ran.stderr);
        assert!(
            ran.stderr.contains("hint: free some space"),
            "{fault}\n{}",
            ran.stderr
        );
        full += 1;
        let second = place.run(&command(&WITHOUT_PERPLEXITY));
        assert_eq!(second.code, 0, "after {fault}\n{}", second.stderr);
        assert_same(
            &outcome(&place.path("out")),
            &expected,
            &format!("after {fault}"),
        );
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    assert!(full >= 10, "{full} full disks");
}

#[test]
fn too_little_room_is_refused_before_anything_is_written() {
    let place = of_layers(2);
    let ran = with_fault(&place, &WANDA, "room:100000").expect("an exit code");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("has not enough room") && ran.stderr.contains("97.66 KiB are free"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("the masks "), "{}", ran.stderr);
    assert!(!place.path("out").exists());
    // What is replaced makes room for what replaces it.
    place.prune(&WANDA);
    let forced: Vec<&str> = WANDA.iter().copied().chain(["--force"]).collect();
    let ran = with_fault(&place, &forced, "room:100000").expect("an exit code");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_run_that_is_killed_again_and_again_gets_on_every_time() {
    let place = place();
    let expected = undisturbed(&place, &WANDA);
    let mut kills = 0;
    // Enough operations for a layer and the way back to it.
    while with_fault(&place, &WANDA, "kill:75").is_none() {
        kills += 1;
        assert!(kills < 20, "it does not get on");
    }
    assert!(kills >= 2, "{kills}");
    assert_same(&outcome(&place.path("out")), &expected, "after many kills");
    let sessions = place.manifest("out").sessions;
    assert_eq!(sessions.len(), kills + 1, "{sessions:?}");
    assert!(sessions.is_sorted_by_key(|session| session.first_layer));
}

/// A run that takes long enough to be hit.
fn slow() -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 128,
        intermediate_size: 352,
        num_hidden_layers: 4,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    })
}

const SLOW: [&str; 15] = [
    "--model",
    "m",
    "--sparsity-ratio",
    "0.6",
    "--save",
    "out",
    "--dataset",
    "train.txt",
    "--eval-dataset",
    "test.txt",
    "--nsamples",
    "24",
    "--seqlen",
    "256",
    "--quiet",
];

#[test]
#[cfg(unix)]
fn killed_at_any_time_a_run_goes_on_to_the_same_end() {
    let place = slow();
    let began = std::time::Instant::now();
    assert_eq!(place.run(&SLOW).code, 0);
    let whole = began.elapsed();
    let expected = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    let mut kills = 0;
    for tenth in 1..10 {
        let mut child = spawned(&mut place.command(&SLOW));
        std::thread::sleep(whole * tenth / 10);
        // It may have finished already.
        let _ = child.kill();
        kills += usize::from(child.wait().expect("a child").code().is_none());
        if place.path("out/unfinished.json").exists() || !place.path("out/run.json").exists() {
            let second = place.run(&SLOW);
            assert_eq!(second.code, 0, "{}", second.stderr);
        }
        let found = outcome(&place.path("out"));
        assert_same(&found, &expected, &format!("after {tenth} tenths"));
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
    assert!(kills >= 3, "{kills}");
}

fn spawned(command: &mut std::process::Command) -> Child {
    command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary")
}

#[cfg(unix)]
fn signal(child: &Child, signal: &str) {
    let id = child.id().to_string();
    let kill = std::process::Command::new("kill")
        .args(["-s", signal, &id])
        .status();
    assert!(kill.expect("kill(1)").success());
}

/// Starts a run that waits at a file operation within its layers, and comes back when it is there.
#[cfg(unix)]
fn waiting(place: &Place, arguments: &[&str]) -> Child {
    let at = interrupted(place, arguments);
    fs::remove_dir_all(place.path("out")).expect("removed");
    let mut command = place.command(arguments);
    let child = spawned(command.env("PRUNE_FAULT", format!("wait:{at}")));
    let came = (0..30_000).any(|_| {
        std::thread::sleep(Duration::from_millis(2));
        finished_layers(place) == 2
    });
    assert!(came, "two layers do not come");
    child
}

#[test]
#[cfg(unix)]
fn a_signal_stops_a_run_with_exit_code_3_and_the_command_that_goes_on() {
    let place = slow();
    assert_eq!(place.run(&SLOW).code, 0);
    let expected = outcome(&place.path("out"));
    for name in ["INT", "TERM", "USR1"] {
        fs::remove_dir_all(place.path("out")).expect("removed");
        let flags: Vec<&str> = SLOW
            .iter()
            .copied()
            .filter(|flag| *flag != "--quiet")
            .collect();
        let child = waiting(&place, &flags);
        signal(&child, name);
        let output = child.wait_with_output().expect("a child");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(3), "{name}\n{stderr}");
        assert!(
            stderr.contains(&format!("interrupted (SIG{name})")),
            "{stderr}"
        );
        let last = stderr.lines().last().unwrap_or_default().trim();
        assert!(last.ends_with(&flags.join(" ")), "{last}");
        assert!(!place.path("out/prune.lock").exists() && !place.path("out/run.json").exists());
        // The command as it was printed, in a shell.
        let mut again = place.command(&[]);
        let binary = env!("CARGO_BIN_EXE_prune");
        let shell = last.replacen(last.split(' ').next().unwrap_or_default(), binary, 1);
        let environment: Vec<_> = again
            .get_envs()
            .map(|(k, v)| (k.to_owned(), v.map(ToOwned::to_owned)))
            .collect();
        let mut sh = std::process::Command::new("sh");
        sh.args(["-c", &shell]).current_dir(place.path("."));
        for (key, value) in environment {
            match value {
                Some(value) => sh.env(key, value),
                None => sh.env_remove(key),
            };
        }
        let second = ran(&mut sh);
        assert_eq!(second.code, 0, "{}", second.stderr);
        assert!(
            second.stderr.contains("going on with an unfinished run"),
            "{}",
            second.stderr
        );
        let mut found = outcome(&place.path("out"));
        // `--quiet` is part of the command line only.
        let (mut one, mut other) = (Value::Null, Value::Null);
        for (json, files) in [(&mut one, &mut found), (&mut other, &mut expected.clone())] {
            *json = serde_json::from_slice(&files["run.json"]).expect("JSON");
            json.as_object_mut().expect("an object").remove("arguments");
        }
        assert_eq!(one, other);
        found.insert("run.json".to_string(), expected["run.json"].clone());
        assert_same(&found, &expected, name);
        again.env_clear();
    }
}

#[test]
#[cfg(unix)]
fn a_second_signal_ends_it_at_once_and_nothing_is_lost() {
    let place = slow();
    assert_eq!(place.run(&SLOW).code, 0);
    let expected = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    let child = waiting(&place, &SLOW);
    signal(&child, "TERM");
    signal(&child, "INT");
    let output = child.wait_with_output().expect("a child");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(place.run(&SLOW).code, 0);
    assert_same(&outcome(&place.path("out")), &expected, "after two signals");
}

/// How many layers the state in `out` calls finished.
fn finished_layers(place: &Place) -> usize {
    let state = fs::read_to_string(place.path("out/unfinished.json")).unwrap_or_default();
    let state: Value = serde_json::from_str(&state).unwrap_or_default();
    state["layers"].as_array().map_or(0, Vec::len)
}

/// Leaves a run that was killed after its first two layers; answers at which operation.
fn interrupted(place: &Place, arguments: &[&str]) -> u64 {
    for at in (40..2000).step_by(8) {
        let _ = fs::remove_dir_all(place.path("out"));
        let mut command = place.command(arguments);
        let status = command.env("PRUNE_FAULT", format!("kill:{at}")).output();
        let code = status.expect("the binary").status.code();
        assert!(code.is_none(), "{at}: {code:?}");
        if finished_layers(place) == 2 {
            return at;
        }
    }
    panic!("no run ends after two layers")
}

#[test]
fn going_on_may_be_ended_too() {
    let place = place();
    let expected = undisturbed(&place, &WANDA);
    for (number, what) in ["kill", "forget", "fail"]
        .iter()
        .cycle()
        .take(15)
        .enumerate()
    {
        assert!(with_fault(&place, &WANDA, "kill:70").is_none());
        let fault = format!("{what}:{}", 1 + 6 * number);
        let second = with_fault(&place, &WANDA, &fault);
        assert!(second.is_none_or(|ran| ran.code <= 1), "{fault}");
        if !place.path("out/run.json").exists() {
            let third = place.run(&command(&WANDA));
            assert_eq!(third.code, 0, "after {fault}\n{}", third.stderr);
        }
        assert_same(
            &outcome(&place.path("out")),
            &expected,
            &format!("going on, after {fault}"),
        );
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

#[test]
fn a_run_cut_off_at_its_last_step_is_finished() {
    let place = of_layers(2);
    let expected = undisturbed(&place, &MAGNITUDE);
    place.prune(&MAGNITUDE);
    let is_there = |name: &str| place.path(&format!("out/{name}")).exists();
    let at = (60..400).find(|at| {
        let _ = fs::remove_dir_all(place.path("out"));
        let ran = with_fault(&place, &MAGNITUDE, &format!("kill:{at}"));
        assert!(ran.is_none(), "no run ends between its last two steps");
        is_there("run.json") && is_there("unfinished.json")
    });
    assert!(at.is_some() && is_there("model/config.json"));
    let ran = place.run(&command(&MAGNITUDE));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("this run is finished"),
        "{}",
        ran.stderr
    );
    assert!(ran.stdout.contains("sparsity reached"), "{}", ran.stdout);
    let found = outcome(&place.path("out"));
    assert_eq!(found["run.json"], expected["run.json"]);
    assert!(!found.contains_key("unfinished.json"));
}

#[test]
fn a_record_whose_model_is_gone_does_not_end_a_run() {
    let place = of_layers(2);
    let expected = undisturbed(&place, &MAGNITUDE);
    place.prune(&MAGNITUDE);
    let record = fs::read(place.path("out/run.json")).expect("a record");
    fs::remove_dir_all(place.path("out")).expect("removed");
    assert!(with_fault(&place, &MAGNITUDE, "kill:60").is_none());
    fs::write(place.path("out/run.json"), record).expect("written");
    let ran = place.run(&command(&MAGNITUDE));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        !ran.stderr.contains("this run is finished"),
        "{}",
        ran.stderr
    );
    assert_same(&outcome(&place.path("out")), &expected, "gone on with");
}

#[test]
fn force_never_leaves_the_record_of_a_model_that_is_gone() {
    let place = of_layers(2);
    let forced: Vec<&str> = MAGNITUDE.iter().copied().chain(["--force"]).collect();
    let mut gone = 0;
    for at in 1..16 {
        let _ = fs::remove_dir_all(place.path("out"));
        place.prune(&MAGNITUDE);
        assert!(with_fault(&place, &forced, &format!("kill:{at}")).is_none());
        let is_there = |name: &str| place.path(&format!("out/{name}")).exists();
        gone += usize::from(!is_there("model/config.json"));
        assert!(
            is_there("model/config.json") || !is_there("run.json"),
            "killed at operation {at}"
        );
    }
    assert!(gone > 0, "no model was ever removed");
}

#[test]
fn a_model_folder_of_another_run_is_left_alone() {
    let place = place();
    let flags = |save: &'static str, ratio: &'static str| {
        vec![
            "--model",
            "m",
            "--sparsity-ratio",
            ratio,
            "--eval",
            "none",
            "--save",
            save,
            "--save-model",
            "shared",
        ]
    };
    let run = |save, ratio| command(&flags(save, ratio));
    assert!(with_fault(&place, &flags("a", "0.5"), "kill:60").is_none());
    let before = outcome(&place.path("shared"));
    let ran = place.run(&run("b", "0.6"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr
            .contains("the model folder `shared` is not empty"),
        "{}",
        ran.stderr
    );
    let mut after = outcome(&place.path("shared"));
    for files in [&mut after, &mut before.clone()] {
        files.remove("prune.lock");
    }
    assert!(
        before
            .iter()
            .filter(|(name, _)| *name != "prune.lock")
            .eq(&after)
    );

    // By force it is the other run's, and the first one does not take it back.
    let forced: Vec<&str> = run("b", "0.6").into_iter().chain(["--force"]).collect();
    assert_eq!(place.run(&forced).code, 0);
    let finished = outcome(&place.path("shared"));
    let ran = place.run(&run("a", "0.5"));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr
            .contains("the model folder `shared` is not empty"),
        "{}",
        ran.stderr
    );
    assert_eq!(outcome(&place.path("shared")), finished);
}

#[test]
fn without_a_model_an_unfinished_run_is_not_replaced() {
    let place = place();
    interrupted(&place, &command(&WANDA));
    let ran = place.run(&command(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--no-save-model",
        "--save",
        "out",
    ]));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("`out` holds an unfinished run"),
        "{}",
        ran.stderr
    );
    assert_eq!(place.run(&command(&WANDA)).code, 0);
}

#[test]
fn other_settings_are_refused_with_the_difference() {
    let place = place();
    interrupted(&place, &command(&WANDA));
    let other = |from: &str, to: &'static str| -> Vec<&'static str> {
        let flags = command(&WANDA);
        let changed = flags
            .iter()
            .map(|flag| if *flag == from { to } else { flag });
        changed
            .map(|flag| Box::leak(flag.to_string().into_boxed_str()) as &str)
            .collect()
    };
    for (from, to, difference) in [
        ("0.5", "0.6", "sparsity-ratio: 0.5 there, 0.6 now"),
        ("both", "pruned", "eval: dense and pruned there, pruned now"),
        ("4", "3", "calibration tokens: "),
        ("5", "4", "evaluation tokens: "),
        (
            "--save-masks",
            "--profile",
            "save-masks: true there, false now",
        ),
    ] {
        let ran = place.run(&other(from, to));
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        assert!(
            ran.stderr
                .contains("holds an unfinished run with other settings"),
            "{}",
            ran.stderr
        );
        assert!(
            ran.stderr.contains(difference),
            "{difference}\n{}",
            ran.stderr
        );
        assert!(
            ran.stderr.contains("hint: go on with `") && ran.stderr.contains("--force"),
            "{}",
            ran.stderr
        );
    }
    // Another model of the same shape.
    place.checkpoint(
        "other",
        &RandomCheckpoint {
            num_hidden_layers: 3,
            dtype: StoredDtype::Bf16,
            max_shard: ByteSize(150_000),
            seed: 9,
            ..RandomCheckpoint::default()
        },
    );
    let ran = place.run(&other("m", "other"));
    assert!(ran.stderr.contains("source: "), "{}", ran.stderr);
    // The one that was begun goes on all the same, and from there.
    let ran = place.run(&command(&WANDA));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("2 of 3 layers are finished"),
        "{}",
        ran.stderr
    );
}

#[test]
fn another_arithmetic_is_refused_with_the_flag_that_is_common() {
    let place = place();
    let in_f32: Vec<&str> = WANDA.iter().copied().chain(["--dtype", "f32"]).collect();
    interrupted(&place, &command(&in_f32));
    let ran = place.run(&command(&WANDA));
    if !ran.stderr.contains("arithmetic: ") {
        eprintln!("skipped: this CPU has no bf16 products, all is f32 here");
        return;
    }
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("was begun with another arithmetic"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains("hint: add --dtype f32"),
        "{}",
        ran.stderr
    );
    let ran = place.run(&command(&in_f32));
    assert_eq!(ran.code, 0, "{}", ran.stderr);

    fs::remove_dir_all(place.path("out")).expect("removed");
    interrupted(&place, &command(&WANDA));
    let ran = place.run(&command(&in_f32));
    assert!(
        ran.stderr.contains("hint: add --dtype bf16 --use-cpu"),
        "{}",
        ran.stderr
    );
    // Another CPU's, as far as this one can tell.
    let state = place.path("out/unfinished.json");
    let text = fs::read_to_string(&state).expect("a state");
    let other = text.replace("bf16 by bf16 products", "bf16 by other products");
    assert_ne!(text, other);
    fs::write(&state, other).expect("a file of ours");
    let ran = place.run(&command(&in_f32));
    assert!(ran.stderr.contains("--force --dtype f32"), "{}", ran.stderr);
    fs::write(&state, text).expect("a file of ours");
    let in_bf16: Vec<&str> = WANDA.iter().copied().chain(["--dtype", "bf16"]).collect();
    let ran = place.run(&command(&in_bf16));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn force_starts_over_only_with_other_settings() {
    let place = place();
    interrupted(&place, &command(&WANDA));
    let forced: Vec<&str> = WANDA.iter().copied().chain(["--force"]).collect();
    let ran = place.run(&command(&forced));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("2 of 3 layers are finished"),
        "{}",
        ran.stderr
    );

    fs::remove_dir_all(place.path("out")).expect("removed");
    interrupted(&place, &command(&WANDA));
    let ran = place.run(&[&MAGNITUDE[..], &["--force"]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!ran.stderr.contains("going on"), "{}", ran.stderr);
    assert!(
        !place.path("out/unfinished.json").exists()
            && !place.path("out/masks.safetensors.partial").exists()
    );
    assert_eq!(place.manifest("out").pruning.unwrap().method, "magnitude");
}

#[test]
fn resume_needs_something_to_go_on_with() {
    let place = place();
    let resume: Vec<&str> = WANDA.iter().copied().chain(["--resume"]).collect();
    let ran = place.run(&command(&resume));
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr
            .contains("--resume: there is no unfinished run in `out`"),
        "{}",
        ran.stderr
    );
    assert!(!place.path("out").exists(), "nothing was made");
    interrupted(&place, &command(&WANDA));
    let ran = place.run(&command(&resume));
    assert_eq!(ran.code, 0, "{}", ran.stderr);

    let ran = place.run(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--resume",
        "--prune-method",
        "magnitude",
    ]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("hint: add --save DIR"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_finished_layer_that_was_changed_is_done_again() {
    let place = place();
    let expected = undisturbed(&place, &WANDA);
    interrupted(&place, &command(&WANDA));
    // A byte in the middle of every unfinished file of the model.
    for name in place.names("out/model") {
        let path = place.path("out/model").join(&name);
        let mut bytes = fs::read(&path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
        fs::write(&path, bytes).expect("written");
    }
    let ran = place.run(&command(&WANDA));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("is not on the disk as it was written"),
        "{}",
        ran.stderr
    );
    let mut found = outcome(&place.path("out"));
    let mut manifest: Value = serde_json::from_slice(&found["run.json"]).expect("JSON");
    let warnings = manifest["warnings"].as_array_mut().expect("a list");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    warnings.clear();
    let mut whole: Value = serde_json::from_slice(&expected["run.json"]).expect("JSON");
    whole["warnings"].as_array_mut().expect("a list").clear();
    assert_eq!(manifest, whole);
    found.insert("run.json".to_string(), expected["run.json"].clone());
    assert_same(&found, &expected, "after a change");
}

#[test]
fn without_its_files_an_unfinished_run_starts_over() {
    let place = place();
    let expected = undisturbed(&place, &MAGNITUDE);
    interrupted(&place, &command(&WANDA));
    fs::remove_dir_all(place.path("out")).expect("removed");
    assert!(with_fault(&place, &MAGNITUDE, "kill:60").is_none());
    fs::remove_dir_all(place.path("out/model")).expect("removed");
    let ran = place.run(&command(&MAGNITUDE));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("starting over"), "{}", ran.stderr);
    let found = outcome(&place.path("out"));
    assert_eq!(found["model/SHA256SUMS"], expected["model/SHA256SUMS"]);
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let place = slow();
    let mut child = waiting(&place, &SLOW);
    let ran = place.run(&SLOW);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("error: another prune works in `out`"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains(&format!("process {}", child.id())),
        "{}",
        ran.stderr
    );
    assert_eq!(child.wait().expect("a child").code(), Some(0));
    assert!(!place.path("out/prune.lock").exists());
}

#[test]
fn the_lock_of_a_killed_run_is_said_to_be_stale() {
    let place = place();
    interrupted(&place, &command(&WANDA));
    assert!(place.path("out/prune.lock").exists());
    let ran = place.run(&command(&WANDA));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("a stale lock in `out`: process "),
        "{}",
        ran.stderr
    );
}

#[test]
fn evaluating_into_an_unfinished_run_is_refused() {
    let place = place();
    interrupted(&place, &command(&WANDA));
    let ran = place.run(&[
        "eval",
        "--model",
        "m",
        "--eval-dataset",
        "test.txt",
        "--seqlen",
        "64",
        "--save",
        "out",
    ]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("`out` holds an unfinished run"),
        "{}",
        ran.stderr
    );
}

#[test]
fn sums_beside_the_model_are_those_of_its_files() {
    let place = place();
    place.prune(&WANDA);
    let sums = fs::read_to_string(place.path("out/model/SHA256SUMS")).expect("sums");
    let mut listed: Vec<String> = Vec::new();
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").expect("sha256sum's form");
        let bytes = fs::read(place.path("out/model").join(name)).expect("a file");
        let digest = <sha2::Sha256 as sha2::Digest>::digest(&bytes);
        assert_eq!(prune::bytes::hex(&digest), sum, "{name}");
        listed.push(name.to_string());
    }
    let mut names: Vec<String> = place.names("out/model").into_iter().collect();
    names.retain(|name| name != "SHA256SUMS");
    assert_eq!(listed, names);
    let manifest: Manifest = place.manifest("out");
    let files = &manifest.output.expect("an output").verification["files"];
    for file in files.as_array().expect("a list") {
        let line = format!(
            "{}  {}",
            file["sha256"].as_str().unwrap(),
            file["file"].as_str().unwrap()
        );
        assert!(sums.contains(&line), "{line}");
    }
}
