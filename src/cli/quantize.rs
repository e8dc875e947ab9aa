//! `prune quantize`: flags and result.

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelPathArgs;
use crate::job;
use crate::report;
use crate::settings::{ConversionSettings, QuantizeSettings};

pub(super) const EXAMPLES: &str = "\
Examples:
  prune quantize --to nf4-double out/7b/model --save out/7b-4bit
  prune eval out/7b-4bit --eval-dataset wikitext2:wiki/";

/// Flags of `prune quantize`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("word", |word| word.help("Checkpoint folder in Hugging Face layout, or an id of the hub; not quantised")))]
pub struct QuantizeArgs {
    #[command(flatten)]
    model: ModelPathArgs,

    #[command(flatten)]
    settings: QuantizeSettings,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Runs the command and prints its result.
///
/// # Errors
/// Fails as [`job::quantize()`].
pub fn command(args: &QuantizeArgs, arguments: Vec<String>, console: &Console) -> Result<()> {
    let example = "prune quantize --to nf4-double out/7b/model --save out/7b-4bit";
    let model = args.model.path(example)?;
    let mut settings = args.settings.clone();
    settings.output = ConversionSettings { model, arguments, ..settings.output };
    let report = job::quantize(&settings, console)?;
    console.record(&report, &report::quantization::text(&report))
}
