//! `prune demo`: the main job on the model inside the binary, several times, a recovery, a sentence by each result, and a packed result.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};

use super::demo_packing;
use super::run::{prune, recover};
use crate::checkpoint::Checkpoint;
use crate::data::{DatasetSpec, Tokenizer};
use crate::demo::embedded;
use crate::failure::Failure;
use crate::generation::{self, Generator};
use crate::model::ModelConfig;
use crate::pruning::Pattern;
use crate::report::demo_table::{DemoRow, DemoTable};
use crate::run::events::LockLost;
use crate::run::{Event, Events, Manifest, Silent};
use crate::settings::{
    CalibrationSettings, ComputeDtype, EvalSides, RecoverySettings, RecoveryWay, Settings,
};

/// Settings of `prune demo`.
#[derive(Debug, Clone, Default)]
pub struct DemoSettings {
    /// `--save`: a folder for the dense model and every run; `None`: a temporary folder.
    pub save: Option<PathBuf>,
    /// `--seed` of the calibration samples.
    pub seed: u64,
    /// `--threads`.
    pub threads: Option<u16>,
}

const FREE: Pattern = Pattern::Unstructured;
const TWO_OF_FOUR: Pattern = Pattern::NOfM { n: 2, m: 4 };

/// A run of the demo.
#[derive(Debug, Clone, Copy)]
enum DemoRun {
    /// Prunes by a method, a ratio and a pattern.
    Prune(&'static str, f64, Pattern),
    /// Trains the pruned model in this folder, with the dense model as its teacher.
    Recover(&'static str),
}

const RUNS: [DemoRun; 9] = [
    DemoRun::Prune("magnitude", 0.5, FREE),
    DemoRun::Prune("wanda", 0.5, FREE),
    DemoRun::Prune("magnitude", 0.6, FREE),
    DemoRun::Prune("wanda", 0.6, FREE),
    DemoRun::Recover("wanda-60"),
    DemoRun::Prune("ladder", 0.6, FREE),
    DemoRun::Prune("magnitude", 0.5, TWO_OF_FOUR),
    DemoRun::Prune("wanda", 0.5, TWO_OF_FOUR),
    DemoRun::Prune("ladder", 0.5, TWO_OF_FOUR),
];

/// The run whose model is packed: many zeros, and sentences that a reader follows.
const PACKED: DemoRun = DemoRun::Prune("wanda", 0.6, FREE);

/// Samples of the recovery.
const RECOVERY_SAMPLES: u32 = 64;

impl DemoRun {
    /// The name of the row, and the name of the folder.
    fn names(self) -> [String; 2] {
        match self {
            Self::Prune(method, ratio, FREE) => {
                let percent = 100.0 * ratio;
                [format!("{method} {percent:.0} %"), format!("{method}-{percent:.0}")]
            }
            Self::Prune(method, _, pattern) => {
                let pattern = pattern.to_string();
                [format!("{method} {pattern}"), format!("{method}-{}", pattern.replace(':', "of"))]
            }
            Self::Recover(pruned) => [
                format!("{} %, recovered", pruned.replace('-', " ")),
                format!("{pruned}-recovered"),
            ],
        }
    }
}

/// Token ids of the demo text, shared by the runs.
const TEXT_CACHE: &str = "text-cache";

/// Longest sentence, in tokens.
const SENTENCE_TOKENS: usize = 40;

/// Prunes the embedded model in several ways, trains one result, packs one, and lets each write a sentence.
///
/// # Errors
/// Fails when the folder is not empty or cannot be written; see also [`prune()`].
pub fn demo(settings: &DemoSettings, events: &dyn Events) -> Result<DemoTable> {
    match &settings.save {
        Some(save) => {
            refuse_used(save)?;
            prune_all(settings, save, events)
        }
        None => {
            let folder = TemporaryFolder::new("prune-demo").map_err(|failure| {
                failure.hint("name one with --save, or another place with TMPDIR")
            })?;
            events.emit(Event::Temporary(Some(folder.path.clone())));
            let table = prune_all(settings, &folder.path, events);
            events.emit(Event::Temporary(None));
            table
        }
    }
}

/// Makes all runs, in folders below `root`.
fn prune_all(settings: &DemoSettings, root: &Path, events: &dyn Events) -> Result<DemoTable> {
    let dense = root.join("dense");
    embedded::write_model(&dense)?;
    events
        .note("a small Llama that tells stories, pruned eight ways and trained once:".to_string());

    let mut rows = Vec::new();
    let mut parameters = 0;
    for (number, run) in RUNS.into_iter().enumerate() {
        let started = Instant::now();
        let [name, folder] = run.names();
        let folder = root.join(folder);
        // The first run measures the dense perplexity as well.
        let sides = match number {
            0 => EvalSides::Both,
            _ => EvalSides::Pruned,
        };
        let step = StepEvents { events, title: format!("{}/{} {name}", number + 1, RUNS.len()) };
        let manifest = run_once(settings, root, run, sides, &step)
            .with_context(|| format!("in the run `{name}`"))?;
        for warning in &manifest.warnings {
            events.warn(format!("{name}: {warning}"));
        }
        if let Some(report) = manifest.perplexity.dense {
            parameters = manifest.model.parameters;
            rows.push(DemoRow {
                name: "dense".to_owned(),
                sparsity: 0.0,
                perplexity: report.perplexity,
                continuation: sentence(&dense)?,
            });
        }
        let continuation = sentence(&folder.join("model"))?;
        events.note(format!(
            "  {}/{} {name:<22}{:.1} s",
            number + 1,
            RUNS.len(),
            started.elapsed().as_secs_f64()
        ));
        let report = manifest.perplexity.pruned;
        rows.push(DemoRow {
            name,
            sparsity: manifest.sparsity.map_or(0.0, |sparsity| sparsity.ratio),
            perplexity: report.map_or(f64::NAN, |report| report.perplexity),
            continuation,
        });
    }
    let started = Instant::now();
    let [name, folder] = PACKED.names();
    let phase = format!("{name}, packed");
    events.emit(Event::PhaseStarted { phase: phase.clone(), unit: "models", steps: 1 });
    let packing = demo_packing::measure(&name, &root.join(folder), settings.threads)
        .with_context(|| format!("in the packing of `{name}`"))?;
    events.emit(Event::PhaseDone { phase, elapsed: started.elapsed() });
    let seconds = started.elapsed().as_secs_f64();
    events.note(format!("      {:<22}{seconds:.1} s", format!("{name}, packed")));
    // The cache is of no use after the runs; a leftover does no harm.
    let _ = std::fs::remove_dir_all(root.join(TEXT_CACHE));
    Ok(DemoTable { parameters, prompt: embedded::PROMPT.to_owned(), rows, packing })
}

/// The main job on the embedded model, or its recovery.
fn run_once(
    demo: &DemoSettings,
    root: &Path,
    run: DemoRun,
    sides: EvalSides,
    events: &dyn Events,
) -> Result<Manifest> {
    let text: DatasetSpec = "demo".parse()?;
    let mut calibration = CalibrationSettings {
        dataset: text.clone(),
        seed: demo.seed,
        ..CalibrationSettings::default()
    };
    let mut settings = match run {
        DemoRun::Prune(method, ratio, pattern) => {
            let mut settings = Settings::pruning(root.join("dense"));
            if let Some(sparsity) = &mut settings.sparsity {
                sparsity.prune_method = method.to_string();
                sparsity.selection.sparsity_ratio = Some(ratio);
                sparsity.selection.sparsity_type = pattern;
            }
            settings
        }
        DemoRun::Recover(pruned) => {
            calibration.nsamples = RECOVERY_SAMPLES;
            let recovery = RecoverySettings {
                teacher: Some(root.join("dense")),
                ..RecoverySettings::of(RecoveryWay::Blocks)
            };
            Settings {
                sparsity: None,
                recovery: Some(recovery),
                ..Settings::pruning(root.join(pruned).join("model"))
            }
        }
    };
    settings.arguments = vec!["prune".to_string(), "demo".to_string()];
    // The same table on every CPU.
    settings.model.dtype = ComputeDtype::F32;
    settings.calibration = Some(calibration);
    settings.evaluation.eval = sides;
    settings.evaluation.eval_dataset = text;
    settings.evaluation.text_cache = Some(root.join(TEXT_CACHE));
    settings.device.threads = demo.threads;
    let [_, folder] = run.names();
    settings.output.save = Some(root.join(folder));
    match run {
        DemoRun::Prune(..) => prune(settings, events, None),
        DemoRun::Recover(_) => recover(settings, events),
    }
}

/// The progress of a step, under the name of the step. Everything else that a run tells would hide the table.
struct StepEvents<'a> {
    events: &'a dyn Events,
    /// `3/9 magnitude 60 %`.
    title: String,
}

impl Events for StepEvents<'_> {
    fn emit(&self, event: Event) {
        match event {
            Event::PhaseStarted { unit, steps, .. } => {
                self.events.emit(Event::PhaseStarted { phase: self.title.clone(), unit, steps });
            }
            Event::PhaseDone { elapsed, .. } => {
                self.events.emit(Event::PhaseDone { phase: self.title.clone(), elapsed });
            }
            Event::SweepStarted { .. } | Event::SweepDone | Event::Progress { .. } => {
                self.events.emit(event);
            }
            _ => {}
        }
    }

    fn is_stopping(&self) -> bool {
        self.events.is_stopping()
    }

    fn when_lock_lost(&self) -> LockLost {
        self.events.when_lock_lost()
    }
}

/// Returns the sentence a checkpoint writes after the prompt.
fn sentence(folder: &Path) -> Result<String> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let tokenizer = Tokenizer::load(folder)?;
    let mut model = Generator::load_all(checkpoint, config, &Silent)?;
    generation::sentence(&mut model, &tokenizer, embedded::PROMPT, SENTENCE_TOKENS)
}

/// Refuses a folder that holds anything.
fn refuse_used(folder: &Path) -> Result<()> {
    let is_used = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    };
    if is_used {
        return Err(
            Failure::new(format!("`{}` is not an empty folder", folder.display()))
                .hint("choose another --save folder, remove this one (a demo that was interrupted begins anew), or leave --save out to keep nothing")
                .into(),
        );
    }
    Ok(())
}

/// A folder of our own, gone when dropped.
pub(crate) struct TemporaryFolder {
    pub(crate) path: PathBuf,
}

impl TemporaryFolder {
    /// Makes a folder whose name begins with `name`.
    pub(crate) fn new(name: &str) -> Result<Self, Failure> {
        let parent = std::env::temp_dir();
        let make = |number| {
            let path = parent.join(format!("{name}-{}-{number}", std::process::id()));
            std::fs::create_dir(&path).map(|()| path)
        };
        let is_taken = |made: &io::Result<PathBuf>| matches!(made, Err(error) if error.kind() == io::ErrorKind::AlreadyExists);
        let made = (0..1000).map(make).find(|made| !is_taken(made));
        let made = made.unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()));
        let path = made.map_err(|error| {
            Failure::new(format!("cannot make a folder in `{}`: {error}", parent.display()))
        })?;
        Ok(Self { path })
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // A folder that cannot be removed stays with the system's temporary files.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
