//! `prune pack` and `prune unpack`: flags and results.

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelPathArgs;
use crate::job;
use crate::report;
use crate::settings::{ConversionSettings, PackSettings};

pub(super) const EXAMPLES: &str = "\
Examples:
  prune pack out/7b/model --save out/7b-packed
  prune eval out/7b-packed --eval-dataset wikitext2:wiki/";

pub(super) const UNPACK_EXAMPLES: &str = "\
Example:
  prune unpack out/7b-packed --save out/7b-dense";

/// Flags of `prune pack`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("word", |word| word.help("Pruned checkpoint: a folder in Hugging Face layout, or an id of the hub")))]
pub struct PackArgs {
    #[command(flatten)]
    model: ModelPathArgs,

    #[command(flatten)]
    settings: PackSettings,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Flags of `prune unpack`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("word", |word| word.help("Packed checkpoint: a folder, or an id of the hub")))]
pub struct UnpackArgs {
    #[command(flatten)]
    model: ModelPathArgs,

    #[command(flatten)]
    settings: ConversionSettings,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Runs `prune pack` and prints its result.
///
/// # Errors
/// Fails as [`job::pack()`].
pub fn pack(args: &PackArgs, arguments: Vec<String>, console: &Console) -> Result<()> {
    let model = args.model.path("prune pack out/7b/model --save out/7b-packed")?;
    let mut settings = args.settings.clone();
    settings.output = ConversionSettings { model, arguments, ..settings.output };
    let report = job::pack(&settings, console)?;
    console.record(&report, &report::packing::packed(&report))
}

/// Runs `prune unpack` and prints its result.
///
/// # Errors
/// Fails as [`job::unpack()`].
pub fn unpack(args: &UnpackArgs, arguments: Vec<String>, console: &Console) -> Result<()> {
    let model = args.model.path("prune unpack out/7b-packed --save out/7b-dense")?;
    let settings = ConversionSettings { model, arguments, ..args.settings.clone() };
    let report = job::unpack(&settings, console)?;
    console.record(&report, &report::packing::unpacked(&report))
}
