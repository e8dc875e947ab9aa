//! `prune inspect`: what a checkpoint holds, and whether it is a pruned copy of a dense one.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use crate::checkpoint::Checkpoint;
use crate::eval;
use crate::failure::Failure;
use crate::model::ModelConfig;
use crate::report;
use crate::run::Inspection;

const EXAMPLES: &str = "\
Examples:
  prune inspect out/llama2-7b/model
  prune inspect out/llama2-7b/model --against llama-2-7b
  prune inspect out/2of4/model --json | jq .sparsity.ratio

Exit codes: 0 fine, 1 not a pruned copy of DENSE, or matrices missing, 2 wrong usage.";

/// Flags of `prune inspect`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub struct InspectArgs {
    /// Checkpoint folder in Hugging Face layout; needs no tokenizer
    #[arg(value_name = "DIR")]
    folder: PathBuf,

    /// The dense checkpoint DIR was made from
    ///
    /// Every weight of the decoder linears must be +0 or DENSE's, bit for bit, and every other tensor DENSE's, byte for byte;
    /// else what differs is told and the exit code is 1.
    #[arg(long, value_name = "DENSE")]
    against: Option<PathBuf>,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Runs the command and prints what it found.
///
/// # Errors
/// Fails for everything [`execute`] fails for, and, after the result is printed, when decoder linears are missing or the
/// folder is no pruned copy.
pub fn command(args: &InspectArgs, console: &Console) -> Result<()> {
    let inspection = execute(args, console)?;
    console.record(&inspection, &report::inspection::text(&inspection))?;
    judge(&inspection)
}

/// Looks at the checkpoint.
///
/// # Errors
/// Fails when a folder is no checkpoint or cannot be read.
pub fn execute(args: &InspectArgs, console: &Console) -> Result<Inspection> {
    let model = open(&args.folder)?;
    let config = load_config(&args.folder)?;
    let dense = args.against.as_deref().map(open).transpose()?;
    eval::inspect(&model, &config, dense.as_ref(), console)
}

/// Opens a checkpoint; a run folder is answered with its model's folder.
fn open(folder: &Path) -> Result<Checkpoint> {
    let model = folder.join("model");
    Checkpoint::open(folder).map_err(|error| {
        if folder.join("run.json").is_file() && model.join("config.json").is_file() {
            Failure::new(format!("`{}` is a run folder", folder.display()))
                .hint(format!("name its checkpoint: {}", model.display()))
                .into()
        } else {
            error
        }
    })
}

fn load_config(folder: &Path) -> Result<ModelConfig> {
    if !folder.join("config.json").is_file() {
        return Err(
            Failure::new(format!("there is no config.json in `{}`", folder.display()))
                .hint("copy it from the checkpoint these weights belong to")
                .into(),
        );
    }
    ModelConfig::load(folder)
}

/// The failures a script can rely on.
fn judge(inspection: &Inspection) -> Result<()> {
    let with =
        |failure: Failure, lines: Vec<String>| lines.into_iter().fold(failure, Failure::detail);
    if let Some(comparison) = &inspection.against
        && !comparison.is_pruned_copy
    {
        let failure = Failure::new(format!(
            "`{}` is not a pruned copy of `{}`",
            inspection.model, comparison.dense
        ));
        return Err(with(failure, report::inspection::differences(comparison)).into());
    }
    if !inspection.problems.is_empty() {
        let failure = Failure::new(format!(
            "`{}` does not hold the decoder linears of its config.json",
            inspection.model
        ));
        return Err(with(failure, report::inspection::problems(inspection)).into());
    }
    Ok(())
}
