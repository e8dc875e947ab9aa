//! `prune eval`: the sweep without an editor.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;

use super::args::{DeviceArgs, EvaluationArgs, MessageArgs, ModelArgs};
use super::console::Console;
use super::outcome::{Outcome, gate};
use super::profile;
use super::run_folder::RunFolder;
use super::session::Session;
use crate::checkpoint::WeightSource;
use crate::data::TextCache;
use crate::pipeline::RunShape;
use crate::report;
use crate::run::{Event, Events, Manifest, Moment};
use crate::runtime::{Passenger, Side, Sweep, memory};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune eval --model out/llama2-7b/model --eval-dataset wikitext2:wiki/
  prune eval --model out/model --eval-dataset text.txt --max-perplexity 12 --json";

/// Flags of `prune eval`.
#[derive(Debug, Clone, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    evaluation: EvaluationArgs,
    /// Tokens per window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS", help_heading = "Evaluation")]
    seqlen: Option<usize>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Folder for run.json; without it only the table is printed
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

/// Runs the command and prints its table.
///
/// # Errors
/// See [`execute`].
pub fn command(args: &EvalArgs, arguments: Vec<String>, console: &Console) -> Result<Outcome> {
    let manifest = execute(args, arguments, console)?;
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    Ok(Outcome::of(&manifest, console))
}

/// Measures the perplexity of a checkpoint.
///
/// # Errors
/// Fails for everything [`Session::open`] refuses, and when the evaluation text is missing or too short.
pub fn execute(args: &EvalArgs, arguments: Vec<String>, console: &Console) -> Result<Manifest> {
    let session = Session::open(&args.model, &args.device, args.seqlen, console)?;
    let mut folder = RunFolder::at(
        &session.folder,
        args.save.as_deref(),
        None,
        false,
        args.force,
    )?;
    folder.lock(console)?;
    folder.look()?;
    session.plan(
        &RunShape {
            windows: 1,
            sides: &[Side::Dense],
            ..session.job()
        },
        &args.device,
    )?;
    let text = session.check_evaluation(&args.evaluation, console)?;
    let cache = TextCache::open(args.evaluation.text_cache.clone());
    let expected = RunShape {
        windows: 1,
        sides: &[Side::Dense],
        tokenising: session.tokenising([&text], &cache)?,
        ..session.job()
    };
    session.plan(&expected, &args.device)?;
    let windows = {
        let tokenizer = session.tokenizer()?;
        session.evaluation(&args.evaluation, &text, &tokenizer, &cache, console)?
    };
    memory::release_freed();
    session.clock.mark(Moment::ModelLoaded, console);
    let job = RunShape {
        windows: windows.windows,
        ..expected
    };
    let plan = session.plan(&job, &args.device)?;
    let spill_folder = session.spill_folder(&plan, &args.device, args.save.as_deref(), console)?;
    console.line(&format!(
        "evaluating {} on {}: {} windows of {} tokens",
        session.folder.display(),
        args.evaluation.eval_dataset,
        windows.windows,
        session.seqlen
    ));
    for line in report::plan::text(&plan).lines() {
        console.line(line);
    }
    let peak = args
        .profile
        .then(|| profile::peak(session.products, session.threads));
    let devices = session.devices(&plan)?;
    let mut perplexity = session.perplexity(
        Side::Dense,
        spill_folder.as_deref(),
        &devices,
        &windows,
        console,
    )?;
    let source: Arc<dyn WeightSource> = session.checkpoint.clone();
    let sweep = Sweep {
        source,
        finished: None,
        config: Arc::clone(&session.config),
        seqlen: session.seqlen,
        settings: plan.memory_settings.clone(),
        products: session.products,
        devices: &devices,
        clock: &session.clock,
        events: console,
    };
    console.emit(Event::SweepStarted {
        layers: session.config.num_hidden_layers,
        finished: 0,
        passes: session.passes(0, windows.windows, 1, 0),
    });
    let swept = sweep.run(None, &mut [&mut perplexity as &mut dyn Passenger])?;
    console.emit(Event::SweepDone);
    session.clock.mark(Moment::End, console);
    let watch = swept.watch.clone();
    let mut manifest = session.manifest("eval", arguments, &plan, swept)?;
    manifest.profile = Some(profile::report(
        peak,
        (session.products, session.dtype()),
        &watch,
        None,
        &manifest,
    ));
    manifest.perplexity.dense = perplexity.report();
    manifest.gate = gate(&args.evaluation, manifest.perplexity.dense);
    manifest.evaluation = Some(serde_json::to_value(&windows.protocol)?);
    for exceeded in manifest.exceeded_plan() {
        console.warn(exceeded);
    }
    manifest.warnings = console.warnings();
    folder.prepare()?;
    folder.record(&manifest)?;
    Ok(manifest)
}
