//! Groups of flags that several commands share, and the settings they mean.

use std::fmt::Display;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::de::DeserializeOwned;

use crate::data::DatasetSpec;
use crate::failure::Failure;
use crate::placement::Budget;
use crate::run::verification::VerifyLevel;
use crate::run::{HiddenStatesStorage, MemorySettings};
use crate::runtime::Simulation;
use crate::settings::{
    CalibrationSettings, DATASET, DeviceChoice, DeviceMapChoice, DeviceSettings, EvalSides,
    EvaluationSettings, NSAMPLES, OutputSettings,
};

/// Device and memory flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Devices")]
pub struct DeviceArgs {
    /// Compute on the CPU alone; no GPU is touched
    #[arg(long)]
    pub(super) use_cpu: bool,

    /// Device that computes: `auto`, `cpu`, or in a build with CUDA `cuda` or `cuda:N`
    ///
    /// `auto` uses all GPUs there are where the build has CUDA, and the CPU else.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(super) device: DeviceChoice,

    /// Placement of layers on GPUs: auto, balanced, sequential, or a JSON file of modules and devices
    ///
    /// `auto` lets all GPUs share the samples of every layer; `balanced` gives each an equal run of layers; `sequential` fills one
    /// after the other. `prune plan --json` prints a map that can be edited.
    #[arg(long, value_name = "MAP", default_value = "auto")]
    pub(super) device_map: DeviceMapChoice,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    ///
    /// Results do not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,

    /// Memory limits, like cuda:0=10GiB,cpu=24GiB [default: 80 % of what is available; of a GPU, less a reserve]
    ///
    /// An amount without a device, like 8GB, is the CPU's. A GPU's context counts as part of its budget. GiB and MiB are powers of 1024, GB and MB of 1000. Available is the smaller of what the system has left and what the
    /// control group (of a batch job, a container) allows. The run is planned to stay below; what cannot fit is refused before it
    /// begins. Results do not depend on it.
    #[arg(long, value_name = "DEVICE=SIZE")]
    pub(super) max_memory: Option<Budget>,

    /// Place of hidden states between layers
    ///
    /// `auto` leaves it to the plan: RAM where they fit beside the rest, else the disk, and says so. Results do not depend on it.
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub(super) hidden_states: HiddenStatesArg,

    /// Folder for hidden states on disk [default: the run folder, else the system's temporary folder]
    #[arg(long, value_name = "DIR")]
    pub(super) offload_folder: Option<PathBuf>,

    /// Settings that trade memory for time, as JSON; for tests
    #[arg(long, alias = "knobs", value_name = "JSON", hide = true, value_parser = from_json::<MemorySettings>)]
    pub(super) memory_settings: Option<MemorySettings>,

    /// Simulated GPUs, as JSON; for tests
    #[arg(long, value_name = "JSON", hide = true, value_parser = from_json::<Simulation>)]
    pub(super) simulate: Option<Simulation>,
}

/// A value of a flag as JSON.
pub(super) fn from_json<T: DeserializeOwned>(
    json: &str,
) -> std::result::Result<T, serde_json::Error> {
    serde_json::from_str(json)
}

/// The values of a list with commas.
///
/// # Arguments
/// * `flag`: the name of the flag, for errors
/// * `example`: a list to type, for errors
///
/// # Errors
/// Fails for an empty list, an empty value and a value that occurs twice, and as `parse`.
pub(super) fn from_list<T: PartialEq + Display>(
    flag: &str,
    example: &str,
    list: &str,
    parse: impl Fn(&str) -> std::result::Result<T, Failure>,
) -> Result<Vec<T>> {
    let mut values: Vec<T> = Vec::new();
    let texts: Vec<&str> = list.split(',').map(str::trim).collect();
    for (at, text) in texts.iter().enumerate() {
        if text.is_empty() {
            let message = match texts.len() {
                1 => format!("{flag} is empty"),
                of => format!("value {} of {of} of {flag} {list} is empty", at + 1),
            };
            return Err(Failure::usage(message)
                .hint(format!("write values separated by commas, like {flag} {example}"))
                .into());
        }
        let value = parse(text)?;
        if let Some(first) = values.iter().position(|other| *other == value) {
            let mut others = texts.clone();
            others.remove(at);
            return Err(Failure::usage(format!(
                "{flag} {list} has {value} twice, as values {} and {}",
                first + 1,
                at + 1
            ))
            .hint(format!("use {flag} {}", others.join(",")))
            .into());
        }
        values.push(value);
    }
    Ok(values)
}

impl DeviceArgs {
    pub(super) fn settings(&self) -> DeviceSettings {
        DeviceSettings {
            use_cpu: self.use_cpu,
            device: self.device.clone(),
            device_map: self.device_map.clone(),
            threads: self.threads,
            max_memory: self.max_memory.clone().unwrap_or_default(),
            hidden_states: self.hidden_states.storage(),
            offload_folder: self.offload_folder.clone(),
            memory_settings: self.memory_settings.clone(),
            simulate: self.simulate.clone(),
        }
    }
}

/// Places of hidden states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HiddenStatesArg {
    /// The GPUs that compute where they fit, else RAM, else disk
    Auto,
    /// Memory
    Ram,
    /// A spill file in the offload folder
    Disk,
}

impl HiddenStatesArg {
    /// The place; `None` leaves the choice to the plan.
    pub(super) fn storage(self) -> Option<HiddenStatesStorage> {
        match self {
            Self::Auto => None,
            Self::Ram => Some(HiddenStatesStorage::Ram),
            Self::Disk => Some(HiddenStatesStorage::Disk),
        }
    }
}

/// Evaluation flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Evaluation")]
pub struct EvaluationArgs {
    /// Evaluation text: NAME, NAME:PATH or a path
    ///
    /// `wikitext2:PATH` (raw text, parquet, or a folder holding the test split; rows joined with two newlines), `c4:SHARD.json.gz`
    /// (the first 1100 documents), `ptb:PATH` (sentences joined with a space), or a path: plain text as it stands, .jsonl, .gz or
    /// .parquet of documents. `wikitext2` and `c4` alone are downloaded from the hub; `demo` is a text inside the program.
    #[arg(long, value_name = "NAME[:PATH]", default_value = DATASET)]
    pub(super) eval_dataset: DatasetSpec,

    /// Only the first N windows, for a quick look
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) eval_windows: Option<u64>,

    /// Gate: exit with code 4 where the perplexity is above X, or not a number
    ///
    /// Of the pruned model where one is made. Everything is written and printed all the same.
    #[arg(long, value_name = "X", value_parser = perplexity_limit)]
    pub(super) max_perplexity: Option<f64>,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(long, value_name = "DIR")]
    pub(super) text_cache: Option<PathBuf>,
}

impl EvaluationArgs {
    pub(super) fn settings(&self, eval: EvalSides) -> EvaluationSettings {
        EvaluationSettings {
            eval,
            eval_dataset: self.eval_dataset.clone(),
            eval_windows: self.eval_windows,
            max_perplexity: self.max_perplexity,
            text_cache: self.text_cache.clone(),
        }
    }
}

/// Message flags.
#[derive(Debug, Clone, Copy, Default, Args)]
#[command(next_help_heading = "Messages")]
pub struct MessageArgs {
    /// Print the result as one JSON object, that of run.json, in place of the table
    #[arg(long)]
    pub json: bool,

    /// Form of progress, on standard error
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

/// Forms of progress.
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

/// Calibration flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Calibration")]
pub(super) struct CalibrationArgs {
    /// Calibration text: NAME, NAME:PATH or a path
    ///
    /// `wikitext2:PATH` (raw text, parquet, or a folder holding the train split; rows joined with a space), `c4:SHARD.json.gz`
    /// (documents longer than a sample), `ptb:PATH` (sentences joined with a space), or a path: plain text as it stands, .jsonl,
    /// .gz or .parquet of documents. `wikitext2` and `c4` alone are downloaded from the hub; `demo` is a text inside the program.
    #[arg(long, value_name = "NAME[:PATH]", default_value = DATASET)]
    dataset: DatasetSpec,

    /// Calibration samples
    #[arg(long, value_name = "N", default_value_t = NSAMPLES, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    nsamples: u32,

    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(long, value_name = "TOKENS")]
    pub(super) seqlen: Option<usize>,

    /// Seed of the sampling; the same seed picks the reference's samples [default: 0]
    #[arg(long, value_name = "SEED")]
    pub(super) seed: Option<u64>,
}

impl CalibrationArgs {
    pub(super) fn settings(&self) -> CalibrationSettings {
        CalibrationSettings {
            dataset: self.dataset.clone(),
            nsamples: self.nsamples,
            seed: self.seed.unwrap_or(0),
        }
    }
}

/// Output flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Run folder: model/, run.json, log_METHOD.txt. Without it and --save-model nothing is written
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,

    /// Folder for the pruned checkpoint [default: SAVE/model]
    #[arg(long, value_name = "DIR", conflicts_with = "no_save_model")]
    pub(super) save_model: Option<PathBuf>,

    /// Write the report only, no checkpoint
    #[arg(long)]
    no_save_model: bool,

    /// Write no README.md for the hub into the model's folder
    ///
    /// Without this flag the card names the source, its licence, the method, the calibration and the perplexities, and the
    /// source's own README.md is kept as README.source.md; docs/publishing.md shows it. pruning.json is written in any case.
    #[arg(long)]
    no_model_card: bool,

    /// Also write which weights were pruned: SAVE/masks.safetensors
    ///
    /// One uint8 tensor of packed bits per pruned matrix, 1 = pruned; docs/inspect.md shows how to unpack them. A 16th of the
    /// size of a 16-bit model.
    #[arg(long)]
    save_masks: bool,

    /// Replace a finished run and its model files, or an unfinished one of other settings
    #[arg(long)]
    force: bool,

    /// Only continue an unfinished run; fail if there is none
    ///
    /// The same command without this flag also continues what an interrupted run left in --save: finished layers are checked, the
    /// samples pass through them once more, and the result equals that of an uninterrupted run.
    #[arg(long)]
    pub(super) resume: bool,

    /// Print memory at the original's checkpoints and after each layer, and write SAVE/memory_log.csv
    ///
    /// Memory of this process in GiB; the column names say GB, as the original's do. 01_start, 02_model_loaded (headers read, texts
    /// tokenized), 03_before_pruning, layer_0 and so on, 04_after_pruning, 05_before_eval and 06_after_eval (the head; the rest
    /// of the evaluation happened layer by layer), 07_before_save_model and 08_after_save_model (finishing and reading back the
    /// files), 09_end.
    #[arg(long)]
    log_memory: bool,

    /// Also print where the time went, and its share of what this CPU can do
    ///
    /// Seconds, GFLOP/s and share of the peak of each part: read, pack, qkv, attention, o, mlp, statistics, score and select, output
    /// error, write, head. The time of write is what the run waits for the disk. The peak is measured first, which takes a second. Times without
    /// the peak are in every run.json.
    #[arg(long)]
    profile: bool,

    /// Checks after saving: hashes, zeros and N:M groups, or also every kept weight with the source
    #[arg(long, value_name = "LEVEL", default_value = "quick")]
    verify: VerifyLevel,
}

impl OutputArgs {
    pub(super) fn settings(&self) -> OutputSettings {
        OutputSettings {
            save: self.save.clone(),
            save_model: self.save_model.clone(),
            no_save_model: self.no_save_model,
            no_model_card: self.no_model_card,
            save_masks: self.save_masks,
            force: self.force,
            resume: self.resume,
            log_memory: self.log_memory,
            profile: self.profile,
            verify: self.verify,
        }
    }
}
