//! The real binary on tiny random checkpoints: flags, run folder, table and messages.

mod habits;
mod help;
mod texts;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, WeightSource};
use prune::linalg::StoredDtype;
use prune::model::family::FAMILIES;
use prune::run::verification::VerifyLevel;
use prune::synthetic::RandomCheckpoint;
use safetensors::Dtype;

use crate::support::{Place, TEXTS, ran, split};

/// Files beside a pruned model that are no copies of its source's; the last one only if the source has a card.
const OWN_FILES: [&str; 4] = ["README.md", "SHA256SUMS", "pruning.json", "README.source.md"];

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
            checkpoint.read(entry, 0, &mut bytes).expect("the tensor can be read");
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
    let mut linears = FAMILIES.iter().flat_map(|family| family.linears);
    linears.any(|(id, _)| name.ends_with(&format!("{}.weight", id.name())))
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
        for (at, (old, new)) in before.bytes.chunks(each).zip(after.bytes.chunks(each)).enumerate()
        {
            let is_plus_zero = new.iter().all(|&byte| byte == 0);
            assert!(old == new || is_plus_zero, "element {at} of `{name}`");
        }
        let row_bytes = before.shape[1] * each;
        let rows = after.bytes.chunks(row_bytes).map(|row| {
            row.chunks(each).filter(|element| element.iter().all(|&byte| byte == 0)).count()
        });
        zeros.insert(name.clone(), rows.collect());
    }
    let files = |folder: &Path| -> BTreeSet<_> {
        fs::read_dir(folder)
            .expect("the folder is there")
            .map(|entry| entry.expect("the folder can be listed").file_name())
            .filter(|name| !OWN_FILES.contains(&&*name.to_string_lossy()))
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
    let ran = place.prune("--model m --sparsity-ratio 0.5 --eval both --save out");

    assert_eq!(place.names("out"), ["log_wanda.txt", "model", "run.json"].map(String::from).into());
    let mut names = place.names("out/model");
    for name in &OWN_FILES[..3] {
        assert!(names.remove(*name), "{name}");
    }
    assert_eq!(names, place.names("m"), "no .partial, no spill file");
    assert_eq!(
        place.names("."),
        [".cache", "m", "out", "test.txt", "train.txt"].map(String::from).into()
    );

    let manifest = place.manifest("out");
    let (dense, pruned) = (manifest.perplexity.dense.unwrap(), manifest.perplexity.pruned.unwrap());
    let log = fs::read_to_string(place.path("out/log_wanda.txt")).unwrap();
    assert_eq!(
        log,
        format!("method\tactual_sparsity\tppl_test\nwanda\t0.5000\t{:.4}\n", pruned.perplexity)
    );
    // A model that knows nothing gives every one of 320 tokens the same chance; small random weights stay near that.
    for report in [dense, pruned] {
        assert!((250.0..400.0).contains(&report.perplexity), "{report:?}");
        assert_eq!((report.windows, report.seqlen), (5, 64));
        assert_eq!(report.perplexity, report.mean_loss.exp());
        assert!(report.standard_error > 0.0);
    }
    assert_ne!(dense.perplexity, pruned.perplexity);

    assert_eq!(ran.stdout.lines().next(), Some("model              m (0.133 M parameters)"));
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
        assert!(ran.stderr.lines().any(|found| found == line), "{}", ran.stderr);
    }
    assert!(!ran.stderr.contains("warning"), "{}", ran.stderr);
    assert!(!ran.stdout.contains("layer 0"), "progress is no result: {}", ran.stdout);
}

#[test]
fn the_manifest_tells_what_was_done() {
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.5 --eval both --save out --use-cpu");
    let manifest = place.manifest("out");
    assert_eq!((manifest.schema, manifest.command.as_str()), (1, "prune"));
    assert!(manifest.arguments.ends_with(&split(TEXTS)));
    assert_eq!(manifest.warnings, Vec::<String>::new());
    // Embedding and head 2·320·64; a layer 64·64·2 + 32·64·2 + 3·176·64 + 2 norms of 64; the last norm 64.
    let linears = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 176 * 64;
    assert_eq!(manifest.model.parameters, 2 * 320 * 64 + 2 * (linears + 128) + 64);
    assert_eq!(manifest.model.bytes, ByteSize(4 * manifest.model.parameters));

    let pruning = manifest.pruning.unwrap();
    assert_eq!((pruning.method.as_str(), pruning.sparsity_ratio), ("wanda", 0.5));
    assert_eq!((pruning.matrices, pruning.matrices_in_model), (14, 14));
    let sparsity = manifest.sparsity.unwrap();
    // Rows of 64 and 176: halves are whole numbers, so the ratio is met exactly.
    assert_eq!((sparsity.weights, sparsity.zeros, sparsity.ratio), (2 * linears, linears, 0.5));
    assert_eq!(manifest.layers.len(), 2);
    for layer in &manifest.layers {
        assert_eq!((layer.matrices.len(), layer.sparsity), (7, 0.5));
        for matrix in &layer.matrices {
            assert_eq!(matrix.pruned, Some((matrix.shape[0] * matrix.shape[1] / 2) as u64));
            assert_eq!(matrix.mask_sha256.as_ref().map(String::len), Some(64));
        }
    }

    let calibration = manifest.calibration.unwrap();
    assert_eq!(calibration.dataset, "text");
    assert_eq!(calibration.windows, 4);
    assert_eq!(calibration.starts.len(), 4);
    // One token per byte, and <s>.
    let tokens = fs::metadata(place.path("train.txt")).unwrap().len() + 1;
    assert_eq!(calibration.total_tokens, tokens);
    assert_eq!(manifest.evaluation.unwrap().tokens_used, 5 * 64);

    let phases: Vec<String> = manifest.phases.iter().map(|phase| phase.phase.to_string()).collect();
    for phase in [
        "tokenize",
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
        assert!(phases.iter().any(|of| of == phase), "no `{phase}` in {phases:?}");
    }
    let phases_seconds: f64 = manifest.phases.iter().map(|phase| phase.seconds).sum();
    assert!(phases_seconds > 0.0 && phases_seconds <= manifest.seconds);
    if cfg!(target_os = "linux") {
        let largest = manifest.phases.iter().filter_map(|phase| phase.peak_anonymous).max();
        assert!(largest.is_some_and(|peak| peak > ByteSize(1 << 20)));
        assert_eq!(manifest.peak_anonymous, largest);
    }

    let output = manifest.output.unwrap();
    assert_eq!(output.model, "out/model");
    let verification = output.verification;
    assert_eq!(verification.level, VerifyLevel::Quick);
    assert_eq!(verification.tensors_rewritten, 14);
    // The embedding, the head, the last norm and two norms per layer.
    assert_eq!(verification.tensors_copied, 7);
    let file = fs::read(place.path("out/model/model.safetensors")).unwrap();
    assert_eq!(verification.files[0].bytes, file.len() as u64);
    assert_eq!(verification.files[0].sha256, sha256(&file));
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn scripts_written_for_the_python_original_run() {
    let place = Place::new();
    let ran = place.prune(
        "--model m --sparsity_ratio 0.5 --prune_method wanda \
         --sparsity_type unstructured --save_model pruned --save=out",
    );
    assert!(ran.stderr.contains("output       pruned\n"), "{}", ran.stderr);
    compare(&place.path("m"), &place.path("pruned"), is_linear);
    assert_eq!(place.names("out"), ["log_wanda.txt", "run.json"].map(String::from).into());
}

#[test]
fn eval_of_the_output_gives_the_perplexity_of_the_run_to_the_bit() {
    for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
        let place = Place::with(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() });
        place.prune("--model m --sparsity-ratio 0.5 --eval both --save out");
        let eval = |model: &str, save: &str| {
            let ran = place.run(&format!(
                "eval --model {model} --eval-dataset test.txt --seqlen 64 --eval-windows 5 \
                 --save {save}"
            ));
            assert_eq!(ran.code, 0, "{}", ran.stderr);
            assert!(
                ran.stdout.starts_with("model ") && ran.stdout.contains("\nperplexity "),
                "{}",
                ran.stdout
            );
            place.manifest(save)
        };
        let run = place.manifest("out");
        let (source, output) = (eval("m", "evaluated"), eval("out/model", "evaluated-output"));
        let bits = |report: Option<prune::run::manifest::PerplexityReport>| {
            report.map(|report| report.perplexity.to_bits())
        };
        assert!(source.perplexity.dense.is_some());
        assert_eq!(bits(source.perplexity.dense), bits(run.perplexity.dense));
        assert_eq!(bits(output.perplexity.dense), bits(run.perplexity.pruned));
        assert_eq!((output.command.as_str(), output.output.is_none()), ("eval", true));
        assert_eq!(
            source.model.identity, output.model.identity,
            "the same names, shapes and layout"
        );
        assert_eq!(place.names("evaluated"), ["run.json".to_string()].into());
    }
}

#[test]
fn ratio_zero_is_a_dense_evaluation_and_copies_the_model() {
    let place = Place::new();
    // Neither text nor samples to calibrate with: nothing is to be pruned.
    let ran = place.run(
        "--model m --sparsity-ratio 0 --eval both --eval-dataset test.txt --seqlen 64 \
         --eval-windows 5 --save out",
    );
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
    let ran = place.prune("--model m --sparsity-ratio 0.5");
    assert!(
        ran.stderr
            .lines()
            .any(|line| line == "warning: nothing will be saved; name a run folder with --save"),
        "{}",
        ran.stderr
    );
    assert!(ran.stdout.contains("pruned perplexity"), "{}", ran.stdout);
    assert_eq!(place.names("."), [".cache", "m", "test.txt", "train.txt"].map(String::from).into());
}

#[test]
fn no_save_model_keeps_the_report_only() {
    let place = Place::new();
    let ran = place.prune("--model m --sparsity-ratio 0.5 --save out --no-save-model");
    assert!(ran.stderr.contains("output       no model (--no-save-model)\n"), "{}", ran.stderr);
    assert_eq!(place.names("out"), ["log_wanda.txt", "run.json"].map(String::from).into());
    assert!(place.manifest("out").output.is_none());
}

#[test]
fn threads_come_from_the_flag_then_from_slurm() {
    let place = Place::new();
    let threads = |slurm: &str, flags: &str, save: &str| {
        let line = format!(
            "eval --model m --eval-dataset test.txt --seqlen 64 --eval-windows 2 --save {save} {flags}"
        );
        let ran = ran(place.command(&line).env("SLURM_CPUS_PER_TASK", slurm));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        place.manifest(save).arithmetic.threads
    };
    assert_eq!(threads("3", "", "a"), 3);
    assert_eq!(threads("3", "--threads 1", "b"), 1);
    // The value for heterogeneous jobs is no number and counts as absent.
    let affinity = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads("2(x2)", "", "c"), affinity);
}

#[test]
fn a_finished_run_is_replaced_only_by_force() {
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.5 --eval none --save out");
    let first = fs::read(place.path("out/run.json")).unwrap();
    let again = format!("--model m --sparsity-ratio 0.25 --eval none --save out {TEXTS}");
    let refused = place.run(&again);
    assert_eq!(refused.code, 1);
    assert_eq!(
        refused.stderr,
        "error: `out` holds a finished run\nhint: choose another --save folder, or replace it with --force\n"
    );
    assert_eq!(fs::read(place.path("out/run.json")).unwrap(), first);
    fs::write(place.path("out/notes.txt"), "mine").unwrap();
    assert_eq!(place.run(&format!("{again} --force")).code, 0);
    assert_eq!(place.manifest("out").sparsity.unwrap().ratio, 0.25);
    compare(&place.path("m"), &place.path("out/model"), is_linear);
    assert_eq!(fs::read_to_string(place.path("out/notes.txt")).unwrap(), "mine");
}
