//! `prune make-checkpoint` (hidden): a random model of any shape, for tests, benches and scale runs.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use super::console::Console;
use crate::bytes::ByteSize;
use crate::linalg::StoredDtype;
use crate::run::Events;
use crate::synthetic::RandomCheckpoint;

/// Flags of `prune make-checkpoint`.
#[derive(Debug, Clone, Args)]
pub struct MakeCheckpointArgs {
    /// Folder to write; must not exist or be empty
    #[arg(value_name = "DIR")]
    target: PathBuf,
    /// Family: `model_type` of config.json
    #[arg(long, value_name = "NAME", default_value = "llama")]
    model_type: String,
    /// Width of the residual stream
    #[arg(long, default_value_t = 64)]
    hidden_size: usize,
    /// Width of the MLP
    #[arg(long, default_value_t = 176)]
    intermediate_size: usize,
    /// Decoder layers
    #[arg(long, default_value_t = 2)]
    num_hidden_layers: usize,
    /// Query heads
    #[arg(long, default_value_t = 4)]
    num_attention_heads: usize,
    /// Key and value heads [default: as many as query heads]
    #[arg(long)]
    num_key_value_heads: Option<usize>,
    /// Elements per head [default: hidden size / heads]
    #[arg(long)]
    head_dim: Option<usize>,
    /// Rows of the embedding, at least 260
    #[arg(long, default_value_t = 320)]
    vocab_size: usize,
    /// Context length in tokens
    #[arg(long, default_value_t = 2048)]
    max_position_embeddings: usize,
    /// Base of the rotary frequencies
    #[arg(long, default_value_t = 10_000.0)]
    rope_theta: f64,
    /// Rotary scaling as JSON, as config.json holds it
    #[arg(long, value_name = "JSON", value_parser = <Value as std::str::FromStr>::from_str)]
    rope_scaling: Option<Value>,
    /// No head of its own
    #[arg(long)]
    tie_word_embeddings: bool,
    /// Biases on q, k, v and o
    #[arg(long)]
    attention_bias: bool,
    /// Biases on gate, up and down
    #[arg(long)]
    mlp_bias: bool,
    /// Dtype of every tensor
    #[arg(long, default_value = "bf16")]
    dtype: StoredDtype,
    /// Largest file
    #[arg(long, default_value = "4GiB")]
    max_shard: ByteSize,
    /// Seed of the weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder or tokenizer.json to copy the tokenizer from [default: one token per byte]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
}

/// Writes the checkpoint.
pub fn command(args: &MakeCheckpointArgs) -> Result<()> {
    let console = Console::default();
    let checkpoint = RandomCheckpoint {
        hidden_size: args.hidden_size,
        intermediate_size: args.intermediate_size,
        num_hidden_layers: args.num_hidden_layers,
        num_attention_heads: args.num_attention_heads,
        num_key_value_heads: args.num_key_value_heads.unwrap_or(args.num_attention_heads),
        head_dim: args.head_dim,
        vocab_size: args.vocab_size,
        max_position_embeddings: args.max_position_embeddings,
        rope_theta: args.rope_theta,
        rope_scaling: args.rope_scaling.clone(),
        tie_word_embeddings: args.tie_word_embeddings,
        attention_bias: args.attention_bias,
        mlp_bias: args.mlp_bias,
        dtype: args.dtype,
        max_shard: args.max_shard,
        seed: args.seed,
        tokenizer: args.tokenizer.clone(),
        ..RandomCheckpoint::of_family(&args.model_type)?
    };
    checkpoint.write(&args.target, &console)?;
    console.clear();
    console.note(format!("wrote {}", args.target.display()));
    Ok(())
}
