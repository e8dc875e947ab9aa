//! `prune plan`: flags, plan and table.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;

use super::args::MessageArgs;
use super::console::Console;
use super::model::ModelWordArgs;
use crate::job::plan::{plan, shape_names, table};
use crate::job::plan_generate::generation_table;
use crate::job::plan_ranks::rank_table;
use crate::job::plan_recover::training_table;
use crate::placement::Rate;
use crate::pruning::METHODS;
use crate::report;
use crate::settings::{
    CalibrationSettings, DeviceSettings, EvalSides, NSAMPLES, PRUNE_METHOD, PlanSettings,
    PlanSubject, RankSettings, Settings, share,
};

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune plan models/llama-2-7b
  prune plan --shape llama-3.2-1b --max-memory cpu=2GiB
  prune plan --shape llama-2-70b --inventory two-a100.json
  prune plan --table
  prune plan --shape llama-2-7b --recover
  prune plan --shape llama-2-70b --ranks 16 --network 25Gb/s
  prune plan --shape llama-2-7b --generate --sparsity-ratio 0.5";

/// The command of a message that asks for a model.
const EXAMPLE: &str =
    "prune plan models/llama-2-7b, or a published shape: prune plan --shape llama-2-7b";

/// Flags of `prune plan`.
#[derive(Debug, Clone, Args)]
#[command(
    mut_arg("model", |flag| flag.long_help("Checkpoint folder, or an id on the hub, of which only headers are fetched")),
    mut_arg("device", |flag| flag.hide(true)),
    mut_arg("offload_folder", |flag| flag.hide(true))
)]
pub struct PlanArgs {
    #[command(flatten)]
    model: ModelWordArgs,

    /// A published model's shape in place of a checkpoint, by its name in --table
    #[arg(long, value_name = "NAME", hide_possible_values = true, help_heading = "Model", conflicts_with_all = ["word", "model"], value_parser = PossibleValuesParser::new(shape_names()))]
    shape: Option<String>,

    /// A table of all shapes
    ///
    /// The table shows what a run of each shape takes, and the least that works.
    #[arg(long, help_heading = "Model", conflicts_with_all = ["word", "model", "shape"])]
    table: bool,

    /// A table of trainings by `prune recover`
    ///
    /// The table has the model, or all shapes, with the memory and files of each training. Other settings are the defaults of `prune recover`, without evaluation. The table shows the memory without a limit, but for layers that
    /// would stay in it, and the least that works.
    #[arg(long, help_heading = "Model", conflicts_with_all = ["prune_method", "nsamples", "eval", "eval_windows", "no_save_model", "max_memory", "hidden_states", "device_map", "inventory"])]
    recover: bool,

    /// A table of the memory that `prune generate` takes
    ///
    /// The table has the model, or all shapes, with dense, compact and 8-bit weights, for a text of --seqlen tokens.
    #[arg(long, help_heading = "Model", conflicts_with_all = ["recover", "prune_method", "nsamples", "eval", "eval_windows", "no_save_model", "hidden_states", "device_map"])]
    generate: bool,

    /// A table for 1, 2, 4 … ranks of a build with MPI, up to this number
    ///
    /// Each rank has a machine like this machine, or like the machine of --inventory, and computes on its CPU. Every rank reads all weights from the shared storage. See docs/clusters.md.
    #[arg(long, value_name = "N", help_heading = "Ranks", conflicts_with_all = ["table", "recover", "generate"], value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,

    /// Bits or bytes per second that a rank sends: 25Gb/s, 2GB/s
    #[arg(
        long,
        value_name = "RATE",
        help_heading = "Ranks",
        requires = "ranks",
        default_value = "25Gb/s"
    )]
    network: Rate,

    /// Bits or bytes per second of the storage that all ranks read [default: the disk of the machine]
    #[arg(long, value_name = "RATE", help_heading = "Ranks", requires = "ranks")]
    storage: Option<Rate>,

    /// Share of zeros of the generating model [default: of the checkpoint's folder, else 0.5]
    #[arg(long, value_name = "RATIO", help_heading = "Run", requires = "generate", value_parser = share)]
    sparsity_ratio: Option<f64>,

    /// Rank of the trained factors [default: that of `prune recover`]
    #[arg(hide_short_help = true, long, value_name = "N", help_heading = "Run", requires = "recover", value_parser = clap::value_parser!(u32).range(1..))]
    rank: Option<u32>,

    /// Examples per training step [default: those of `prune recover`]
    #[arg(hide_short_help = true, long, value_name = "N", help_heading = "Run", requires = "recover", value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: Option<u32>,

    /// Method, which decides whether samples are needed
    #[arg(long, value_name = "METHOD", default_value = PRUNE_METHOD, help_heading = "Run",
          value_parser = PossibleValuesParser::new(METHODS.iter().map(|method| method.name())))]
    prune_method: String,

    /// Calibration samples
    #[arg(long, value_name = "N", default_value_t = NSAMPLES, help_heading = "Run", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    nsamples: u32,

    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS", help_heading = "Run")]
    seqlen: Option<usize>,

    /// Models that perplexity is measured of
    #[arg(long, value_name = "SIDE", default_value = "pruned", help_heading = "Run")]
    eval: EvalSides,

    /// Evaluation windows [default: as WikiText-2's test text]
    ///
    /// WikiText-2's test text has 166 windows of 2048 tokens for Llama 2, 141 for Llama 3.
    #[arg(hide_short_help = true, long, value_name = "N", help_heading = "Run", value_parser = clap::value_parser!(u32).range(1..))]
    eval_windows: Option<u32>,

    /// No model is written
    #[arg(hide_short_help = true, long, help_heading = "Run")]
    no_save_model: bool,

    /// A machine described in a file, in place of this one
    ///
    /// Like {"cpu": {"memory": "64GiB", "threads": 16}, "gpus": [{"memory": "24GiB"}]}. "rates" may hold cpu_thread_gflops, gpu_tflops, disk_gb_s and pcie_gb_s for the estimate of time. `--dtype auto` plans f32
    /// products, since a file does not say what the CPU multiplies.
    #[arg(long, value_name = "FILE", help_heading = "Devices")]
    inventory: Option<PathBuf>,

    #[command(flatten)]
    device: DeviceSettings,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

impl PlanArgs {
    fn settings(&self) -> Result<PlanSettings> {
        let mut run = Settings::pruning("");
        let subject = match &self.shape {
            None if (self.recover || self.generate) && self.model.is_missing() => {
                PlanSubject::Table
            }
            _ if self.table => PlanSubject::Table,
            Some(shape) => PlanSubject::Shape(shape.clone()),
            None => PlanSubject::Model,
        };
        run.model = match subject {
            PlanSubject::Model => self.model.settings(EXAMPLE)?,
            _ => self.model.flags.clone(),
        };
        if let Some(sparsity) = &mut run.sparsity {
            sparsity.prune_method = self.prune_method.clone();
        }
        run.calibration =
            Some(CalibrationSettings { nsamples: self.nsamples, ..CalibrationSettings::default() });
        run.seqlen = self.seqlen;
        run.evaluation.eval = self.eval;
        run.evaluation.eval_windows = self.eval_windows.map(u64::from);
        run.output.no_save_model = self.no_save_model;
        run.device = self.device.clone();
        Ok(PlanSettings {
            subject,
            run,
            inventory: self.inventory.clone(),
            rank: self.rank.map(|rank| rank as usize),
            zeros: self.sparsity_ratio,
            batch_size: self.batch_size.map(|size| size as usize),
        })
    }
}

/// Runs the command and prints the plan.
pub fn command(args: &PlanArgs, console: &Console) -> Result<()> {
    let settings = args.settings()?;
    if args.recover {
        let rows = training_table(&settings, console)?;
        return console.record(&rows, &report::training_plan::table(&rows, console.columns()));
    }
    if let Some(ranks) = args.ranks {
        let ranks = usize::from(ranks);
        let asked = RankSettings { ranks, network: args.network, storage: args.storage };
        let rows = rank_table(&settings, &asked, console)?;
        return console.record(&rows, &report::rank_plan::table(&rows, console.columns()));
    }
    if args.generate {
        let rows = generation_table(&settings, console)?;
        return console.record(&rows, &report::generation_plan::table(&rows, console.columns()));
    }
    if settings.subject == PlanSubject::Table {
        let rows = table(&settings)?;
        return console.record(&rows, &report::plan::table(&rows, console.columns()));
    }
    let record = plan(&settings, console)?;
    let mut text = format!(
        "{:<14} {}: {} parameters, {} in {}\n",
        "model",
        record.model,
        match record.parameters as f64 {
            ..1e9 => report::millions(record.parameters),
            many => format!("{:.2} billion", many / 1e9),
        },
        record.weights,
        record.dtype,
    );
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{:<14} {}", "assumes", record.assumed);
    text += &report::plan::text(&record.plan);
    if record.plan.devices.len() > 1 {
        text += "Figures for GPUs are predicted by formula; docs/dev/gpu-results.md says what was measured.\n";
    }
    console.record(&record, &text)
}
