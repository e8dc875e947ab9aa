//! `prune generate`: its tokens equal candle's, with and without a cache, from memory and from disk.

mod command;
mod decoding;
mod weights;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use prune::checkpoint::Checkpoint;
use prune::data::Tokenizer;
use prune::demo::embedded;
use prune::generation::{
    DecodingArithmetic, FinishReason, Generated, GenerationRequest, Generator, PROMPT_BLOCK,
    Sampler, Sampling, SequenceShape, generate,
};
use prune::linalg::StoredDtype;
use prune::model::{Dtypes, ModelConfig};
use prune::placement::Residency;
use prune::run::Silent;
use prune::runtime::LayerSource;
use prune::synthetic::RandomCheckpoint;
use serde_json::json;

use crate::oracle::{Candles, distance, ours, prompt, sharp};
use crate::support;

/// Places of layers: all in memory, some, none.
const RESTS: [fn(usize) -> Residency; 2] = [Residency::all, Residency::none];

fn open(folder: &Path, rest: fn(usize) -> Residency) -> Result<Generator> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let residency = rest(config.num_hidden_layers);
    Generator::load(LayerSource::as_stored(checkpoint, config), residency, &Silent)
}

/// The logits after a prompt, and after three tokens behind it.
fn logits_of(generator: &mut Generator, prompt: &[u32]) -> Result<Vec<Vec<f32>>> {
    let mut sequence = generator.begin(prompt.len() + 3)?;
    let mut logits = vec![generator.read(&mut sequence, prompt)?.to_vec()];
    for token in [7, 1, 200] {
        logits.push(generator.read(&mut sequence, &[token])?.to_vec());
    }
    Ok(logits)
}

fn written(
    generator: &mut Generator,
    prompt: &[u32],
    max_tokens: usize,
    sampling: &Sampling,
) -> Result<Generated> {
    let request = GenerationRequest { prompt, max_tokens, stop_ids: &[] };
    generate(generator, &request, &mut Sampler::new(sampling), |_| Ok(true))
}

/// The greedy continuation by candle's Llama, with its own cache.
fn greedy_candles(folder: &Path, prompt: &[u32], tokens: usize) -> Result<Vec<u32>> {
    let mut candles = Candles::load(folder)?;
    let mut logits = candles.read(prompt)?;
    let mut ids = Vec::new();
    while ids.len() < tokens {
        let mut best = 0;
        for (id, &logit) in logits.iter().enumerate() {
            if logit > logits[best] {
                best = id;
            }
        }
        ids.push(best as u32);
        logits = candles.read(&[best as u32])?;
    }
    Ok(ids)
}

fn compare_with_candle(folder: &Path, prompt: &[u32], tokens: usize) -> Result<()> {
    let theirs = greedy_candles(folder, prompt, tokens)?;
    for rest in RESTS {
        let mut generator = open(folder, rest)?;
        let streamed = generator.residency().streamed();
        let ours = written(&mut generator, prompt, tokens, &Sampling::GREEDY)?;
        assert_eq!(ours.ids, theirs, "{streamed} layers streamed");
        assert_eq!(ours.finish, FinishReason::MaxTokens);
    }
    Ok(())
}

#[test]
fn greedy_tokens_of_the_demo_model_are_candles() -> Result<()> {
    let folder = tempfile::tempdir()?;
    embedded::write_model(folder.path())?;
    let tokenizer = Tokenizer::load(folder.path())?;
    for text in [embedded::PROMPT, "The"] {
        let prompt = tokenizer.encode(text)?;
        compare_with_candle(folder.path(), &prompt, 90)?;
    }
    Ok(())
}

#[test]
fn greedy_tokens_of_the_real_checkpoints_are_candles() -> Result<()> {
    let Some(shared) = support::shared() else {
        return Ok(());
    };
    for (model, text) in
        [("stories260k", "Once upon a time"), ("wikitext-llama-8m", "The war began in")]
    {
        let folder = shared.join("models").join(model);
        let prompt = Tokenizer::load(&folder)?.encode(text)?;
        compare_with_candle(&folder, &prompt, 100)?;
    }
    Ok(())
}

#[test]
fn greedy_tokens_are_candles_in_every_dtype_and_grouping() -> Result<()> {
    let plain = RandomCheckpoint::default;
    for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
        for num_key_value_heads in [1, 2, 4] {
            let folder = sharp(&RandomCheckpoint {
                dtype,
                num_key_value_heads,
                num_hidden_layers: 3,
                tie_word_embeddings: dtype == StoredDtype::Bf16,
                ..plain()
            })?;
            compare_with_candle(folder.path(), &prompt(20, 320), 40)?;
        }
    }
    Ok(())
}

#[test]
fn logits_behind_a_cache_are_those_of_the_whole_sequence() -> Result<()> {
    // Biases, a head_dim of its own and llama3's scaling, which candle's Llama cannot all do.
    let folder = sharp(&RandomCheckpoint {
        head_dim: Some(24),
        attention_bias: true,
        mlp_bias: true,
        max_position_embeddings: 2048,
        rope_scaling: Some(json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
        ..RandomCheckpoint::default()
    })?;
    // One block and a bit: a whole block, then 3 tokens; and steps of every kind on the way to the same place.
    let tokens = prompt(PROMPT_BLOCK + 3, 320);
    let whole = ours(folder.path(), &tokens)?;
    let largest = whole.iter().fold(0f32, |max, logit| max.max(logit.abs()));
    for rest in RESTS {
        let mut generator = open(folder.path(), rest)?;
        let mut sequence = generator.begin(tokens.len())?;
        for steps in [&[tokens.len()][..], &[1; PROMPT_BLOCK + 3], &[129, 1, 1, 300, 84]] {
            sequence.clear();
            let mut at = 0;
            for &step in steps {
                generator.read(&mut sequence, &tokens[at..at + step])?;
                at += step;
            }
            assert_eq!((at, sequence.tokens()), (tokens.len(), tokens.len()));
            let apart = distance(sequence.logits(), &whole) / largest;
            assert!(apart < 1e-4, "{} steps: {apart:e}", steps.len());
        }
        assert!(generator.read(&mut sequence, &[1]).is_err(), "no room left");
    }
    Ok(())
}

#[test]
fn some_layers_in_memory_and_some_from_disk_write_the_same() -> Result<()> {
    let folder = sharp(&RandomCheckpoint { num_hidden_layers: 5, ..RandomCheckpoint::default() })?;
    let config = ModelConfig::load(folder.path())?;
    let shape =
        SequenceShape { capacity: 30, threads: 2, arithmetic: DecodingArithmetic::default() };
    let dtypes = Dtypes::all(StoredDtype::F32);
    let sizes = Generator::sizes(&config, dtypes, shape, prune::bytes::ByteSize(0));
    let expected = written(
        &mut open(folder.path(), Residency::all)?,
        &prompt(10, 320),
        20,
        &Sampling::GREEDY,
    )?;
    let beside = sizes.head + sizes.kv_cache + sizes.workspace;
    for slots in 1..=5u64 {
        let budget = prune::bytes::ByteSize(beside.0 + slots * sizes.layer.0);
        let residency = Residency::settle(&sizes, budget)?;
        assert_eq!(residency.resident(), [0, 0, 1, 2, 5][slots as usize - 1]);
        let checkpoint = Arc::new(Checkpoint::open(folder.path())?);
        let layers = LayerSource::as_stored(checkpoint, Arc::new(config.clone()));
        let mut generator = Generator::load(layers, residency, &Silent)?;
        let found = written(&mut generator, &prompt(10, 320), 20, &Sampling::GREEDY)?;
        assert_eq!(found.ids, expected.ids, "{slots} places for layers");
    }
    Ok(())
}

#[test]
fn a_layer_that_cannot_be_read_is_an_error_every_time_and_never_a_wait() -> Result<()> {
    let folder = sharp(&RandomCheckpoint { num_hidden_layers: 3, ..RandomCheckpoint::default() })?;
    let mut generator = open(folder.path(), Residency::none)?;
    let file = fs::OpenOptions::new().write(true).open(folder.path().join("model.safetensors"))?;
    file.set_len(4096)?;
    for _ in 0..2 {
        let mut sequence = generator.begin(4)?;
        assert!(generator.read(&mut sequence, &[1, 2]).is_err());
    }
    Ok(())
}

#[test]
fn a_seed_writes_the_same_text_twice_and_another_seed_another() -> Result<()> {
    let folder = sharp(&RandomCheckpoint::default())?;
    let mut generator = open(folder.path(), Residency::all)?;
    let hot = Sampling { temperature: 1.5, top_p: Some(0.95), top_k: Some(100), seed: 7 };
    let first = written(&mut generator, &[256, 65], 60, &hot)?;
    assert_eq!(first.ids, written(&mut generator, &[256, 65], 60, &hot)?.ids);
    let other = Sampling { seed: 8, ..hot };
    assert_ne!(first.ids, written(&mut generator, &[256, 65], 60, &other)?.ids);
    Ok(())
}
