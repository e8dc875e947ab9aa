//! Scores and choices of the reference script, on the models of the goldens.

use std::path::Path;

use anyhow::{Context, Result};
use prune::job;
use prune::pipeline::layer_drop::{DropRule, LayerScores, choose};
use prune::run::Silent;
use prune::settings::{
    CalibrationSettings, ComputeDtype, DropCount, EvalSides, LayerDropSettings, Settings,
};
use serde_json::Value;

use crate::golden::dataset;
use crate::support;

/// The largest difference of a score: the bound. The reference computes states in f32 and cosines in f64, as we do.
const SCORE: f64 = 1e-4;

/// Longest span in the goldens.
const SPANS: usize = 3;

fn numbers(value: &Value) -> Result<Vec<f64>> {
    let values = value.as_array().context("a list of numbers")?.iter();
    values.map(|value| value.as_f64().context("a number")).collect()
}

fn layers(value: &Value) -> Result<Vec<usize>> {
    let numbers = numbers(value)?.into_iter();
    Ok(numbers.map(|number| number as usize).collect())
}

/// The largest relative error of a perplexity. No weight differs here, so only rounding does.
const PERPLEXITY: f64 = 1e-4;

/// The settings of a golden.
fn settings(
    shared: &Path,
    golden: &Value,
    cache: &Path,
    drop: (usize, DropRule),
) -> Result<Settings> {
    let of = |key: &str| golden["settings"][key].as_str().context(key.to_owned());
    let mut settings = Settings::pruning(shared.join("models").join(of("model")?));
    settings.model.dtype = ComputeDtype::F32;
    if let Some(sparsity) = &mut settings.sparsity {
        sparsity.prune_nothing_unless_asked();
    }
    settings.layer_drop = Some(LayerDropSettings {
        drop_layers: Some(DropCount::Number(drop.0)),
        drop_rule: drop.1,
        layers_dropped: Vec::new(),
    });
    settings.calibration = Some(CalibrationSettings {
        dataset: dataset(shared, of("train")?)?.parse()?,
        nsamples: 32,
        seed: 0,
    });
    settings.seqlen = Some(512);
    settings.evaluation.eval_dataset = dataset(shared, of("test")?)?.parse()?;
    settings.evaluation.text_cache = Some(cache.to_path_buf());
    Ok(settings)
}

fn read(shared: &Path, name: &str) -> Result<Value> {
    let golden = shared.join(format!("goldens/methods/layer-drop/{name}.json"));
    Ok(serde_json::from_slice(&std::fs::read(golden)?)?)
}

/// Scores the model of a golden, and compares scores, order and choices.
fn compare(shared: &Path, name: &str) -> Result<()> {
    let golden = read(shared, name)?;
    let cache = tempfile::tempdir()?;
    let drop = (SPANS, DropRule::Influence);
    let mut settings = settings(shared, &golden, cache.path(), drop)?;
    settings.evaluation.eval = EvalSides::None;
    let manifest = job::prune(settings, &Silent, None)?;
    let drop = manifest.layer_drop.context("layers were dropped")?;
    let calibration = manifest.calibration.context("layers were scored")?;
    let hash = &golden["calibration_tokens_sha256_int32le"];
    assert_eq!(Value::from(calibration.tokens_sha256), *hash, "{name}");

    let close = |ours: &[f64], theirs: &Value, what: &str| -> Result<()> {
        let theirs = numbers(theirs)?;
        assert_eq!(ours.len(), theirs.len(), "{name}: {what}");
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!((ours - theirs).abs() < SCORE, "{name}: {what}: {ours} {theirs}");
        }
        Ok(())
    };
    close(&drop.block_influence, &golden["block_influence"], "influence")?;
    let distances = &golden["angular_distance_last_token"];
    for (at, ours) in drop.angular_distance.iter().enumerate() {
        close(ours, &distances[(at + 1).to_string()], "angle")?;
    }

    let scores = LayerScores { influence: drop.block_influence, angles: drop.angular_distance };
    let order = layers(&golden["drop_order_block_influence"])?;
    for count in 1..order.len() {
        let mut first = order[..count].to_vec();
        first.sort_unstable();
        assert_eq!(choose(&scores, DropRule::Influence, count), first, "{name}");
    }
    for (rule, key) in [(DropRule::Influence, "block_influence"), (DropRule::Angle, "angular")] {
        for count in [1, 2] {
            let theirs = layers(&golden["ppl"][key][format!("dropped_{count}")])?;
            assert_eq!(choose(&scores, rule, count), theirs, "{name}: {key}");
        }
    }
    Ok(())
}

fn golden(name: &str) -> Result<()> {
    match support::shared() {
        None => Ok(()),
        Some(shared) => compare(&shared, name),
    }
}

#[test]
fn scores_on_stories_are_those_of_the_reference() -> Result<()> {
    golden("stories")
}

#[test]
fn scores_on_wikitext_are_those_of_the_reference() -> Result<()> {
    golden("wikitext-llama-8m")
}

#[test]
fn perplexities_on_stories_are_those_of_the_reference() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    let golden = read(&shared, "stories")?;
    let cache = tempfile::tempdir()?;
    for (rule, key) in [(DropRule::Influence, "block_influence"), (DropRule::Angle, "angular")] {
        for count in [1, 2] {
            let settings = settings(&shared, &golden, cache.path(), (count, rule))?;
            let manifest = job::prune(settings, &Silent, None)?;
            let ours = manifest.perplexity.pruned.context("it is measured")?;
            let theirs = golden["ppl"][key][format!("ppl_{count}")].as_f64();
            let theirs = theirs.context("a perplexity")?;
            let apart = (ours.perplexity / theirs - 1.0).abs();
            assert!(apart < PERPLEXITY, "{key} {count}: {} {theirs}", ours.perplexity);
        }
    }
    Ok(())
}
