//! `prune`: flags of the main job, and its table.

use std::path::Path;

use anyhow::Result;
use clap::Args;

use super::args::{CalibrationArgs, DeviceArgs, EvaluationArgs, MessageArgs, OutputArgs};
use super::console::Console;
use super::layer_drop::LayerDropArgs;
use super::model::ModelArgs;
use super::outcome::Outcome;
use super::sparsity::SparsityArgs;
use super::width_drop::WidthDropArgs;
use crate::job;
use crate::report;
use crate::run::command_line::quoted;
use crate::run::{Events, Manifest};
use crate::settings::{EvalSides, Settings};

/// Flags of `prune` itself.
#[derive(Debug, Clone, Args)]
pub struct PruneArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    pub(super) sparsity: SparsityArgs,
    #[command(flatten)]
    layer_drop: LayerDropArgs,
    #[command(flatten)]
    width_drop: WidthDropArgs,
    #[command(flatten)]
    pub(super) calibration: CalibrationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Models that perplexity is measured of
    #[arg(long, value_name = "SIDE", default_value = "pruned", help_heading = "Evaluation")]
    eval: EvalSides,
    #[command(flatten)]
    evaluation: EvaluationArgs,
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

impl PruneArgs {
    /// The settings of this command line.
    pub fn settings(&self, arguments: Vec<String>) -> Result<Settings> {
        let layer_drop = self.layer_drop.settings();
        let width_drop = self.width_drop.settings();
        let mut sparsity = self.sparsity.settings()?;
        if layer_drop.is_some() || width_drop.is_some() {
            sparsity.prune_nothing_unless_asked();
        }
        Ok(Settings {
            arguments,
            model: self.model.settings()?,
            sparsity: Some(sparsity),
            layer_drop,
            width_drop,
            recovery: None,
            calibration: Some(self.calibration.settings()),
            seqlen: self.calibration.seqlen,
            evaluation: self.evaluation.settings(self.eval),
            device: self.device.settings(),
            output: self.output.settings(),
        })
    }
}

/// Runs the command and prints its table.
pub fn command(args: &PruneArgs, arguments: Vec<String>, console: &Console) -> Result<Outcome> {
    let settings = args.settings(arguments)?;
    if settings.output.log_memory {
        console.log_memory();
    }
    let manifest = job::prune(settings, console, None)?;
    if let Some(summary) = console.memory_summary() {
        console.lines(summary.trim_end().to_string());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    if manifest.pruning.as_ref().is_some_and(|of| !of.prunes_nothing()) {
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
    let drop = (manifest.layer_drop.as_ref(), manifest.width_drop.as_ref());
    let name = report::card::model_name(&manifest.model.name(), pruning, drop);
    let repository = format!("YOUR_NAME/{name}");
    let mut words = vec!["hf", "upload", &repository, &output.model];
    // The model folder may be the run folder. Its run.json names paths of this machine.
    if Path::new(&output.model).join("run.json").exists() {
        words.extend(["--exclude", "run.json"]);
    }
    Some(quoted(&words.into_iter().map(String::from).collect::<Vec<_>>()))
}
