//! Settings of `prune quantize`.

use std::path::PathBuf;

use crate::placement::Budget;
use crate::quantized::FourBitFormat;

/// Settings of `prune quantize`.
#[derive(Debug, Clone)]
pub struct QuantizeSettings {
    /// The checkpoint, a folder or an id of the hub.
    pub model: PathBuf,
    /// `--to`.
    pub to: FourBitFormat,
    /// `--save`: the model's folder.
    pub save: PathBuf,
    /// `--force`: replace model files.
    pub force: bool,
    /// `--threads`.
    pub threads: Option<u16>,
    /// `--max-memory`.
    pub max_memory: Budget,
    /// The command line.
    pub arguments: Vec<String>,
}
