//! The forward pass with gradients against the one that prunes, layer by layer.

use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Device, Tensor, safetensors};
use prune::checkpoint::Checkpoint;
use prune::model::differentiable::{DifferentiableModel, Weights};
use prune::model::{DecoderLayer, Embedding, Head, LayerContext, ModelConfig};
use prune::synthetic::RandomCheckpoint;
use serde_json::json;

use crate::oracle::{distance, prompt, sharp};

/// Largest difference of two logits. Both sides compute in f32 and sum up to 176 products in another order through two layers.
/// Measured: at most 7.3e-6, with logits of up to 16. Ten times that leaves room for other kernels; a wrong formula moves them by
/// more than 1.
const LOGITS: f32 = 7.5e-5;

const SEQLEN: usize = 40;

/// All logits of two sequences by the layers that prune.
fn plain(folder: &Path, tokens: &[u32]) -> Result<Vec<f32>> {
    let (config, checkpoint) = (ModelConfig::load(folder)?, Checkpoint::open(folder)?);
    let mut context = LayerContext::new(&config, SEQLEN);
    let mut all = Vec::new();
    for sequence in tokens.chunks(SEQLEN) {
        let mut hidden = Embedding::open(&checkpoint, &config)?.rows(sequence)?;
        for index in 0..config.num_hidden_layers {
            let layer = DecoderLayer::load(&checkpoint, &config, index)?;
            hidden = layer.forward(&hidden, &mut context)?;
        }
        Head::load(&checkpoint, &config)?.logits(&hidden, &mut context, |_, logits| {
            all.extend_from_slice(logits);
            Ok(())
        })?;
    }
    Ok(all)
}

/// The same logits by the differentiable model.
fn differentiable(folder: &Path, tokens: &[u32]) -> Result<Vec<f32>> {
    let stored = safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
    let widened = stored.into_iter().map(|(name, tensor)| Ok((name, tensor.to_dtype(DType::F32)?)));
    let weights = widened.collect::<Result<Weights>>()?;
    let model = DifferentiableModel::new(&ModelConfig::load(folder)?, SEQLEN)?;
    let ids = Tensor::from_slice(tokens, (tokens.len() / SEQLEN, SEQLEN), &Device::Cpu)?;
    Ok(model.logits(&weights, &ids)?.flatten_all()?.to_vec1()?)
}

#[test]
fn logits_are_those_of_the_layers_that_prune() {
    let shapes = [
        RandomCheckpoint::default(),
        RandomCheckpoint {
            attention_bias: true,
            mlp_bias: true,
            head_dim: Some(24),
            num_key_value_heads: 1,
            ..RandomCheckpoint::default()
        },
        RandomCheckpoint {
            tie_word_embeddings: true,
            rope_scaling: Some(json!({"rope_type": "linear", "factor": 4.0})),
            ..RandomCheckpoint::default()
        },
    ];
    for shape in shapes {
        let folder = sharp(&shape).unwrap();
        let tokens = prompt(2 * SEQLEN, shape.vocab_size);
        let (plain, differentiable) = (
            plain(folder.path(), &tokens).unwrap(),
            differentiable(folder.path(), &tokens).unwrap(),
        );
        let apart = distance(&plain, &differentiable);
        crate::golden::show(&format!("logits differ by at most {apart:e}"));
        assert!(apart <= LOGITS, "{shape:?}: {apart:e}");
    }
}

#[test]
fn a_missing_weight_is_named() {
    let config = ModelConfig::from_json(
        &json!({"model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}),
    )
    .unwrap();
    let model = DifferentiableModel::new(&config, 2).unwrap();
    let ids = Tensor::new(&[[1u32, 2]], &Device::Cpu).unwrap();
    let error = model.logits(&Weights::new(), &ids).unwrap_err();
    assert_eq!(error.to_string(), "there is no weight `model.embed_tokens.weight`");
}
