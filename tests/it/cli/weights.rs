//! The weights of the output: pruned matrices hold the requested zeros, and every other byte equals the source's.

use std::fs;

use half::{bf16, f16};
use prune::bytes::ByteSize;
use prune::linalg::StoredDtype;
use prune::model::LinearId;
use prune::run::verification::VerifyLevel;
use prune::synthetic::RandomCheckpoint;

use super::{compare, is_linear, tensors, zeros_per_row};
use crate::support::Place;

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
        place.prune("--model m --sparsity-ratio 0.6 --save out --verify full");
        let zeros = compare(&place.path("m"), &place.path("out/model"), is_linear);
        let manifest = place.manifest("out");
        let verification = manifest.output.unwrap().verification;
        assert_eq!(verification.level, VerifyLevel::Full, "{dtype:?}");
        assert_eq!(zeros.len(), 14);
        // int(64 · 0.6) = 38 and int(176 · 0.6) = 105 of every row, truncated as Python does. Random weights hold a zero now
        // and then; Wanda takes those first, so no row has more.
        for layer in 0..2 {
            assert_eq!(zeros_per_row(&zeros, &LinearId::Q.full_name(layer)), 38, "{dtype:?}");
            assert_eq!(zeros_per_row(&zeros, &LinearId::DOWN.full_name(layer)), 105, "{dtype:?}");
        }
        for matrix in manifest.layers.iter().flat_map(|layer| &layer.matrices) {
            let rows = &zeros[&format!("{}.weight", matrix.name)];
            assert_eq!(matrix.zeros, rows.iter().sum::<usize>() as u64, "{}", matrix.name);
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
    let shards = place.names("m").iter().filter(|name| name.ends_with(".safetensors")).count();
    assert!(shards > 3, "{:?}", place.names("m"));
    place.prune("--model m --sparsity-ratio 0.5 --eval none --save out");
    let zeros = compare(&place.path("m"), &place.path("out/model"), is_linear);
    assert_eq!(zeros_per_row(&zeros, "model.layers.1.mlp.up_proj"), 32);
    let manifest = place.manifest("out");
    let files = manifest.output.unwrap().verification.files;
    assert_eq!(files.len(), shards);
}

#[test]
fn a_tied_head_is_the_embedding_and_stays_away() {
    let place = Place::with(&RandomCheckpoint {
        tie_word_embeddings: true,
        dtype: StoredDtype::Bf16,
        ..RandomCheckpoint::default()
    });
    place.prune("--model m --sparsity-ratio 0.5 --save out");
    compare(&place.path("m"), &place.path("out/model"), is_linear);
    let names: Vec<String> =
        tensors(&place.path("out/model")).into_iter().map(|(name, _)| name).collect();
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
    let ran =
        place.run("--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save out");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    compare(&place.path("m"), &place.path("out/model"), is_linear);
    let manifest = place.manifest("out");
    assert!(manifest.calibration.is_none() && manifest.evaluation.is_none());
    assert!(manifest.perplexity.dense.is_none() && manifest.perplexity.pruned.is_none());
    let log = fs::read_to_string(place.path("out/log_magnitude.txt")).unwrap();
    let sparsity = manifest.sparsity.unwrap();
    assert_eq!(
        log,
        format!("method\tactual_sparsity\tppl_test\nmagnitude\t{:.4}\tnan\n", sparsity.ratio)
    );
    // The reference removes what is ≤ the weight at position int(n / 2) of n sorted ones: one more than half of each of the
    // 14 matrices, and what ties with it.
    let half = 46080 + 14;
    assert!((half..half + 14).contains(&sparsity.zeros), "{}", sparsity.zeros);
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
        place.prune(&format!(
            "--model m --prune-method {method} --sparsity-type {pattern} --eval none --save out"
        ));
        compare(&place.path("m"), &place.path("out/model"), is_linear);
        for (name, stored) in tensors(&place.path("out/model")) {
            if is_linear(&name) {
                for (group, elements) in stored.bytes.chunks(2 * m).enumerate() {
                    let zeros = elements.chunks(2).filter(|element| *element == [0, 0]).count();
                    assert!(zeros >= n, "{pattern}: group {group} of `{name}` has {zeros} zeros");
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
    place.prune("--model m --sparsity-ratio 0.5 --sparsity-type 2:4 --eval none --save out");
    assert_eq!(place.manifest("out").sparsity.unwrap().ratio, 0.5);
}

#[test]
fn include_and_exclude_leave_the_rest_alone_and_say_what_they_mean() {
    let place = Place::new();
    let ran = place.prune(
        "--model m --sparsity-ratio 0.5 --eval none --save out --include self_attn.* \
         --include model.layers.1.mlp.* --exclude k_proj",
    );
    let chosen = |name: &str| {
        is_linear(name)
            && !name.contains("k_proj")
            && (name.contains("self_attn") || name.contains("layers.1.mlp"))
    };
    let zeros = compare(&place.path("m"), &place.path("out/model"), chosen);
    assert!(
        zeros.values().flatten().all(|&zeros| zeros == 32 || zeros == 88),
        "halves of 64 and 176"
    );
    for line in [
        "             9 of 14 matrices:",
        "               layer 0: q_proj v_proj o_proj",
        "               layer 1: q_proj v_proj o_proj gate_proj up_proj down_proj",
    ] {
        assert!(ran.stderr.lines().any(|found| found == line), "{}", ran.stderr);
    }
    let manifest = place.manifest("out");
    let left_alone: Vec<_> = manifest
        .layers
        .iter()
        .flat_map(|layer| &layer.matrices)
        .filter(|matrix| matrix.mask_sha256.is_none())
        .map(|matrix| matrix.name.rsplit('.').next().unwrap_or_default())
        .collect();
    assert_eq!(left_alone, ["k_proj", "gate_proj", "up_proj", "down_proj", "k_proj"]);
    let pruning = manifest.pruning.unwrap();
    assert_eq!((pruning.matrices, pruning.matrices_in_model), (9, 14));
    assert_eq!(pruning.exclude, ["k_proj"]);
}

#[test]
fn layer_ratios_come_from_a_file_for_all_layers_or_for_some() {
    let place = Place::new();
    fs::write(place.path("all.json"), "[0.25, 0.75]").unwrap();
    fs::write(place.path("some.json"), "{\"1\": 0.75}").unwrap();
    for (save, overall, first) in [("all", "", 0.25), ("some", "--sparsity-ratio 0.5", 0.5)] {
        place.prune(&format!(
            "--model m --eval none --save {save} --layer-ratios {save}.json {overall}"
        ));
        let manifest = place.manifest(save);
        let sparsities: Vec<f64> = manifest.layers.iter().map(|layer| layer.sparsity).collect();
        assert_eq!(sparsities, [first, 0.75], "{save}");
        assert_eq!(manifest.pruning.unwrap().layer_ratios, Some(vec![first, 0.75]), "{save}");
    }
}

#[test]
fn a_model_that_is_sparse_already_is_pruned_again_and_its_zeros_are_told() {
    let place = Place::new();
    place.prune("--model m --sparsity-ratio 0.3 --eval none --save once");
    let ran = place.prune("--model once/model --sparsity-ratio 0.5 --eval none --save twice");
    let (once, twice) =
        (place.manifest("once").sparsity.unwrap(), place.manifest("twice").sparsity.unwrap());
    // A row of 64 lost int(19.2) = 19, a row of 176 int(52.8) = 52 weights.
    let rows_of_64 = 64 + 32 + 32 + 64 + 176 + 176;
    assert_eq!(once.zeros, 2 * (rows_of_64 * 19 + 64 * 52));
    assert_eq!((twice.zeros_before, twice.zeros), (once.zeros, 46080));
    let row = format!("zeros before       {} weights were zero already", once.zeros);
    assert!(ran.stdout.lines().any(|line| line == row), "{}", ran.stdout);
    compare(&place.path("once/model"), &place.path("twice/model"), is_linear);
}

#[test]
fn widened_halves_are_pruned_by_value_not_by_bits() {
    // The smallest magnitudes of an f16 and a bf16 model go, whatever their sign: with magnitude no kept weight of a matrix
    // is smaller than a pruned one.
    for dtype in [StoredDtype::F16, StoredDtype::Bf16] {
        let place = Place::with(&RandomCheckpoint { dtype, ..RandomCheckpoint::default() });
        place.prune(
            "--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save out",
        );
        let value = |bytes: &[u8]| match dtype {
            StoredDtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32().abs(),
            _ => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32().abs(),
        };
        for ((name, before), (_, after)) in
            tensors(&place.path("m")).iter().zip(tensors(&place.path("out/model")))
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
