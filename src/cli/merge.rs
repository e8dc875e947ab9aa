//! `prune merge`: flags and table.

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use super::args::MessageArgs;
use super::console::Console;
use super::outcome::Outcome;
use crate::failure::Failure;
use crate::job;
use crate::merging::methods::METHODS;
use crate::merging::recipe::OTHER_METHODS;
use crate::ranks::Ranks;
use crate::report;
use crate::settings::MergeSettings;

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune merge ties.yml --save out/merged
  prune merge --base llama-2-7b --model chat --model math --method ties \\
        --density 0.5 --weight 0.6,0.4 --save out/merged
  prune merge --model llama-2-7b+my-lora --method linear --save out/folded";

/// Flags of `prune merge`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("method", |flag| flag.help("How the models are merged").long_help(methods_help()).value_parser(PossibleValuesParser::new(method_names()))))]
pub struct MergeArgs {
    #[command(flatten)]
    settings: MergeSettings,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Names of the methods, and hidden names that the recipe refuses with the reason.
fn method_names() -> Vec<PossibleValue> {
    let of_models = METHODS.iter().map(|method| method.declaration().name);
    let others = OTHER_METHODS.map(|name| PossibleValue::new(name).hide(true));
    let names = of_models.chain(job::peft_methods()).map(PossibleValue::new);
    names.chain(others).collect()
}

/// The table of methods, for the help text.
fn methods_help() -> String {
    let methods: Vec<String> = METHODS
        .iter()
        .map(|method| format!("{} ({})", method.declaration().name, method.summary()))
        .collect();
    let of_adapters: Vec<&str> = job::peft_methods().collect();
    format!(
        "How the models are merged: {}; with --semantics peft also {}",
        methods.join(", "),
        of_adapters.join(", ")
    )
}

/// Runs the command and prints its table.
pub fn command(
    args: &MergeArgs,
    arguments: Vec<String>,
    console: &Console,
    ranks: &Ranks,
) -> Result<Outcome> {
    let settings = MergeSettings { arguments, ..args.settings.clone() };
    if settings.save.is_none() && settings.save_model.is_none() {
        return Err(Failure::usage("a merge needs a folder for its result")
            .hint("add --save DIR; the model becomes DIR/model")
            .into());
    }
    if settings.log_memory {
        console.log_memory();
    }
    let manifest = job::merge_on(ranks, settings, console)?;
    if let Some(summary) = console.memory_summary() {
        console.lines(summary.trim_end().to_string());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    Ok(Outcome::of(&manifest, console))
}
