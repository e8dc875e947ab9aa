//! The same command gives the same bits: twice, with one thread or several, with hidden states in RAM or on disk.
//!
//! The checkpoint is large enough for threads to share its work. Its sizes are no multiples of block sizes.

use std::fs;

use prune::linalg::StoredDtype;
use prune::run::HiddenStatesStorage;
use prune::synthetic::RandomCheckpoint;

use crate::support::Place;

/// Everything of a run that must not depend on how it was computed.
#[derive(Debug, PartialEq)]
struct Bits {
    masks: Vec<Option<String>>,
    dense: Option<u64>,
    pruned: Option<u64>,
    losses: Vec<u64>,
    samples: String,
}

fn place(dtype: StoredDtype) -> Place {
    Place::with(&RandomCheckpoint {
        hidden_size: 256,
        intermediate_size: 685,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        vocab_size: 523,
        dtype,
        ..RandomCheckpoint::default()
    })
}

/// Runs with `flags`, saves as `name`; the results and the model's files.
fn bits(place: &Place, name: &str, flags: &str) -> (Bits, Vec<(String, Vec<u8>)>) {
    let ran = place.run(&format!(
        "--model m --sparsity-ratio 0.55 --eval both --dataset train.txt \
        --eval-dataset test.txt --nsamples 3 --seqlen 200 --eval-windows 3 --save {name} {flags}"
    ));
    assert_eq!(ran.code, 0, "{flags:?}\n{}", ran.stderr);
    let manifest = place.manifest(name);
    let perplexity = &manifest.perplexity;
    let reports = || perplexity.dense.iter().chain(&perplexity.pruned);
    let bits = Bits {
        masks: manifest
            .layers
            .iter()
            .flat_map(|layer| &layer.matrices)
            .map(|matrix| matrix.mask_sha256.clone())
            .collect(),
        dense: perplexity.dense.map(|report| report.perplexity.to_bits()),
        pruned: perplexity.pruned.map(|report| report.perplexity.to_bits()),
        losses: reports()
            .flat_map(|report| [report.mean_loss.to_bits(), report.standard_error.to_bits()])
            .collect(),
        samples: manifest.calibration.expect("wanda calibrates").tokens_sha256,
    };
    assert_eq!(bits.masks.iter().flatten().count(), 14, "every matrix has a mask");
    assert!(bits.dense.is_some() && bits.pruned.is_some());
    let model = format!("{name}/model");
    let files = place
        .names(&model)
        .into_iter()
        .map(|file| {
            let bytes = fs::read(place.path(&model).join(&file)).expect("listed above");
            (file, bytes)
        })
        .collect();
    (bits, files)
}

#[track_caller]
fn assert_alike(place: &Place, one: &str, other: &str) {
    let ((first, first_files), (second, second_files)) =
        (bits(place, "one", one), bits(place, "other", other));
    assert_eq!(first, second);
    assert!(first_files == second_files, "the written models differ");
}

#[test]
fn the_same_command_gives_the_same_bits() {
    assert_alike(&place(StoredDtype::Bf16), "", "");
}

#[test]
fn threads_do_not_change_a_bit() {
    for dtype in [StoredDtype::F32, StoredDtype::Bf16] {
        let place = place(dtype);
        let (one, files) = bits(&place, "one", "--threads 1");
        // Five is more than there are samples, and than most machines of these tests have.
        for threads in ["2", "5"] {
            let (other, other_files) = bits(&place, threads, &format!("--threads {threads}"));
            assert_eq!(one, other, "{dtype:?}, {threads} threads");
            assert!(
                files == other_files,
                "{dtype:?}: the models written by 1 and {threads} threads differ"
            );
            assert_eq!(place.manifest(threads).arithmetic.threads.to_string(), threads);
        }
    }
}

#[test]
fn where_hidden_states_rest_does_not_change_a_bit() {
    let place = place(StoredDtype::F16);
    assert_alike(&place, "--hidden-states ram", "--hidden-states disk");
    assert_eq!(place.manifest("one").hidden_states, HiddenStatesStorage::Ram);
    assert_eq!(place.manifest("other").hidden_states, HiddenStatesStorage::Disk);
    assert_eq!(
        place.names("other"),
        ["log_wanda.txt", "model", "run.json"].map(String::from).into(),
        "no spill file stays"
    );
}

#[test]
fn the_seed_decides_the_samples_and_nothing_else_does() {
    let place = place(StoredDtype::Bf16);
    let (zero, _) = bits(&place, "zero", "--seed 0");
    let (one, _) = bits(&place, "one", "--seed 1");
    assert_ne!(zero.samples, one.samples);
    assert_eq!(zero.dense, one.dense);
    assert_ne!(zero.masks, one.masks);
}
