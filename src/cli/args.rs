//! Groups of flags that several commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::data::DatasetSpec;

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
    /// (the first 1100 documents), or a path: plain text as it stands, .jsonl, .gz or .parquet of documents.
    #[arg(long, value_name = "NAME[:PATH]", default_value = "wikitext2")]
    pub eval_dataset: DatasetSpec,

    /// Only the first N windows, for a quick look
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub eval_windows: Option<u64>,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(long, value_name = "DIR")]
    pub text_cache: Option<PathBuf>,
}
