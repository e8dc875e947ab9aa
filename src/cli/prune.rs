//! `prune`: the main job. Settings → plan (`job`) → sweep → save → report (`record`).

mod job;
mod record;
mod texts;
mod unfinished;

use std::sync::Arc;

use anyhow::Result;
use clap::Args;

use super::args::{
    CalibrationArgs, DeviceArgs, EvalSides, EvaluationArgs, MessageArgs, ModelArgs, OutputArgs,
    SparsityArgs,
};
use super::console::Console;
use super::ending::Unfinished;
use super::memory_log::{self, MemoryLog};
use super::outcome::{Outcome, gate};
use super::{profile, shell};
use crate::checkpoint::{CheckpointWriter, ExpectedMatrix, WeightSource};
use crate::eval::Perplexity;
use crate::pipeline::{
    CalibrationStream, Pruner, Record, SaveMasks, SelectionTime, StateFile, Watcher, resume,
};
use crate::report;
use crate::run::manifest::{OutputReport, Perplexities};
use crate::run::{Event, Events, Manifest, Moment, Phase};
use crate::runtime::{Editor, Passenger, Side, Sweep};
use job::{Job, Settled};
use unfinished::Outputs;

/// Flags of `prune` itself.
#[derive(Debug, Clone, Args)]
pub struct PruneArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sparsity: SparsityArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// What perplexity is measured of
    #[arg(
        long,
        value_name = "SIDE",
        default_value = "pruned",
        help_heading = "Evaluation"
    )]
    eval: EvalSides,
    #[command(flatten)]
    evaluation: EvaluationArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// Runs the command and prints its table.
///
/// # Errors
/// See [`execute`].
pub fn command(args: &PruneArgs, arguments: Vec<String>, console: &Console) -> Result<Outcome> {
    let manifest = execute(args, arguments, console, None)?;
    if let Some(summary) = console.memory_summary() {
        console.line(summary.trim_end());
    }
    console.record(&manifest, &report::table::text(&manifest))?;
    console.profile(&manifest);
    console.line("zeros alone change neither the size of the files nor the speed of inference");
    Ok(Outcome::of(&manifest, console))
}

/// Prunes a checkpoint as the flags say, writes the results, and returns the manifest. `watcher` sees every mask.
///
/// # Errors
/// Everything that can be wrong with settings, checkpoint, texts and folders fails before the sweep; after that, reading,
/// writing and weights that are not finite.
pub fn execute(
    args: &PruneArgs,
    arguments: Vec<String>,
    console: &Console,
    watcher: Option<&mut dyn Watcher>,
) -> Result<Manifest> {
    if args.output.log_memory {
        console.log_memory(MemoryLog::default());
    }
    console.set_unfinished(not_begun(&args.output, &arguments));
    let job = match Job::settle(args, console)? {
        Settled::Job(job) => job,
        Settled::Finished(manifest) => {
            console.set_unfinished(None);
            return Ok(*manifest);
        }
    };
    job.announce(console);
    let Job {
        session,
        folder,
        texts,
        targets,
        spill_folder,
        ..
    } = &*job;

    let peak = args
        .output
        .profile
        .then(|| profile::peak(session.products, session.threads));
    console.set_unfinished(folder.unfinished(&arguments));
    let outputs = unfinished::outputs(&job, arguments.clone(), console)?;
    if let Some(run) = &folder.run {
        console.write_memory_log(&run.join(memory_log::FILE))?;
    }
    let finished = unfinished::finished(&outputs)?;
    let Outputs {
        mut writer,
        mut masks,
        state: left,
    } = outputs;
    let layers_before = left.layers.clone();
    let warnings = || console.warnings();
    let mut state = folder
        .state()
        .map(|folder| {
            let started = session.started_unix_seconds();
            StateFile::begin(folder, left, &session.clock, &warnings, started)
        })
        .transpose()?;
    let measured = state.as_ref().and_then(StateFile::perplexity).cloned();
    let first = layers_before.len();
    let mut watchers: Vec<&mut dyn Watcher> = Vec::new();
    if let Some(watcher) = watcher {
        watchers.push(watcher);
    }
    if let Some(masks) = &mut masks {
        watchers.push(masks);
    }
    let devices = session.devices(&job.plan)?;
    let calibration = texts
        .calibration
        .as_ref()
        .filter(|_| first < session.config.num_hidden_layers)
        .map(|samples| {
            session.embedded(
                spill_folder.as_deref(),
                &devices,
                "calibration",
                &samples.tokens,
                console,
            )
        })
        .transpose()?
        .map(|hidden| CalibrationStream::new(hidden, (*session.config).clone()));
    let mut passengers: Vec<Perplexity<'_>> = Vec::new();
    for side in args.eval.sides() {
        if let Some(windows) = texts.windows.as_ref().filter(|_| measured.is_none()) {
            passengers.push(session.perplexity(
                *side,
                spill_folder.as_deref(),
                &devices,
                windows,
                console,
            )?);
        }
    }
    let mut pruner = Pruner {
        method: job.method,
        targets,
        calibration,
        sink: writer.as_mut(),
        watchers,
        clock: &session.clock,
        events: console,
        num_hidden_layers: session.config.num_hidden_layers,
        selection: SelectionTime::default(),
        record: state.as_mut().map(|state| state as &mut dyn Record),
        expected: resume::expected_of(&layers_before, targets.pattern),
        layers: layers_before,
    };
    let source: Arc<dyn WeightSource> = session.checkpoint.clone();
    let sweep = Sweep {
        source,
        finished,
        config: Arc::clone(&session.config),
        seqlen: session.seqlen,
        settings: job.plan.memory_settings.clone(),
        products: session.products,
        devices: &devices,
        clock: &session.clock,
        events: console,
    };
    let mut riders: Vec<&mut dyn Passenger> = passengers
        .iter_mut()
        .map(|passenger| passenger as &mut dyn Passenger)
        .collect();
    session.clock.mark(Moment::BeforePruning, console);
    console.emit(Event::SweepStarted {
        layers: session.config.num_hidden_layers,
        finished: first,
        passes: session.passes(texts.samples(), texts.windows(), riders.len(), first),
    });
    let swept = sweep.run(Some(&mut pruner as &mut dyn Editor), &mut riders);
    console.emit(Event::SweepDone);
    let swept = swept?;
    let (layers, expected, selection) = (pruner.layers, pruner.expected, pruner.selection);
    let watch = swept.watch.clone();
    let mut perplexity = Perplexities::default();
    for (side, passenger) in args.eval.sides().iter().zip(&passengers) {
        match side {
            Side::Dense => perplexity.dense = passenger.report(),
            Side::Pruned => perplexity.pruned = passenger.report(),
        }
    }
    let perplexity = measured.unwrap_or(perplexity);
    if let Some(state) = &mut state {
        state.measured(perplexity.clone(), &layers)?;
    }

    let output = finish(&job, writer, masks, &expected, console)?;
    session.clock.mark(Moment::End, console);
    let mut manifest = session.manifest("prune", arguments, &job.plan, swept)?;
    manifest.profile = Some(profile::report(
        peak,
        (session.products, session.dtype()),
        &watch,
        Some(&selection),
        &manifest,
    ));
    manifest.sparsity = Some(record::sparsity(&layers));
    manifest.layers = layers;
    manifest.pruning = Some(record::settings(
        args,
        targets,
        session.config.num_hidden_layers,
    ));
    manifest.calibration = texts
        .calibration
        .as_ref()
        .map(record::calibration_record)
        .transpose()?;
    manifest.evaluation = texts
        .windows
        .as_ref()
        .map(|windows| serde_json::to_value(&windows.protocol))
        .transpose()?;
    manifest.perplexity = perplexity;
    manifest.output = output;
    manifest.masks = job.masks.as_ref().map(|path| path.display().to_string());
    manifest.gate = gate(&args.evaluation, manifest.perplexity.pruned);
    record::warn_of_infinite(&manifest, console);
    for exceeded in manifest.exceeded_plan() {
        console.warn(exceeded);
    }
    manifest.warnings = console.warnings();
    if let Some(state) = &state {
        state.complete(&mut manifest);
    }
    folder.record(&manifest)?;
    if let Some(state) = &state {
        state.remove()?;
    }
    console.set_unfinished(None);
    Ok(manifest)
}

/// What a signal leaves while nothing was written yet: a run that will write a model may as well be begun again.
fn not_begun(output: &OutputArgs, arguments: &[String]) -> Option<Unfinished> {
    let writes_model =
        !output.no_save_model && (output.save.is_some() || output.save_model.is_some());
    writes_model.then(|| Unfinished {
        text: format!(
            "nothing was changed; this begins, or goes on with what was there:\n  {}",
            shell::quoted(arguments)
        ),
        is_resumable: true,
        has_begun: false,
    })
}

/// Reads everything back and gives the files their names.
fn finish(
    job: &Job<'_>,
    writer: Option<CheckpointWriter>,
    masks: Option<SaveMasks>,
    expected: &[ExpectedMatrix],
    console: &Console,
) -> Result<Option<OutputReport>> {
    let clock = &job.session.clock;
    if writer.is_some() {
        clock.mark(Moment::BeforeSaving, console);
    }
    let level = job.args.output.verify.level();
    let verification = writer
        .map(|writer| {
            clock.measure(Phase::SaveAndVerify, || {
                writer.finish(expected, level, console)
            })
        })
        .transpose()?;
    if let Some(masks) = masks {
        clock.measure(Phase::SaveAndVerify, || masks.finish())?;
    }
    let Some((model, verification)) = job.folder.model.as_ref().zip(verification) else {
        return Ok(None);
    };
    clock.mark(Moment::AfterSaving, console);
    Ok(Some(OutputReport {
        model: model.display().to_string(),
        verification: serde_json::to_value(verification)?,
    }))
}
