//! `prune`: the main job. Settings → plan → sweep → save → report.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;

use super::args::{
    CalibrationArgs, DeviceArgs, EvalSides, EvaluationArgs, MessageArgs, ModelArgs, OutputArgs,
    SparsityArgs,
};
use super::console::Console;
use super::memory_log::{self, MemoryLog};
use super::outcome::{Outcome, gate};
use super::run_folder::RunFolder;
use super::session::Session;
use crate::bytes::ByteSize;
use crate::checkpoint::{CheckpointWriter, WeightSink, WeightSource};
use crate::data::{self, Calibration, Evaluation, Role, TextCache};
use crate::eval::{Perplexity, Side};
use crate::failure::Failure;
use crate::model::Embedding;
use crate::pipeline::{CalibrationStream, Pruner, SaveMasks, TargetPlan, Watcher, Workload};
use crate::pruning::{self, Needs, Pattern, PruningMethod};
use crate::report;
use crate::run::manifest::{OutputReport, PruningSettings, SparsityReport};
use crate::run::{Event, Events, Manifest};
use crate::runtime::{Editor, Passenger, Rest, Sweep, memory};

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
    let method =
        pruning::method(&args.sparsity.prune_method).context("the method is in the table")?;
    if args.evaluation.max_perplexity.is_some() && args.eval == EvalSides::None {
        return Err(Failure::usage(
            "--max-perplexity needs a perplexity, and --eval none measures none",
        )
        .hint("use --eval pruned, or leave --max-perplexity out")
        .into());
    }
    if args.output.log_memory {
        console.log_memory(MemoryLog::default());
    }
    let session = Session::open(&args.model, &args.device, args.calibration.seqlen, console)?;
    let folder = RunFolder::check(
        &session.folder,
        args.output.save.as_deref(),
        args.output.save_model.as_deref(),
        !args.output.no_save_model,
        args.output.force,
    )?;
    let masks = args.output.save_masks.then(|| folder.masks()).transpose()?;
    let targets = TargetPlan::resolve(&args.sparsity.selection()?, method, &session.config)?;
    let texts = Texts::tokenise(args, &session, calibrates(method, &targets), console)?;
    memory::release_freed();
    session.clock.mark("02_model_loaded", console);
    let streams: Vec<usize> = texts.streams();
    let workload = Workload::new(
        &session.config,
        session.dtype(),
        session.seqlen,
        &streams,
        texts.windows.is_some(),
        session.threads,
    )
    .with_output_errors(&session.config, texts.calibration_tokens());
    let rest = session.settle_hidden_states(
        &args.device,
        &workload,
        args.output.save.as_deref(),
        console,
    );
    print_plan(
        args, &session, &targets, &texts, &workload, &rest, &folder, console,
    );
    if let Some(path) = &masks {
        console.line(&format!("masks        {}", path.display()));
    }

    folder.prepare()?;
    if let Some(run) = &folder.run {
        console.write_memory_log(&run.join(memory_log::FILE))?;
    }
    console.set_unfinished(folder.unfinished());
    let writer = folder.model.as_ref().map(|model| {
        session.clock.measure("allocate", || {
            CheckpointWriter::create(&session.checkpoint, model, console)
        })
    });
    let mut writer = writer.transpose()?;
    let masks = masks.as_ref().map(|path| {
        session.clock.measure("allocate", || {
            SaveMasks::create(path, method, &targets, &session.config, console)
        })
    });
    let mut masks = masks.transpose()?;
    let mut watchers: Vec<&mut dyn Watcher> = Vec::new();
    if let Some(watcher) = watcher {
        watchers.push(watcher);
    }
    if let Some(masks) = &mut masks {
        watchers.push(masks);
    }
    let calibration = texts
        .calibration
        .as_ref()
        .map(|samples| session.embedded(&rest, "calibration", &samples.tokens, console))
        .transpose()?
        .map(|hidden| CalibrationStream::new(hidden, (*session.config).clone()));
    let mut passengers: Vec<Perplexity<'_>> = Vec::new();
    for side in args.eval.sides() {
        if let Some(windows) = &texts.windows {
            passengers.push(session.perplexity(*side, &rest, windows, console)?);
        }
    }
    let mut pruner = Pruner {
        method,
        targets: &targets,
        calibration,
        sink: writer.as_mut().map(|writer| writer as &mut dyn WeightSink),
        watchers,
        clock: &session.clock,
        events: console,
        num_hidden_layers: session.config.num_hidden_layers,
        layers: Vec::new(),
        expected: Vec::new(),
    };
    let source: Arc<dyn WeightSource> = session.checkpoint.clone();
    let sweep = Sweep {
        source,
        config: Arc::clone(&session.config),
        seqlen: session.seqlen,
        clock: &session.clock,
        events: console,
    };
    let mut riders: Vec<&mut dyn Passenger> = passengers
        .iter_mut()
        .map(|passenger| passenger as &mut dyn Passenger)
        .collect();
    session.clock.mark("03_before_pruning", console);
    console.emit(Event::SweepStarted {
        layers: session.config.num_hidden_layers,
        passes: session.passes(streams[0], texts.windows(), texts.sides),
    });
    let swept = sweep.run(Some(&mut pruner as &mut dyn Editor), &mut riders);
    console.emit(Event::SweepDone);
    if let (Err(_), Some(unfinished)) = (&swept, folder.unfinished()) {
        console.line(&unfinished);
    }
    swept?;
    let (layers, expected) = (pruner.layers, pruner.expected);

    if writer.is_some() {
        session.clock.mark("07_before_save_model", console);
    }
    let verification = writer.map(|writer| {
        session.clock.measure("save and verify", || {
            writer.finish(&expected, args.output.verify.level(), console)
        })
    });
    let verification = verification.transpose()?;
    if let Some(masks) = masks {
        session
            .clock
            .measure("save and verify", || masks.finish())?;
    }
    if verification.is_some() {
        session.clock.mark("08_after_save_model", console);
    }
    console.set_unfinished(None);
    session.clock.mark("09_end", console);
    let mut manifest = session.manifest("prune", arguments, &rest)?;
    manifest.sparsity = Some(sparsity(&layers));
    manifest.layers = layers;
    manifest.pruning = Some(settings(args, &targets, session.config.num_hidden_layers));
    manifest.calibration = texts
        .calibration
        .as_ref()
        .map(calibration_record)
        .transpose()?;
    manifest.evaluation = texts
        .windows
        .as_ref()
        .map(|windows| serde_json::to_value(&windows.protocol))
        .transpose()?;
    for (side, passenger) in args.eval.sides().iter().zip(&passengers) {
        match side {
            Side::Dense => manifest.perplexity.dense = passenger.report(),
            Side::Pruned => manifest.perplexity.pruned = passenger.report(),
        }
    }
    if let (Some(model), Some(verification)) = (&folder.model, verification) {
        manifest.output = Some(OutputReport {
            model: model.display().to_string(),
            verification: serde_json::to_value(verification)?,
        });
    }
    manifest.gate = gate(&args.evaluation, manifest.perplexity.pruned);
    warn_of_infinite(&manifest, console);
    manifest.warnings = console.warnings();
    folder.record(&manifest)?;
    Ok(manifest)
}

/// Whether any matrix is scored with statistics.
fn calibrates(method: &dyn PruningMethod, targets: &TargetPlan) -> bool {
    let prunes_nothing = targets.pattern == Pattern::Unstructured
        && targets.sparsity_ratio == 0.0
        && targets.uneven_ratios().is_none();
    method.needs() != Needs::Nothing && !prunes_nothing
}

/// The token ids of a run.
struct Texts {
    calibration: Option<Calibration>,
    windows: Option<Evaluation>,
    sides: usize,
}

impl Texts {
    /// Checks that both texts are there, then tokenises them; the tokenizer is gone when this returns.
    fn tokenise(
        args: &PruneArgs,
        session: &Session,
        calibrates: bool,
        console: &Console,
    ) -> Result<Self> {
        let evaluates = args.eval != EvalSides::None;
        let calibration_text = calibrates
            .then(|| {
                Embedding::open(&*session.checkpoint, &session.config)?;
                session.check_text(&args.calibration.dataset, Role::Calibration, console)
            })
            .transpose()?;
        let evaluation_text = evaluates
            .then(|| session.check_evaluation(&args.evaluation, console))
            .transpose()?;
        let mut texts = Self {
            calibration: None,
            windows: None,
            sides: args.eval.sides().len(),
        };
        if !calibrates && !evaluates {
            return Ok(texts);
        }
        let cache = TextCache::open(args.evaluation.text_cache.clone());
        let tokenizer = session.tokenizer()?;
        if let Some(dataset) = &calibration_text {
            let CalibrationArgs { nsamples, seed, .. } = &args.calibration;
            let samples = session.clock.measure("tokenise", || {
                data::calibration(
                    dataset,
                    &tokenizer,
                    *nsamples as usize,
                    session.seqlen,
                    *seed,
                    &cache,
                    console,
                )
            })?;
            session.check_ids(&samples.tokens, &tokenizer, "calibration")?;
            texts.calibration = Some(samples);
        }
        if let Some(dataset) = &evaluation_text {
            texts.windows =
                Some(session.evaluation(&args.evaluation, dataset, &tokenizer, &cache, console)?);
        }
        Ok(texts)
    }

    /// Evaluation windows.
    fn windows(&self) -> usize {
        self.windows.as_ref().map_or(0, |windows| windows.windows)
    }

    fn calibration_tokens(&self) -> usize {
        let samples = self.calibration.as_ref();
        samples.map_or(0, |samples| samples.tokens.len())
    }

    /// Samples per stream of hidden states, calibration first.
    fn streams(&self) -> Vec<usize> {
        let windows = self.windows();
        let calibration = self
            .calibration
            .as_ref()
            .map_or(0, |samples| samples.nsamples);
        std::iter::once(calibration)
            .chain(std::iter::repeat_n(windows, self.sides))
            .collect()
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "it tells everything that was settled"
)]
fn print_plan(
    args: &PruneArgs,
    session: &Session,
    targets: &TargetPlan,
    texts: &Texts,
    workload: &Workload,
    rest: &Rest,
    folder: &RunFolder,
    console: &Console,
) {
    let config = &session.config;
    console.line(&format!(
        "model        {}: {} layers of {}, {}, {}",
        session.folder.display(),
        config.num_hidden_layers,
        config.hidden_size,
        session.dtype().name(),
        session.checkpoint.total_bytes()
    ));
    let variant = if targets.use_variant { ", variant" } else { "" };
    console.line(&format!(
        "pruning      {} {:.4} {}{variant}",
        args.sparsity.prune_method, targets.sparsity_ratio, targets.pattern
    ));
    for line in targets.describe() {
        console.line(&format!("             {line}"));
    }
    if let Some(samples) = &texts.calibration {
        console.line(&format!(
            "calibration  {}: {} samples of {} tokens, seed {}",
            args.calibration.dataset, samples.nsamples, samples.seqlen, args.calibration.seed
        ));
    }
    if let Some(windows) = &texts.windows {
        let sides: Vec<_> = args.eval.sides().iter().map(|side| side.name()).collect();
        console.line(&format!(
            "evaluation   {}: {} windows of {} tokens, {}",
            args.evaluation.eval_dataset,
            windows.windows,
            windows.seqlen,
            sides.join(" and ")
        ));
    }
    let hidden = match rest {
        _ if workload.hidden_states == ByteSize::ZERO => "none".to_string(),
        Rest::Ram => format!("{} in RAM", workload.hidden_states),
        Rest::Spill(folder) => format!("{} in `{}`", workload.hidden_states, folder.display()),
    };
    console.line(&format!(
        "memory       layers {}, workspace {}, head {}, hidden states {hidden}; {} threads",
        workload.layers, workload.workspace, workload.head, session.threads
    ));
    if !args.device.names_the_cpu() {
        console
            .line("device       cpu; this build has no CUDA (--use-cpu says that this is meant)");
    }
    match &folder.model {
        Some(model) => console.line(&format!("output       {}", model.display())),
        None if folder.run.is_some() => console.line("output       no model (--no-save-model)"),
        None => console.warn("nothing will be saved; name a run folder with --save".to_string()),
    }
}

fn settings(args: &PruneArgs, targets: &TargetPlan, layers: usize) -> PruningSettings {
    PruningSettings {
        method: args.sparsity.prune_method.clone(),
        sparsity_ratio: targets.sparsity_ratio,
        sparsity_type: targets.pattern.to_string(),
        use_variant: targets.use_variant,
        include: args.sparsity.include.clone(),
        exclude: args.sparsity.exclude.clone(),
        matrices: targets.matrices(),
        matrices_in_model: layers * 7,
        layer_ratios: targets.uneven_ratios(),
        propagate: "pruned".to_string(),
    }
}

fn calibration_record(samples: &Calibration) -> Result<serde_json::Value> {
    let mut record = serde_json::to_value(&samples.protocol)?;
    if let Some(fields) = record.as_object_mut() {
        fields.insert("starts".into(), serde_json::to_value(&samples.starts)?);
        if let Some(documents) = &samples.documents {
            fields.insert("documents".into(), serde_json::to_value(documents)?);
        }
    }
    Ok(record)
}

fn sparsity(layers: &[crate::run::manifest::LayerReport]) -> SparsityReport {
    let matrices = || layers.iter().flat_map(|layer| &layer.matrices);
    let zeros = matrices().map(|matrix| matrix.zeros).sum();
    let weights = matrices()
        .map(|matrix| (matrix.shape[0] * matrix.shape[1]) as u64)
        .sum();
    SparsityReport {
        zeros,
        zeros_before: matrices().map(|matrix| matrix.zeros_before).sum(),
        weights,
        ratio: zeros as f64 / weights as f64,
    }
}

fn warn_of_infinite(manifest: &Manifest, events: &dyn Events) {
    for (side, report) in [
        ("dense", manifest.perplexity.dense),
        ("pruned", manifest.perplexity.pruned),
    ] {
        if report.is_some_and(|report| !report.perplexity.is_finite()) {
            events.warn(format!(
                "the {side} perplexity is not finite: the model's outputs overflow or are NaN"
            ));
        }
    }
}
