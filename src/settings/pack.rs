//! Settings of `prune pack` and `prune unpack`.

use std::path::PathBuf;

use clap::Args;

use crate::packed::PackedValues;
use crate::placement::Budget;

/// Settings of `prune pack`.
#[derive(Debug, Clone, Args)]
pub struct PackSettings {
    /// Stored values of kept weights [default: exact]
    ///
    /// `exact` keeps their bits: unpacking restores every byte. `int8` rounds them to 8 bits, with an f16 scale per row and 128 columns:
    /// half of the size, and another model. Zeros stay 0 in both.
    #[arg(long, value_name = "VALUES", default_value = "exact", hide_default_value = true)]
    pub values: PackedValues,

    /// The settings that `prune unpack` has, too.
    #[command(flatten)]
    pub output: PackOutputSettings,
}

/// Settings of both commands.
#[derive(Debug, Clone, Args)]
pub struct PackOutputSettings {
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

impl PackOutputSettings {
    /// The limit of `--max-memory`; none without the flag.
    pub fn budget(&self) -> Budget {
        self.max_memory.clone().unwrap_or_default()
    }
}
