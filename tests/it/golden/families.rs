//! Checkpoints of other families in `goldens/families`, computed by transformers: states after each layer, perplexities and masks.
//!
//! Both spellings of `config.json` are compared: that of transformers 5 and that of published checkpoints.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use prune::checkpoint::Checkpoint;
use prune::job;
use prune::model::family::FAMILIES;
use prune::model::{DecoderLayer, Embedding, Head, LayerContext, ModelConfig};
use prune::run::Silent;
use prune::settings::{CalibrationSettings, ComputeDtype, EvalSides, Settings};
use serde_json::Value;

use super::compare::{Comparison, DENSE_PERPLEXITY, relative, within};
use super::reference::{Golden, dataset};
use crate::support::{self, sparsity};

/// Every checkpoint of a family that has a record. Fails for a family without a checkpoint.
fn checkpoints() -> Result<Vec<String>> {
    let Some(shared) = support::shared() else {
        return Ok(Vec::new());
    };
    let mut names = Vec::new();
    let mut left: Vec<&str> = FAMILIES.iter().map(|family| family.model_type).collect();
    for entry in fs::read_dir(shared.join("goldens/families"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let config = shared.join("models/families").join(&name).join("config.json");
        let Ok(config) = fs::read_to_string(config) else {
            continue;
        };
        let config: Value = serde_json::from_str(&config)?;
        let family = FAMILIES.iter().find(|family| config["model_type"] == family.model_type);
        if let Some(family) = family {
            left.retain(|of| *of != family.model_type);
            names.push(name);
        }
    }
    ensure!(left.is_empty(), "families without a golden: {left:?}");
    names.sort();
    Ok(names)
}

/// Largest difference to a state or logit of transformers. Both compute in f32 and sum up to 180 products in another order, through
/// four layers. The states are numbers of up to about 16. Measured: at most 6.7e-6;
/// the rest leaves room for other kernels.
const STATES: f32 = 5e-5;

fn folders(name: &str) -> Option<(PathBuf, PathBuf)> {
    let shared = support::shared()?;
    Some((shared.join("models/families").join(name), shared.join("goldens/families").join(name)))
}

/// A golden of a run, in the form of the other goldens: one perplexity, that of windows of 256 tokens.
fn golden(path: &Path) -> Result<Golden> {
    let mut json: Value = serde_json::from_str(&fs::read_to_string(path)?)?;
    json["settings"]["variant"] = false.into();
    json["ppl"] = json["ppl"]["256"].clone();
    let folder = tempfile::tempdir()?;
    let name = path.file_name().context("a golden has a name")?;
    let stem = path.file_stem().context("a golden has a name")?.display();
    for kind in ["masks", "scaler_row"] {
        let tensors = path.with_file_name(format!("{stem}.{kind}.safetensors"));
        if tensors.is_file() {
            fs::copy(&tensors, folder.path().join(tensors.file_name().context("a name")?))?;
        }
    }
    let copy = folder.path().join(name);
    fs::write(&copy, json.to_string())?;
    Golden::load(&copy)
}

/// The settings of a run on a golden's checkpoint and texts.
fn settings(
    model: &Path,
    golden: &Golden,
    cache: &Path,
    (method, ratio): (&str, f64),
) -> Result<Settings> {
    let shared = support::shared().context("checked by the caller")?;
    let of = &golden.settings;
    let mut settings = Settings::pruning(model);
    settings.model.dtype = ComputeDtype::F32;
    settings.sparsity = Some(sparsity(method, ratio, of.sparsity_type.parse()?));
    settings.calibration = Some(CalibrationSettings {
        dataset: dataset(&shared, &of.train)?.parse()?,
        nsamples: u32::try_from(of.nsamples)?,
        seed: of.seed,
    });
    settings.evaluation.eval_dataset = dataset(&shared, &of.test)?.parse()?;
    settings.evaluation.text_cache = Some(cache.to_path_buf());
    Ok(settings)
}

#[test]
fn other_families_prune_and_predict_as_transformers() {
    let cache = tempfile::tempdir().unwrap();
    for name in &checkpoints().unwrap() {
        let Some((model, goldens)) = folders(name) else {
            return;
        };
        for pattern in ["unstructured", "2of4"] {
            let golden = golden(&goldens.join(format!("wanda-0.5-{pattern}.json"))).unwrap();
            let mut settings = settings(&model, &golden, cache.path(), ("wanda", 0.5)).unwrap();
            settings.seqlen = Some(256);
            // The next test compares the dense model. Perplexity follows from a mask in the same way for both patterns.
            let is_measured = pattern == "unstructured";
            settings.evaluation.eval =
                if is_measured { EvalSides::Pruned } else { EvalSides::None };
            let mut comparison = Comparison::new(&golden);
            comparison.is_measured = is_measured;
            let manifest = job::prune(settings, &Silent, Some(&mut comparison)).unwrap();
            super::show(&comparison.finish(&manifest));
            assert!(comparison.failures.is_empty(), "{name}: {}", comparison.failures.join("\n"));
        }
    }
}

#[test]
fn other_families_predict_windows_of_two_lengths_as_transformers() {
    let cache = tempfile::tempdir().unwrap();
    for name in &checkpoints().unwrap() {
        let Some((model, goldens)) = folders(name) else {
            return;
        };
        let golden = golden(&goldens.join("wanda-0.5-unstructured.json")).unwrap();
        let dense = dense(&goldens).unwrap();
        for seqlen in ["256", "512"] {
            let mut settings = settings(&model, &golden, cache.path(), ("magnitude", 0.0)).unwrap();
            settings.seqlen = Some(seqlen.parse().unwrap());
            settings.evaluation.eval = EvalSides::Both;
            settings.evaluation.eval_windows = Some(FIRST);
            let manifest = job::prune(settings, &Silent, None).unwrap();
            let ours = manifest.perplexity.dense.unwrap().perplexity;
            let losses = dense["perplexity"][seqlen]["window_mean_nll_first8"].as_array().unwrap();
            assert_eq!(losses.len() as u64, FIRST);
            let sum: f64 = losses.iter().map(|loss| loss.as_f64().unwrap()).sum();
            compare_dense(&format!("{name} {seqlen}"), ours, (sum / FIRST as f64).exp());
        }
    }
}

/// Windows whose losses a golden has.
const FIRST: u64 = 8;

fn dense(goldens: &Path) -> Result<Value> {
    Ok(serde_json::from_str(&fs::read_to_string(goldens.join("dense.json"))?)?)
}

fn compare_dense(what: &str, ours: f64, reference: f64) {
    let error = relative(ours, reference);
    super::show(&format!("{what}: {ours}, {reference}: {error:e}"));
    assert!(within(error, DENSE_PERPLEXITY), "{what}: {ours}, {reference}");
}

/// Largest difference of two tensors of one shape.
fn distance(ours: &Tensor, reference: &Tensor) -> Result<f32> {
    ensure!(ours.dims() == reference.dims(), "{ours:?}, {reference:?}");
    Ok((ours - reference)?.abs()?.flatten_all()?.max(0)?.to_scalar()?)
}

/// Compares every saved state and logit of a checkpoint; returns the largest difference.
fn compare_states(model: &Path, goldens: &Path) -> Result<f32> {
    let reference = safetensors::load(goldens.join("states.safetensors"), &Device::Cpu)?;
    let (config, checkpoint) = (ModelConfig::load(model)?, Checkpoint::open(model)?);
    let mut largest = 0f32;
    let mut compared = 0;
    for length in [64usize, 256] {
        let ids = &reference[&format!("input_ids_{length}")];
        let ids: Vec<u32> = ids.to_dtype(DType::U32)?.to_vec1()?;
        let mut context = LayerContext::new(&config, ids.len());
        let mut check = |name: String, ours: &Tensor| -> Result<()> {
            if let Some(saved) = reference.get(&name) {
                let rows = saved.dim(0)?;
                let ours = ours.narrow(0, ours.dim(0)? - rows, rows)?;
                largest = largest.max(distance(&ours, saved)?);
                compared += 1;
            }
            Ok(())
        };
        let mut hidden = Embedding::open(&checkpoint, &config)?.rows(&ids)?;
        check(format!("layer0_input_{length}"), &hidden)?;
        for index in 0..config.num_hidden_layers {
            let layer = DecoderLayer::load(&checkpoint, &config, index)?;
            hidden = layer.forward(&hidden, &mut context)?;
            check(format!("layer{index}_output_{length}"), &hidden)?;
            check(format!("layer{index}_output_{length}_last4"), &hidden)?;
        }
        let mut logits = Vec::new();
        let head = Head::load(&checkpoint, &config)?;
        head.logits(&hidden, &mut context, |_, some| {
            logits.extend_from_slice(some);
            Ok(())
        })?;
        let logits = Tensor::from_vec(logits, (length, config.vocab_size), &Device::Cpu)?;
        check(format!("logits_{length}_last4"), &logits)?;
    }
    ensure!(compared >= 9, "{compared} states were compared");
    Ok(largest)
}

#[test]
fn other_families_have_the_states_of_transformers_in_both_spellings_of_the_configuration() {
    for name in &checkpoints().unwrap() {
        let Some((model, goldens)) = folders(name) else {
            return;
        };
        let published = tempfile::tempdir().unwrap();
        for file in fs::read_dir(&model).unwrap() {
            let name = file.unwrap().file_name();
            fs::copy(model.join(&name), published.path().join(&name)).unwrap();
        }
        let style = model.join("config.published-style.json");
        if style.is_file() {
            fs::copy(style, published.path().join("config.json")).unwrap();
        }
        assert_eq!(
            ModelConfig::load(&model).unwrap(),
            ModelConfig::load(published.path()).unwrap()
        );
        for folder in [&*model, published.path()] {
            let largest = compare_states(folder, &goldens).unwrap();
            super::show(&format!("{name}: states differ by at most {largest:e}"));
            assert!(largest <= STATES, "{name}: {largest:e}");
        }
    }
}
