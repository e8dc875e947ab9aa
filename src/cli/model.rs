//! The model of a command: `--model`, or a word of the command line.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::failure::Failure;
use crate::settings::ModelSettings;

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
    pub(super) flags: ModelSettings,
}

impl ModelWordArgs {
    /// The model of `--model`, which is empty without the flag.
    fn flag(&self) -> Option<&PathBuf> {
        Some(&self.flags.model).filter(|model| !model.as_os_str().is_empty())
    }

    /// Returns whether no model is named.
    pub(super) fn is_missing(&self) -> bool {
        self.word.is_none() && self.flag().is_none()
    }

    /// The model's settings.
    ///
    /// # Arguments
    /// * `example`: a command to type where no model is named
    ///
    /// # Errors
    /// Fails when the model is named twice or not at all.
    pub(super) fn settings(&self, example: &str) -> Result<ModelSettings> {
        let model = one_of(self.word.as_ref(), self.flag(), example)?;
        Ok(ModelSettings { model, ..self.flags.clone() })
    }
}

/// Refuses settings without a model, for commands that take it as a flag only.
pub(super) fn check_named(settings: &ModelSettings) -> Result<()> {
    if settings.model.as_os_str().is_empty() {
        return Err(Failure::usage("--model is missing")
            .hint("name a checkpoint folder, like --model models/llama-2-7b; see prune --help")
            .into());
    }
    Ok(())
}
