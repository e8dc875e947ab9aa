//! Groups of flags that several commands share.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

#[cfg(feature = "cuda")]
use crate::bytes::ByteSize;
use crate::checkpoint::VerifyLevel;
use crate::data::DatasetSpec;
use crate::failure::Failure;
use crate::pipeline::{LayerRatios, Selection};
use crate::placement::device_map::Prefixes;
use crate::placement::inventory::Gpu;
use crate::placement::{Budget, DeviceMap, Inventory, Policy};
use crate::pruning::{METHODS, Pattern};
use crate::run::HiddenStatesStorage;
use crate::run::MemorySettings;
use crate::runtime::{Side, Simulation};

/// What is read.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Checkpoint folder in Hugging Face layout, or an id on the hub
    ///
    /// A folder with config.json, model.safetensors (or model.safetensors.index.json and its shards) and tokenizer.json.
    /// Weights may be f32, f16 or bf16. Where there is no such folder, `owner/name` is downloaded from the hub.
    #[arg(long, value_name = "DIR|ID")]
    pub model: Option<PathBuf>,

    /// Branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REV")]
    pub revision: Option<String>,

    /// Folder of the hub's files [default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub]
    ///
    /// Shared with the Python client: what either has downloaded the other finds.
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,

    /// Arithmetic of the forward pass
    ///
    /// Never changes the dtype of the output, which is the source's. On a CPU with bf16 products (AMD from Zen 4, Intel from
    /// Sapphire Rapids on) `auto` multiplies bf16 weights by activations rounded to bf16, accumulating in f32, which is several
    /// times as fast as f32; masks differ in some near-ties. Everything else is f32: on a CPU with AMX tiles (Intel from Sapphire
    /// Rapids on) by sums of bf16 products, about as exact as f32's own and faster, and with `f32` by one chain of multiply-adds,
    /// which gives the same bits on every CPU that has them fused.
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub dtype: ComputeDtype,
}

/// The dtypes the forward pass can be computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ComputeDtype {
    /// bf16 for bf16 checkpoints where the CPU has it; for all others bf16x3 where it has tiles, else f32
    Auto,
    /// Single precision, the same bits on every CPU with fused multiply-adds
    F32,
    /// Single precision as sums of products of bf16 parts, three of an activation, on AMX tiles
    #[value(name = "bf16x3")]
    Bf16x3,
    /// bf16 products with f32 accumulation, for bf16 checkpoints
    Bf16,
}

/// Where it runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Devices")]
pub struct DeviceArgs {
    /// Compute on the CPU alone; no GPU is touched
    #[arg(long)]
    pub use_cpu: bool,

    /// Where to compute: `auto`, `cpu`, or in a build with CUDA `cuda` or `cuda:N`
    ///
    /// `auto` uses all GPUs there are where the build has CUDA, and the CPU else.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceArg,

    /// Which GPU computes which layer: auto, balanced, sequential, or a JSON file of modules and devices
    ///
    /// `auto` lets all GPUs share the samples of every layer; `balanced` gives each an equal run of layers; `sequential` fills one
    /// after the other. `prune plan --json` prints a map that can be edited.
    #[arg(long, value_name = "MAP", default_value = "auto")]
    pub device_map: DeviceMapArg,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    ///
    /// Results do not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// How much memory may be used, like cuda:0=10GiB,cpu=24GiB [default: 80 % of what is available; of a GPU, less a reserve]
    ///
    /// A GPU's context counts as part of its budget. GiB and MiB are powers of 1024, GB and MB of 1000. Available is the smaller of what the system has left and what the
    /// control group (of a batch job, a container) allows. The run is planned to stay below; what cannot fit is refused before it
    /// begins. Results do not depend on it.
    #[arg(long, value_name = "DEVICE=SIZE")]
    pub max_memory: Option<Budget>,

    /// Where hidden states rest between layers
    ///
    /// `auto` leaves it to the plan: RAM where they fit beside the rest, else the disk, and says so. Results do not depend on it.
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub hidden_states: HiddenStatesArg,

    /// Folder for hidden states on disk [default: the run folder, else the system's temporary folder]
    #[arg(long, value_name = "DIR")]
    pub offload_folder: Option<PathBuf>,

    /// Settings that trade memory for time, as JSON; for tests
    #[arg(long, alias = "knobs", value_name = "JSON", hide = true, value_parser = memory_settings)]
    pub memory_settings: Option<MemorySettings>,

    /// GPUs that are none, as JSON; for tests
    #[arg(long, value_name = "JSON", hide = true, value_parser = simulation)]
    pub simulate: Option<Simulation>,
}

fn simulation(json: &str) -> std::result::Result<Simulation, serde_json::Error> {
    serde_json::from_str(json)
}

fn memory_settings(json: &str) -> std::result::Result<MemorySettings, serde_json::Error> {
    serde_json::from_str(json)
}

/// A device by name, as given; [`DeviceArgs::check`] says what this build makes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceArg {
    /// The best there is
    Auto,
    /// The CPU
    Cpu,
    /// `cuda` or `cuda:N`
    Cuda(Option<usize>),
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(formatter, "auto"),
            Self::Cpu => write!(formatter, "cpu"),
            Self::Cuda(None) => write!(formatter, "cuda"),
            Self::Cuda(Some(index)) => write!(formatter, "cuda:{index}"),
        }
    }
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            _ => name
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(|index| Self::Cuda(Some(index)))
                .ok_or_else(|| "devices are auto, cpu, cuda and cuda:N".to_string()),
        }
    }
}

impl DeviceArgs {
    /// Refuses devices this build does not have, and flags that contradict each other.
    ///
    /// # Errors
    /// A usage error that names the flags.
    pub fn check(&self) -> Result<()> {
        let device = &self.device;
        match device {
            DeviceArg::Cuda(_) if self.use_cpu => Err(Failure::usage(format!(
                "--use-cpu and --device {device} contradict each other"
            ))
            .hint("leave one of them out")
            .into()),
            DeviceArg::Cuda(_) if !cfg!(feature = "cuda") && self.simulate.is_none() => {
                Err(Failure::usage(format!("--device {device}: this build has no CUDA"))
                    .hint("use --use-cpu, or leave --device out; docs/building.md says how to build with CUDA")
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// What the flags leave to the plan.
    ///
    /// # Errors
    /// Fails when a device map cannot be read.
    pub fn policy(&self) -> Result<Policy> {
        Ok(Policy {
            budget: self.max_memory.clone().unwrap_or_default(),
            map: self.device_map.load()?,
            cpu_only: self.names_the_cpu(),
            only_gpu: match self.device {
                DeviceArg::Cuda(Some(index)) => Some(index),
                _ => None,
            },
            must_use_gpu: matches!(self.device, DeviceArg::Cuda(_)),
            storage: self.hidden_states.storage(),
        })
    }

    /// This machine: what is free of its memory, and its GPUs, if they may be used.
    ///
    /// # Errors
    /// Fails for simulated GPUs whose sizes are none.
    pub fn inventory(&self, threads: usize) -> Result<Inventory> {
        let mut inventory = Inventory::here(threads);
        if let Some(simulation) = &self.simulate {
            for size in &simulation.gpus {
                inventory.gpus.push(Gpu {
                    name: "simulated".to_string(),
                    memory: size.parse()?,
                });
            }
            return Ok(inventory);
        }
        if !self.names_the_cpu() {
            inventory.gpus = gpus();
        }
        Ok(inventory)
    }

    /// Whether all GPUs that may be used compute in bf16; true without any.
    pub fn gpus_have_bf16(&self) -> bool {
        #[cfg(feature = "cuda")]
        if !self.names_the_cpu() && self.simulate.is_none() {
            let gpus = crate::runtime::engine::cuda::gpus();
            return gpus
                .iter()
                .all(|gpu| gpu.has_bf16 || gpu.free == ByteSize::ZERO);
        }
        true
    }

    /// Whether the CPU was asked for, and not only taken because there is nothing else.
    pub fn names_the_cpu(&self) -> bool {
        self.use_cpu || self.device == DeviceArg::Cpu
    }
}

/// The GPUs of this machine, if this build can use any.
#[cfg(feature = "cuda")]
pub(super) fn gpus() -> Vec<Gpu> {
    let as_planned = |gpu: crate::runtime::engine::cuda::FoundGpu| Gpu {
        name: gpu.name,
        // The plan counts a context; this process has made its own already.
        memory: match gpu.free {
            ByteSize::ZERO => ByteSize::ZERO,
            free => free + crate::model::on_device::CONTEXT,
        },
    };
    let found = crate::runtime::engine::cuda::gpus();
    found.into_iter().map(as_planned).collect()
}

/// None: this build cannot use any.
#[cfg(not(feature = "cuda"))]
pub(super) fn gpus() -> Vec<Gpu> {
    Vec::new()
}

/// `--device-map` as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceMapArg {
    /// `auto`, `balanced` or `sequential`.
    Named(DeviceMap),
    /// A JSON file of modules and devices.
    File(PathBuf),
}

impl FromStr for DeviceMapArg {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Named(DeviceMap::Auto),
            "balanced" => Self::Named(DeviceMap::Balanced),
            "sequential" => Self::Named(DeviceMap::Sequential),
            file => Self::File(file.into()),
        })
    }
}

impl DeviceMapArg {
    /// The map, read where it is in a file.
    ///
    /// # Errors
    /// Fails when the file cannot be read or is no such map.
    pub fn load(&self) -> Result<DeviceMap> {
        Ok(match self {
            Self::Named(map) => map.clone(),
            Self::File(file) => DeviceMap::Manual(Prefixes::load(file)?),
        })
    }
}

/// Where hidden states rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HiddenStatesArg {
    /// RAM where they fit, else disk
    Auto,
    /// Memory
    Ram,
    /// A spill file in the offload folder
    Disk,
}

impl HiddenStatesArg {
    /// Returns the chosen storage; `None` leaves the choice to the plan.
    pub fn storage(self) -> Option<HiddenStatesStorage> {
        match self {
            Self::Auto => None,
            Self::Ram => Some(HiddenStatesStorage::Ram),
            Self::Disk => Some(HiddenStatesStorage::Disk),
        }
    }
}

/// What perplexity is measured on.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Evaluation")]
pub struct EvaluationArgs {
    /// Evaluation text: NAME, NAME:PATH or a path
    ///
    /// `wikitext2:PATH` (raw text, parquet, or a folder holding the test split; rows joined with two newlines), `c4:SHARD.json.gz`
    /// (the first 1100 documents), `ptb:PATH` (sentences joined with a space), or a path: plain text as it stands, .jsonl, .gz or
    /// .parquet of documents. `wikitext2` and `c4` alone are downloaded from the hub; `demo` is a text inside the program.
    #[arg(long, value_name = "NAME[:PATH]", default_value = "wikitext2")]
    pub eval_dataset: DatasetSpec,

    /// Only the first N windows, for a quick look
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub eval_windows: Option<u64>,

    /// Gate: exit with code 4 where the perplexity is above X, or not a number
    ///
    /// Of the pruned model where one is made. Everything is written and printed all the same.
    #[arg(long, value_name = "X", value_parser = perplexity_limit)]
    pub max_perplexity: Option<f64>,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(long, value_name = "DIR")]
    pub text_cache: Option<PathBuf>,
}

/// What is told while it works.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Messages")]
pub struct MessageArgs {
    /// Print the result as one JSON object, that of run.json, in place of the table
    #[arg(long)]
    pub json: bool,

    /// How progress is shown, on standard error
    ///
    /// `auto` draws bars on a terminal and writes a plain line now and then elsewhere. `json` writes one JSON object per line for
    /// every event, warnings and errors included.
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub progress: ProgressArg,

    /// Only warnings, errors and the result
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,

    /// Also every matrix, and memory after every layer
    #[arg(short, long)]
    pub verbose: bool,
}

/// How progress is shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum ProgressArg {
    /// Bars on a terminal, else plain lines
    #[default]
    Auto,
    /// Bars
    Bar,
    /// A line every ten seconds
    Plain,
    /// JSON lines
    Json,
}

/// A perplexity is at least 1.
fn perplexity_limit(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(limit) if limit.is_finite() && limit >= 1.0 => Ok(limit),
        _ => Err("a limit is a number of at least 1".to_string()),
    }
}

/// What goes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sparsity")]
pub(super) struct SparsityArgs {
    #[arg(
        long,
        value_name = "METHOD",
        default_value = "wanda",
        value_parser = PossibleValuesParser::new(METHODS.iter().map(|method| method.name())),
        help = methods_help()
    )]
    pub(super) prune_method: String,

    /// Fraction removed, from 0 up to but not including 1
    ///
    /// May be left out with an N:M pattern, where it must equal N/M. 0 prunes nothing: a dense evaluation.
    #[arg(long, value_name = "RATIO", allow_negative_numbers = true)]
    pub(super) sparsity_ratio: Option<f64>,

    /// `unstructured`, or N:M with N pruned of each M neighbours
    #[arg(long, value_name = "TYPE", default_value = "unstructured")]
    pub(super) sparsity_type: Pattern,

    /// Wanda's variant: rows give up an equal share of their score instead of an equal number of weights
    #[arg(long)]
    pub(super) use_variant: bool,

    /// Prune only matrices that match a glob; may be repeated
    ///
    /// Matched against model.layers.0.self_attn.q_proj, self_attn.q_proj and q_proj. What is chosen is printed.
    #[arg(long, value_name = "GLOB")]
    pub(super) include: Vec<String>,

    /// Leave matrices alone that match a glob; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub(super) exclude: Vec<String>,

    /// JSON file with a ratio per layer: [0.5, 0.6, ...], or {"0": 0.3} for some
    #[arg(long, value_name = "FILE")]
    pub(super) layer_ratios: Option<PathBuf>,
}

/// What statistics are computed from.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Calibration")]
pub(super) struct CalibrationArgs {
    /// Calibration text: NAME, NAME:PATH or a path
    ///
    /// `wikitext2:PATH` (raw text, parquet, or a folder holding the train split; rows joined with a space), `c4:SHARD.json.gz`
    /// (documents longer than a sample), `ptb:PATH` (sentences joined with a space), or a path: plain text as it stands, .jsonl,
    /// .gz or .parquet of documents. `wikitext2` and `c4` alone are downloaded from the hub; `demo` is a text inside the program.
    #[arg(long, value_name = "NAME[:PATH]", default_value = "wikitext2")]
    pub(super) dataset: DatasetSpec,

    /// Calibration samples
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) nsamples: u32,

    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS")]
    pub(super) seqlen: Option<usize>,

    /// Seed of the sampling; the same seed picks the reference's samples
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub(super) seed: u64,
}

/// What is left behind.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Run folder: model/, run.json, log_METHOD.txt. Without it and --save-model nothing is written
    #[arg(long, value_name = "DIR")]
    pub(super) save: Option<PathBuf>,

    /// Folder for the pruned checkpoint [default: SAVE/model]
    #[arg(long, value_name = "DIR", conflicts_with = "no_save_model")]
    pub(super) save_model: Option<PathBuf>,

    /// Write the report only, no checkpoint
    #[arg(long)]
    pub(super) no_save_model: bool,

    /// Also write which weights were pruned: SAVE/masks.safetensors
    ///
    /// One uint8 tensor of packed bits per pruned matrix, 1 = pruned; docs/inspect.md shows how to unpack them. A 16th of the
    /// size of a 16-bit model.
    #[arg(long)]
    pub(super) save_masks: bool,

    /// Replace a finished run and its model files, or an unfinished one of other settings
    #[arg(long)]
    pub(super) force: bool,

    /// Only go on with an unfinished run; fail where there is none
    ///
    /// The same command goes on by itself with what an interrupted run left in --save: finished layers are checked, the samples
    /// pass through them once more, and the outcome is that of a run that was never interrupted.
    #[arg(long)]
    pub(super) resume: bool,

    /// Tell memory at the original's checkpoints and after each layer, and write SAVE/memory_log.csv
    ///
    /// Of this process, in GiB, although the columns say GB as the original's. 01_start, 02_model_loaded (headers read, texts
    /// tokenised), 03_before_pruning, layer_0 and so on, 04_after_pruning, 05_before_eval and 06_after_eval (the head; the rest
    /// of the evaluation happened layer by layer), 07_before_save_model and 08_after_save_model (finishing and reading back the
    /// files), 09_end.
    #[arg(long)]
    pub(super) log_memory: bool,

    /// Also print where the time went, and its share of what this CPU can do
    ///
    /// Seconds, GFLOP/s and share of the peak of each part: read, pack, qkv, attention, o, mlp, statistics, score, select, output
    /// error, write, head. Of writing it is what the run waits for. The peak is measured first, which takes a second. Times without
    /// the peak are in every run.json.
    #[arg(long)]
    pub(super) profile: bool,

    /// What is compared after saving: hashes, zeros and N:M groups, or also every kept weight with the source
    #[arg(long, value_name = "LEVEL", default_value = "quick")]
    pub(super) verify: Verify,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum EvalSides {
    /// The pruned model
    Pruned,
    /// The dense and the pruned model, in one sweep
    Both,
    /// Nothing; needs no evaluation text
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Verify {
    /// Hashes, zeros, N:M groups
    Quick,
    /// Also every kept weight against the source
    Full,
}

/// The table of methods, for the help text.
fn methods_help() -> String {
    let methods: Vec<String> = METHODS
        .iter()
        .map(|method| format!("{} ({})", method.name(), method.summary()))
        .collect();
    format!("How weights are chosen: {}", methods.join(" or "))
}

impl SparsityArgs {
    pub(super) fn selection(&self) -> Result<Selection> {
        Ok(Selection {
            sparsity_ratio: self.sparsity_ratio,
            pattern: Some(self.sparsity_type),
            use_variant: self.use_variant,
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            layer_ratios: self
                .layer_ratios
                .as_deref()
                .map(LayerRatios::load)
                .transpose()?,
        })
    }
}

impl EvalSides {
    pub(super) fn sides(self) -> &'static [Side] {
        match self {
            Self::Pruned => &[Side::Pruned],
            Self::Both => &[Side::Dense, Side::Pruned],
            Self::None => &[],
        }
    }
}

impl Verify {
    pub(super) fn level(self) -> VerifyLevel {
        match self {
            Self::Quick => VerifyLevel::Quick,
            Self::Full => VerifyLevel::Full,
        }
    }
}
