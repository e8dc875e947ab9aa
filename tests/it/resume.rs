//! Interrupted runs: the same command continues after a kill at every file operation, a failing disk, a power cut or a signal, and
//! leaves the files of an undisturbed run.
//!
//! `PRUNE_FAULT` ends the program at its n-th file operation; see `src/disk/faults.rs`.

mod damage;
mod faults;
mod repairs;
mod settings;
mod signals;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::run::Manifest;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::support::{Place, Ran, TEXTS, Work};

/// Wanda, both perplexities and masks: everything a run can leave.
const WANDA: &str = "--model m --sparsity-ratio 0.5 --eval both --save-masks --save out";

/// The same files, sooner.
const WITHOUT_PERPLEXITY: &str =
    "--model m --sparsity-ratio 0.5 --eval none --save-masks --save out";

/// No statistics, no samples.
const MAGNITUDE: &str = "--model m --prune-method magnitude --sparsity-type 2:4 --eval none \
    --verify full --save out";

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

fn command(flags: &str) -> String {
    format!("{flags} {TEXTS}")
}

/// Runs with a fault and the common texts; `None` where a signal ended it.
fn with_fault(place: &Place, flags: &str, fault: &str) -> Option<Ran> {
    place.with_fault(&command(flags), fault)
}

/// Every file below a folder, by its path in it; of `run.json` what does not depend on times, nor on how much memory was free.
pub(crate) fn outcome(folder: &Path) -> BTreeMap<String, Vec<u8>> {
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
        // The speed of products, too.
        fields.remove("zeros_gain");
        for layer in fields["layers"].as_array_mut().expect("a list") {
            layer.as_object_mut().expect("a layer").remove("seconds");
        }
        *manifest = serde_json::to_vec_pretty(&json).expect("JSON");
    }
    files
}

/// The files of an undisturbed run; the folder is removed again.
fn undisturbed(place: &Place, flags: &str) -> BTreeMap<String, Vec<u8>> {
    place.prune(flags);
    let outcome = outcome(&place.path("out"));
    fs::remove_dir_all(place.path("out")).expect("removed");
    outcome
}

pub(crate) fn assert_same(
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
    // A model that loads has its record and its card.
    for name in ["pruning.json", "README.md"] {
        let is_there = run.join("model").join(name).exists();
        assert!(is_there || !run.join("model/config.json").exists(), "{name}, {when}");
    }
    assert!(
        run.join("run.json").exists() || !run.join("model/config.json").exists() || {
            // All was published, and only the record is missing.
            run.join("unfinished.json").exists()
                && fs::read_dir(run.join("model")).expect("a folder").all(|entry| {
                    !entry.expect("an entry").path().to_string_lossy().ends_with("partial")
                })
        },
        "{when}"
    );
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

const SLOW: &str = "--model m --sparsity-ratio 0.6 --save out --dataset train.txt \
    --eval-dataset test.txt --nsamples 24 --seqlen 256 --quiet";

fn spawned(command: &mut std::process::Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary")
}

#[cfg(unix)]
pub(crate) fn signal(child: &Child, signal: &str) {
    let id = child.id().to_string();
    let kill = std::process::Command::new("kill").args(["-s", signal, &id]).status();
    assert!(kill.expect("kill(1)").success());
}

/// Starts a run that waits at a file operation within its layers, and comes back when it is there.
#[cfg(unix)]
fn waiting(place: &Place, arguments: &str) -> Child {
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

/// Number of finished layers in the state of `out`.
fn finished_layers(place: &Place) -> usize {
    let state = fs::read_to_string(place.path("out/unfinished.json")).unwrap_or_default();
    let state: Value = serde_json::from_str(&state).unwrap_or_default();
    state["layers"].as_array().map_or(0, Vec::len)
}

/// Number of layers that no later process does again: those of the state of `out`, or all where its record is written.
pub(crate) fn saved_layers(place: &Place, layers: usize) -> usize {
    match place.path("out/run.json").exists() {
        true => layers,
        false => finished_layers(place),
    }
}

/// Leaves a run that was killed after its first two layers; answers at which operation.
fn interrupted(place: &Place, arguments: &str) -> u64 {
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
    let expected = undisturbed(&place, WANDA);
    for (number, what) in ["kill", "forget", "fail"].iter().cycle().take(15).enumerate() {
        assert!(with_fault(&place, WANDA, "kill:70").is_none());
        let fault = format!("{what}:{}", 1 + 6 * number);
        let second = with_fault(&place, WANDA, &fault);
        assert!(second.is_none_or(|ran| ran.code <= 1), "{fault}");
        if !place.path("out/run.json").exists() {
            let saved = finished_layers(&place);
            let third = place.run(&command(WANDA));
            assert_eq!(third.code, 0, "after {fault}\n{}", third.stderr);
            Work::of(&third.stderr).assert_layers_after(saved, 3, &fault);
        }
        assert_same(&outcome(&place.path("out")), &expected, &format!("going on, after {fault}"));
        fs::remove_dir_all(place.path("out")).expect("removed");
    }
}

/// Leaves a run that was killed between its last two steps: the record is written, and its state is not removed.
fn cut_off_at_the_last_step(place: &Place, flags: &str) {
    let is_there = |name: &str| place.path(&format!("out/{name}")).exists();
    let at = (60..400).find(|at| {
        let _ = fs::remove_dir_all(place.path("out"));
        let ran = with_fault(place, flags, &format!("kill:{at}"));
        assert!(ran.is_none(), "no run ends between its last two steps");
        is_there("run.json") && is_there("unfinished.json")
    });
    assert!(at.is_some() && is_there("model/config.json"));
}

#[test]
fn a_run_cut_off_at_its_last_step_is_finished() {
    let place = of_layers(2);
    let expected = undisturbed(&place, MAGNITUDE);
    cut_off_at_the_last_step(&place, MAGNITUDE);
    let ran = place.run(&command(MAGNITUDE));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("this run is finished"), "{}", ran.stderr);
    assert!(ran.stdout.contains("sparsity reached"), "{}", ran.stdout);
    let found = outcome(&place.path("out"));
    assert_eq!(found["run.json"], expected["run.json"]);
    assert!(!found.contains_key("unfinished.json"));
}

/// The record of the first command had no gate, or another one.
#[test]
fn a_finished_run_is_compared_with_the_gate_of_the_command() {
    let place = of_layers(2);
    let flags = "--model m --prune-method magnitude --sparsity-type 2:4 --eval pruned --save out";
    cut_off_at_the_last_step(&place, flags);
    // Random weights have a perplexity near the size of the vocabulary, 320.
    let ran = place.run(&command(&format!("{flags} --max-perplexity 1.5 --json")));
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("gate missed: "), "{}", ran.stderr);
    let gate = place.manifest("out").gate.expect("the command has a gate");
    assert!(!gate.is_met && gate.max_perplexity == 1.5, "{gate:?}");
    let printed: Value = serde_json::from_str(&ran.stdout).expect("one JSON object");
    let saved = fs::read(place.path("out/run.json")).expect("a record");
    assert_eq!(printed, serde_json::from_slice::<Value>(&saved).expect("JSON"));
}

/// Started before anything of value: its own memory log is no result of another run.
#[test]
fn the_memory_log_of_an_unfinished_run_is_its_own() {
    let place = place();
    let flags = command(&format!("{MAGNITUDE} --log-memory"));
    interrupted(&place, &flags);
    assert!(place.path("out/memory_log.csv").exists());
    let ran = place.run(&flags);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn a_record_whose_model_is_gone_does_not_end_a_run() {
    let place = of_layers(2);
    let expected = undisturbed(&place, MAGNITUDE);
    place.prune(MAGNITUDE);
    let record = fs::read(place.path("out/run.json")).expect("a record");
    fs::remove_dir_all(place.path("out")).expect("removed");
    assert!(with_fault(&place, MAGNITUDE, "kill:60").is_none());
    fs::write(place.path("out/run.json"), record).expect("written");
    let ran = place.run(&command(MAGNITUDE));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(!ran.stderr.contains("this run is finished"), "{}", ran.stderr);
    assert_same(&outcome(&place.path("out")), &expected, "gone on with");
}

#[test]
fn force_never_leaves_the_record_of_a_model_that_is_gone() {
    let place = of_layers(2);
    let forced = format!("{MAGNITUDE} --force");
    let mut gone = 0;
    for at in 1..16 {
        let _ = fs::remove_dir_all(place.path("out"));
        place.prune(MAGNITUDE);
        assert!(with_fault(&place, &forced, &format!("kill:{at}")).is_none());
        let is_there = |name: &str| place.path(&format!("out/{name}")).exists();
        gone += usize::from(!is_there("model/config.json"));
        assert!(is_there("model/config.json") || !is_there("run.json"), "killed at operation {at}");
    }
    assert!(gone > 0, "no model was ever removed");
}

#[test]
fn a_finished_layer_that_was_changed_is_done_again() {
    let place = place();
    let expected = undisturbed(&place, WANDA);
    interrupted(&place, &command(WANDA));
    // A byte in the middle of every unfinished file of the model. A lock with a changed owner would be watched first.
    let names = place.names("out/model").into_iter();
    for name in names.filter(|name| name != "prune.lock") {
        let path = place.path("out/model").join(&name);
        let mut bytes = fs::read(&path).expect("a file");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
        fs::write(&path, bytes).expect("written");
    }
    let ran = place.run(&command(WANDA));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("is not on the disk as it was written"), "{}", ran.stderr);
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
    let expected = undisturbed(&place, MAGNITUDE);
    interrupted(&place, &command(WANDA));
    fs::remove_dir_all(place.path("out")).expect("removed");
    assert!(with_fault(&place, MAGNITUDE, "kill:60").is_none());
    fs::remove_dir_all(place.path("out/model")).expect("removed");
    let ran = place.run(&command(MAGNITUDE));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("starting over"), "{}", ran.stderr);
    let found = outcome(&place.path("out"));
    assert_eq!(found["model/SHA256SUMS"], expected["model/SHA256SUMS"]);
}

#[test]
fn the_lock_of_a_killed_run_is_said_to_be_stale() {
    let place = place();
    interrupted(&place, &command(WANDA));
    assert!(place.path("out/prune.lock").exists());
    let ran = place.run(&command(WANDA));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("a stale lock in `out`: process "), "{}", ran.stderr);
}

/// The flag decides nothing else, so a continued run may give it.
#[test]
fn a_run_that_goes_on_without_a_card_leaves_none_of_the_first_attempt() {
    let place = of_layers(2);
    let is_there = |name: &str| place.path(&format!("out/model/{name}")).exists();
    let cut_off = (40..400).find(|at| {
        let _ = fs::remove_dir_all(place.path("out"));
        assert!(with_fault(&place, MAGNITUDE, &format!("kill:{at}")).is_none());
        is_there("README.md") && !is_there("config.json")
    });
    assert!(cut_off.is_some());
    place.prune(&format!("{MAGNITUDE} --no-model-card"));
    assert!(!is_there("README.md") && is_there("pruning.json") && is_there("config.json"));
    let sums = fs::read_to_string(place.path("out/model/SHA256SUMS")).expect("sums");
    assert!(!sums.contains("README"), "{sums}");
}

#[test]
fn sums_beside_the_model_are_those_of_its_files() {
    let place = place();
    place.prune(WANDA);
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
    for file in manifest.output.expect("an output").verification.files {
        let line = format!("{}  {}", file.sha256, file.file);
        assert!(sums.contains(&line), "{line}");
    }
}
