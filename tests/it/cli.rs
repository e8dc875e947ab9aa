//! The real binary on tiny random checkpoints, started as a person would: flags in, run folder, table and messages out.
//!
//! [`Place`] is the bench the other modules use too: a temporary folder that is the program's working folder, so that all
//! names in arguments and messages are short and relative.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;
use half::{bf16, f16};
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::demo::RandomCheckpoint;
use prune::linalg::StoredDtype;
use prune::model::Projection;
use prune::run::{Manifest, Silent};
use safetensors::Dtype;
use tempfile::TempDir;

/// A temporary folder with a model `m`, the texts `train.txt` and `test.txt`, and the program at home in it.
pub(crate) struct Place {
    folder: TempDir,
}

/// What a command left: exit code and the two streams.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Texts and sizes that every run of these tests shares: 4 samples and 5 windows of 64 tokens.
pub(crate) const TEXTS: [&str; 10] = [
    "--dataset",
    "train.txt",
    "--eval-dataset",
    "test.txt",
    "--nsamples",
    "4",
    "--seqlen",
    "64",
    "--eval-windows",
    "5",
];

/// What would lead the program to somebody's hub, token or proxy.
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
        shape
            .write(&self.path(name), &Silent)
            .expect("the shape is a Llama's");
    }

    /// The absolute path of a name in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program with these arguments, here; for tests that set more.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_prune"));
        command
            .args(arguments)
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

    /// Runs the program.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        ran(&mut self.command(arguments))
    }

    /// Runs the program with `first`, then [`TEXTS`]; it must succeed.
    pub(crate) fn prune(&self, first: &[&str]) -> Ran {
        let arguments: Vec<&str> = first.iter().chain(&TEXTS).copied().collect();
        let ran = self.run(&arguments);
        assert_eq!(ran.code, 0, "{first:?}\n{}", ran.stderr);
        ran
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

/// Runs a command to its end.
pub(crate) fn ran(command: &mut Command) -> Ran {
    let output = command
        .output()
        .expect("the binary was built by this test run");
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
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        text += WORDS[(state >> 33) as usize % WORDS.len()];
        text += if number % 11 == 0 { ".\n" } else { " " };
    }
    text
}

/// One stored tensor.
#[derive(Debug, PartialEq)]
struct Stored {
    shard: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Every tensor of a checkpoint, in file order.
fn tensors(folder: &Path) -> Vec<(String, Stored)> {
    let checkpoint = Checkpoint::open(folder).expect("a checkpoint");
    checkpoint
        .tensors()
        .map(|entry| {
            let mut bytes = vec![0; entry.bytes as usize];
            checkpoint
                .read(entry, 0, &mut bytes)
                .expect("the tensor can be read");
            let stored = Stored {
                shard: checkpoint.shards()[entry.shard].file_name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                bytes,
            };
            (entry.name.clone(), stored)
        })
        .collect()
}

/// A module's weight, without `.weight`: `self_attn.q_proj` and the like are what is pruned.
fn is_linear(name: &str) -> bool {
    Projection::ALL
        .iter()
        .any(|projection| name.ends_with(&format!("{}.weight", projection.name())))
}

/// Holds an output to its source: same names, order, files, dtypes and shapes; where `may_change`, every element is the
/// source's bit for bit or +0, elsewhere every byte is the source's; sidecars are copies. Returns the zeros of each row of
/// each matrix that changed.
fn compare(
    source: &Path,
    output: &Path,
    may_change: impl Fn(&str) -> bool,
) -> BTreeMap<String, Vec<usize>> {
    let (before, after) = (tensors(source), tensors(output));
    let names = |tensors: &[(String, Stored)]| -> Vec<String> {
        tensors.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&before), names(&after));
    let mut zeros = BTreeMap::new();
    for ((name, before), (_, after)) in before.iter().zip(&after) {
        assert_eq!(
            (&before.shard, before.dtype, &before.shape),
            (&after.shard, after.dtype, &after.shape),
            "{name}"
        );
        if !may_change(name) {
            assert!(before.bytes == after.bytes, "`{name}` was to be left alone");
            continue;
        }
        let each = before.dtype.bitsize() / 8;
        for (at, (old, new)) in before
            .bytes
            .chunks(each)
            .zip(after.bytes.chunks(each))
            .enumerate()
        {
            let is_plus_zero = new.iter().all(|&byte| byte == 0);
            assert!(old == new || is_plus_zero, "element {at} of `{name}`");
        }
        let row_bytes = before.shape[1] * each;
        let rows = after.bytes.chunks(row_bytes).map(|row| {
            row.chunks(each)
                .filter(|element| element.iter().all(|&byte| byte == 0))
                .count()
        });
        zeros.insert(name.clone(), rows.collect());
    }
    let files = |folder: &Path| -> BTreeSet<_> {
        fs::read_dir(folder)
            .expect("the folder is there")
            .map(|entry| entry.expect("the folder can be listed").file_name())
            .filter(|name| name != "SHA256SUMS")
            .collect()
    };
    assert_eq!(files(source), files(output));
    for name in files(source) {
        if !name.to_string_lossy().ends_with(".safetensors") {
            assert_eq!(
                fs::read(source.join(&name)).expect("listed above"),
                fs::read(output.join(&name)).expect("listed above"),
                "{name:?}"
            );
        }
    }
    zeros
}

/// Zeros per row of a matrix, where all rows have as many.
fn zeros_per_row(zeros: &BTreeMap<String, Vec<usize>>, name: &str) -> usize {
    let rows = &zeros[&format!("{name}.weight")];
    assert!(rows.iter().all(|&count| count == rows[0]), "{rows:?}");
    rows[0]
}

#[test]
fn a_wanda_run_leaves_a_model_a_manifest_and_a_log_and_nothing_else() {
    let place = Place::new();
    let ran = place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "both",
        "--save",
        "out",
    ]);

    assert_eq!(
        place.names("out"),
        ["log_wanda.txt", "model", "run.json"]
            .map(String::from)
            .into()
    );
    let mut names = place.names("out/model");
    assert!(names.remove("SHA256SUMS"));
    assert_eq!(names, place.names("m"), "no .partial, no spill file");
    assert_eq!(
        place.names("."),
        [".cache", "m", "out", "test.txt", "train.txt"]
            .map(String::from)
            .into()
    );

    let manifest = place.manifest("out");
    let (dense, pruned) = (
        manifest.perplexity.dense.unwrap(),
        manifest.perplexity.pruned.unwrap(),
    );
    let log = fs::read_to_string(place.path("out/log_wanda.txt")).unwrap();
    assert_eq!(
        log,
        format!(
            "method\tactual_sparsity\tppl_test\nwanda\t0.5000\t{:.4}\n",
            pruned.perplexity
        )
    );
    // A model that knows nothing gives every one of 320 tokens the same chance; small random weights stay near that.
    for report in [dense, pruned] {
        assert!((250.0..400.0).contains(&report.perplexity), "{report:?}");
        assert_eq!((report.windows, report.seqlen), (5, 64));
        assert_eq!(report.perplexity, report.mean_loss.exp());
        assert!(report.standard_error > 0.0);
    }
    assert_ne!(dense.perplexity, pruned.perplexity);

    assert_eq!(
        ran.stdout.lines().next(),
        Some("model              m (0.1 M parameters)")
    );
    for row in [
        "pruning            wanda 0.5000 unstructured, 14 of 14 matrices",
        "sparsity reached   0.500000 (46080 of 92160 weights)",
        "result             out/model (read back and verified)",
    ] {
        assert!(ran.stdout.lines().any(|line| line == row), "{}", ran.stdout);
    }
    for line in [
        "pruning      wanda 0.5000 unstructured",
        "             all 14 matrices of 2 layers",
        "calibration  train.txt: 4 samples of 64 tokens, seed 0",
        "evaluation   test.txt: 5 windows of 64 tokens, dense and pruned",
        "output       out/model",
    ] {
        assert!(
            ran.stderr.lines().any(|found| found == line),
            "{}",
            ran.stderr
        );
    }
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    assert!(
        !ran.stdout.contains("layer 0"),
        "progress is no result: {}",
        ran.stdout
    );
}

#[test]
fn the_manifest_tells_what_was_done() {
    let place = Place::new();
    place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "both",
        "--save",
        "out",
        "--use-cpu",
    ]);
    let manifest = place.manifest("out");
    assert_eq!((manifest.schema, manifest.command.as_str()), (1, "prune"));
    assert!(manifest.arguments.ends_with(&TEXTS.map(String::from)));
    assert_eq!(manifest.warnings, Vec::<String>::new());
    // Embedding and head 2·320·64; a layer 64·64·2 + 32·64·2 + 3·176·64 + 2 norms of 64; the last norm 64.
    let linears = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 176 * 64;
    assert_eq!(
        manifest.model.parameters,
        2 * 320 * 64 + 2 * (linears + 128) + 64
    );
    assert_eq!(
        manifest.model.bytes,
        ByteSize(4 * manifest.model.parameters)
    );

    let pruning = manifest.pruning.unwrap();
    assert_eq!(
        (pruning.method.as_str(), pruning.sparsity_ratio),
        ("wanda", 0.5)
    );
    assert_eq!((pruning.matrices, pruning.matrices_in_model), (14, 14));
    let sparsity = manifest.sparsity.unwrap();
    // Rows of 64 and 176: halves are whole numbers, so the ratio is met exactly.
    assert_eq!(
        (sparsity.weights, sparsity.zeros, sparsity.ratio),
        (2 * linears, linears, 0.5)
    );
    assert_eq!(manifest.layers.len(), 2);
    for layer in &manifest.layers {
        assert_eq!((layer.matrices.len(), layer.sparsity), (7, 0.5));
        for matrix in &layer.matrices {
            assert_eq!(
                matrix.pruned,
                Some((matrix.shape[0] * matrix.shape[1] / 2) as u64)
            );
            assert_eq!(matrix.mask_sha256.as_ref().map(String::len), Some(64));
        }
    }

    let calibration = manifest.calibration.unwrap();
    assert_eq!(calibration["dataset"], "text");
    assert_eq!(calibration["windows"], 4);
    assert_eq!(calibration["starts"].as_array().map(Vec::len), Some(4));
    // One token per byte, and <s>.
    let tokens = fs::metadata(place.path("train.txt")).unwrap().len() + 1;
    assert_eq!(calibration["total_tokens"], tokens);
    assert_eq!(manifest.evaluation.unwrap()["tokens_used"], 5 * 64);

    let phases: Vec<&str> = manifest
        .phases
        .iter()
        .map(|phase| phase.phase.as_str())
        .collect();
    for phase in [
        "tokenise",
        "allocate",
        "embed",
        "read",
        "calibrate",
        "score and mask",
        "write",
        "propagate",
        "evaluate dense",
        "evaluate pruned",
        "head",
        "save and verify",
    ] {
        assert!(phases.contains(&phase), "no `{phase}` in {phases:?}");
    }
    let phases_seconds: f64 = manifest.phases.iter().map(|phase| phase.seconds).sum();
    assert!(phases_seconds > 0.0 && phases_seconds <= manifest.seconds);
    if cfg!(target_os = "linux") {
        let largest = manifest
            .phases
            .iter()
            .filter_map(|phase| phase.peak_anonymous)
            .max();
        assert!(largest.is_some_and(|peak| peak > ByteSize(1 << 20)));
        assert_eq!(manifest.peak_anonymous, largest);
    }

    let output = manifest.output.unwrap();
    assert_eq!(output.model, "out/model");
    let verification = output.verification;
    assert_eq!(verification["level"], "quick");
    assert_eq!(verification["tensors_rewritten"], 14);
    // The embedding, the head, the last norm and two norms per layer.
    assert_eq!(verification["tensors_copied"], 7);
    let file = fs::read(place.path("out/model/model.safetensors")).unwrap();
    assert_eq!(verification["files"][0]["bytes"], file.len());
    assert_eq!(verification["files"][0]["sha256"], sha256(&file));
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[test]
fn kept_weights_and_untouched_tensors_are_the_sources_in_every_dtype() {
    for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
        let place = Place::with(&RandomCheckpoint {
            dtype,
            attention_bias: true,
            mlp_bias: true,
            ..RandomCheckpoint::default()
        });
        fs::write(place.path("m/LICENSE.txt"), "do as you like\n").unwrap();
        place.prune(&[
            "--model",
            "m",
            "--sparsity-ratio",
            "0.6",
            "--save",
            "out",
            "--verify",
            "full",
        ]);
        let zeros = compare(&place.path("m"), &place.path("out/model"), is_linear);
        let manifest = place.manifest("out");
        let verification = manifest.output.unwrap().verification;
        assert_eq!(verification["level"], "full", "{dtype:?}");
        assert_eq!(zeros.len(), 14);
        // int(64 · 0.6) = 38 and int(176 · 0.6) = 105 of every row, truncated as Python does. Random weights hold a zero now
        // and then; Wanda takes those first, so no row has more.
        for layer in 0..2 {
            assert_eq!(
                zeros_per_row(&zeros, &Projection::Q.full_name(layer)),
                38,
                "{dtype:?}"
            );
            assert_eq!(
                zeros_per_row(&zeros, &Projection::Down.full_name(layer)),
                105,
                "{dtype:?}"
            );
        }
        for matrix in manifest.layers.iter().flat_map(|layer| &layer.matrices) {
            let rows = &zeros[&format!("{}.weight", matrix.name)];
            assert_eq!(
                matrix.zeros,
                rows.iter().sum::<usize>() as u64,
                "{}",
                matrix.name
            );
        }
    }
}

#[test]
fn a_sharded_checkpoint_keeps_its_files_and_its_index() {
    let place = Place::with(&RandomCheckpoint {
        // The embedding's 320·64·4 bytes are 80 KiB, so this makes several files.
        max_shard: ByteSize(100 << 10),
        ..RandomCheckpoint::default()
    });
    let shards = place
        .names("m")
        .iter()
        .filter(|name| name.ends_with(".safetensors"))
        .count();
    assert!(shards > 3, "{:?}", place.names("m"));
    place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "out",
    ]);
    let zeros = compare(&place.path("m"), &place.path("out/model"), is_linear);
    assert_eq!(zeros_per_row(&zeros, "model.layers.1.mlp.up_proj"), 32);
    let manifest = place.manifest("out");
    let files = &manifest.output.unwrap().verification["files"];
    assert_eq!(files.as_array().map(Vec::len), Some(shards));
}

#[test]
fn a_tied_head_is_the_embedding_and_stays_away() {
    let place = Place::with(&RandomCheckpoint {
        tie_word_embeddings: true,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    });
    place.prune(&["--model", "m", "--sparsity-ratio", "0.5", "--save", "out"]);
    compare(&place.path("m"), &place.path("out/model"), is_linear);
    let names: Vec<String> = tensors(&place.path("out/model"))
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    assert!(!names.contains(&"lm_head.weight".to_string()));
    let perplexity = place.manifest("out").perplexity.pruned.unwrap().perplexity;
    assert!((100.0..1000.0).contains(&perplexity), "{perplexity}");
}

#[test]
fn magnitude_without_evaluation_needs_neither_text_nor_tokenizer() {
    let place = Place::new();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::remove_file(place.path("m").join(name)).unwrap();
    }
    let ran = place.run(&[
        "--model",
        "m",
        "--prune-method",
        "magnitude",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "out",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    compare(&place.path("m"), &place.path("out/model"), is_linear);
    let manifest = place.manifest("out");
    assert!(manifest.calibration.is_none() && manifest.evaluation.is_none());
    assert!(manifest.perplexity.dense.is_none() && manifest.perplexity.pruned.is_none());
    let log = fs::read_to_string(place.path("out/log_magnitude.txt")).unwrap();
    let sparsity = manifest.sparsity.unwrap();
    assert_eq!(
        log,
        format!(
            "method\tactual_sparsity\tppl_test\nmagnitude\t{:.4}\tnan\n",
            sparsity.ratio
        )
    );
    // The reference removes what is ≤ the weight at position int(n / 2) of n sorted ones: one more than half of each of the
    // 14 matrices, and what ties with it.
    let half = 46080 + 14;
    assert!(
        (half..half + 14).contains(&sparsity.zeros),
        "{}",
        sparsity.zeros
    );
}

#[test]
fn n_of_m_patterns_need_no_ratio_and_hold_in_every_group() {
    for (pattern, method, n, m) in [
        ("2:4", "wanda", 2, 4),
        ("1:4", "wanda", 1, 4),
        ("4:8", "magnitude", 4, 8),
        ("3:16", "magnitude", 3, 16),
    ] {
        let place = Place::with(&RandomCheckpoint {
            dtype: StoredDtype::Bf16,
            ..RandomCheckpoint::default()
        });
        place.prune(&[
            "--model",
            "m",
            "--prune-method",
            method,
            "--sparsity-type",
            pattern,
            "--eval",
            "none",
            "--save",
            "out",
        ]);
        compare(&place.path("m"), &place.path("out/model"), is_linear);
        for (name, stored) in tensors(&place.path("out/model")) {
            if is_linear(&name) {
                for (group, elements) in stored.bytes.chunks(2 * m).enumerate() {
                    let zeros = elements
                        .chunks(2)
                        .filter(|element| *element == [0, 0])
                        .count();
                    assert!(
                        zeros >= n,
                        "{pattern}: group {group} of `{name}` has {zeros} zeros"
                    );
                }
            }
        }
        let manifest = place.manifest("out");
        let pruning = manifest.pruning.unwrap();
        assert_eq!(
            (pruning.sparsity_type.as_str(), pruning.sparsity_ratio),
            (pattern, n as f64 / m as f64)
        );
        let pruned: u64 = manifest
            .layers
            .iter()
            .flat_map(|layer| &layer.matrices)
            .filter_map(|matrix| matrix.pruned)
            .sum();
        // 92160 decoder weights, all in whole groups.
        assert_eq!(pruned, 92160 * n as u64 / m as u64, "{pattern}");
    }
}

#[test]
fn a_ratio_beside_its_pattern_is_accepted_where_they_agree() {
    let place = Place::new();
    place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--sparsity-type",
        "2:4",
        "--eval",
        "none",
        "--save",
        "out",
    ]);
    assert_eq!(place.manifest("out").sparsity.unwrap().ratio, 0.5);
}

#[test]
fn include_and_exclude_leave_the_rest_alone_and_say_what_they_mean() {
    let place = Place::new();
    let ran = place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "out",
        "--include",
        "self_attn.*",
        "--include",
        "model.layers.1.mlp.*",
        "--exclude",
        "k_proj",
    ]);
    let chosen = |name: &str| {
        is_linear(name)
            && !name.contains("k_proj")
            && (name.contains("self_attn") || name.contains("layers.1.mlp"))
    };
    let zeros = compare(&place.path("m"), &place.path("out/model"), chosen);
    assert!(
        zeros
            .values()
            .flatten()
            .all(|&zeros| zeros == 32 || zeros == 88),
        "halves of 64 and 176"
    );
    for line in [
        "             9 of 14 matrices:",
        "               layer 0: q_proj v_proj o_proj",
        "               layer 1: q_proj v_proj o_proj gate_proj up_proj down_proj",
    ] {
        assert!(
            ran.stderr.lines().any(|found| found == line),
            "{}",
            ran.stderr
        );
    }
    let manifest = place.manifest("out");
    let left_alone: Vec<_> = manifest
        .layers
        .iter()
        .flat_map(|layer| &layer.matrices)
        .filter(|matrix| matrix.mask_sha256.is_none())
        .map(|matrix| matrix.name.rsplit('.').next().unwrap_or_default())
        .collect();
    assert_eq!(
        left_alone,
        ["k_proj", "gate_proj", "up_proj", "down_proj", "k_proj"]
    );
    let pruning = manifest.pruning.unwrap();
    assert_eq!((pruning.matrices, pruning.matrices_in_model), (9, 14));
    assert_eq!(pruning.exclude, ["k_proj"]);
}

#[test]
fn layer_ratios_come_from_a_file_for_all_layers_or_for_some() {
    let place = Place::new();
    fs::write(place.path("all.json"), "[0.25, 0.75]").unwrap();
    fs::write(place.path("some.json"), "{\"1\": 0.75}").unwrap();
    for (file, overall, first) in [("all.json", None, 0.25), ("some.json", Some("0.5"), 0.5)] {
        let mut arguments = vec![
            "--model",
            "m",
            "--eval",
            "none",
            "--save",
            file,
            "--layer-ratios",
            file,
        ];
        arguments[5] = if file == "all.json" { "all" } else { "some" };
        arguments.extend(overall.map(|_| "--sparsity-ratio"));
        arguments.extend(overall);
        place.prune(&arguments);
        let manifest = place.manifest(arguments[5]);
        let sparsities: Vec<f64> = manifest.layers.iter().map(|layer| layer.sparsity).collect();
        assert_eq!(sparsities, [first, 0.75], "{file}");
        assert_eq!(
            manifest.pruning.unwrap().layer_ratios,
            Some(vec![first, 0.75]),
            "{file}"
        );
    }
}

#[test]
fn scripts_written_for_the_python_original_run() {
    let place = Place::new();
    let ran = place.prune(&[
        "--model",
        "m",
        "--sparsity_ratio",
        "0.5",
        "--prune_method",
        "wanda",
        "--sparsity_type",
        "unstructured",
        "--save_model",
        "pruned",
        "--save=out",
    ]);
    assert!(
        ran.stderr.contains("output       pruned\n"),
        "{}",
        ran.stderr
    );
    compare(&place.path("m"), &place.path("pruned"), is_linear);
    assert_eq!(
        place.names("out"),
        ["log_wanda.txt", "run.json"].map(String::from).into()
    );
}

#[test]
fn eval_of_the_output_gives_the_perplexity_of_the_run_to_the_bit() {
    for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
        let place = Place::with(&RandomCheckpoint {
            dtype,
            ..RandomCheckpoint::default()
        });
        place.prune(&[
            "--model",
            "m",
            "--sparsity-ratio",
            "0.5",
            "--eval",
            "both",
            "--save",
            "out",
        ]);
        let eval = |model: &str, save: &str| {
            let ran = place.run(&[
                "eval",
                "--model",
                model,
                "--eval-dataset",
                "test.txt",
                "--seqlen",
                "64",
                "--eval-windows",
                "5",
                "--save",
                save,
            ]);
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            assert!(ran.stdout.contains("dense perplexity"), "{}", ran.stdout);
            place.manifest(save)
        };
        let run = place.manifest("out");
        let (source, output) = (
            eval("m", "evaluated"),
            eval("out/model", "evaluated-output"),
        );
        let bits = |report: Option<prune::run::manifest::PerplexityReport>| {
            report.map(|report| report.perplexity.to_bits())
        };
        assert!(source.perplexity.dense.is_some());
        assert_eq!(bits(source.perplexity.dense), bits(run.perplexity.dense));
        assert_eq!(bits(output.perplexity.dense), bits(run.perplexity.pruned));
        assert_eq!(
            (output.command.as_str(), output.output.is_none()),
            ("eval", true)
        );
        assert_eq!(
            source.model.identity, output.model.identity,
            "the same names, shapes and layout"
        );
        assert_eq!(place.names("evaluated"), ["run.json".to_string()].into());
    }
}

#[test]
fn a_model_that_is_sparse_already_is_pruned_again_and_its_zeros_are_told() {
    let place = Place::new();
    place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.3",
        "--eval",
        "none",
        "--save",
        "once",
    ]);
    let ran = place.prune(&[
        "--model",
        "once/model",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "twice",
    ]);
    let (once, twice) = (
        place.manifest("once").sparsity.unwrap(),
        place.manifest("twice").sparsity.unwrap(),
    );
    // A row of 64 lost int(19.2) = 19, a row of 176 int(52.8) = 52 weights.
    let rows_of_64 = 64 + 32 + 32 + 64 + 176 + 176;
    assert_eq!(once.zeros, 2 * (rows_of_64 * 19 + 64 * 52));
    assert_eq!((twice.zeros_before, twice.zeros), (once.zeros, 46080));
    let row = format!(
        "zeros before       {} weights were zero already",
        once.zeros
    );
    assert!(ran.stdout.lines().any(|line| line == row), "{}", ran.stdout);
    compare(
        &place.path("once/model"),
        &place.path("twice/model"),
        is_linear,
    );
}

#[test]
fn ratio_zero_is_a_dense_evaluation_and_copies_the_model() {
    let place = Place::new();
    // Neither text nor samples to calibrate with: nothing is to be pruned.
    let ran = place.run(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0",
        "--eval",
        "both",
        "--eval-dataset",
        "test.txt",
        "--seqlen",
        "64",
        "--eval-windows",
        "5",
        "--save",
        "out",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(
        fs::read(place.path("m/model.safetensors")).unwrap(),
        fs::read(place.path("out/model/model.safetensors")).unwrap()
    );
    let manifest = place.manifest("out");
    assert!(manifest.perplexity.dense.is_some());
    assert_eq!(manifest.perplexity.dense, manifest.perplexity.pruned);
    let sparsity = manifest.sparsity.unwrap();
    assert_eq!(sparsity.zeros, sparsity.zeros_before);
}

#[test]
fn without_save_nothing_is_written_and_a_warning_says_so() {
    let place = Place::new();
    let ran = place.prune(&["--model", "m", "--sparsity-ratio", "0.5"]);
    assert!(
        ran.stderr
            .lines()
            .any(|line| line == "warning: nothing will be saved; name a run folder with --save"),
        "{}",
        ran.stderr
    );
    assert!(ran.stdout.contains("pruned perplexity"), "{}", ran.stdout);
    assert_eq!(
        place.names("."),
        [".cache", "m", "test.txt", "train.txt"]
            .map(String::from)
            .into()
    );
}

#[test]
fn no_save_model_keeps_the_report_only() {
    let place = Place::new();
    let ran = place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--save",
        "out",
        "--no-save-model",
    ]);
    assert!(
        ran.stderr
            .contains("output       no model (--no-save-model)\n"),
        "{}",
        ran.stderr
    );
    assert_eq!(
        place.names("out"),
        ["log_wanda.txt", "run.json"].map(String::from).into()
    );
    assert!(place.manifest("out").output.is_none());
}

#[test]
fn threads_come_from_the_flag_then_from_slurm() {
    let place = Place::new();
    let threads = |slurm: &str, flags: &[&str], save: &str| {
        let arguments: Vec<&str> = [
            "eval",
            "--model",
            "m",
            "--eval-dataset",
            "test.txt",
            "--seqlen",
            "64",
            "--eval-windows",
            "2",
            "--save",
            save,
        ]
        .iter()
        .chain(flags)
        .copied()
        .collect();
        let ran = ran(place.command(&arguments).env("SLURM_CPUS_PER_TASK", slurm));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        place.manifest(save).arithmetic.threads
    };
    assert_eq!(threads("3", &[], "a"), 3);
    assert_eq!(threads("3", &["--threads", "1"], "b"), 1);
    // What Slurm writes for heterogeneous jobs is no number: as if it were absent.
    let affinity = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads("2(x2)", &[], "c"), affinity);
}

#[test]
fn a_finished_run_is_replaced_only_by_force() {
    let place = Place::new();
    place.prune(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--eval",
        "none",
        "--save",
        "out",
    ]);
    let first = fs::read(place.path("out/run.json")).unwrap();
    let again: Vec<&str> = [
        "--model",
        "m",
        "--sparsity-ratio",
        "0.25",
        "--eval",
        "none",
        "--save",
        "out",
    ]
    .iter()
    .chain(&TEXTS)
    .copied()
    .collect();
    let refused = place.run(&again);
    assert_eq!(refused.code, 1);
    assert_eq!(
        refused.stderr,
        "error: `out` holds a finished run\nhint: choose another --save folder, or replace it with --force\n"
    );
    assert_eq!(fs::read(place.path("out/run.json")).unwrap(), first);
    fs::write(place.path("out/notes.txt"), "mine").unwrap();
    let forced: Vec<&str> = again.iter().chain(&["--force"]).copied().collect();
    assert_eq!(place.run(&forced).code, 0);
    assert_eq!(place.manifest("out").sparsity.unwrap().ratio, 0.25);
    compare(&place.path("m"), &place.path("out/model"), is_linear);
    assert_eq!(
        fs::read_to_string(place.path("out/notes.txt")).unwrap(),
        "mine"
    );
}

#[test]
fn documents_are_read_from_json_lines_and_gzip_by_path() {
    let place = Place::new();
    let documents: String = (0..20)
        .map(|number| {
            format!(
                "{}\n",
                serde_json::json!({"text": words(number, 60), "url": "x"})
            )
        })
        .collect();
    fs::write(place.path("documents.jsonl"), &documents).unwrap();
    let mut gzip = GzEncoder::new(
        fs::File::create(place.path("documents.json.gz")).unwrap(),
        Compression::fast(),
    );
    gzip.write_all(documents.as_bytes()).unwrap();
    gzip.finish().unwrap();
    let mut runs = Vec::new();
    for (file, save) in [
        ("documents.jsonl", "plain"),
        ("documents.json.gz", "packed"),
    ] {
        let ran = place.run(&[
            "--model",
            "m",
            "--sparsity-ratio",
            "0.5",
            "--dataset",
            file,
            "--eval-dataset",
            file,
            "--nsamples",
            "4",
            "--seqlen",
            "64",
            "--save",
            save,
        ]);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let manifest = place.manifest(save);
        let calibration = manifest.calibration.unwrap();
        assert_eq!(calibration["dataset"], "documents");
        assert_eq!(calibration["documents"].as_array().map(Vec::len), Some(4));
        runs.push((
            calibration["tokens_sha256"].clone(),
            manifest.perplexity.pruned.unwrap().perplexity.to_bits(),
        ));
    }
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn wikitext2_is_found_in_its_folder() {
    let place = Place::new();
    fs::create_dir(place.path("wiki")).unwrap();
    for split in ["train", "test"] {
        let text = words(3, 2000);
        fs::write(place.path(&format!("wiki/wiki.{split}.raw")), text).unwrap();
    }
    let ran = place.run(&[
        "--model",
        "m",
        "--sparsity-ratio",
        "0.5",
        "--dataset",
        "wikitext2:wiki",
        "--eval-dataset",
        "wikitext2:wiki",
        "--nsamples",
        "2",
        "--seqlen",
        "64",
        "--eval-windows",
        "2",
        "--save",
        "out",
    ]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stdout
            .contains(" over windows (wikitext2, 2 windows of 64 tokens)\n"),
        "{}",
        ran.stdout
    );
    let manifest = place.manifest("out");
    assert_eq!(manifest.calibration.unwrap()["path"], "wiki/wiki.train.raw");
    assert_eq!(manifest.evaluation.unwrap()["path"], "wiki/wiki.test.raw");
}

#[test]
fn widened_halves_are_pruned_by_value_not_by_bits() {
    // The smallest magnitudes of an f16 and a bf16 model go, whatever their sign: with magnitude no kept weight of a matrix
    // is smaller than a pruned one.
    for dtype in [StoredDtype::F16, StoredDtype::Bf16] {
        let place = Place::with(&RandomCheckpoint {
            dtype,
            ..RandomCheckpoint::default()
        });
        place.prune(&[
            "--model",
            "m",
            "--prune-method",
            "magnitude",
            "--sparsity-ratio",
            "0.5",
            "--eval",
            "none",
            "--save",
            "out",
        ]);
        let value = |bytes: &[u8]| match dtype {
            StoredDtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32().abs(),
            _ => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32().abs(),
        };
        for ((name, before), (_, after)) in tensors(&place.path("m"))
            .iter()
            .zip(tensors(&place.path("out/model")))
        {
            if !is_linear(name) {
                continue;
            }
            let (mut kept, mut gone) = (f32::INFINITY, 0f32);
            for (old, new) in before.bytes.chunks(2).zip(after.bytes.chunks(2)) {
                if new == [0, 0] {
                    gone = gone.max(value(old));
                } else {
                    kept = kept.min(value(new));
                }
            }
            assert!(gone < kept, "{name}: {gone} went, {kept} stayed");
        }
    }
}

#[test]
fn help_is_what_the_snapshots_show() {
    let place = Place::empty();
    for (arguments, snapshot) in [
        (&["--help"][..], "help.txt"),
        (&["eval", "--help"][..], "eval-help.txt"),
        (&["generate", "--help"][..], "generate-help.txt"),
        (&["inspect", "--help"][..], "inspect-help.txt"),
        (&["demo", "--help"][..], "demo-help.txt"),
    ] {
        let ran = place.run(arguments);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        assert!(
            !ran.stdout.contains("make-checkpoint"),
            "hidden: {}",
            ran.stdout
        );
        let found: String = ran
            .stdout
            .lines()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect();
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/it/snapshots")
            .join(snapshot);
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap();
        assert!(
            found == expected,
            "help differs from {snapshot}; where that is meant: UPDATE_SNAPSHOTS=1 cargo test help_is\n{found}"
        );
    }
}

#[test]
fn the_short_help_has_one_line_per_flag() {
    let help = Place::empty().run(&["-h"]).stdout;
    for flag in [
        "--model",
        "--sparsity-ratio",
        "--prune-method",
        "--dataset",
        "--eval-dataset",
        "--save",
        "--verify",
    ] {
        let line = help
            .lines()
            .find(|line| line.trim_start().starts_with(&format!("{flag} ")));
        assert!(
            line.is_some_and(|line| line.split("  ").filter(|part| !part.is_empty()).count() >= 2),
            "{flag}\n{help}"
        );
    }
}
