//! Random checkpoints of other families against the models of candle-transformers, where it has the family.
//!
//! candle's windows let one key more through, and its longrope is another. So prompts are no longer than a window, and no checkpoint has
//! longrope. Its Gemmas scale scores by 1/√head_dim, so `query_pre_attn_scalar` is head_dim here. Those differences are compared with
//! transformers' results in `golden/families.rs`.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::{gemma2, gemma3, mistral, olmo2, phi3, qwen2, qwen3, smol};
use prune::model::ModelConfig;
use prune::model::family::FAMILIES;
use prune::synthetic::RandomCheckpoint;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{LOGITS, distance, ours, prompt, sharp};

/// The logits after the last of some tokens.
type Forward = dyn FnOnce(&[u32]) -> candle_core::Result<Tensor>;

/// Keys that candle's configurations require and a `config.json` may leave out.
fn config<C: DeserializeOwned>(of: &Value) -> Result<C> {
    let mut all = json!({"attention_bias": false, "hidden_act": "silu", "use_sliding_window": false, "sliding_window": 4096,
        "max_window_layers": 28, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": false});
    for (key, value) in of.as_object().context("a config is an object")? {
        all[key] = value.clone();
    }
    Ok(serde_json::from_value(all)?)
}

/// candle's model of a family; `None` where candle has no such family.
fn candles(family: &str, of: &Value, weights: VarBuilder<'_>) -> Result<Option<Box<Forward>>> {
    macro_rules! model {
        ($model:expr) => {{
            let mut model = $model?;
            let forward = move |tokens: &[u32]| {
                model.forward(&Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?, 0)
            };
            Box::new(forward) as Box<Forward>
        }};
    }
    Ok(Some(match family {
        "mistral" => model!(mistral::Model::new(&config(of)?, weights)),
        "qwen2" => model!(qwen2::ModelForCausalLM::new(&config(of)?, weights)),
        "qwen3" => model!(qwen3::ModelForCausalLM::new(&config(of)?, weights)),
        "gemma2" => model!(gemma2::Model::new(false, &config(of)?, weights)),
        "gemma3_text" => {
            let mut model = gemma3::Model::new(false, &config(of)?, weights)?;
            // Its caches take only a token at a time.
            Box::new(move |tokens| {
                let mut last = Tensor::zeros(0, DType::F32, &Device::Cpu)?;
                for (at, token) in tokens.iter().enumerate() {
                    last = model.forward(&Tensor::new(&[[*token]], &Device::Cpu)?, at)?;
                }
                Ok(last)
            })
        }
        "phi3" => model!(phi3::Model::new(&config(of)?, weights)),
        "olmo2" => model!(olmo2::Model::new(&config(of)?, weights)),
        "smollm3" => model!(smol::smollm3::ModelForCausalLM::new(&config(of)?, weights)),
        _ => return Ok(None),
    }))
}

/// Compares the last position's logits of a checkpoint. Returns whether candle has the family.
fn compare(folder: &Path, tokens: usize) -> Result<bool> {
    let (ours_config, text) =
        (ModelConfig::load(folder)?, std::fs::read_to_string(folder.join("config.json"))?);
    let weights = safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
    let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let family = ours_config.family.model_type;
    let Some(forward) = candles(family, &serde_json::from_str(&text)?, weights)? else {
        return Ok(false);
    };
    let tokens = prompt(tokens, ours_config.vocab_size);
    let candles: Vec<f32> = forward(&tokens)?.flatten_all()?.to_vec1()?;
    let largest = candles.iter().fold(0f32, |max, logit| max.max(logit.abs()));
    ensure!(largest > 0.1 && largest < 60.0, "logits of up to {largest} say nothing");
    let apart = distance(&ours(folder, &tokens)?, &candles);
    ensure!(apart <= LOGITS * largest.max(1.0), "{} tokens: {apart:e} apart", tokens.len());
    Ok(true)
}

#[test]
fn logits_of_random_checkpoints_of_other_families_are_candles() {
    let mut compared = Vec::new();
    for family in FAMILIES.iter().map(|family| family.model_type) {
        for (heads, key_value_heads, head_dim) in [(4, 2, 16), (6, 1, 24), (3, 3, 32)] {
            let is_narrow = ["qwen2", "phi3", "olmo2", "smollm3"].contains(&family);
            let mut shape = RandomCheckpoint::of_family(family).unwrap();
            shape.num_attention_heads = heads;
            shape.num_key_value_heads = key_value_heads;
            // candle computes the width of a head of these families.
            shape.head_dim = Some(head_dim).filter(|_| !is_narrow);
            shape.hidden_size = if is_narrow { heads * head_dim } else { 80 };
            shape.num_hidden_layers = 7;
            shape.tie_word_embeddings = family.starts_with("gemma");
            let settings = json!({"query_pre_attn_scalar": head_dim, "sliding_window": 64, "sliding_window_pattern": 6,
                "rope_local_base_freq": 5000.0, "partial_rotary_factor": 0.5, "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0, "no_rope_layer_interval": 4});
            for (key, value) in settings.as_object().unwrap() {
                shape.settings.insert(key.clone(), value.clone());
            }
            let folder = sharp(&shape).unwrap();
            for tokens in [1, 7, 64] {
                let what = || format!("{family}, {heads} heads of {head_dim}");
                if compare(folder.path(), tokens).with_context(what).unwrap() {
                    compared.push(family);
                }
            }
        }
    }
    compared.dedup();
    let others: Vec<_> = FAMILIES[1..].iter().map(|family| family.model_type).collect();
    assert_eq!(compared, others, "candle has every family but Llama, which has tests of its own");
}
