//! The test harness: a folder in which the binary runs ([`Place`]), a run in this process, the usual texts and checkpoints,
//! and the place of the reference's files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource, encode_header};
use prune::cli::prune::PruneArgs;
use prune::cli::recover::RecoverArgs;
use prune::pipeline::Selection;
use prune::pruning::Pattern;
use prune::run::{Manifest, Silent};
use prune::settings::{Settings, SparsitySettings};
use prune::synthetic::RandomCheckpoint;
use safetensors::tensor::TensorInfo;
use serde_json::Value;
use tempfile::TempDir;

/// The folder of real texts, models and goldens: `PRUNE_SHARED`, else `../shared` beside the checkout. Prints a line and returns
/// `None` where it is absent.
pub(crate) fn shared() -> Option<PathBuf> {
    let folder = std::env::var_os("PRUNE_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"), PathBuf::from);
    if folder.join("goldens").is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: no goldens in `{}` (set PRUNE_SHARED)", folder.display());
    None
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    args: PruneArgs,
}

/// The settings of a command line, for a process that gets them as text.
pub(crate) fn settings_of(line: &str) -> anyhow::Result<Settings> {
    let flags = Flags::try_parse_from(std::iter::once("prune".to_owned()).chain(split(line)))?;
    flags.args.settings(Vec::new())
}

#[derive(Parser)]
struct RecoverFlags {
    #[command(flatten)]
    args: RecoverArgs,
}

/// The settings of a command line of `prune recover`.
pub(crate) fn recover_settings_of(line: &str) -> anyhow::Result<Settings> {
    let words = std::iter::once("prune".to_owned()).chain(split(line));
    RecoverFlags::try_parse_from(words)?.args.settings(Vec::new())
}

/// A method with its ratio and pattern, for all matrices.
pub(crate) fn sparsity(method: &str, ratio: f64, sparsity_type: Pattern) -> SparsitySettings {
    SparsitySettings {
        prune_method: method.to_owned(),
        selection: Selection { sparsity_ratio: Some(ratio), sparsity_type, ..Selection::default() },
        ..SparsitySettings::default()
    }
}

/// A temporary folder with a model `m`, the texts `train.txt` and `test.txt`, and the program at home in it.
pub(crate) struct Place {
    folder: TempDir,
}

/// Exit code and output of a command.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Texts and sizes that every run of these tests shares: 4 samples and 5 windows of 64 tokens.
pub(crate) const TEXTS: &str =
    "--dataset train.txt --eval-dataset test.txt --nsamples 4 --seqlen 64 --eval-windows 5";

/// Variables that would lead the program to a real hub, token or proxy.
const NOT_INHERITED: [&str; 12] = [
    "HF_ENDPOINT",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "http_proxy",
    "HTTP_PROXY",
    "https_proxy",
    "HTTPS_PROXY",
    "all_proxy",
    "ALL_PROXY",
];

impl Place {
    /// An empty folder with the two texts.
    pub(crate) fn empty() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("train.txt"), words(1, 4000)).expect("a new file");
        fs::write(folder.path().join("test.txt"), words(2, 1000)).expect("a new file");
        Self { folder }
    }

    /// With the checkpoint `shape` as `m`.
    pub(crate) fn with(shape: &RandomCheckpoint) -> Self {
        let place = Self::empty();
        place.checkpoint("m", shape);
        place
    }

    /// With the default checkpoint as `m`: two layers of 64, f32, 320 tokens, 512 positions.
    pub(crate) fn new() -> Self {
        Self::with(&RandomCheckpoint::default())
    }

    /// Writes a checkpoint.
    pub(crate) fn checkpoint(&self, name: &str, shape: &RandomCheckpoint) {
        shape.write(&self.path(name), &Silent).expect("the shape is a Llama's");
    }

    /// Writes `own.jsonl`: a question twice, with both answers. A model is right once.
    pub(crate) fn write_questions(&self) {
        let row = |label: u32| {
            format!(
                "{{\"context\": \"the cat\", \"choices\": [\"sat\", \"a mat\"], \"label\": {label}}}\n"
            )
        };
        fs::write(self.path("own.jsonl"), row(0) + &row(1)).expect("written");
    }

    /// The absolute path of a name in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command that [`Place::run`] runs, for tests that set more.
    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_prune"));
        command
            .args(split(line))
            .current_dir(self.folder.path())
            .env("PRUNE_CACHE", self.path(".cache"))
            .env("NO_COLOR", "1")
            .env("COLUMNS", "100")
            .env_remove("SLURM_CPUS_PER_TASK")
            // No test asks the real hub; those of `hub` serve their own.
            .env("HF_HUB_OFFLINE", "1")
            .env("HF_HOME", self.path(".hf"));
        for name in NOT_INHERITED {
            command.env_remove(name);
        }
        command
    }

    /// Runs the program with a command line as [`split`] reads it: `place.run("eval --model m --seqlen 64")`.
    pub(crate) fn run(&self, line: &str) -> Ran {
        ran(&mut self.command(line))
    }

    /// Runs the program with `line` and [`TEXTS`]. The run must succeed.
    pub(crate) fn prune(&self, line: &str) -> Ran {
        let ran = self.run(&format!("{line} {TEXTS}"));
        assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
        ran
    }

    /// Runs the program with a fault of `src/disk/faults.rs`; `None` where a signal ended it.
    pub(crate) fn with_fault(&self, line: &str, fault: &str) -> Option<Ran> {
        let mut command = self.command(line);
        let output = command.env("PRUNE_FAULT", fault).output();
        let output = output.expect("the binary was built by this test run");
        Some(Ran {
            code: output.status.code()?,
            stdout: String::from_utf8(output.stdout).expect("results are UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("messages are UTF-8"),
        })
    }

    /// The manifest of a run folder.
    pub(crate) fn manifest(&self, run: &str) -> Manifest {
        let text = fs::read(self.path(run).join("run.json")).expect("a finished run has run.json");
        serde_json::from_slice(&text).expect("run.json is a manifest")
    }

    /// The names in a folder.
    pub(crate) fn names(&self, folder: &str) -> BTreeSet<String> {
        fs::read_dir(self.path(folder))
            .expect("the folder is there")
            .map(|entry| {
                let entry = entry.expect("the folder can be listed");
                entry.file_name().to_string_lossy().into_owned()
            })
            .collect()
    }
}

/// The work of a process by its standard error, with `--progress json` or without: the units that a repetition does again.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// The layers that were finished, in order.
    pub(crate) layers: Vec<u64>,
    /// The steps of a training of the whole model; only with `--progress json`.
    pub(crate) steps: Vec<u64>,
}

impl Work {
    pub(crate) fn of(stderr: &str) -> Self {
        let mut work = Self::default();
        for line in stderr.lines() {
            // "layer 3 sparsity 0.500000 (0.1 s)"
            if let Some((layer, rest)) =
                line.strip_prefix("layer ").and_then(|rest| rest.split_once(' '))
                && rest.starts_with("sparsity ")
            {
                work.layers.extend(layer.parse::<u64>());
            }
            let Ok(event) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            match event["event"].as_str() {
                Some("layer_pruned") => work.layers.extend(event["layer"].as_u64()),
                Some("training_step") if event["layer"].is_null() => {
                    work.steps.extend(event["step"].as_u64());
                }
                _ => {}
            }
        }
        work
    }

    /// Checks that a process began after the `saved` finished layers of all `layers`, and did each later one once.
    #[track_caller]
    pub(crate) fn assert_layers_after(&self, saved: usize, layers: usize, when: &str) {
        let expected: Vec<u64> = (saved as u64..layers as u64).collect();
        assert_eq!(self.layers, expected, "{saved} layers were saved, {when}");
    }
}

/// The layers that are finished in the states of the unfinished runs below a folder, by folder.
pub(crate) fn saved_cells(sweep: &Path) -> BTreeMap<PathBuf, usize> {
    let cells = fs::read_dir(sweep).into_iter().flatten().flatten();
    let saved = cells.filter_map(|cell| {
        let state = fs::read(cell.path().join("unfinished.json")).ok()?;
        let state: Value = serde_json::from_slice(&state).expect("a state is JSON");
        let is_finished = cell.path().join("run.json").exists();
        (!is_finished).then(|| (cell.path(), state["layers"].as_array().map_or(0, Vec::len)))
    });
    saved.collect()
}

/// Checks that the last process of each cell began after the layers that were saved.
#[track_caller]
pub(crate) fn assert_cells_after(saved: &BTreeMap<PathBuf, usize>, when: &str) {
    for (cell, layers) in saved {
        let text = fs::read(cell.join("run.json")).expect("a finished cell");
        let manifest: Manifest = serde_json::from_slice(&text).expect("a manifest");
        let last = manifest.sessions.last().expect("a process");
        assert_eq!(last.first_layer, *layers, "{}, {when}", cell.display());
    }
}

#[test]
fn the_work_of_a_process_is_counted_in_both_forms() {
    let work = Work::of(
        "model  m: 2 layers\nlayer 0 sparsity 0.500000 (0.1 s)\nlayer 1/2: calibrate: 3/4 samples\n\
         {\"event\":\"layer_pruned\",\"layer\":1}\n{\"event\":\"training_step\",\"step\":7,\"layer\":null}\n\
         {\"event\":\"training_step\",\"step\":1,\"layer\":0}\n",
    );
    assert_eq!((work.layers, work.steps), (vec![0, 1], vec![7]));
}

/// Runs a command to its end.
pub(crate) fn ran(command: &mut Command) -> Ran {
    let output = command.output().expect("the binary was built by this test run");
    Ran {
        code: output.status.code().expect("no signal ended it"),
        stdout: String::from_utf8(output.stdout).expect("results are UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("messages are UTF-8"),
    }
}

/// `count` words without much of a pattern, one sentence per line: about six bytes each.
pub(crate) fn words(seed: u64, count: usize) -> String {
    const WORDS: [&str; 12] = [
        "layer", "weight", "the", "of", "sparse", "a", "column", "norm", "is", "lowest", "row",
        "and",
    ];
    let mut state = seed;
    let mut text = String::new();
    for number in 1..=count {
        // Knuth's multiplier; the high bits are the random ones.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text += WORDS[(state >> 33) as usize % WORDS.len()];
        text += if number % 11 == 0 { ".\n" } else { " " };
    }
    text
}

/// Splits a command line at white space. A word that begins with a quote ends at the next such quote, so that a value may
/// contain spaces or be empty: `--prompt 'two words'`, `--prompt "it's"`, `--include ''`. Other quotes belong to their word.
pub(crate) fn split(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = line.trim_start();
    while let Some(first) = rest.chars().next() {
        let (word, after) = if first == '\'' || first == '"' {
            rest[1..].split_once(first).expect("the quote is closed")
        } else {
            rest.split_once(char::is_whitespace).unwrap_or((rest, ""))
        };
        words.push(word.to_owned());
        rest = after.trim_start();
    }
    words
}

#[test]
fn a_command_line_is_split_at_white_space_and_quotes_hold_a_value_together() {
    assert_eq!(split(" eval --model  m\n--json "), ["eval", "--model", "m", "--json"]);
    assert_eq!(
        split(r#"--prompt 'two words' --system "it's" --include ''"#),
        ["--prompt", "two words", "--system", "it's", "--include", ""]
    );
    assert_eq!(split(r#"--knobs {"threads":1}"#), ["--knobs", r#"{"threads":1}"#]);
}

/// The command line of a run that is refused: the model, half of the weights, the usual texts, saved as `out`; then `more`.
/// A flag of `more` replaces the flag of the same name, and `--flag -` leaves that flag out.
pub(crate) fn arguments(more: &str) -> String {
    let given = split(more);
    let is_given = |flag: &str| given.iter().any(|word| word.split('=').next() == Some(flag));
    let defaults = split(&format!("--model m --sparsity-ratio 0.5 --save out {TEXTS}"));
    let mut line = String::new();
    for pair in defaults.chunks(2) {
        if !is_given(&pair[0]) {
            line += &format!("{} {} ", pair[0], pair[1]);
        }
    }
    line += more;
    for pair in given.windows(2) {
        if pair[1] == "-" {
            line = line.replace(&format!("{} -", pair[0]), "");
        }
    }
    line
}

/// Names and contents below the folder, the text cache aside.
fn contents(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let (root, mut found) = (place.path("."), BTreeMap::new());
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("the folder can be listed").path();
            let name =
                path.strip_prefix(&root).expect("found below the root").display().to_string();
            if name == ".cache" {
                continue;
            }
            if path.is_dir() {
                found.insert(name, Vec::new());
                folders.push(path);
            } else {
                found.insert(name, fs::read(path).expect("listed above"));
            }
        }
    }
    found
}

/// Runs `prune` with [`arguments`] and holds the refusal to `code`, `first` and `hint` (empty: none); nothing may be written.
#[track_caller]
pub(crate) fn refuses(place: &Place, more: &str, code: i32, first: &str, hint: &str) -> Ran {
    refuses_command(place, &arguments(more), code, first, hint)
}

#[track_caller]
pub(crate) fn refuses_command(
    place: &Place,
    line: &str,
    code: i32,
    first: &str,
    hint: &str,
) -> Ran {
    let before = contents(place);
    let ran = place.run(line);
    let shown = &ran.stderr;
    assert!(!shown.contains("panicked"), "{shown}");
    // Earlier lines (cached tokens, the plan) are no part of the error.
    let error = shown.find("error: ").map_or("", |at| &shown[at..]);
    assert_eq!(error.lines().next(), Some(first), "{shown}");
    let last = error.lines().find(|line| line.starts_with("hint: ")).unwrap_or("");
    assert_eq!(last, hint, "{shown}");
    assert_eq!(ran.code, code, "{shown}");
    assert_eq!(ran.stdout, "", "an error is no result");
    let after = contents(place);
    assert!(
        before == after,
        "written: {:?}",
        after.keys().filter(|name| !before.contains_key(*name)).collect::<Vec<_>>()
    );
    ran
}

pub(crate) fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json =
        serde_json::from_slice(&fs::read(path).expect("it was written")).expect("it is JSON");
    change(&mut json);
    fs::write(path, json.to_string()).expect("it can be replaced");
}

/// Changes the content of a sealed JSON file, `unfinished.json`, and seals it anew.
pub(crate) fn edit_sealed(path: &Path, change: impl FnOnce(String) -> String) {
    let text = fs::read_to_string(path).expect("it was written");
    let (_, rest) = text.split_once('\n').expect("a seal");
    let changed = change(format!("{{\n{rest}"));
    prune::checkpoint::write_sealed_json(path, &changed).expect("it can be replaced");
}

pub(crate) fn sharded() -> Place {
    Place::with(&RandomCheckpoint { max_shard: ByteSize(200 << 10), ..RandomCheckpoint::default() })
}

/// Writes `m/model.safetensors` anew with tensors changed; `change` sees name, header and bytes, and says whether it stays.
pub(crate) fn rewrite(
    place: &Place,
    mut change: impl FnMut(&str, &mut TensorInfo, &mut Vec<u8>) -> bool,
) {
    let path = place.path("m");
    let checkpoint = Checkpoint::open(&path).expect("a good checkpoint");
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for entry in checkpoint.tensors() {
        let mut bytes = vec![0; entry.bytes as usize];
        checkpoint.read(entry, 0, &mut bytes).expect("a good checkpoint");
        let mut info =
            TensorInfo { dtype: entry.dtype, shape: entry.shape.clone(), data_offsets: (0, 0) };
        if change(&entry.name, &mut info, &mut bytes) {
            info.data_offsets = (data.len(), data.len() + bytes.len());
            infos.push((entry.name.clone(), info));
            data.extend(bytes);
        }
    }
    let mut file = encode_header(&BTreeMap::from([("format".into(), "pt".into())]), &infos);
    file.extend(data);
    fs::write(path.join("model.safetensors"), file).expect("it can be replaced");
}

/// Compares `found` with a file in `snapshots/`; `UPDATE_SNAPSHOTS=1` writes it.
#[track_caller]
pub(crate) fn assert_snapshot(name: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/snapshots").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, found).expect("snapshots can be written");
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "{name} differs; if that is meant: UPDATE_SNAPSHOTS=1 with the command of this test\n{found}"
    );
}
