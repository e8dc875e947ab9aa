//! No memory setting changes a result: masks, models and perplexities equal those of the default, with every setting at its extreme
//! alone and with all of them.
//!
//! A head that is read in parts is the exception: the exponentials before the largest logit are rounded relative to another number,
//! so the perplexity may differ in its last digits.

use std::fs;

use prune::linalg::StoredDtype;
use prune::synthetic::RandomCheckpoint;

use crate::support::Place;

/// Every setting alone, then all. The last two read the head in parts.
pub(crate) const EXTREMES: [&str; 8] = [
    r#"{"prefetch":false}"#,
    r#"{"mlp_tokens":1}"#,
    r#"{"logits_bytes":1}"#,
    r#"{"weights":"matrix"}"#,
    r#"{"attention_heads":1}"#,
    r#"{"prefetch":false,"weights":"matrix","mlp_tokens":1,"attention_heads":1,"logits_bytes":1}"#,
    r#"{"head_rows":1}"#,
    r#"{"prefetch":false,"weights":"matrix","mlp_tokens":1,"attention_heads":1,"logits_bytes":1,"head_rows":1}"#,
];

/// With rows of the head read in parts, perplexity may differ by this share. Measured: at most 1.3e-9 over the 597 predictions of
/// these tests, each of which sums 523 exponentials that are rounded to f32; the more predictions, the less.
const IN_PARTS: f64 = 5e-9;

/// Results that are equal under every setting.
struct Results {
    masks: Vec<Option<String>>,
    zeros: Vec<u64>,
    output_errors: Vec<Option<f64>>,
    perplexities: Vec<f64>,
    model: Vec<Vec<u8>>,
}

fn results(place: &Place, name: &str, flags: &str, settings: Option<&str>) -> Results {
    let settings =
        settings.map_or_else(String::new, |settings| format!("--memory-settings {settings}"));
    let line = format!(
        "--model m --eval both --dataset train.txt --eval-dataset test.txt --nsamples 3 \
         --seqlen 200 --eval-windows 3 --force --save {name} {flags} {settings}"
    );
    let ran = place.run(&line);
    assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
    let manifest = place.manifest(name);
    let matrices = || manifest.layers.iter().flat_map(|layer| &layer.matrices);
    let perplexity = &manifest.perplexity;
    let reports = perplexity.dense.iter().chain(&perplexity.pruned);
    let folder = place.path(&format!("{name}/model"));
    let model = if folder.is_dir() {
        let names = place.names(&format!("{name}/model"));
        let read = |file: &String| fs::read(folder.join(file)).expect("just listed");
        // They have the perplexities, or the hash of a file with them.
        let has_perplexities = ["README.md", "SHA256SUMS", "pruning.json"];
        let names = names.iter();
        let others = names.filter(|name| !has_perplexities.contains(&name.as_str()));
        others.map(read).collect()
    } else {
        Vec::new()
    };
    Results {
        masks: matrices().map(|matrix| matrix.mask_sha256.clone()).collect(),
        zeros: matrices().map(|matrix| matrix.zeros).collect(),
        output_errors: matrices().map(|matrix| matrix.relative_output_error).collect(),
        perplexities: reports.flat_map(|report| [report.perplexity, report.mean_loss]).collect(),
        model,
    }
}

/// Runs with the default and with every extreme.
fn no_memory_setting_changes(shape: &RandomCheckpoint, flags: &str, saves: bool) {
    let place = Place::with(shape);
    let default = results(&place, "default", flags, None);
    assert_eq!(default.perplexities.len(), 4, "both sides are evaluated");
    assert!(default.masks.iter().flatten().count() > 0);
    assert_ne!(default.perplexities[0], default.perplexities[2], "pruning shows");
    assert_eq!(!default.model.is_empty(), saves);
    for settings in EXTREMES {
        let other = results(&place, "other", flags, Some(settings));
        assert_eq!(other.masks, default.masks, "{settings}");
        assert_eq!(other.zeros, default.zeros, "{settings}");
        assert_eq!(other.output_errors, default.output_errors, "{settings}");
        assert!(other.model == default.model, "{settings}: the models differ");
        if settings.contains("head_rows") {
            let pairs = other.perplexities.iter().zip(&default.perplexities);
            for (other, default) in pairs {
                let distance = (other / default - 1.0).abs();
                assert!(distance <= IN_PARTS, "{settings}: {other} {default}");
            }
        } else {
            assert_eq!(other.perplexities, default.perplexities, "{settings}");
        }
    }
}

/// Sizes that are no multiples of anything, grouped-query heads, and biases everywhere.
fn shape(dtype: StoredDtype) -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 256,
        intermediate_size: 685,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        vocab_size: 523,
        attention_bias: true,
        mlp_bias: true,
        dtype,
        ..RandomCheckpoint::default()
    }
}

#[test]
fn no_memory_setting_changes_what_wanda_prunes_and_leaves() {
    no_memory_setting_changes(&shape(StoredDtype::Bf16), "--sparsity-ratio 0.55", true);
}

/// Some matrices are left alone, and nothing is written: the zeros are nowhere but in the masks.
#[test]
fn no_memory_setting_changes_an_n_m_pattern_that_is_not_saved() {
    let shape = RandomCheckpoint {
        intermediate_size: 688,
        tie_word_embeddings: true,
        ..shape(StoredDtype::F32)
    };
    let flags = "--sparsity-type 2:4 --exclude *o_proj --no-save-model";
    no_memory_setting_changes(&shape, flags, false);
}

#[test]
fn no_memory_setting_changes_what_magnitude_prunes() {
    let flags = "--prune-method magnitude --sparsity-ratio 0.5";
    let shape =
        RandomCheckpoint { attention_bias: false, mlp_bias: false, ..shape(StoredDtype::F16) };
    no_memory_setting_changes(&shape, flags, true);
}

#[test]
fn no_memory_setting_changes_the_perplexity_of_a_model_that_is_only_evaluated() {
    let place = Place::with(&shape(StoredDtype::Bf16));
    let perplexity = |settings: &str| {
        let ran = place.run(&format!(
            "eval --model m --eval-dataset test.txt --seqlen 200 --eval-windows 3 \
             --hidden-states disk --force --save out --memory-settings {settings}"
        ));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let report = place.manifest("out").perplexity.dense;
        report.expect("it was measured").perplexity
    };
    let default = perplexity("{}");
    for settings in EXTREMES {
        let tolerance = if settings.contains("head_rows") { IN_PARTS } else { 0.0 };
        assert!((perplexity(settings) / default - 1.0).abs() <= tolerance, "{settings}");
    }
}
