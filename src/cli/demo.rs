//! `prune demo`: the main job on the model inside the binary, several times, and what became of its sentences.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, Parser};

use super::args::MessageArgs;
use super::console::Console;
use super::prune::{self, PruneArgs};
use crate::checkpoint::Checkpoint;
use crate::data::Tokenizer;
use crate::demo::embedded;
use crate::failure::Failure;
use crate::generation::{self, Generator};
use crate::model::ModelConfig;
use crate::report::demo_table::{DemoRow, DemoTable};
use crate::run::{Events, Manifest, Silent};

const EXAMPLES: &str = "\
Examples:
  prune demo
  prune demo --save out/demo && prune report out/demo/*-*";

/// Flags of `prune demo`.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub struct DemoArgs {
    /// Folder to keep the dense model and every run in; must not exist or be empty
    ///
    /// The dense model goes to DIR/dense, every run to a folder of its own with model/ and run.json. Without it, a
    /// temporary folder is used and removed.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,

    /// Seed of the calibration samples
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// One pruning run of the demo.
struct DemoRun {
    name: &'static str,
    folder: &'static str,
    flags: &'static [&'static str],
}

const RUNS: [DemoRun; 6] = [
    DemoRun {
        name: "magnitude 50 %",
        folder: "magnitude-50",
        flags: &["--prune-method=magnitude", "--sparsity-ratio=0.5"],
    },
    DemoRun {
        name: "wanda 50 %",
        folder: "wanda-50",
        flags: &["--prune-method=wanda", "--sparsity-ratio=0.5"],
    },
    DemoRun {
        name: "magnitude 60 %",
        folder: "magnitude-60",
        flags: &["--prune-method=magnitude", "--sparsity-ratio=0.6"],
    },
    DemoRun {
        name: "wanda 60 %",
        folder: "wanda-60",
        flags: &["--prune-method=wanda", "--sparsity-ratio=0.6"],
    },
    DemoRun {
        name: "magnitude 2:4",
        folder: "magnitude-2of4",
        flags: &["--prune-method=magnitude", "--sparsity-type=2:4"],
    },
    DemoRun {
        name: "wanda 2:4",
        folder: "wanda-2of4",
        flags: &["--prune-method=wanda", "--sparsity-type=2:4"],
    },
];

/// Token ids of the demo text, shared by the runs.
const TEXT_CACHE: &str = "text-cache";

/// Tokens a sentence may have before it is cut.
const SENTENCE_TOKENS: usize = 40;

/// Runs the command and prints its table.
///
/// # Errors
/// See [`execute`].
pub fn command(args: &DemoArgs, console: &Console) -> Result<()> {
    let started = Instant::now();
    let table = execute(args, console)?;
    console.line("");
    console.record(&table, &table.text())?;
    console.line(&format!("\n{}", explanation(args)));
    console.line(&format!("({:.0} s)", started.elapsed().as_secs_f64()));
    Ok(())
}

/// Prunes the embedded model in several ways and lets each result write a sentence.
///
/// # Errors
/// Fails when the folder is not empty or cannot be written; see also [`prune::execute`].
pub fn execute(args: &DemoArgs, console: &Console) -> Result<DemoTable> {
    match &args.save {
        Some(save) => {
            refuse_used(save)?;
            prune_all(args, save, console)
        }
        None => {
            let folder = TemporaryFolder::new()?;
            console.set_temporary(Some(folder.path.clone()));
            let table = prune_all(args, &folder.path, console);
            console.set_temporary(None);
            table
        }
    }
}

/// All runs, below one folder.
fn prune_all(args: &DemoArgs, root: &Path, console: &Console) -> Result<DemoTable> {
    let dense = root.join("dense");
    embedded::write_model(&dense)?;
    console.line("a small Llama that tells stories, pruned six ways:");

    let mut rows = Vec::new();
    let mut parameters = 0;
    for (number, run) in RUNS.iter().enumerate() {
        let started = Instant::now();
        // The dense perplexity rides along once.
        let sides = if number == 0 { "both" } else { "pruned" };
        let manifest = prune_once(args, root, run, sides)
            .with_context(|| format!("in the run `{}`", run.name))?;
        for warning in &manifest.warnings {
            console.warn(format!("{}: {warning}", run.name));
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
        let report = manifest.perplexity.pruned;
        rows.push(DemoRow {
            name: run.name.to_owned(),
            sparsity: manifest.sparsity.map_or(0.0, |sparsity| sparsity.ratio),
            perplexity: report.map_or(f64::NAN, |report| report.perplexity),
            continuation: sentence(&root.join(run.folder).join("model"))?,
        });
        console.line(&format!(
            "  {}/{} {:<16}{:.1} s",
            number + 1,
            RUNS.len(),
            run.name,
            started.elapsed().as_secs_f64()
        ));
    }
    // Nobody looks for it beside the runs; what cannot be removed does no harm.
    let _ = std::fs::remove_dir_all(root.join(TEXT_CACHE));
    Ok(DemoTable {
        parameters,
        prompt: embedded::PROMPT.to_owned(),
        rows,
    })
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    args: PruneArgs,
}

/// The main job, as a command line would run it.
fn prune_once(args: &DemoArgs, root: &Path, run: &DemoRun, sides: &str) -> Result<Manifest> {
    let folder = |flag: &str, name: &str| {
        let mut flag = std::ffi::OsString::from(flag);
        flag.push(root.join(name));
        flag
    };
    let mut arguments: Vec<std::ffi::OsString> = vec![
        "prune".into(),
        folder("--model=", "dense"),
        folder("--save=", run.folder),
        folder("--text-cache=", TEXT_CACHE),
        "--dataset=demo".into(),
        "--eval-dataset=demo".into(),
        // The same table on every CPU.
        "--dtype=f32".into(),
        format!("--eval={sides}").into(),
        format!("--seed={}", args.seed).into(),
    ];
    arguments.extend(run.flags.iter().map(Into::into));
    if let Some(threads) = args.threads {
        arguments.push(format!("--threads={threads}").into());
    }
    let flags = Flags::try_parse_from(&arguments).context("the demo's own flags")?;
    let said = arguments
        .iter()
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    prune::execute(&flags.args, said, &Console::quiet(), None)
}

/// What a checkpoint writes after the prompt.
fn sentence(folder: &Path) -> Result<String> {
    let config = Arc::new(ModelConfig::load(folder)?);
    let checkpoint = Arc::new(Checkpoint::open(folder)?);
    let tokenizer = Tokenizer::load(folder)?;
    let mut model = Generator::load_all(checkpoint, config, &Silent)?;
    generation::sentence(&mut model, &tokenizer, embedded::PROMPT, SENTENCE_TOKENS)
}

/// What the table says, and what to type next.
fn explanation(args: &DemoArgs) -> String {
    let kept = match &args.save {
        Some(save) => {
            let save = save.display();
            format!(
                "The models are in `{save}`. Look closer:\n  \
                 prune eval --model {save}/wanda-60/model --eval-dataset demo\n  \
                 prune --model {save}/dense --sparsity-ratio 0.7 --dataset demo --eval-dataset demo"
            )
        }
        None => "Keep the models with `prune demo --save DIR`. Then, on a model of your own:\n  \
                 prune --model DIR --sparsity-ratio 0.5 --eval both --save OUT"
            .to_owned(),
    };
    format!(
        "Perplexity says how many tokens the model hesitates between; less is better.\n\
         Magnitude drops the smallest weights, Wanda those that matter least to the\n\
         activations they meet. Zeros alone change neither the size of the files nor\n\
         the speed of inference.\n{kept}"
    )
}

/// A folder that holds anything is left alone.
fn refuse_used(folder: &Path) -> Result<()> {
    let is_used = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
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
struct TemporaryFolder {
    path: PathBuf,
}

impl TemporaryFolder {
    fn new() -> Result<Self> {
        let parent = std::env::temp_dir();
        for number in 0..1000 {
            let path = parent.join(format!("prune-demo-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(Failure::new(format!(
                        "cannot make a folder in `{}`: {error}",
                        parent.display()
                    ))
                    .hint("name one with --save, or another place with TMPDIR")
                    .into());
                }
            }
        }
        Err(Failure::new(format!(
            "no free name for a temporary folder in `{}`",
            parent.display()
        ))
        .hint("name a folder with --save")
        .into())
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        // What cannot be removed stays in the system's folder for such things.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
