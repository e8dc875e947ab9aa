//! The results of the reference: every f32 run of locuslab/wanda in `goldens/` is repeated and compared.
//!
//! `cargo test --test it golden -- --nocapture` prints the tables of docs/dev/parity.md. `support::shared` finds the files.

mod allocation;
mod closing_runs;
mod compare;
mod families;
mod permutation;
mod recovery;
mod recovery_runs;
mod reference;
mod repairs;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use prune::job;
use prune::linalg::product::Kernel;
use prune::linalg::{StoredDtype, StoredMatrix};
use prune::model::LinearId;
use prune::pipeline::{MaskObserver, PrunedMatrix};
use prune::pruning::mask::{Mask, RowBits};
use prune::pruning::{ColumnSquares, Pattern, Statistics, Target};
use prune::run::Silent;
use prune::settings::{CalibrationSettings, ComputeDtype, EvalSides, Settings};

use crate::support::{self, sparsity};
use compare::{Comparison, DENSE_PERPLEXITY, Rule, differences, relative, within};
pub(crate) use reference::dataset;
use reference::{Golden, goldens};

/// The folders there are tests for, and how many f32 runs each held when they were written.
const FOLDERS: [(&str, usize); 3] =
    [("stories260k", 9), ("stories260k-on-stories", 6), ("wikitext-llama-8m", 10)];

/// Folders of other forms, which have tests of their own or belong to operations that are not built.
const OTHER_FOLDERS: [&str; 6] = ["families", "gradual", "merge", "methods", "recovery", "tasks"];

/// Runs that also measure the dense model beside the pruned one in the same sweep, once per model.
const DENSE_TOO: [&str; 2] =
    ["wanda-0.5-unstructured", "wikitext-llama-8m-float32-wanda-0.5-unstructured"];

/// Runs whose perplexity is compared by hand: their masks are compared bit by bit like all others, and the perplexity that follows
/// from a mask is computed as for the runs that are not listed, which have each method, and of each model the strongest pruning.
const MASKS_ONLY: [&str; 13] = [
    "stories260k-float32-magnitude-0.5-2of4",
    "stories260k-float32-magnitude-0.5-unstructured",
    "stories260k-float32-wanda-0.6-unstructured",
    "stories260k-float32-wanda-variant-0.5-unstructured",
    "stories-0.5-per-output",
    "stories-0.6-per-output",
    "wikitext-llama-8m-0.5-per-output",
    "wikitext-llama-8m-float32-magnitude-0.5-unstructured",
    "wikitext-llama-8m-float32-wanda-0.5-2of4",
    "wikitext-llama-8m-float32-wanda-0.5-4of8",
    "wikitext-llama-8m-float32-wanda-0.6-unstructured",
    "wikitext-llama-8m-float32-wanda-variant-0.5-unstructured",
    "wikitext-llama-8m-float32-dense-0.5-unstructured",
];

const HEADER: &str = "\
| golden | matrices equal | bits equal | worst matrix | statistics median / max | perplexity ours / reference | relative difference |
| --- | --- | --- | --- | --- | --- | --- |";

#[expect(clippy::print_stdout, reason = "the table is what docs/dev/parity.md shows")]
pub(crate) fn show(text: &str) {
    println!("{text}");
}

/// Settings of a run in addition to those of its golden.
#[derive(Clone, Copy)]
struct Ask {
    seed: u64,
    eval: EvalSides,
    dtype: ComputeDtype,
    /// Perplexity is compared.
    is_measured: bool,
}

/// The settings of a golden's run.
fn settings(golden: &Golden, shared: &Path, cache: &Path, ask: Ask) -> Result<Settings> {
    let of = &golden.settings;
    let (method, ratio) = match of.method.as_str() {
        "dense" => ("wanda", 0.0),
        _ if of.variant => ("wanda-variant", of.sparsity_ratio),
        _ => (Rule::of(of).method(), of.sparsity_ratio),
    };
    let mut settings = Settings::pruning(shared.join("models").join(&of.model));
    settings.model.dtype = ask.dtype;
    settings.sparsity = Some(sparsity(method, ratio, of.sparsity_type.parse()?));
    settings.calibration = Some(CalibrationSettings {
        dataset: dataset(shared, &of.train)?.parse()?,
        nsamples: u32::try_from(of.nsamples)?,
        seed: ask.seed,
    });
    settings.seqlen = Some(of.seqlen);
    settings.evaluation.eval = ask.eval;
    settings.evaluation.text_cache = Some(cache.to_path_buf());
    if ask.eval != EvalSides::None {
        settings.evaluation.eval_dataset = dataset(shared, &of.test)?.parse()?;
    }
    Ok(settings)
}

/// One golden, repeated: its comparison, its row, and the dense perplexity where that was asked for.
fn repeat<'a>(
    golden: &'a Golden,
    shared: &Path,
    cache: &Path,
    ask: Ask,
) -> Result<(Comparison<'a>, String, Option<f64>)> {
    let mut comparison = Comparison::new(golden);
    comparison.is_measured = ask.is_measured;
    let settings = settings(golden, shared, cache, ask)?;
    let manifest = job::prune(settings, &Silent, Some(&mut comparison))
        .with_context(|| golden.name.clone())?;
    let row = comparison.finish(&manifest);
    let dense = manifest.perplexity.dense.map(|report| report.perplexity);
    Ok((comparison, row, dense))
}

/// The runs of a folder that are targets of ours.
fn targets(shared: &Path, folder: &str) -> Result<Vec<Golden>> {
    let mut targets = Vec::new();
    for golden in goldens(&shared.join("goldens").join(folder))? {
        if golden.skipped_because()?.is_none() {
            targets.push(golden);
        }
    }
    Ok(targets)
}

/// The runs whose perplexity is measured.
#[derive(Clone, Copy, PartialEq)]
enum Measured {
    /// Those that are not in [`MASKS_ONLY`].
    Some,
    All,
}

/// Repeats the runs of a folder that `is_chosen` names in this arithmetic, prints their table, and fails with everything that was
/// wrong.
fn repeat_folder(
    folder: &str,
    dtype: ComputeDtype,
    measured: Measured,
    is_chosen: impl Fn(&str) -> bool,
) -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let cache = tempfile::tempdir()?;
    let targets = targets(&shared, folder)?;
    let (mut table, mut failures, mut notes) =
        (format!("\n{folder}, {dtype:?}\n\n{HEADER}\n"), Vec::new(), Vec::new());
    let mut times = Vec::new();
    for golden in targets.iter().filter(|golden| is_chosen(&golden.name)) {
        let is_in = |names: &[&str]| names.contains(&golden.name.as_str());
        let is_dense_too = is_in(&DENSE_TOO);
        let is_measured = measured == Measured::All || !is_in(&MASKS_ONLY);
        let ask = Ask {
            seed: golden.settings.seed,
            eval: match (is_measured, is_dense_too) {
                (false, _) => EvalSides::None,
                (true, true) => EvalSides::Both,
                (true, false) => EvalSides::Pruned,
            },
            dtype,
            is_measured,
        };
        let start = Instant::now();
        let (comparison, row, dense) = repeat(golden, &shared, cache.path(), ask)?;
        times.push(format!("{} {:.1} s", golden.name, start.elapsed().as_secs_f64()));
        table += &format!("{row}\n");
        failures.extend(comparison.failures);
        notes.extend(comparison.notes);
        if is_dense_too {
            let text = &golden.settings.test;
            let is_dense =
                |other: &&Golden| other.settings.method == "dense" && other.settings.test == *text;
            let reference =
                targets.iter().find(is_dense).context("the folder has a dense run")?.ppl;
            let dense = dense.context("a dense perplexity was asked for")?;
            if !within(relative(dense, reference), DENSE_PERPLEXITY) {
                failures.push(format!(
                    "{}: dense perplexity beside it {dense}, reference {reference}",
                    golden.name
                ));
            }
        }
    }
    show(&format!("{table}\n{}\ntimes: {}", notes.join("\n"), times.join(", ")));
    assert!(!times.is_empty(), "no golden of `{folder}` was chosen");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

#[test]
fn stories260k_prunes_and_predicts_as_the_reference() {
    repeat_folder("stories260k", ComputeDtype::F32, Measured::Some, |_| true).unwrap();
}

#[test]
fn stories260k_on_stories_prunes_and_predicts_as_the_reference() {
    let folder = "stories260k-on-stories";
    repeat_folder(folder, ComputeDtype::F32, Measured::Some, |_| true).unwrap();
    // The default arithmetic: one run that measures both sides.
    repeat_folder(folder, ComputeDtype::Auto, Measured::Some, |name| DENSE_TOO.contains(&name))
        .unwrap();
}

#[test]
fn wikitext_llama_8m_prunes_and_predicts_as_the_reference() {
    let folder = "wikitext-llama-8m";
    repeat_folder(folder, ComputeDtype::Auto, Measured::Some, |name| {
        !name.starts_with("fulltest-")
    })
    .unwrap();
    if Kernel::has_split() {
        repeat_folder(folder, ComputeDtype::F32, Measured::Some, |name| DENSE_TOO.contains(&name))
            .unwrap();
    }
}

/// The goldens of RIA that are built: without permutation and weight update.
#[test]
fn ria_prunes_and_predicts_as_its_reference() {
    repeat_folder("methods/ria", ComputeDtype::F32, Measured::Some, |name| {
        !name.starts_with("wikitext")
    })
    .unwrap();
}

#[test]
fn ria_prunes_the_wikitext_model_as_its_reference() {
    repeat_folder("methods/ria", ComputeDtype::Auto, Measured::Some, |name| {
        name.starts_with("wikitext")
    })
    .unwrap();
}

#[test]
#[ignore = "ten minutes; the same masks are compared by the tests above, and perplexities of every method"]
fn every_golden_has_the_perplexity_of_the_reference() {
    for (folder, _) in FOLDERS {
        for dtype in [ComputeDtype::F32, ComputeDtype::Auto] {
            repeat_folder(folder, dtype, Measured::All, |name| !name.starts_with("fulltest-"))
                .unwrap();
        }
    }
    repeat_folder("methods/ria", ComputeDtype::F32, Measured::All, |_| true).unwrap();
}

#[test]
#[ignore = "two evaluations of 115 s of processor time each; masks and arithmetic are those of the test above"]
fn wikitext_llama_8m_predicts_the_full_test_text_as_the_reference() {
    let folder = "wikitext-llama-8m";
    repeat_folder(folder, ComputeDtype::Auto, Measured::All, |name| name.starts_with("fulltest-"))
        .unwrap();
}

#[test]
fn every_golden_is_repeated_or_skipped_for_a_printed_reason() {
    let Some(shared) = support::shared() else {
        return;
    };
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(shared.join("goldens")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            folders.push(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    folders.retain(|folder| !OTHER_FOLDERS.contains(&folder.as_str()));
    folders.sort();
    assert_eq!(folders, FOLDERS.map(|(folder, _)| folder), "a folder has no test");
    for (folder, at_least) in FOLDERS {
        let all = goldens(&shared.join("goldens").join(folder)).unwrap();
        let mut repeated = 0;
        for golden in &all {
            let reason = golden.skipped_because().unwrap();
            match reason {
                None => repeated += 1,
                Some(reason) => show(&format!("skipped: {folder}/{}: {reason}", golden.name)),
            }
            let settings = &golden.settings;
            let must_run = settings.dtype == "float32" && settings.method != "sparsegpt";
            let is_refused = golden.name == "stories260k-float32-wanda-0.5-4of8";
            assert_eq!(reason.is_none(), must_run && !is_refused, "{}", golden.name);
        }
        assert!(
            repeated >= at_least,
            "{folder}: {repeated} goldens to repeat, there were {at_least}"
        );
    }
}

#[test]
fn the_comparison_notices_another_seed() {
    let Some(shared) = support::shared() else {
        return;
    };
    let cache = tempfile::tempdir().unwrap();
    let path = "goldens/stories260k-on-stories/wanda-0.5-unstructured.json";
    let mut golden = Golden::load(&shared.join(path)).unwrap();
    let path = "goldens/stories260k/stories260k-float32-wanda-0.5-unstructured.json";
    // Statistics of another text, which must not pass either.
    golden.statistics = Golden::load(&shared.join(path)).unwrap().statistics;
    let ask = Ask { seed: 1, eval: EvalSides::None, dtype: ComputeDtype::F32, is_measured: true };
    let (comparison, ..) = repeat(&golden, &shared, cache.path(), ask).unwrap();
    let said = comparison.failures.join("\n");
    for complaint in [
        "other starts",
        "other calibration tokens",
        "bits differ",
        "another mask",
        "statistics are off",
        "perplexity NaN",
    ] {
        assert!(said.contains(complaint), "no word of `{complaint}` in:\n{said}");
    }
}

/// Two rows of four; with these statistics the scores are 1 2 3 4 and 4 (3 + 2^-21) 3 2.
fn toy() -> (StoredMatrix, Statistics) {
    let near_three = 3.0 + 2f32.powi(-21);
    let weights = [1.0, -1.0, 3.0, 4.0, 4.0, -near_three / 2.0, 3.0, 2.0];
    (
        StoredMatrix::from_f32(StoredDtype::F32, 2, 4, &weights),
        Statistics::Merged(Box::new(ColumnSquares::from_mean(vec![1.0, 4.0, 1.0, 1.0]))),
    )
}

fn pruned<'a>(
    weight: &'a StoredMatrix,
    statistics: Option<&'a Statistics>,
    mask: &'a Mask,
    pattern: Pattern,
) -> PrunedMatrix<'a> {
    let target = Target { ratio: 0.5, pattern };
    PrunedMatrix { layer: 0, id: LinearId::UP, weight, statistics, target, mask }
}

fn mask(prunes: impl Fn(usize, usize) -> bool + Sync + Send) -> Mask {
    let fill = |(): &mut (), row: usize, bits: &mut RowBits<'_>| {
        bits.set_where(|column| prunes(row, column));
        Ok::<_, std::convert::Infallible>(())
    };
    Mask::by_rows(2, 4, || (), fill).expect("nothing fails")
}

#[test]
fn the_comparison_notices_flipped_bits_and_lets_only_near_ties_pass() {
    let (weight, statistics) = toy();
    let ours = mask(|row, column| if row == 0 { column < 2 } else { column > 1 });
    let golden: Golden = serde_json::from_value(serde_json::json!({
        "settings": {"model": "toy", "train": "", "test": "", "method": "wanda", "sparsity_ratio": 0.5,
            "sparsity_type": "unstructured", "variant": false, "nsamples": 1, "seqlen": 4, "seed": 0, "dtype": "float32"},
        "per_linear": {"model.layers.0.mlp.up_proj": {"shape": [2, 4], "pruned": 4, "mask_sha256": ours.sha256()}},
        "calibration_starts": [], "calibration_tokens_sha256_int32le": null, "ppl": 1.0}))
    .unwrap();
    let verdict = |reference: u8, pattern: Pattern| {
        let mut golden = golden.clone();
        let bits = vec![reference];
        golden.masks = Some([("model.layers.0.mlp.up_proj".to_owned(), bits)].into());
        if reference != ours.bits()[0] {
            golden.per_linear.values_mut().for_each(|linear| linear.mask_sha256.clear());
        }
        let mut comparison = Comparison::new(&golden);
        comparison.matrix(&pruned(&weight, Some(&statistics), &ours, pattern)).unwrap();
        ([comparison.failures, comparison.far].concat(), comparison.notes)
    };
    let unstructured = Pattern::Unstructured;
    assert_eq!(ours.bits(), [0b1100_0011]);
    assert_eq!(verdict(0b1100_0011, unstructured), (vec![], vec![]));
    // Row 1: the 3 and the 3 + 2^-21 change places, one step of f32 apart either way.
    let (failures, notes) = verdict(0b1010_0011, unstructured);
    assert_eq!((failures.len(), notes.len()), (0, 2), "{failures:?}");
    // Row 0: the 2 and the 3 change places.
    let (failures, notes) = verdict(0b1100_0101, unstructured);
    assert_eq!((failures.len(), notes.len()), (2, 0), "{failures:?}");
    assert!(
        failures[0].contains("row 0 column 1: pruned by us only, score 2e0, threshold 3e0"),
        "{failures:?}"
    );
    assert!(
        failures[1].contains("row 0 column 2: kept by us only, score 3e0, threshold 2e0"),
        "{failures:?}"
    );
    // A single flip, whose count is wrong too but which no count could excuse.
    let (failures, _) = verdict(0b1100_0111, unstructured);
    assert_eq!(failures.len(), 1, "{failures:?}");
    // Groups of two: the 1 competes with the 2 only, and is not near it.
    let alternating = mask(|row, column| (row + column) % 2 == 0);
    let in_groups = pruned(&weight, Some(&statistics), &alternating, Pattern::NOfM { n: 1, m: 2 });
    assert_eq!(differences(&in_groups, Rule::Wanda, &[alternating.bits()[0] ^ 0b11]).len(), 2);
}

#[test]
fn without_statistics_weights_compete_over_the_whole_matrix() {
    let (weight, _) = toy();
    // |W|: 1 1 3 4 | 4 1.5 3 2: the four lowest are 1 1 1.5 2; the reference takes the 3 of row 1 for the 2.
    let ours = mask(|row, column| if row == 0 { column < 2 } else { column == 1 || column == 3 });
    let found = differences(
        &pruned(&weight, None, &ours, Pattern::Unstructured),
        Rule::Magnitude,
        &[ours.bits()[0] ^ 0b1100_0000],
    );
    assert_eq!(found.len(), 2);
    let said = format!("{found:?}");
    assert!(
        said.contains("score: 3.0, threshold: 2.0") && said.contains("score: 2.0, threshold: 3.0"),
        "{said}"
    );
}
