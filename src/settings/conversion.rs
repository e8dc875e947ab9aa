//! Settings that the commands share that store a checkpoint in another form: `prune quantize`, `prune pack`, `prune unpack`.

use std::path::PathBuf;

use clap::Args;

use crate::placement::Budget;

/// Source, result and machine of a command that stores a checkpoint in another form.
#[derive(Debug, Clone, Args)]
pub struct ConversionSettings {
    /// The checkpoint, a folder or an id of the hub.
    #[arg(skip)]
    pub model: PathBuf,

    /// Folder for the result; must not hold another model
    #[arg(long, value_name = "OUT")]
    pub save: PathBuf,

    /// Replace the model files in OUT
    #[arg(long)]
    pub force: bool,

    /// Worker threads [default: SLURM_CPUS_PER_TASK, else the processors this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Memory limit, like 2GiB [default: 80 % of what is available]
    ///
    /// The run is planned to stay below; what cannot fit is refused before it begins. Results do not depend on it.
    #[arg(long, value_name = "SIZE")]
    pub max_memory: Option<Budget>,

    /// The command line.
    #[arg(skip)]
    pub arguments: Vec<String>,
}

impl ConversionSettings {
    /// The limit of `--max-memory`; none without the flag.
    pub fn budget(&self) -> Budget {
        self.max_memory.clone().unwrap_or_default()
    }
}
