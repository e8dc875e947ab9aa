//! `prune eval`: flags and table.

use std::path::PathBuf;

use anyhow::Result;
use clap::builder::ArgPredicate;
use clap::{ArgAction, Args};

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelWordArgs;
use super::outcome::Outcome;
use crate::job;
use crate::ranks::Ranks;
use crate::report;
use crate::settings::{
    DeviceSettings, EvalSides, EvaluationSettings, OutputSettings, Settings, WeightSettings,
};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune eval out/llama2-7b/model --eval-dataset wikitext2:wiki/
  prune eval out/model --eval-dataset text.txt --max-perplexity 12 --json
  prune eval out/7b/model --against meta-llama/Llama-2-7b-hf
  prune eval out/7b/model --tasks arc_easy,piqa,my=questions.jsonl \\
        --tasks-from tasks";

/// Flags of `prune eval`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("kl_positions", |flag| flag.requires("against")))]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelWordArgs,
    /// The perplexity is measured beside tasks where a text is named. It comes before the text, whose default does not count here.
    #[arg(long, hide = true, default_value = "true", action = ArgAction::Set,
        default_value_ifs = [("eval_dataset", ArgPredicate::IsPresent, "true"), ("tasks", ArgPredicate::IsPresent, "false"),
            ("eval_zero_shot", ArgPredicate::IsPresent, "false")])]
    measures_text: bool,
    /// Dense model to compare with, position by position: KL divergence, equal top tokens, ratio of perplexities
    ///
    /// A folder or an id of the hub, with the same vocabulary. Both models pass the windows, one after the other.
    #[arg(long, value_name = "DIR|ID", help_heading = "Evaluation")]
    against: Option<PathBuf>,
    #[command(flatten)]
    evaluation: EvaluationSettings,
    /// Tokens per window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS", help_heading = "Evaluation")]
    seqlen: Option<usize>,
    #[command(flatten, next_help_heading = "Evaluation")]
    weights: WeightSettings,
    #[command(flatten)]
    device: DeviceSettings,
    /// Folder for run.json; without it only the table is printed
    ///
    /// An interrupted evaluation with this folder is continued by the same command, after the layers that it has passed.
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    save: Option<PathBuf>,
    /// Also print where the time went, and its share of what this CPU can do
    #[arg(long, help_heading = "Output")]
    profile: bool,
    /// Replace a finished run in the --save folder
    #[arg(long, help_heading = "Output")]
    force: bool,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

impl EvalArgs {
    fn settings(&self, arguments: Vec<String>) -> Result<Settings> {
        let evaluation = EvaluationSettings {
            eval: EvalSides::Dense,
            against: self.against.clone(),
            measures_text: self.measures_text
                || self.against.is_some()
                || self.evaluation.max_perplexity.is_some(),
            ..self.evaluation.clone()
        };
        Ok(Settings {
            arguments,
            seqlen: self.seqlen,
            evaluation,
            weights: Some(self.weights),
            device: self.device.clone(),
            output: OutputSettings {
                save: self.save.clone(),
                profile: self.profile,
                force: self.force,
                ..OutputSettings::default()
            },
            ..Settings::measuring(self.model.settings("prune eval out/7b/model")?)
        })
    }
}

/// Runs the command and prints its table.
pub fn command(
    args: &EvalArgs,
    arguments: Vec<String>,
    console: &Console,
    ranks: &Ranks,
) -> Result<Outcome> {
    let manifest = job::eval_on(ranks, args.settings(arguments)?, console)?;
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    Ok(Outcome::of(&manifest, console))
}
