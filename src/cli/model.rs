//! Flags that name a model, and the model as a word of the command line.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::failure::Failure;
use crate::settings::{ComputeDtype, ModelSettings};

/// Model flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Checkpoint folder in Hugging Face layout, or an id on the hub
    ///
    /// A folder with config.json, model.safetensors (or model.safetensors.index.json and its shards) and tokenizer.json.
    /// Weights may be f32, f16 or bf16. Where there is no such folder, `owner/name` is downloaded from the hub.
    #[arg(long, value_name = "DIR|ID")]
    pub(super) model: Option<PathBuf>,

    /// Branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REV")]
    pub(super) revision: Option<String>,

    /// Folder of the hub's files [default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub]
    ///
    /// Shared with the Python client: what either has downloaded the other finds.
    #[arg(long, value_name = "DIR")]
    pub(super) cache_dir: Option<PathBuf>,

    /// Arithmetic of the forward pass
    ///
    /// Never changes the dtype of the output, which is the source's. On a CPU with bf16 products (AMD from Zen 4, Intel from
    /// Sapphire Rapids on) `auto` multiplies bf16 weights by activations rounded to bf16, accumulating in f32, which is several
    /// times as fast as f32; masks differ in some near-ties. Everything else is f32: on a CPU with AMX tiles (Intel from Sapphire
    /// Rapids on) by sums of bf16 products, about as exact as f32's own and faster, and with `f32` by one chain of multiply-adds,
    /// which gives the same bits on every CPU that has them fused. PyTorch's names mean the same: float32, float16, bfloat16.
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub(super) dtype: ComputeDtype,
}

impl ModelArgs {
    pub(super) fn settings(&self) -> Result<ModelSettings> {
        let model = self.model.clone().ok_or_else(|| {
            Failure::usage("--model is missing")
                .hint("name a checkpoint folder, like --model models/llama-2-7b; see prune --help")
        })?;
        Ok(self.of(model))
    }

    /// The settings of these flags for the checkpoint `model`.
    pub(super) fn of(&self, model: PathBuf) -> ModelSettings {
        ModelSettings {
            model,
            revision: self.revision.clone(),
            cache_dir: self.cache_dir.clone(),
            dtype: self.dtype,
        }
    }
}

/// A model of a command that needs its weights alone: a word, or --model.
#[derive(Debug, Clone, Args)]
pub struct ModelPathArgs {
    /// Checkpoint folder in Hugging Face layout; needs no tokenizer
    #[arg(value_name = "DIR")]
    word: Option<PathBuf>,

    /// The same folder as a flag
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
}

impl ModelPathArgs {
    /// The path.
    ///
    /// # Errors
    /// Fails when it is named twice or not at all; `example` is a command to type.
    pub(super) fn path(&self, example: &str) -> Result<PathBuf> {
        one_of(self.word.as_ref(), self.model.as_ref(), example)
    }
}

/// The model of a word or a flag.
fn one_of(word: Option<&PathBuf>, flag: Option<&PathBuf>, example: &str) -> Result<PathBuf> {
    match (word, flag) {
        (Some(word), Some(flag)) => Err(Failure::usage(format!(
            "two models are named: `{}` and --model {}",
            word.display(),
            flag.display()
        ))
        .hint("leave one of them out")
        .into()),
        (Some(model), None) | (None, Some(model)) => Ok(model.clone()),
        (None, None) => Err(Failure::usage("no model is named")
            .hint(format!("name a checkpoint folder, or an id on the hub: {example}"))
            .into()),
    }
}

/// Model flags of commands that take the model as a word, too: `prune eval out/7b/model`.
#[derive(Debug, Clone, Args)]
pub struct ModelWordArgs {
    /// The model, as --model names it
    #[arg(value_name = "MODEL")]
    word: Option<PathBuf>,
    #[command(flatten)]
    pub(super) flags: ModelArgs,
}

impl ModelWordArgs {
    /// Returns whether no model is named.
    pub(super) fn is_missing(&self) -> bool {
        self.word.is_none() && self.flags.model.is_none()
    }

    /// The model's settings.
    ///
    /// # Arguments
    /// * `example`: a command to type where no model is named
    ///
    /// # Errors
    /// Fails when the model is named twice or not at all.
    pub(super) fn settings(&self, example: &str) -> Result<ModelSettings> {
        let model = one_of(self.word.as_ref(), self.flags.model.as_ref(), example)?;
        Ok(self.flags.of(model))
    }
}
