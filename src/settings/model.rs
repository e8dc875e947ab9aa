//! Settings of the checkpoint and its arithmetic.

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::deciding::not_deciding;

/// Model flags.
#[derive(Debug, Clone, Args, Serialize)]
#[command(next_help_heading = "Model")]
pub struct ModelSettings {
    /// Checkpoint folder, or an id on the hub
    ///
    /// A folder in Hugging Face layout: config.json, model.safetensors (or model.safetensors.index.json and its shards) and tokenizer.json.
    /// Weights may be f32, f16 or bf16. Where there is no such folder, `owner/name` is downloaded from the hub.
    // Empty until a command has a model: some commands also take it as a word.
    #[arg(long, value_name = "DIR|ID", default_value = "", hide_default_value = true, value_parser = OsStringValueParser::new().map(PathBuf::from))]
    #[serde(serialize_with = "not_deciding")]
    pub model: PathBuf,

    /// Branch, tag or commit of a model on the hub [default: main]
    #[arg(hide_short_help = true, long, value_name = "REV")]
    #[serde(serialize_with = "not_deciding")]
    pub revision: Option<String>,

    /// Folder of the hub's files [default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub]
    ///
    /// Shared with the Python client: what either has downloaded the other finds.
    #[arg(hide_short_help = true, long, value_name = "DIR")]
    #[serde(serialize_with = "not_deciding")]
    pub cache_dir: Option<PathBuf>,

    /// Arithmetic of the forward pass
    ///
    /// Never changes the dtype of the output, which is the source's. On a CPU with bf16 products (AMD from Zen 4, Intel from
    /// Sapphire Rapids on) `auto` multiplies bf16 weights by activations rounded to bf16, accumulating in f32, which is several
    /// times as fast as f32; masks differ in some near-ties. `bf16` does so for checkpoints of any dtype: scores and the saved
    /// weights are still made from the stored weights. Everything else is f32: on a CPU with AMX tiles (Intel from Sapphire
    /// Rapids on) by sums of bf16 products, about as exact as f32's own and faster, and with `f32` by one chain of multiply-adds,
    /// which gives the same bits on every CPU that has them fused. PyTorch's names mean the same: float32, float16, bfloat16.
    #[arg(hide_short_help = true, long, value_name = "DTYPE", default_value = "auto")]
    #[serde(serialize_with = "not_deciding")]
    pub dtype: ComputeDtype,
}

impl ModelSettings {
    /// A checkpoint with default settings.
    pub fn of(model: impl Into<PathBuf>) -> Self {
        Self { model: model.into(), ..super::defaults::without_flags() }
    }
}

/// Arithmetic of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// bf16 for bf16 checkpoints where the CPU has it; for all others bf16x3 where it has tiles, else f32
    Auto,
    /// Single precision, the same bits on every CPU with fused multiply-adds
    #[value(aliases = ["float32", "fp32", "torch.float32"])]
    F32,
    /// Single precision as sums of products of bf16 parts, three of an activation, on AMX tiles
    Bf16x3,
    /// bf16 products with f32 accumulation; weights of other checkpoints are rounded for the products only
    #[value(aliases = ["bfloat16", "torch.bfloat16"])]
    Bf16,
    /// For f16 checkpoints: f16 on GPUs; the CPU computes them in single precision
    #[value(aliases = ["float16", "fp16", "half", "torch.float16"])]
    F16,
}
