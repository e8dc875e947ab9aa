//! `prune plan`: what a run would take and how long, without running it and without reading a weight.

use std::path::PathBuf;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args};
use serde::Serialize;
use serde_json::Value;

use super::args::{ComputeDtype, DeviceMapArg, EvalSides, HiddenStatesArg, MessageArgs};
use super::console::Console;
use super::session;
use super::{located, planned};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype};
use crate::model::shapes::{self, SHAPES, Shape};
use crate::model::{Dtypes, ModelConfig, footprint};
use crate::pipeline::RunShape;
use crate::placement::device_map;
use crate::placement::inventory::Cpu;
use crate::placement::{Budget, Device, Inventory, Policy, planner};
use crate::pruning::{METHODS, Needs, method};
use crate::report;
use crate::report::plan::TableRow;
use crate::run::Plan;

/// Shown below the flags.
pub(super) const EXAMPLES: &str = "\
Examples:
  prune plan --model models/llama-2-7b
  prune plan --shape llama-3.2-1b --max-memory cpu=2GiB
  prune plan --shape llama-2-70b --inventory two-a100.json
  prune plan --table";

/// Tokens of WikiText-2's test text with the tokenizers of Llama 2 and, for vocabularies above 64 000, Llama 3. Counted.
const TEST_TOKENS: [usize; 2] = [341_469, 289_077];

/// Flags of `prune plan`.
#[derive(Debug, Clone, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["model", "shape", "table"])))]
pub struct PlanArgs {
    /// Checkpoint folder, or an id on the hub, of which only headers are fetched
    #[arg(long, value_name = "DIR|ID", help_heading = "Model")]
    model: Option<PathBuf>,

    /// Branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REV", help_heading = "Model")]
    revision: Option<String>,

    /// Folder of the hub's files [default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub]
    #[arg(long, value_name = "DIR", help_heading = "Model")]
    cache_dir: Option<PathBuf>,

    /// A published model's shape in place of a checkpoint
    #[arg(long, value_name = "NAME", help_heading = "Model", value_parser = PossibleValuesParser::new(SHAPES.iter().map(|shape| shape.name)))]
    shape: Option<String>,

    /// A table of all shapes: what they take, and the least that works
    #[arg(long, help_heading = "Model")]
    table: bool,

    /// The method, which decides whether calibration samples are needed
    #[arg(long, value_name = "METHOD", default_value = "wanda", help_heading = "Run",
          value_parser = PossibleValuesParser::new(METHODS.iter().map(|method| method.name())))]
    prune_method: String,

    /// Calibration samples
    #[arg(long, value_name = "N", default_value_t = 128, help_heading = "Run", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    nsamples: u32,

    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS", help_heading = "Run")]
    seqlen: Option<usize>,

    /// What perplexity is measured of
    #[arg(
        long,
        value_name = "SIDE",
        default_value = "pruned",
        help_heading = "Run"
    )]
    eval: EvalSides,

    /// Evaluation windows [default: those of WikiText-2's test text, 166 of 2048 tokens for Llama 2, 141 for Llama 3]
    #[arg(long, value_name = "N", help_heading = "Run", value_parser = clap::value_parser!(u32).range(1..))]
    eval_windows: Option<u32>,

    /// Arithmetic of the forward pass, as of a run
    ///
    /// With --inventory `auto` plans f32 products, since a file does not say what the CPU multiplies.
    #[arg(
        long,
        value_name = "DTYPE",
        default_value = "auto",
        help_heading = "Run"
    )]
    dtype: ComputeDtype,

    /// No model is written
    #[arg(long, help_heading = "Run")]
    no_save_model: bool,

    /// A machine described in a file, in place of this one: {"cpu": {"memory": "64GiB", "threads": 16}, "gpus": [{"memory": "24GiB"}]}
    ///
    /// "rates" may hold cpu_thread_gflops, gpu_tflops, disk_gb_s and pcie_gb_s for the estimate of time.
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    inventory: Option<PathBuf>,

    /// How much memory may be used, like cuda:0=10GiB,cpu=24GiB [default: 80 % of the CPU's, a GPU's less a reserve]
    #[arg(long, value_name = "DEVICE=SIZE,…", help_heading = "Machine")]
    max_memory: Option<Budget>,

    /// Which GPU computes which layer: auto, balanced, sequential, or a JSON file of modules and devices
    ///
    /// `auto` lets all GPUs share the samples of every layer; `balanced` gives each an equal run of layers; `sequential` fills one
    /// after the other.
    #[arg(
        long,
        value_name = "MAP",
        default_value = "auto",
        help_heading = "Machine"
    )]
    device_map: DeviceMapArg,

    /// Use no GPU
    #[arg(long, help_heading = "Machine")]
    use_cpu: bool,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    #[arg(long, value_name = "N", help_heading = "Machine", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Where hidden states rest between layers
    #[arg(
        long,
        value_name = "WHERE",
        default_value = "auto",
        help_heading = "Machine"
    )]
    hidden_states: HiddenStatesArg,

    #[command(flatten)]
    pub(super) messages: MessageArgs,
}

/// A model to plan for.
struct Subject {
    name: String,
    config: ModelConfig,
    dtypes: Dtypes,
}

/// The object of `--json`.
#[derive(Serialize)]
struct Record<'a> {
    model: &'a str,
    parameters: u64,
    inventory: &'a Inventory,
    #[serde(flatten)]
    plan: &'a Plan,
    /// As accelerate reads it, and `--device-map`.
    device_map: Value,
}

/// Runs the command and prints the plan.
///
/// # Errors
/// Fails for a model that cannot be read, a machine or a map that is none, and where the run does not fit.
pub fn command(args: &PlanArgs, console: &Console) -> Result<()> {
    let inventory = match &args.inventory {
        Some(file) => Inventory::load(file)?,
        None => {
            let mut here = Inventory::here(session::threads(args.threads));
            if !args.use_cpu {
                here.gpus = super::args::gpus();
            }
            here
        }
    };
    if args.table {
        let rows = table(args, &inventory)?;
        return console.record(&rows, &report::plan::table(&rows));
    }
    let subject = args.subject(console)?;
    let job = args.job(&subject, inventory.cpu.threads)?;
    let plan = planned::plan(&job, &inventory, &args.policy()?)?;
    let parameters = footprint::parameters(&subject.config);
    let record = Record {
        model: &subject.name,
        parameters,
        inventory: &inventory,
        plan: &plan,
        device_map: device_map::to_json(&first_devices(&plan)),
    };
    let head = format!(
        "{:<14} {}: {:.2} billion parameters, {} in {}\n",
        "model",
        subject.name,
        parameters as f64 / 1e9,
        ByteSize(parameters.saturating_mul(subject.dtypes.layers.bytes() as u64)),
        subject.dtypes.layers.name(),
    );
    let mut text = head + &report::plan::text(&plan);
    if plan.devices.len() > 1 {
        text += "Figures for GPUs are predicted by formula; docs/gpu-results.md says what was measured.\n";
    }
    console.record(&record, &text)
}

impl PlanArgs {
    fn subject(&self, console: &Console) -> Result<Subject> {
        if let Some(shape) = self.shape.as_deref().and_then(shapes::shape) {
            return Subject::of(shape);
        }
        let model = self
            .model
            .as_deref()
            .unwrap_or_else(|| std::path::Path::new(""));
        let (config, dtypes) = located::headers(
            model,
            self.revision.as_deref(),
            self.cache_dir.as_deref(),
            !self.eval.sides().is_empty(),
            console,
        )?;
        Ok(Subject {
            name: model.display().to_string(),
            config,
            dtypes,
        })
    }

    fn job<'a>(&self, subject: &'a Subject, threads: usize) -> Result<RunShape<'a>> {
        let config = &subject.config;
        let seqlen = session::check_seqlen(self.seqlen, config)?;
        let sides = self.eval.sides();
        let text = TEST_TOKENS[usize::from(config.vocab_size > 64_000)];
        let windows = self
            .eval_windows
            .map_or(text / seqlen, |windows| windows as usize)
            .max(1);
        let calibrates =
            method(&self.prune_method).is_some_and(|method| method.needs() != Needs::Nothing);
        Ok(RunShape {
            config,
            dtypes: subject.dtypes,
            gpu_dtype: subject.dtypes.layers,
            seqlen,
            samples: if calibrates {
                self.nsamples as usize
            } else {
                0
            },
            windows: if !sides.is_empty() { windows } else { 0 },
            sides,
            prunes: true,
            saves: !self.no_save_model,
            threads,
            products: self.products(subject.dtypes.layers)?,
            tokenising: ByteSize::ZERO,
            settings: None,
        })
    }

    /// How products would be computed on the CPU of the machine.
    fn products(&self, stored: StoredDtype) -> Result<Products> {
        match (self.dtype, stored, &self.inventory) {
            (ComputeDtype::Auto, _, Some(_)) => Ok(Products::F32),
            (ComputeDtype::Bf16x3, _, Some(_)) => Ok(Products::Split),
            (ComputeDtype::Bf16, StoredDtype::Bf16, Some(_)) => {
                Ok(Products::Bf16(Kernel::best_bf16().unwrap_or(Kernel::Amx)))
            }
            _ => session::products(self.dtype, stored),
        }
    }

    fn policy(&self) -> Result<Policy> {
        Ok(Policy {
            budget: self.max_memory.clone().unwrap_or_default(),
            map: self.device_map.load()?,
            cpu_only: self.use_cpu,
            only_gpu: None,
            must_use_gpu: false,
            storage: self.hidden_states.storage(),
        })
    }
}

impl Subject {
    fn of(shape: &Shape) -> Result<Self> {
        Ok(Self {
            name: shape.name.to_string(),
            config: shape.config()?,
            dtypes: Dtypes::all(shape.dtype),
        })
    }
}

/// One device per layer, the first where several share the samples: accelerate's maps know no sharing.
fn first_devices(plan: &Plan) -> Vec<Device> {
    let mut devices = Vec::new();
    for layers in &plan.layers {
        let name = layers.devices.first().map_or("cpu", String::as_str);
        let index = name
            .strip_prefix("cuda:")
            .and_then(|index| index.parse().ok());
        let device = index.map_or(Device::Cpu, Device::Cuda);
        devices.extend(std::iter::repeat_n(device, layers.last + 1 - layers.first));
    }
    devices
}

/// Every shape with the settings of the flags: what it takes when nothing is short, and the least that works.
fn table(args: &PlanArgs, inventory: &Inventory) -> Result<Vec<TableRow>> {
    let mut rows = Vec::new();
    for shape in &SHAPES {
        let subject = Subject::of(shape)?;
        let job = args.job(&subject, inventory.cpu.threads)?;
        let parameters = footprint::parameters(&subject.config);
        let unlimited = Inventory {
            cpu: Cpu {
                memory: None,
                ..inventory.cpu.clone()
            },
            gpus: Vec::new(),
            ..inventory.clone()
        };
        let plan = planner::plan(&job, &unlimited, &Policy::default())
            .map_err(|_| Failure::new("a plan without limits does not fit"))?;
        let least = planner::least_that_works(&job);
        rows.push(TableRow {
            model: subject.name,
            parameters,
            weights: ByteSize(parameters * subject.dtypes.layers.bytes() as u64),
            hidden_states: plan.hidden_states.bytes,
            peak: plan.cpu().map(|cpu| cpu.peak).unwrap_or_default(),
            smallest_ram: least.cpu,
            smallest_gpu: least.gpu,
            ram_beside_it: least.with_gpu,
            seconds: plan.time.seconds,
        });
    }
    Ok(rows)
}
