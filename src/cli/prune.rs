//! `prune`: flags of the main job, and its table.

use std::path::Path;

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
use crate::run::command_line::quoted;
use crate::run::{Events, Manifest};
use crate::settings::{
    CalibrationSettings, DeviceSettings, EvalSides, EvaluationSettings, LayerDropSettings,
    ModelSettings, OutputSettings, Settings, SparsitySettings, TargetSizeSettings,
    WidthDropSettings,
};

/// Flags of `prune` itself.
#[derive(Debug, Clone, Args)]
pub struct PruneArgs {
    #[command(flatten)]
    model: ModelSettings,
    #[command(flatten)]
    sparsity: SparsitySettings,
    /// `--prune-method wanda` means `wanda-variant`
    #[arg(long, hide = true)]
    use_variant: bool,
    #[command(flatten)]
    layer_drop: Option<LayerDropSettings>,
    #[command(flatten)]
    width_drop: Option<WidthDropSettings>,
    #[command(flatten)]
    target_size: Option<TargetSizeSettings>,
    #[command(flatten)]
    calibration: CalibrationSettings,
    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(hide_short_help = true, long, value_name = "TOKENS", help_heading = "Calibration")]
    seqlen: Option<usize>,
    #[command(flatten)]
    device: DeviceSettings,
    /// Models that perplexity is measured of
    #[arg(long, value_name = "SIDE", default_value = "pruned", help_heading = "Evaluation")]
    eval: EvalSides,
    #[command(flatten)]
    evaluation: EvaluationSettings,
    #[command(flatten)]
    output: OutputSettings,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

impl PruneArgs {
    /// The settings of this command line.
    ///
    /// # Errors
    /// Fails without a model, for a file of `--layer-ratios` that cannot be read, and for `--use-variant` with a method other than Wanda.
    pub fn settings(&self, arguments: Vec<String>) -> Result<Settings> {
        check_named(&self.model)?;
        let mut sparsity = self.sparsity.clone();
        if self.use_variant {
            sparsity.prune_method = variant_of(&sparsity.prune_method)?;
        }
        let layer_ratios = sparsity.layer_ratios.as_deref().map(LayerRatios::load);
        sparsity.selection.layer_ratios = layer_ratios.transpose()?;
        if self.layer_drop.is_some() || self.width_drop.is_some() {
            sparsity.prune_nothing_unless_asked();
        }
        let evaluation = EvaluationSettings { eval: self.eval, ..self.evaluation.clone() };
        Ok(Settings {
            arguments,
            model: self.model.clone(),
            sparsity: Some(sparsity),
            layer_drop: self.layer_drop.clone().map(LayerDropSettings::in_order),
            width_drop: self.width_drop.clone(),
            target_size: self.target_size.clone(),
            recovery: None,
            calibration: Some(self.calibration.clone()),
            seqlen: self.seqlen,
            weights: None,
            evaluation,
            device: self.device.clone(),
            output: self.output.clone(),
        })
    }
}

/// The method that `--use-variant` makes of a method.
fn variant_of(method: &str) -> Result<String> {
    const VARIANT: &str = "wanda-variant";
    if ["wanda", VARIANT].contains(&method) {
        return Ok(VARIANT.to_string());
    }
    let why = format!("--use-variant belongs to --prune-method wanda, and {method} was given");
    Err(Failure::usage(why).hint("leave --use-variant out").into())
}

/// Runs the command and prints its table.
pub fn command(
    args: &PruneArgs,
    arguments: Vec<String>,
    console: &Console,
    ranks: &Ranks,
) -> Result<Outcome> {
    let settings = args.settings(arguments)?;
    if settings.output.log_memory {
        console.log_memory();
    }
    let manifest = job::prune_on(ranks, settings, console, None)?;
    if let Some(summary) = console.memory_summary() {
        console.lines(summary.trim_end().to_string());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    let prunes = manifest.pruning.as_ref().is_some_and(|of| !of.prunes_nothing());
    // The table says what zeros gain where that is known.
    if prunes && manifest.zeros_gain.is_none() {
        console.note(
            "zeros alone change neither the size of the files nor the speed of inference"
                .to_string(),
        );
    }
    if let Some(command) = upload(&manifest).filter(|_| !args.messages.json) {
        console.note(format!("publish it with: {command}"));
    }
    Ok(Outcome::of(&manifest, console))
}

/// The command that uploads the model to the hub; `None` where none was written.
fn upload(manifest: &Manifest) -> Option<String> {
    let (output, pruning) = (manifest.output.as_ref()?, manifest.pruning.as_ref()?);
    let (layers, width) = (manifest.layer_drop.as_ref(), manifest.width_drop.as_ref());
    let name = report::cards::pruned_name(&manifest.model.name(), pruning, layers, width);
    let repository = format!("YOUR_NAME/{name}");
    let mut words = vec!["hf", "upload", &repository, &output.model];
    // The model folder may be the run folder. Its run.json names paths of this machine.
    if Path::new(&output.model).join("run.json").exists() {
        words.extend(["--exclude", "run.json"]);
    }
    Some(quoted(&words.into_iter().map(String::from).collect::<Vec<_>>()))
}
