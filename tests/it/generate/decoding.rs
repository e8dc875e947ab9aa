//! `prune generate --kv-cache` and `--head`: what is rounded changes memory, and logits by little.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use prune::bytes::ByteSize;
use prune::checkpoint::Checkpoint;
use prune::data::Tokenizer;
use prune::generation::{CacheDtype, DecodingArithmetic, Generator, HeadForm, PROMPT_BLOCK};
use prune::linalg::{CodedActivations, StoredDtype};
use prune::model::{KvCache, ModelConfig, WeightForms};
use prune::placement::Residency;
use prune::run::{GenerationReport, Silent};
use prune::runtime::LayerSource;
use prune::synthetic::RandomCheckpoint;

use super::logits_of;
use crate::oracle::{distance, prompt};
use crate::support::{Place, shared};

fn open(folder: &Path, forms: WeightForms, arithmetic: DecodingArithmetic) -> Result<Generator> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let residency = Residency::all(config.num_hidden_layers);
    let layers = LayerSource { source: checkpoint, config, forms: Arc::new(forms) };
    Ok(Generator::load(layers, residency, &Silent)?.with_arithmetic(arithmetic))
}

/// The logits after a prompt, and after three tokens behind it, with this number of threads.
fn logits(folder: &Path, cache: CacheDtype, threads: usize) -> Result<Vec<Vec<f32>>> {
    let arithmetic = DecodingArithmetic { cache, ..DecodingArithmetic::default() };
    let mut generator = open(folder, WeightForms::dense(), arithmetic)?;
    let tokens = prompt(200, 320);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    pool.install(|| logits_of(&mut generator, &tokens))
}

#[test]
fn a_bf16_cache_changes_logits_by_little_and_threads_by_nothing() -> Result<()> {
    let place = Place::empty();
    // 2048 elements of queries are two pieces of positions or more.
    let shape = RandomCheckpoint {
        num_attention_heads: 16,
        num_key_value_heads: 4,
        head_dim: Some(128),
        max_position_embeddings: 2048,
        ..RandomCheckpoint::default()
    };
    shape.write(&place.path("m"), &Silent)?;
    let of = |cache, threads| logits(&place.path("m"), cache, threads);
    let (exact, rounded) = (of(CacheDtype::F32, 1)?, of(CacheDtype::Bf16, 1)?);
    assert!(exact == of(CacheDtype::F32, 2)? && rounded == of(CacheDtype::Bf16, 2)?);
    assert!(exact != rounded, "bf16 rounds");
    for (rounded, exact) in rounded.iter().zip(&exact) {
        let largest = exact.iter().fold(0f32, |max, logit| max.max(logit.abs()));
        let apart = distance(rounded, exact) / largest;
        // A layer's values are off by 2⁻⁹ of themselves. Scores of a random model are below 1, so their errors change probabilities by
        // 2 · 2⁻⁹ at most. The context is a part of the states that a layer adds to.
        let bound = shape.num_hidden_layers as f32 * 3.0 / 512.0;
        assert!(apart < bound, "{apart:e}");
    }
    Ok(())
}

/// `prune generate` as JSON.
fn report(place: &Place, more: &str) -> GenerationReport {
    let ran = place.run(&format!("generate --model m --use-cpu --max-tokens 3 --json {more}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("one JSON object")
}

#[test]
fn a_bf16_cache_takes_half_the_memory_as_planned() -> Result<()> {
    let place = Place::empty();
    let shape = RandomCheckpoint {
        dtype: StoredDtype::Bf16,
        num_hidden_layers: 4,
        num_attention_heads: 16,
        num_key_value_heads: 16,
        head_dim: Some(128),
        max_position_embeddings: 2048,
        ..RandomCheckpoint::default()
    };
    shape.write(&place.path("m"), &Silent)?;
    fs::write(place.path("prompt"), "a".repeat(600))?;
    let of = |cache| report(&place, &format!("--prompt-file prompt --kv-cache {cache}"));
    let (exact, rounded) = (of("f32"), of("bf16"));
    assert_eq!((exact.kv_cache.as_str(), rounded.kv_cache.as_str()), ("f32", "bf16"));
    let config = ModelConfig::load(&place.path("m"))?;
    let capacity = rounded.prompt_ids.len() + 3;
    assert!(capacity > 600, "a token for each letter");
    let cache = KvCache::bytes(&config, CacheDtype::Bf16, capacity, PROMPT_BLOCK);
    // Peaks of equal runs differ by up to 2 MiB, and what the process holds at the start by less.
    let apart = |saved: f64| (saved - cache.0 as f64).abs() / cache.0 as f64;
    let saved = exact.predicted.0 as f64 - rounded.predicted.0 as f64;
    assert!(apart(saved) < 0.1, "planned {saved} less, the cache takes {cache}");
    if let (Some(exact), Some(peak)) = (exact.peak_anonymous, rounded.peak_anonymous) {
        let saved = exact.0 as f64 - peak.0 as f64;
        assert!(apart(saved) < 0.25, "measured {saved} less, the cache takes {cache}");
        let allowed = rounded.predicted + ByteSize(2 << 20);
        assert!(peak <= allowed, "{peak} of {}", rounded.predicted);
    }
    Ok(())
}

fn first_of_the_largest(logits: &[f32]) -> Option<usize> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|logit| *logit == largest)
}

#[test]
fn a_head_in_8_bits_finds_the_tokens_of_the_stored_head() -> Result<()> {
    let Some(shared) = shared() else {
        return Ok(());
    };
    for (model, text) in [
        ("stories260k", "stories/stories.test.txt"),
        ("wikitext-llama-8m", "wikitext2/wiki.test.raw"),
    ] {
        let folder = shared.join("models").join(model);
        let text = fs::read_to_string(shared.join("data").join(text))?;
        let tokenizer = Tokenizer::load(&folder)?;
        let tokens = tokenizer.encode(&text.chars().take(1000).collect::<String>())?;
        let tokens = &tokens[..tokens.len().min(150)];
        let picks = |head, activations| -> Result<Vec<Option<usize>>> {
            let arithmetic = DecodingArithmetic { activations, ..DecodingArithmetic::default() };
            let mut generator = open(&folder, WeightForms::dense().with_head(head), arithmetic)?;
            let mut sequence = generator.begin(tokens.len())?;
            let each = tokens
                .iter()
                .map(|&token| Ok(first_of_the_largest(generator.read(&mut sequence, &[token])?)));
            each.collect()
        };
        let stored = picks(HeadForm::Stored, CodedActivations::F32)?;
        for activations in [CodedActivations::F32, CodedActivations::Int8] {
            let coded = picks(HeadForm::Int8, activations)?;
            let equal = stored.iter().zip(&coded).filter(|(one, other)| one == other).count();
            let share = equal as f64 / tokens.len() as f64;
            eprintln!("{model}, {activations:?}: {share:.3} of {} tokens", tokens.len());
            assert!(share >= 0.95, "{model}, {activations:?}: {share:.3}");
        }
    }
    Ok(())
}

#[test]
fn a_head_in_8_bits_takes_the_planned_memory_and_the_embedding_stays_as_stored() -> Result<()> {
    let place = Place::empty();
    let shape = RandomCheckpoint {
        dtype: StoredDtype::Bf16,
        hidden_size: 256,
        vocab_size: 20_000,
        // A layer takes more than the rows that are rounded at once, which are freed before.
        intermediate_size: 12_000,
        num_hidden_layers: 2,
        tie_word_embeddings: true,
        ..RandomCheckpoint::default()
    };
    shape.write(&place.path("m"), &Silent)?;
    let of = |head| report(&place, &format!("--prompt a --bench --weights dense --head {head}"));
    let (stored, coded) = (of("stored"), of("int8"));
    assert_eq!((stored.head.as_str(), coded.head.as_str()), ("stored", "int8"));
    // A row in bf16 has 512 bytes; in codes 256, two scales of 2 bytes and a start of 4.
    let saved = 20_000 * (512 - 264);
    let read = |report: &GenerationReport| report.decoding.expect("--bench").bytes_per_token.0;
    assert_eq!(read(&stored) - read(&coded), saved);
    // What the process holds at the start differs from run to run by less than a MiB.
    let apart = |less: f64| (less - saved as f64).abs() / saved as f64;
    let planned = stored.predicted.0 as f64 - coded.predicted.0 as f64;
    assert!(apart(planned) < 0.2, "planned {planned} less of {saved}");
    if let Some(peak) = coded.peak_anonymous {
        assert!(peak <= coded.predicted, "{peak} of {}", coded.predicted);
    }
    Ok(())
}
