//! `prune inspect`: what a checkpoint holds, and whether it is a pruned copy of a dense checkpoint.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelPathArgs;
use crate::failure::Failure;
use crate::job;
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
    #[command(flatten)]
    model: ModelPathArgs,

    /// The dense checkpoint DIR was made from
    ///
    /// Every weight of the decoder linears must be +0 or DENSE's, bit for bit, and every other tensor DENSE's, byte for byte;
    /// else what differs is told and the exit code is 1. Of a merge, what differs is told and the exit code is 0.
    #[arg(long, value_name = "DENSE")]
    against: Option<PathBuf>,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Runs the command and prints what it found.
///
/// # Errors
/// Fails for everything [`job::inspect()`] fails for, and, after the result is printed, when decoder linears are missing or the
/// folder is no pruned copy.
pub fn command(args: &InspectArgs, console: &Console) -> Result<()> {
    let folder = args.model.path("prune inspect out/7b/model")?;
    let inspection = job::inspect(&folder, args.against.as_deref(), console)?;
    console.record(&inspection, &report::inspection::text(&inspection))?;
    judge(&inspection)
}

/// The failures a script can rely on.
fn judge(inspection: &Inspection) -> Result<()> {
    let with =
        |failure: Failure, lines: Vec<String>| lines.into_iter().fold(failure, Failure::detail);
    if let Some(comparison) = &inspection.against
        && !comparison.is_made_from_dense()
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
