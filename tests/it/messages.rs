//! Messages of a run and its end: quiet, verbose, JSON, gates, memory checkpoints, interruption.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use prune::run::Manifest;
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;

use crate::support::{Place, TEXTS};

const HALF: &str = "--model m --sparsity-ratio 0.5";

/// Rows whose values the machine decides.
const OF_THE_MACHINE: [&str; 7] = [
    "time",
    "peak memory",
    "arithmetic",
    "KL from dense",
    "same top token",
    "right token",
    "perplexity ratio",
];

/// The table without what the machine decides: times, peaks, kernel, threads, the digits of perplexities and of the divergence.
fn settled(table: &str) -> String {
    let rows = table.lines().filter(|row| !row.starts_with("  "));
    let rows = rows.map(|row| {
        let name = row.split("  ").next().unwrap_or(row);
        match row.split_once(" over windows ") {
            Some((_, protocol)) => format!("{name}: … over windows {protocol}\n"),
            None if OF_THE_MACHINE.contains(&name) => format!("{name}: …\n"),
            None => format!("{row}\n"),
        }
    });
    rows.collect()
}

#[test]
fn the_final_table_is_what_the_snapshot_shows() {
    let place = Place::new();
    let ran = place.prune(&format!("{HALF} --save out --eval both --use-cpu"));
    assert!(ran.stdout.contains("  calibrate "), "phases: {}", ran.stdout);
    let found = settled(&ran.stdout);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/snapshots/table.txt");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, &found).expect("snapshots can be written");
    }
    assert_eq!(found, fs::read_to_string(&path).expect("the snapshot is there"));
}

#[test]
fn quiet_leaves_the_result_only() {
    let place = Place::new();
    let ran = place.prune(&format!("{HALF} --save out -q"));
    assert_eq!(ran.stderr, "");
    assert!(ran.stdout.contains("pruned perplexity"), "{}", ran.stdout);
    let warned = place.prune(&format!("{HALF} -q"));
    assert_eq!(warned.stderr, "warning: nothing will be saved; name a run folder with --save\n");
}

#[test]
fn verbose_tells_every_matrix_and_memory() {
    let place = Place::new();
    let ran = place.prune(&format!("{HALF} --save out -v"));
    assert!(ran.stderr.contains("  model.layers.1.mlp.down_proj sparsity 0.5"), "{}", ran.stderr);
    if cfg!(target_os = "linux") {
        assert!(ran.stderr.contains("memory at layer_1: "), "{}", ran.stderr);
    }
}

#[test]
fn json_prints_the_manifest_and_nothing_else_on_standard_output() {
    let place = Place::new();
    let ran = place.prune(&format!("{HALF} --save out --json"));
    let printed: Value = serde_json::from_str(&ran.stdout).expect("one JSON object");
    let saved: Value =
        serde_json::from_slice(&fs::read(place.path("out/run.json")).unwrap()).unwrap();
    assert_eq!(printed, saved);
    let arguments = "eval --model m --json --eval-dataset test.txt --seqlen 64 --eval-windows 5";
    let eval = place.run(arguments);
    let manifest: Manifest = serde_json::from_str(&eval.stdout).expect("one JSON object");
    assert_eq!(manifest.command, "eval");
}

#[test]
fn json_progress_is_one_object_per_line() {
    let place = Place::new();
    let ran = place.prune(&format!("{HALF} --progress json"));
    let events: Vec<Value> = ran
        .stderr
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}")))
        .collect();
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    assert_eq!(
        (count("sweep_started"), count("layer_pruned"), count("warning")),
        (1, 2, 1),
        "{}",
        ran.stderr
    );
    // Two layers: calibration twice but for the last (4 samples each), the head and two layers for 5 windows.
    let sweep = events.iter().find(|event| event["event"] == "sweep_started");
    assert_eq!(sweep.unwrap()["passes"], 4 * 3 + 5 * 3);
    let failed = place.run("--model nowhere --sparsity-ratio 0.5 --progress json");
    let last: Value = serde_json::from_str(failed.stderr.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "error");
}

/// The titles of the phases of a run, by its events.
fn phases(line: &str, place: &Place) -> Vec<String> {
    let ran = place.run(&format!("{line} --progress json"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let events = ran.stderr.lines().map(|line| serde_json::from_str(line).expect("an event"));
    let begun = events.filter(|event: &Value| event["event"] == "phase_started");
    begun.filter_map(|event| event["phase"].as_str().map(str::to_string)).collect()
}

#[test]
fn a_model_is_called_dense_or_pruned_only_where_a_run_has_both() {
    let place = Place::new();
    let line = "eval m --eval-dataset test.txt --seqlen 64 --use-cpu";
    let alone = phases(line, &place);
    assert!(alone.contains(&"layer 1 of 0-1: evaluate".to_string()), "{alone:?}");
    assert!(alone.contains(&"head: perplexity".to_string()), "{alone:?}");
    let ran = place.run(line);
    assert!(ran.stderr.contains(" windows of 64 tokens\n"), "{}", ran.stderr);
    assert!(!(ran.stderr + &ran.stdout).contains("dense"));

    let both = phases(&format!("{HALF} --save out --eval both --use-cpu {TEXTS}"), &place);
    assert!(both.contains(&"layer 1 of 0-1: evaluate dense".to_string()), "{both:?}");
    let recover =
        format!("recover --model out/model --teacher m --how blocks --eval both --use-cpu {TEXTS}");
    let trained = phases(&recover, &place);
    assert!(trained.contains(&"layer 1 of 0-1: evaluate before".to_string()), "{trained:?}");
    assert!(trained.contains(&"head: perplexity after".to_string()), "{trained:?}");
    let ran = place.run(&recover);
    assert!(ran.stderr.contains(" tokens, before and after\n"), "{}", ran.stderr);
    assert!(!ran.stdout.contains("evaluate dense"), "{}", ran.stdout);
}

#[test]
fn paths_of_the_cache_are_details_and_a_text_is_called_by_its_file() {
    let place = Place::new();
    let line = "eval m --eval-dataset test.txt --seqlen 64";
    place.run(line);
    let ran = place.run(line);
    assert!(!ran.stderr.contains("tokens from the cache"), "{}", ran.stderr);
    assert!(ran.stdout.contains(" over windows (test.txt, "), "{}", ran.stdout);
    let ran = place.run(&format!("{line} -v"));
    assert!(ran.stderr.contains("tokens from the cache: "), "{}", ran.stderr);
}

#[test]
fn a_missed_gate_has_its_own_exit_code_and_everything_is_written() {
    let place = Place::new();
    let run = |save: &str, limit: &str| {
        let arguments = format!("{HALF} --save {save} --max-perplexity {limit} {TEXTS}");
        place.run(&arguments)
    };
    let missed = run("missed", "1.5");
    assert_eq!(missed.code, 4, "{}", missed.stderr);
    assert!(
        missed.stderr.contains("gate missed: perplexity ")
            && missed.stderr.contains(" is above --max-perplexity 1.5\n"),
        "{}",
        missed.stderr
    );
    assert!(place.path("missed/model/config.json").exists());
    let gate = place.manifest("missed").gate.expect("it was asked for");
    assert!(!gate.is_met && gate.max_perplexity == 1.5);
    let met = run("met", "1e9");
    assert_eq!(met.code, 0, "{}", met.stderr);
    assert!(place.manifest("met").gate.is_some_and(|gate| gate.is_met));

    let eval =
        "eval --model m --max-perplexity 1.5 --eval-dataset test.txt --seqlen 64 --eval-windows 5";
    assert_eq!(place.run(eval).code, 4);

    let contradiction = place.run(&format!("{HALF} --eval none --max-perplexity 9 {TEXTS}"));
    assert_eq!(contradiction.code, 2, "{}", contradiction.stderr);
    assert!(contradiction.stderr.contains("hint: use --eval pruned"));
}

#[test]
fn devices_this_build_does_not_have_are_refused() {
    let place = Place::new();
    let run = |flags: &str| place.run(&format!("{HALF} {flags} {TEXTS}"));
    let both = run("--use-cpu --device cuda");
    assert_eq!(
        (both.code, both.stderr.as_str()),
        (
            2,
            "error: --use-cpu and --device cuda contradict each other\n\
             hint: leave one of them out\n"
        )
    );
    let cuda = run("--device cuda:1");
    assert_eq!(
        (cuda.code, cuda.stderr.as_str()),
        (
            2,
            "error: --device cuda:1: this build has no CUDA\n\
             hint: use --use-cpu, or leave --device out; docs/install.md says how to build with CUDA\n"
        )
    );
    assert_eq!(run("--device tpu").code, 2);
    let writes = place.run("generate --model m --prompt a --device-map balanced");
    assert_eq!(writes.code, 2);
    assert!(writes.stderr.contains("computes on the CPU"), "{}", writes.stderr);
    let told = "device       cpu; this build has no CUDA";
    assert!(run("").stderr.contains(told));
    assert!(!run("--use-cpu").stderr.contains(told));
    assert!(!run("--device cpu").stderr.contains(told));
}

#[cfg(target_os = "linux")]
#[test]
fn the_memory_log_has_the_checkpoints_of_the_original_and_a_row_per_layer() {
    let place = Place::new();
    let ran = place.prune(&format!("{HALF} --save out --log_memory"));
    let csv = fs::read_to_string(place.path("out/memory_log.csv")).unwrap();
    let mut lines = csv.lines();
    assert_eq!(
        lines.next().unwrap(),
        "Timestamp,Checkpoint,GPU_Allocated_GB,GPU_Reserved_GB,GPU_Peak_GB,CPU_Used_GB,CPU_Percent,CPU_Peak_GB"
    );
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    let names: Vec<&str> = rows.iter().map(|row| row[1]).collect();
    assert_eq!(
        names,
        [
            "01_start",
            "02_model_loaded",
            "03_before_pruning",
            "layer_0",
            "layer_1",
            "04_after_pruning",
            "05_before_eval",
            "06_after_eval",
            "07_before_save_model",
            "08_after_save_model",
            "09_end"
        ]
    );
    for row in &rows {
        let used: f64 = row[5].parse().unwrap();
        let peak: f64 = row[7].parse().unwrap();
        assert!(used > 0.0 && peak >= used, "{row:?}");
    }
    assert!(ran.stderr.contains("memory 01_start "), "{}", ran.stderr);
    assert!(ran.stderr.contains("MEMORY USAGE SUMMARY (GiB)"), "{}", ran.stderr);
    let samples = place.manifest("out").memory;
    assert_eq!(samples.len(), names.len());
    // A run that replaces this one and does not log leaves no old log behind.
    place.prune(&format!("{HALF} --save out --force"));
    assert!(!place.path("out/memory_log.csv").exists());
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_says_what_it_leaves_and_never_looks_finished() {
    let place =
        Place::with(&RandomCheckpoint { num_hidden_layers: 64, ..RandomCheckpoint::default() });
    let arguments = format!(
        "{HALF} --save out --nsamples 64 --dataset train.txt --eval-dataset test.txt --seqlen 64"
    );
    let mut child = place
        .command(&arguments)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary was built by this test run");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().starts_with("layer 0 sparsity")),
        "the sweep is under way"
    );
    let killed = std::process::Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .expect("kill is there");
    assert!(killed.success());
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(3), "{rest:?}");
    let [.., interrupted, unfinished, command] = &rest[..] else {
        panic!("{rest:?}");
    };
    assert!(interrupted.starts_with("interrupted (SIGINT) in layer "), "{rest:?}");
    assert!(
        unfinished
            .starts_with("finished layers are kept in `out`; this command continues the run:"),
        "{rest:?}"
    );
    assert!(command.contains("--save out"), "{rest:?}");
    assert!(!place.path("out/run.json").exists() && !place.path("out/model/config.json").exists());
}
