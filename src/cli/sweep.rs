//! `prune sweep`: flags, checks of the lists, and the table.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};

use super::args::from_list;
use super::console::Console;
use super::outcome::Outcome;
use super::prune::PruneArgs;
use crate::failure::Failure;
use crate::job;
use crate::job::grid::GridOutcome;
use crate::pipeline::{LayerRatios, Selection};
use crate::pruning::{METHODS, Pattern, REFINEMENTS};
use crate::ranks::Ranks;
use crate::report;
use crate::run::Events;
use crate::run::gate::meets;
use crate::run::metric::Metric;
use crate::settings::{EvalSides, EvaluationSettings, GridSettings, GridShard, Settings};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune sweep --model models/llama-2-7b --methods wanda,magnitude,ria \\
        --ratios 0.4,0.5,0.6 --types unstructured,2:4 --seeds 0,1,2 \\
        --save out/sweep
  prune sweep --model models/llama-2-7b --methods wanda --ratios 0.5 \\
        --seeds 0,1,2,3 --save out/sweep --shard 2/4
  prune sweep --table out/sweep";

/// Flags of `prune sweep`: lists, and those of `prune` except the flags that a list replaces.
#[derive(Debug, Clone, Args)]
#[command(
    mut_arg("prune_method", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("sparsity_ratio", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("sparsity_type", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("use_variant", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("seed", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("save_model", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("no_save_model", |flag| flag.hide(true)),
    mut_arg("resume", |flag| flag.hide(true).conflicts_with("methods")),
    mut_arg("eval", |flag| flag.default_value("both").long_help("Models that perplexity is measured of; the dense model is measured once")),
    mut_arg("save", |flag| flag.help("Folder of the sweep").long_help("Folder of the sweep: a run folder per cell, sweep.json, sweep.md, report.html")),
    mut_arg("save_masks", |flag| flag.help("Also write the masks of each cell: CELL/masks.safetensors").long_help("Also write the masks of each cell: CELL/masks.safetensors")),
    mut_arg("force", |flag| flag.help("Replace finished cells, and cells of other settings").long_help(None::<&str>)),
    mut_arg("json", |flag| flag.long_help("Print the result as one JSON object, the content of sweep.json, in place of the table"))
)]
pub struct SweepArgs {
    /// Methods, separated by commas
    ///
    /// METHOD+STEP is a method with --refine STEP.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        required_unless_present = "table",
        help_heading = "Sweep",
        value_parser = PossibleValuesParser::new(techniques())
    )]
    methods: Vec<String>,

    /// Fractions removed, like 0.4,0.5,0.6
    #[arg(long, value_name = "LIST", allow_hyphen_values = true, help_heading = "Sweep")]
    ratios: Option<String>,

    /// Patterns, like unstructured,2:4 [default: unstructured]
    ///
    /// `unstructured` takes the ratios; each N:M pattern has its own ratio.
    #[arg(long, value_name = "LIST", help_heading = "Sweep")]
    types: Option<String>,

    /// Seeds of the sampling, like 0,1,2 [default: 0]
    ///
    /// A method without calibration samples runs once, as seed 0.
    #[arg(long, value_name = "LIST", help_heading = "Sweep")]
    seeds: Option<String>,

    /// Keep the pruned checkpoint of each cell: CELL/model
    ///
    /// A cell with a checkpoint continues after an interruption at its last finished layer; a cell without one begins again.
    #[arg(hide_short_help = true, long, help_heading = "Sweep", conflicts_with = "no_save_model")]
    keep_models: bool,

    /// Work on the i-th of n parts of the cells, like 2/4
    ///
    /// For job arrays. Cells are dealt out in turn; with --propagate dense in a row, ordered by seed, since cells of one seed share statistics. Processes with different parts may work in one folder at the same time. The process that ends
    /// last writes the table of all cells.
    #[arg(long, value_name = "I/N", help_heading = "Sweep")]
    shard: Option<String>,

    /// List the cells and their states, and do nothing
    #[arg(long, help_heading = "Sweep")]
    dry_run: bool,

    /// Metrics of the table, like perplexity,kl,accuracy [default: perplexity]
    ///
    /// `kl` is the mean divergence from the dense model in nat and `same_top` the share of equal top tokens; both need --eval both. `accuracy` is
    /// the mean over --tasks. The name of a task stands for the accuracy of this task. sweep.json has all metrics. With --table and without this flag,
    /// the table keeps its metrics.
    #[arg(long, value_name = "LIST", help_heading = "Sweep")]
    metrics: Option<String>,

    /// Only write the table and the page of a folder again
    #[arg(
        long,
        value_name = "DIR",
        help_heading = "Sweep",
        conflicts_with_all = ["methods", "ratios", "types", "seeds", "keep_models", "shard", "dry_run", "model", "save"]
    )]
    table: Option<PathBuf>,

    #[command(flatten)]
    pub(super) run: PruneArgs,
}

impl SweepArgs {
    /// Returns whether this process computes a share of the grid of its own.
    pub(super) fn is_shard(&self) -> bool {
        self.shard.is_some()
    }

    fn settings(&self, arguments: Vec<String>) -> Result<GridSettings> {
        let shard = self.shard.as_deref().map(str::parse).transpose()?;
        let mut run = self.run.settings(arguments)?;
        refuse_common_file(&run)?;
        run.output.no_save_model = !self.keep_models;
        let selection = run.sparsity.clone().unwrap_or_default().selection;
        let targets = self.targets(&selection)?;
        let seeds = match &self.seeds {
            None => vec![0],
            Some(seeds) => from_list("--seeds", "0,1,2", seeds, |seed| {
                seed.parse::<u64>().map_err(|_| {
                    Failure::usage(format!(
                        "--seeds has `{seed}`, which is not a whole number from 0 on"
                    ))
                    .hint("write numbers separated by commas, like --seeds 0,1,2")
                })
            })?,
        };
        let methods = from_list("--methods", "wanda,magnitude", &self.methods.join(","), |name| {
            Ok(name.to_string())
        })?;
        let metrics = self.metrics()?;
        check_metrics(metrics.as_deref().unwrap_or_default(), &run)?;
        let metrics = metrics.unwrap_or_else(|| vec![Metric::Perplexity]);
        let shard = shard.unwrap_or(GridShard::WHOLE);
        Ok(GridSettings { run, methods, targets, seeds, shard, metrics })
    }

    /// The metrics of `--metrics`; `None` without the flag.
    fn metrics(&self) -> Result<Option<Vec<Metric>>> {
        let list = self.metrics.as_deref();
        list.map(|list| from_list("--metrics", "perplexity,kl,accuracy", list, str::parse))
            .transpose()
    }

    /// The targets: every ratio, then every N:M pattern.
    fn targets(&self, selection: &Selection) -> Result<Vec<Selection>> {
        let types: Vec<Pattern> = match &self.types {
            None => vec![Pattern::Unstructured],
            Some(types) => from_list("--types", "unstructured,2:4", types, str::parse)?,
        };
        let is_unstructured = types.contains(&Pattern::Unstructured);
        let mut targets = Vec::new();
        match (&self.ratios, is_unstructured) {
            (Some(ratios), true) => {
                for ratio in from_list("--ratios", "0.4,0.5,0.6", ratios, ratio)? {
                    targets.push(Selection { sparsity_ratio: Some(ratio), ..selection.clone() });
                }
            }
            (Some(ratios), false) => {
                let patterns = self.types.as_deref().unwrap_or_default();
                return Err(Failure::usage(format!(
                    "--ratios {ratios} has no use: --types {patterns} names N:M patterns only, and each has its own ratio"
                ))
                .hint(format!(
                    "leave --ratios out, or add `unstructured`: --types unstructured,{patterns}"
                ))
                .into());
            }
            (None, true) => {
                return Err(Failure::usage("--ratios is missing")
                    .hint("name the fractions to remove, like --ratios 0.4,0.5,0.6, or patterns alone, like --types 2:4")
                    .into());
            }
            (None, false) => {}
        }
        if let Some(LayerRatios::All(ratios)) = &selection.layer_ratios {
            return Err(Failure::usage(format!(
                "--layer-ratios names a ratio for all {} layers, so --ratios would change nothing",
                ratios.len()
            ))
            .hint("name some layers only, like {\"0\": 0.3}")
            .into());
        }
        for pattern in types {
            if pattern != Pattern::Unstructured {
                targets.push(Selection { sparsity_type: pattern, ..selection.clone() });
            }
        }
        Ok(targets)
    }
}

/// The names of methods, and hidden names of methods with a refinement.
fn techniques() -> Vec<PossibleValue> {
    let refined = |method: &str| {
        let names = REFINEMENTS.iter().map(|step| format!("{method}+{}", step.name()));
        names.map(|name| PossibleValue::new(name).hide(true)).collect::<Vec<_>>()
    };
    let methods = METHODS.iter().map(|method| method.name());
    methods
        .flat_map(|method| std::iter::once(PossibleValue::new(method)).chain(refined(method)))
        .collect()
}

/// A ratio above 0 and below 1.
fn ratio(text: &str) -> std::result::Result<f64, Failure> {
    let ratio: Option<f64> = text.parse().ok();
    match ratio {
        Some(ratio) if ratio > 0.0 && ratio < 1.0 => Ok(ratio),
        other => {
            let failure = Failure::usage(format!(
                "--ratios has `{text}`; a ratio is the fraction removed, above 0 and below 1"
            ));
            Err(match other {
                Some(percent) if percent > 1.0 && percent < 100.0 => {
                    failure.hint(format!("for {percent} percent write {}", percent / 100.0))
                }
                _ => failure.hint("write fractions separated by commas, like --ratios 0.4,0.5,0.6"),
            })
        }
    }
}

/// Refuses a file that all cells would write.
fn refuse_common_file(run: &Settings) -> Result<()> {
    if run.evaluation.tasks.log_samples.is_none() {
        return Ok(());
    }
    Err(Failure::usage("--log-samples is a flag of a single run: all cells would write one file")
        .hint("measure a cell: prune eval OUT/CELL/model --tasks ... --log-samples FILE")
        .into())
}

/// Refuses metrics that no cell measures.
fn check_metrics(metrics: &[Metric], run: &Settings) -> Result<()> {
    let evaluation = &run.evaluation;
    let tasks: Vec<String> = evaluation.tasks.asked().iter().map(|of| of.name.clone()).collect();
    let is_smaller = run.layer_drop.is_some() || run.width_drop.is_some();
    let compares = evaluation.eval == EvalSides::Both && !is_smaller;
    for metric in metrics {
        let (is_measured, fix) = match metric {
            Metric::Perplexity => {
                (evaluation.eval != EvalSides::None, "use --eval pruned".to_string())
            }
            Metric::Kl | Metric::SameTop if is_smaller => {
                (false, "leave it out: smaller models are not compared in their sweep".to_string())
            }
            Metric::Kl | Metric::SameTop => (compares, "use --eval both".to_string()),
            Metric::Accuracy => (
                !tasks.is_empty(),
                "name tasks, like --tasks boolq,piqa --tasks-from DIR".to_string(),
            ),
            Metric::Task(name) => (
                tasks.contains(name),
                format!(
                    "metrics are perplexity, kl, same_top, accuracy and the tasks of --tasks; for the task `{name}` add --tasks {name}"
                ),
            ),
        };
        if !is_measured {
            return Err(Failure::usage(format!(
                "--metrics names `{metric}`, which this sweep does not measure"
            ))
            .hint(fix)
            .into());
        }
    }
    Ok(())
}

/// Runs the command and prints its table.
///
/// # Errors
/// Fails before the first cell for lists and settings that are wrong, and after the table where a cell has failed.
pub fn command(
    args: &SweepArgs,
    arguments: Vec<String>,
    console: &Console,
    ranks: &Ranks,
) -> Result<Outcome> {
    let computes = args.table.is_none() && !args.dry_run;
    if !computes && !ranks.is_first() {
        return Ok(Outcome::Done);
    }
    if let Some(folder) = &args.table {
        let metrics = args.metrics()?;
        let (record, page) = job::grid::remake(folder, metrics.as_deref(), console)?;
        console.record(&record, &report::grid::text(&record, table_columns(console)))?;
        console.note(format!("page         {}", page.display()));
        return Ok(Outcome::Done);
    }
    let settings = args.settings(arguments)?;
    if args.dry_run {
        let cells = job::grid::preview(&settings)?;
        let mut text = String::new();
        for cell in &cells {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{:<10}  {}", cell.state.name(), cell.name);
        }
        console.record(&cells, &text)?;
        console.note(format!("{}; nothing was done", report::count(cells.len(), "cell")));
        return Ok(Outcome::Done);
    }
    if settings.run.output.log_memory {
        console.log_memory();
    }
    let outcome = job::grid::grid_on(ranks, &settings, console)?;
    if !ranks.is_first() {
        return Ok(Outcome::Done);
    }
    console
        .record(&outcome.record, &report::grid::text(&outcome.record, table_columns(console)))?;
    console.note(format!("page         {}", outcome.page.display()));
    if outcome.elsewhere > 0 {
        console.note(format!(
            "{} cells of other processes are not finished; the last process writes the table of all",
            outcome.elsewhere
        ));
    }
    end(&outcome, &settings.run.evaluation, console)
}

/// The end of a sweep whose table is written.
fn end(
    outcome: &GridOutcome,
    evaluation: &EvaluationSettings,
    console: &Console,
) -> Result<Outcome> {
    if !outcome.failed.is_empty() {
        let mut failure =
            Failure::new(format!("{} of {} cells failed", outcome.failed.len(), outcome.cells));
        for name in &outcome.failed {
            failure = failure.detail(name.as_str());
        }
        return Err(failure
            .hint("sweep.json has their errors; the same command runs them again and leaves finished cells alone")
            .into());
    }
    let gates = [
        ("--max-perplexity", evaluation.max_perplexity, Metric::Perplexity),
        ("--max-kl", evaluation.max_kl, Metric::Kl),
        ("--min-accuracy", evaluation.tasks.min_accuracy, Metric::Accuracy),
    ];
    let mut end = Outcome::Done;
    for (flag, limit, metric) in gates {
        let Some(limit) = limit else {
            continue;
        };
        let cells = outcome.record.cells.iter();
        let missed = cells.filter(|of| {
            of.value(&metric).is_some_and(|value| !meets(metric.is_loss(), limit, value))
        });
        let missed: Vec<&str> = missed.map(|cell| cell.name.as_str()).collect();
        if !missed.is_empty() {
            console
                .error(&format!("gate missed: {flag} {limit} is not met by {}", missed.join(", ")));
            end = Outcome::GateMissed;
        }
    }
    Ok(end)
}

/// Columns of the table; 80 in a file or a pipe.
fn table_columns(console: &Console) -> usize {
    console.columns().unwrap_or(80)
}
