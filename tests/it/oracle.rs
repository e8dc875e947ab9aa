//! Independent implementations of Llama: candle-transformers for the whole model, and formulas in f64 for the rest.
//!
//! candle's Llama has grouped queries, tied embeddings and llama3 rotary scaling. It has no head_dim of its own, no biases and no
//! other scaling: the plain layer of `oracle/plain.rs` has them.

mod families;
mod formulas;
mod output;
mod plain;

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::llama;
use prune::bytes::ByteSize;
use prune::checkpoint::Checkpoint;
use prune::linalg::StoredDtype;
use prune::model::{DecoderLayer, Embedding, Head, LayerContext, ModelConfig};
use prune::run::Silent;
use prune::synthetic::RandomCheckpoint;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support;

/// Largest difference of two logits. Both sides compute in f32 (2^-24 relative) and differ in the order of sums of up to
/// 688 products through up to eight layers. Measured: at most 1e-5, with logits of up to 16; ten times that leaves room for
/// other kernels, while a wrong formula moves logits by more than 1 (tested below).
const LOGITS: f32 = 1e-4;

/// The factor of every weight of a random model: fresh weights make attention uniform and layers nearly the
/// identity, so that hardly any mistake would show. A power of two, exact in every dtype.
const SHARPER: f64 = 8.0;

/// The logits after the last token, through our embedding, layers and head.
pub(crate) fn ours(folder: &Path, tokens: &[u32]) -> Result<Vec<f32>> {
    let config = ModelConfig::load(folder)?;
    let checkpoint = Checkpoint::open(folder)?;
    let mut context = LayerContext::new(&config, tokens.len());
    let mut hidden = Embedding::open(&checkpoint, &config)?.rows(tokens)?;
    for index in 0..config.num_hidden_layers {
        let layer = DecoderLayer::load(&checkpoint, &config, index)?;
        hidden = layer.forward(&hidden, &mut context)?;
    }
    let head = Head::load(&checkpoint, &config)?;
    let mut last = Vec::new();
    head.logits(&hidden, &mut context, |_, logits| {
        last = logits[logits.len() - config.vocab_size..].to_vec();
        Ok(())
    })?;
    Ok(last)
}

/// The same through candle's Llama.
fn candles(folder: &Path, tokens: &[u32]) -> Result<Vec<f32>> {
    Candles::open(folder, false)?.read(tokens)
}

/// candle's Llama and what it has read.
pub(crate) struct Candles {
    model: llama::Llama,
    cache: llama::Cache,
    read: usize,
}

impl Candles {
    /// With or without a cache of keys and values.
    fn open(folder: &Path, is_cached: bool) -> Result<Self> {
        let config = std::fs::read_to_string(folder.join("config.json"))?;
        let config: llama::LlamaConfig = serde_json::from_str(&config)?;
        let config = config.into_config(false);
        let mut tensors = HashMap::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                tensors.extend(safetensors::load(path, &Device::Cpu)?);
            }
        }
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        Ok(Self {
            model: llama::Llama::load(weights, &config)?,
            cache: llama::Cache::new(is_cached, DType::F32, &config, &Device::Cpu)?,
            read: 0,
        })
    }

    /// With a cache, to be read with token by token.
    pub(crate) fn load(folder: &Path) -> Result<Self> {
        Self::open(folder, true)
    }

    /// The logits after these tokens, which follow those read before.
    pub(crate) fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let ids = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        let logits = self.model.forward(&ids, self.read, &mut self.cache)?;
        self.read += tokens.len();
        Ok(logits.squeeze(0)?.to_vec1()?)
    }
}

pub(crate) fn distance(one: &[f32], other: &[f32]) -> f32 {
    assert_eq!(one.len(), other.len(), "as many logits");
    assert!(one.iter().chain(other).all(|logit| logit.is_finite()));
    let differences = one.iter().zip(other).map(|(one, other)| (one - other).abs());
    differences.fold(0.0, f32::max)
}

/// Token ids without a pattern.
pub(crate) fn prompt(length: usize, vocab_size: usize) -> Vec<u32> {
    (0..length).map(|i| ((i * i * 31 + i * 7 + 3) % vocab_size) as u32).collect()
}

/// Compares the last position's logits for prompts of these lengths.
fn compare(folder: &Path, lengths: &[usize]) -> Result<()> {
    let vocab_size = ModelConfig::load(folder)?.vocab_size;
    for &length in lengths {
        let tokens = prompt(length, vocab_size);
        let (ours, candles) = (ours(folder, &tokens)?, candles(folder, &tokens)?);
        let largest = candles.iter().fold(0f32, |max, logit| max.max(logit.abs()));
        ensure!(largest > 0.1 && largest < 30.0, "logits of up to {largest} say nothing");
        let apart = distance(&ours, &candles);
        ensure!(apart <= LOGITS, "{length} tokens: {apart:e} apart");
    }
    Ok(())
}

/// Checks that candle reads a folder, and has our logits after a prompt.
pub(crate) fn loads_in_candle(folder: &Path) -> Result<()> {
    let tokens = prompt(100, ModelConfig::load(folder)?.vocab_size);
    let apart = distance(&ours(folder, &tokens)?, &candles(folder, &tokens)?);
    ensure!(apart <= LOGITS, "{apart:e} apart");
    Ok(())
}

/// A random checkpoint whose every part matters; see [`SHARPER`].
pub(crate) fn sharp(shape: &RandomCheckpoint) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    shape.write(folder.path(), &Silent)?;
    for entry in std::fs::read_dir(folder.path())? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let mut tensors = safetensors::load(&path, &Device::Cpu)?;
        for (name, tensor) in &mut tensors {
            if !name.contains("norm") {
                *tensor = (&*tensor * SHARPER)?;
            }
        }
        safetensors::save(&tensors, &path)?;
    }
    Ok(folder)
}

fn llama3() -> Value {
    // Wavelengths of head_dim 16 and base 10000 are 6.3, 20, 63, 199, ...: one kept (below 64 / 4), two on the ramp, five divided.
    json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64})
}

#[test]
fn logits_of_the_real_checkpoints_are_candles() {
    let Some(shared) = support::shared() else {
        return;
    };
    // 512 tokens are stories260k's limit; lengths around the blocks of our attention and a single token.
    let lengths = [1, 2, 37, 128, 129, 512];
    for model in ["stories260k", "wikitext-llama-8m"] {
        compare(&shared.join("models").join(model), &lengths).with_context(|| model).unwrap();
    }
}

#[test]
fn logits_of_random_checkpoints_of_every_shape_and_dtype_are_candles() {
    let plain = RandomCheckpoint::default;
    let shapes = [
        ("grouped queries", plain()),
        ("one key head", RandomCheckpoint { num_key_value_heads: 1, ..plain() }),
        ("as many key heads", RandomCheckpoint { num_key_value_heads: 4, ..plain() }),
        ("tied", RandomCheckpoint { tie_word_embeddings: true, ..plain() }),
        ("llama3 rotary", RandomCheckpoint { rope_scaling: Some(llama3()), ..plain() }),
        ("head_dim said", RandomCheckpoint { head_dim: Some(16), ..plain() }),
        ("other base", RandomCheckpoint { rope_theta: 500_000.0, ..plain() }),
        ("f16", RandomCheckpoint { dtype: StoredDtype::F16, ..plain() }),
        (
            "bf16, tied",
            RandomCheckpoint { dtype: StoredDtype::Bf16, tie_word_embeddings: true, ..plain() },
        ),
        (
            "bf16, shards",
            RandomCheckpoint { dtype: StoredDtype::Bf16, max_shard: ByteSize(50_000), ..plain() },
        ),
    ];
    for (what, shape) in shapes {
        let folder = sharp(&shape).unwrap();
        compare(folder.path(), &[1, 5, 200]).context(what).unwrap();
    }
}

#[test]
fn the_oracle_notices_a_missing_scaling_and_a_swapped_matrix() {
    let folder =
        sharp(&RandomCheckpoint { rope_scaling: Some(llama3()), ..RandomCheckpoint::default() })
            .unwrap();
    let tokens = prompt(200, 320);
    let right = candles(folder.path(), &tokens).unwrap();
    assert!(distance(&ours(folder.path(), &tokens).unwrap(), &right) <= LOGITS);

    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["rope_scaling"] = Value::Null;
    std::fs::write(&path, config.to_string()).unwrap();
    let unscaled = distance(&ours(folder.path(), &tokens).unwrap(), &right);
    assert!(unscaled > 100.0 * LOGITS, "{unscaled}");
    std::fs::write(&path, text).unwrap();

    let path = folder.path().join("model.safetensors");
    let mut tensors = safetensors::load(&path, &Device::Cpu).unwrap();
    let names = ["gate_proj", "up_proj"].map(|name| format!("model.layers.1.mlp.{name}.weight"));
    let [gate, up] = names.each_ref().map(|name| tensors[name].clone());
    tensors.extend(names.into_iter().zip([up, gate]));
    safetensors::save(&tensors, &path).unwrap();
    let swapped = distance(&ours(folder.path(), &tokens).unwrap(), &right);
    assert!(swapped > 100.0 * LOGITS, "{swapped}");
}
