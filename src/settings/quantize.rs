//! Settings of `prune quantize`.

use std::path::PathBuf;

use clap::Args;

use crate::placement::Budget;
use crate::quantized::FourBitFormat;

/// Settings of `prune quantize`.
#[derive(Debug, Clone, Args)]
pub struct QuantizeSettings {
    /// The checkpoint, a folder or an id of the hub.
    #[arg(skip)]
    pub model: PathBuf,

    /// Format of the decoder linears
    ///
    /// `nf4` has f32 scales, 4.5 bits per weight; `nf4-double` has 8-bit scales, 4.13 bits per weight. Embedding, head, norms and biases
    /// stay as they are. Pruned weights stay exactly 0.
    #[arg(long, value_name = "FORMAT")]
    pub to: FourBitFormat,

    /// Folder for the quantised checkpoint; must not hold another model
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

impl QuantizeSettings {
    /// The limit of `--max-memory`; none without the flag.
    pub fn budget(&self) -> Budget {
        self.max_memory.clone().unwrap_or_default()
    }
}
