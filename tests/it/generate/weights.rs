//! `prune generate --weights`: zeros that are not stored change memory and no bit of the logits.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use prune::checkpoint::Checkpoint;
use prune::generation::{DecodingArithmetic, Generator, PROMPT_BLOCK};
use prune::linalg::product::Kernel;
use prune::linalg::{CodedActivations, Products, StoredDtype};
use prune::model::{KeptShares, ModelConfig, WeightForm, WeightForms};
use prune::placement::Residency;
use prune::run::{GenerationReport, Silent};
use prune::runtime::LayerSource;
use prune::synthetic::RandomCheckpoint;

use super::logits_of;
use crate::oracle::{distance, prompt};
use crate::support::Place;

/// A random model, pruned by magnitude: `out/model`.
fn pruned(shape: &RandomCheckpoint, sparsity: &str) -> Place {
    let place = Place::empty();
    shape.write(&place.path("m"), &Silent).expect("a new folder");
    let ran = place.run(&format!(
        "--model m --prune-method magnitude {sparsity} --use-cpu --eval none --save out --quiet"
    ));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    place
}

fn open(folder: &Path, form: WeightForm, arithmetic: DecodingArithmetic) -> Result<Generator> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let shares = KeptShares::sampled(&*checkpoint, &config)?;
    let residency = Residency::all(config.num_hidden_layers);
    let forms = Arc::new(WeightForms::new(form, shares));
    let layers = LayerSource { source: checkpoint, config, forms };
    Ok(Generator::load(layers, residency, &Silent)?.with_arithmetic(arithmetic))
}

/// The logits after a prompt of more than a block, and after three tokens behind it.
fn logits(generator: &mut Generator) -> Result<Vec<Vec<f32>>> {
    logits_of(generator, &prompt(PROMPT_BLOCK + 5, 320))
}

#[test]
fn logits_have_the_same_bits_without_stored_zeros() -> Result<()> {
    let mut products = vec![Products::F32];
    products.extend(Kernel::best_bf16().map(Products::Bf16));
    products.extend(Kernel::best_bf16().map(Products::AllBf16));
    for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
        for sparsity in ["--sparsity-ratio 0.5", "--sparsity-ratio 0.5 --sparsity-type 2:4"] {
            let shape = RandomCheckpoint {
                dtype,
                max_position_embeddings: 2048,
                ..RandomCheckpoint::default()
            };
            let place = pruned(&shape, sparsity);
            for &products in &products {
                let arithmetic = DecodingArithmetic { products, ..DecodingArithmetic::default() };
                let of = |form| logits(&mut open(&place.path("out/model"), form, arithmetic)?);
                let (dense, compact) = (of(WeightForm::Dense)?, of(WeightForm::Compact)?);
                assert!(dense == compact, "{dtype:?} {sparsity} {products:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn eight_bit_weights_change_logits_by_little_with_either_activations() -> Result<()> {
    let shape = RandomCheckpoint {
        dtype: StoredDtype::Bf16,
        max_position_embeddings: 2048,
        ..RandomCheckpoint::default()
    };
    let place = pruned(&shape, "--sparsity-ratio 0.5");
    let of = |form, activations| {
        let arithmetic = DecodingArithmetic { activations, ..DecodingArithmetic::default() };
        logits(&mut open(&place.path("out/model"), form, arithmetic)?)
    };
    let dense = of(WeightForm::Dense, CodedActivations::F32)?;
    for activations in [CodedActivations::F32, CodedActivations::Int8] {
        let coded = of(WeightForm::Int8, activations)?;
        assert!(coded != dense, "8 bits round");
        for (coded, dense) in coded.iter().zip(&dense) {
            let largest = dense.iter().fold(0f32, |max, logit| max.max(logit.abs()));
            let apart = distance(coded, dense) / largest;
            assert!(apart < 0.05, "{activations:?}: {apart:e}");
        }
    }
    Ok(())
}

/// `prune generate` as JSON.
fn report(place: &Place, more: &str) -> GenerationReport {
    let ran = place.run(&format!(
        "generate --model out/model --use-cpu --prompt a --max-tokens 3 --json {more}"
    ));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("one JSON object")
}

#[test]
fn the_memory_of_weights_without_zeros_is_as_planned_and_less_than_with_them() {
    let shape = RandomCheckpoint {
        dtype: StoredDtype::Bf16,
        hidden_size: 1024,
        intermediate_size: 2816,
        num_hidden_layers: 6,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        ..RandomCheckpoint::default()
    };
    let place = pruned(&shape, "--sparsity-ratio 0.5");
    let dense = report(&place, "--weights dense");
    for (form, bits, activations) in
        [("compact", 9.0, ""), ("int8", 5.25, ""), ("int8", 5.25, "--activations f32")]
    {
        let of = report(&place, &format!("--weights {form} {activations}"));
        assert_eq!((of.weights.as_str(), of.layers_streamed), (form, 0));
        let ratio = of.peak_anonymous.unwrap().0 as f64 / of.predicted.0 as f64;
        assert!((0.85..=1.0).contains(&ratio), "{form}: {ratio} of the plan");
        // 16 bits a weight with zeros; the other memory is the same but for the rows of a part.
        let matrices = 6.0 * (4.0 * 1024.0 * 1024.0 + 3.0 * 1024.0 * 2816.0);
        let saved = matrices * (16.0 - bits) / 8.0;
        let measured = dense.predicted.0 as f64 - of.predicted.0 as f64;
        // As stored in bf16 and what is kept of them, or in f32.
        let rows = 1024.0 * 2816.0 * 4.0;
        assert!((saved - measured - rows).abs() < 0.03 * saved, "{form}: {measured} of {saved}");
    }
}

#[test]
fn the_choice_is_told_and_a_model_without_zeros_stays_as_stored() {
    let shape = RandomCheckpoint { dtype: StoredDtype::Bf16, ..RandomCheckpoint::default() };
    let place = pruned(&shape, "--sparsity-ratio 0.5");
    let ran = |model: &str, more: &str| {
        let ran = place.run(&format!(
            "generate --model {model} --use-cpu --prompt a --max-tokens 3 --bench {more}"
        ));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran.stderr
    };
    let told = ran("out/model", "--weights compact");
    assert!(told.contains("weights      compact: layers take "), "{told}");
    assert!(told.contains("50 % of the weights are 0"), "{told}");
    assert!(told.contains("% of the") && told.contains("limit        "), "{told}");
    let chosen = ran("out/model", "");
    assert!(chosen.contains(" as dense here") || chosen.contains("compact is"), "{chosen}");
    let dense = ran("m", "--weights compact");
    assert!(dense.contains("weights      dense: 0 % of the weights are 0"), "{dense}");
}
