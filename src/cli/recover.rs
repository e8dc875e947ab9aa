//! `prune recover`: flags, and the table of the run.

use anyhow::Result;
use clap::Args;

use super::args::MessageArgs;
use super::console::Console;
use super::model::check_named;
use super::outcome::Outcome;
use crate::failure::Failure;
use crate::job;
use crate::pipeline::LayerRatios;
use crate::ranks::Ranks;
use crate::report;
use crate::settings::{
    CalibrationSettings, DeviceSettings, EvalSides, EvaluationSettings, ModelSettings,
    OutputSettings, RecoverySettings, RecoveryWay, Settings, TEXT, TrainedKind,
};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune recover --model out/7b/model --teacher llama-2-7b --save out/7b-blocks
  prune recover --model out/7b/model --how lora --dataset c4 --save out/7b-lora
  prune recover --model out/7b/model --how lora --base-quant nf4-double \\
        --optim paged-adamw8bit --max-memory cpu=4GiB --save out/7b-qlora";

/// Flags of `prune recover`.
#[derive(Debug, Clone, Args)]
#[command(
    mut_arg("dataset", |flag| flag.help_heading(TEXT).help("Text to train on").long_help(DATASET_HELP)),
    mut_arg("nsamples", |flag| flag.help_heading(TEXT).hide_default_value(true).value_parser(clap::value_parser!(u32).range(1..))
        .default_value_ifs([("how", "lora", NEEDED), ("how", "full", NEEDED)])
        .help("Samples of `blocks`, else examples at most [default: 128; as many as the steps need]")),
    mut_arg("seed", |flag| flag.help_heading(TEXT).help("Seed of samples, their order, and the first factors")),
    mut_arg("save_masks", |flag| flag.hide(true))
)]
pub struct RecoverArgs {
    #[command(flatten)]
    model: ModelSettings,
    #[command(flatten)]
    recovery: RecoverySettings,
    /// Dropout of the factors' input; only 0 is possible
    #[arg(
        hide_short_help = true,
        long,
        value_name = "P",
        default_value = "0",
        help_heading = "Training"
    )]
    lora_dropout: f64,
    #[command(flatten)]
    text: CalibrationSettings,
    /// Tokens per example, and per evaluation window [default: 2048, or the model's limit]
    #[arg(hide_short_help = true, long, value_name = "TOKENS", help_heading = TEXT)]
    seqlen: Option<usize>,
    #[command(flatten)]
    device: DeviceSettings,
    /// Models that perplexity is measured of
    ///
    /// `both` adds the model before the training.
    #[arg(long, value_name = "SIDE", default_value = "both", help_heading = "Evaluation")]
    eval: EvalSides,
    #[command(flatten)]
    evaluation: EvaluationSettings,
    #[command(flatten)]
    output: OutputSettings,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// The long help of `--dataset`.
const DATASET_HELP: &str = "\
Text to train on

NAME, NAME:PATH or a path, as for calibration. Documents are texts (`text`), conversations (`messages`, `conversations`), or a prompt with its answer \
(`prompt` and `completion`, `instruction` and `output`). Conversations go through the model's chat template, and loss counts on answers only. \
docs/datasets.md has all forms.";

/// The largest number, for as many examples as the steps need.
const NEEDED: &str = "4294967295";

impl RecoverArgs {
    /// The settings of this command line.
    ///
    /// # Errors
    /// Fails without a model, for flags that contradict each other, and for a file of `--layer-ratios` that cannot be read.
    pub fn settings(&self, arguments: Vec<String>) -> Result<Settings> {
        check_named(&self.model)?;
        if self.lora_dropout != 0.0 {
            return Err(Failure::usage(format!(
                "--lora-dropout {} is not possible",
                self.lora_dropout
            ))
            .detail("the factors are trained through the merged weight M∘(W + s·B·A), which has no input of its own to drop")
            .hint("leave --lora-dropout out; --weight-decay and --patience limit overfitting, too")
            .into());
        }
        let mut recovery = self.recovery.clone().settled();
        let layer_ratios = recovery.closing.layer_ratios_file.as_deref().map(LayerRatios::load);
        recovery.closing.layer_ratios = layer_ratios.transpose()?;
        if recovery.how == RecoveryWay::Full && recovery.trains == TrainedKind::Factors
            || recovery.how == RecoveryWay::Lora && recovery.trains == TrainedKind::Weights
        {
            return Err(Failure::usage(format!(
                "--train is a choice of --how blocks; --how {} decides it",
                recovery.how.name()
            ))
            .hint("leave --train out")
            .into());
        }
        let mut calibration = self.text.clone();
        if let Some(steps) = recovery.steps.filter(|_| calibration.nsamples == u32::MAX) {
            let needed = steps
                .saturating_mul(recovery.per_step() as u64)
                .saturating_add(recovery.held_out as u64);
            calibration.nsamples = u32::try_from(needed).unwrap_or(u32::MAX);
        }
        Ok(Settings {
            arguments,
            recovery: Some(recovery),
            calibration: Some(calibration),
            seqlen: self.seqlen,
            evaluation: EvaluationSettings { eval: self.eval, ..self.evaluation.clone() },
            device: self.device.clone(),
            output: self.output.clone(),
            ..Settings::measuring(self.model.clone())
        })
    }
}

/// Runs the command and prints its table.
pub fn command(
    args: &RecoverArgs,
    arguments: Vec<String>,
    console: &Console,
    ranks: &Ranks,
) -> Result<Outcome> {
    let settings = args.settings(arguments)?;
    if settings.output.log_memory {
        console.log_memory();
    }
    let manifest = job::recover_on(ranks, settings, console)?;
    if let Some(summary) = console.memory_summary() {
        console.lines(summary.trim_end().to_string());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    Ok(Outcome::of(&manifest, console))
}
