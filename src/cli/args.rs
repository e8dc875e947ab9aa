//! Groups of flags that several commands share.

use std::path::PathBuf;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use crate::checkpoint::VerifyLevel;
use crate::data::DatasetSpec;
use crate::eval::Side;
use crate::pipeline::{LayerRatios, Selection};
use crate::pruning::{METHODS, Pattern};

/// What is read.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Checkpoint folder in Hugging Face layout
    ///
    /// A folder with config.json, model.safetensors (or model.safetensors.index.json and its shards) and tokenizer.json.
    /// Weights may be f32, f16 or bf16.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// Arithmetic of the forward pass
    ///
    /// Never changes the dtype of the output, which is the source's. `auto` is f32 on the CPU.
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub dtype: ComputeDtype,
}

/// The dtypes the forward pass can be computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ComputeDtype {
    /// f32 on the CPU
    Auto,
    /// Single precision
    F32,
}

/// Where it runs.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Devices")]
pub struct DeviceArgs {
    /// Compute on the CPU
    ///
    /// The only device of this build; accepted so that scripts can say it.
    #[arg(long)]
    pub use_cpu: bool,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    ///
    /// Results do not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Where hidden states rest between layers
    ///
    /// `auto` takes RAM where all of them fit into 80 % of the available memory beside the rest, else the disk, and says so.
    /// Results do not depend on it.
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub hidden_states: HiddenStatesArg,

    /// Folder for hidden states on disk [default: the run folder, else the system's temporary folder]
    #[arg(long, value_name = "DIR")]
    pub offload_folder: Option<PathBuf>,
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

/// What perplexity is measured on.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Evaluation")]
pub struct EvaluationArgs {
    /// Evaluation text: NAME:PATH or a path
    ///
    /// `wikitext2:PATH` (raw text, parquet, or a folder holding the test split; rows joined with two newlines), `c4:SHARD.json.gz`
    /// (the first 1100 documents), `demo` (stories inside the program), or a path: plain text as it stands, .jsonl, .gz or
    /// .parquet of documents.
    #[arg(long, value_name = "NAME[:PATH]", default_value = "wikitext2")]
    pub eval_dataset: DatasetSpec,

    /// Only the first N windows, for a quick look
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub eval_windows: Option<u64>,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(long, value_name = "DIR")]
    pub text_cache: Option<PathBuf>,
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
    /// Calibration text: NAME:PATH or a path
    ///
    /// `wikitext2:PATH` (raw text, parquet, or a folder holding the train split; rows joined with a space), `c4:SHARD.json.gz`
    /// (documents longer than a sample), `demo` (stories inside the program), or a path: plain text as it stands, .jsonl, .gz
    /// or .parquet of documents.
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

    /// Replace a finished run and its model files
    #[arg(long)]
    pub(super) force: bool,

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
