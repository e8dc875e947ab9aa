//! Tests of random checkpoints: they can be opened, are reproducible, have the right scale, and impossible shapes are refused.

use std::fs;
use std::path::Path;

use half::f16;
use serde_json::Value;

use super::RandomCheckpoint;
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, INDEX_FILE, SINGLE_FILE, WeightSource};
use crate::linalg::StoredDtype;
use crate::run::Silent;

fn read(checkpoint: &Checkpoint, name: &str) -> anyhow::Result<Vec<u8>> {
    let entry = checkpoint.entry(name).ok_or_else(|| anyhow::anyhow!("no {name}"))?;
    let mut bytes = vec![0; entry.bytes as usize];
    checkpoint.read(entry, 0, &mut bytes)?;
    Ok(bytes)
}

fn refusal(shape: &RandomCheckpoint, target: &Path) -> String {
    shape.write(target, &Silent).err().map_or("none".into(), |error| error.to_string())
}

#[test]
fn random_checkpoint_opens_with_transformers_names_and_shapes() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let shape = RandomCheckpoint {
        attention_bias: true,
        mlp_bias: true,
        dtype: StoredDtype::Bf16,
        head_dim: Some(32),
        ..Default::default()
    };
    shape.write(folder.path(), &Silent)?;
    let checkpoint = Checkpoint::open(folder.path())?;
    // 3 outside the layers; per layer 2 norms, 7 matrices and their 7 biases.
    assert_eq!(checkpoint.tensors().count(), 3 + 2 * 16);
    checkpoint.require("model.embed_tokens.weight", &[320, 64])?;
    checkpoint.require("model.layers.1.self_attn.q_proj.weight", &[4 * 32, 64])?;
    checkpoint.require("model.layers.1.self_attn.k_proj.bias", &[2 * 32])?;
    checkpoint.require("model.layers.0.self_attn.o_proj.weight", &[64, 4 * 32])?;
    checkpoint.require("model.layers.0.mlp.down_proj.weight", &[64, 176])?;
    checkpoint.require("lm_head.weight", &[320, 64])?;
    let config: Value = serde_json::from_slice(&fs::read(folder.path().join("config.json"))?)?;
    assert_eq!(config["torch_dtype"], "bfloat16");
    assert_eq!(config["bos_token_id"], 256);
    Ok(())
}

#[test]
fn tied_checkpoint_in_small_shards_has_an_index_and_no_head() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let shape = RandomCheckpoint {
        tie_word_embeddings: true,
        max_shard: ByteSize(100 << 10),
        ..Default::default()
    };
    shape.write(folder.path(), &Silent)?;
    let checkpoint = Checkpoint::open(folder.path())?;
    assert!(checkpoint.shards().len() > 1);
    assert!(checkpoint.entry("lm_head.weight").is_none());
    assert!(
        checkpoint.shards().iter().all(|shard| shard.file_bytes - shard.data_start <= 100 << 10)
    );
    let index: Value = serde_json::from_slice(&fs::read(folder.path().join(INDEX_FILE))?)?;
    assert_eq!(index["metadata"]["total_size"], checkpoint.total_bytes().0);
    Ok(())
}

#[test]
fn same_seed_gives_the_same_bytes_on_one_thread_and_on_four() -> anyhow::Result<()> {
    let (first, second, other) = (tempfile::tempdir()?, tempfile::tempdir()?, tempfile::tempdir()?);
    // Several shares per tensor: 2000 × 64 × 4 bytes are four shares.
    let shape = RandomCheckpoint { vocab_size: 2000, ..Default::default() };
    let write_with =
        |threads, target: &Path, shape: &RandomCheckpoint| -> anyhow::Result<Vec<u8>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
            pool.install(|| shape.write(target, &Silent))?;
            Ok(fs::read(target.join(SINGLE_FILE))?)
        };
    let one = write_with(1, first.path(), &shape)?;
    assert!(one == write_with(4, second.path(), &shape)?);
    assert!(one != write_with(4, other.path(), &RandomCheckpoint { seed: 1, ..shape })?);
    Ok(())
}

#[test]
fn weights_have_the_deviation_of_a_fresh_model() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let shape =
        RandomCheckpoint { hidden_size: 256, dtype: StoredDtype::F16, ..Default::default() };
    shape.write(folder.path(), &Silent)?;
    let checkpoint = Checkpoint::open(folder.path())?;
    let deviation_and_mean = |name: &str| -> anyhow::Result<(f64, f64)> {
        let bytes = read(&checkpoint, name)?;
        let values: Vec<f64> = bytes
            .chunks_exact(2)
            .map(|pair| f16::from_le_bytes([pair[0], pair[1]]).to_f64())
            .collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Ok(((squares / values.len() as f64).sqrt(), mean))
    };
    // 256 × 256 values: the standard error of a deviation is σ/√(2·65536), 0.3 %.
    let (q, mean) = deviation_and_mean("model.layers.0.self_attn.q_proj.weight")?;
    assert!((q - 0.02).abs() < 0.0004 && mean.abs() < 0.0005, "{q} {mean}");
    // Two layers: 0.02 / √4.
    let (o, _) = deviation_and_mean("model.layers.0.self_attn.o_proj.weight")?;
    assert!((o - 0.01).abs() < 0.0002, "{o}");
    let (_, norm) = deviation_and_mean("model.norm.weight")?;
    assert!((norm - 1.0).abs() < 0.01, "{norm}");
    Ok(())
}

#[test]
fn tokenizer_is_copied_and_must_fit_the_vocabulary() -> anyhow::Result<()> {
    let (given, folder, copy) = (tempfile::tempdir()?, tempfile::tempdir()?, tempfile::tempdir()?);
    RandomCheckpoint::default().write(given.path(), &Silent)?;
    let mut shape = RandomCheckpoint { tokenizer: Some(given.path().into()), ..Default::default() };
    shape.write(folder.path(), &Silent)?;
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
    {
        assert_eq!(
            fs::read(given.path().join(name))?,
            fs::read(folder.path().join(name))?,
            "{name}"
        );
    }
    shape.tokenizer = Some(given.path().join("tokenizer.json"));
    shape.vocab_size = 259;
    assert!(refusal(&shape, copy.path()).contains("260 tokens"));
    Ok(())
}

#[test]
fn impossible_shapes_and_full_folders_are_refused() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let usual = RandomCheckpoint::default;
    for (shape, expected) in [
        (RandomCheckpoint { vocab_size: 259, ..usual() }, "vocab_size 259 is too small"),
        (
            RandomCheckpoint { num_attention_heads: 3, num_key_value_heads: 3, ..usual() },
            "not a multiple of `num_attention_heads` 3",
        ),
        (
            RandomCheckpoint { num_key_value_heads: 3, ..usual() },
            "not a multiple of `num_key_value_heads` 3",
        ),
        (RandomCheckpoint { head_dim: Some(7), ..usual() }, "`head_dim` 7 is odd"),
        (RandomCheckpoint { num_hidden_layers: 0, ..usual() }, "`num_hidden_layers` is 0"),
        (
            RandomCheckpoint {
                intermediate_size: 1 << 24,
                hidden_size: 1 << 24,
                num_hidden_layers: 4096,
                ..usual()
            },
            "its size overflows",
        ),
    ] {
        assert!(
            refusal(&shape, folder.path()).contains(expected),
            "{}",
            refusal(&shape, folder.path())
        );
        assert_eq!(fs::read_dir(folder.path())?.count(), 0);
    }
    fs::write(folder.path().join("notes.txt"), "mine")?;
    assert!(refusal(&usual(), folder.path()).contains("is not empty"));
    Ok(())
}
