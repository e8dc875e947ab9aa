//! Settings of the files that a run writes.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::deciding::not_deciding;

use crate::run::verification::VerifyLevel;

/// Output flags.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[command(next_help_heading = "Output")]
pub struct OutputSettings {
    /// Run folder: model/, run.json, log_METHOD.txt
    ///
    /// Without it and --save-model nothing is written.
    #[arg(long, value_name = "DIR")]
    #[serde(serialize_with = "not_deciding")]
    pub save: Option<PathBuf>,

    /// Folder for the pruned checkpoint [default: SAVE/model]
    #[arg(hide_short_help = true, long, value_name = "DIR", conflicts_with = "no_save_model")]
    #[serde(serialize_with = "not_deciding")]
    pub save_model: Option<PathBuf>,

    /// Write the report only, no checkpoint
    #[arg(hide_short_help = true, long)]
    pub no_save_model: bool,

    /// Write no README.md for the hub into the model's folder
    ///
    /// Without this flag the card names the source, its licence, the method, the calibration and the perplexities, and the
    /// source's own README.md is kept as README.source.md; docs/publishing.md shows it. pruning.json is written in any case.
    #[arg(hide_short_help = true, long)]
    #[serde(serialize_with = "not_deciding")]
    pub no_model_card: bool,

    /// Also write which weights were pruned: SAVE/masks.safetensors
    ///
    /// One uint8 tensor of packed bits per pruned matrix, 1 = pruned; docs/inspect.md shows how to unpack them. A 16th of the
    /// size of a 16-bit model.
    #[arg(hide_short_help = true, long)]
    pub save_masks: bool,

    /// Replace a finished run and its model files
    ///
    /// Also replaces an unfinished run of other settings.
    #[arg(long)]
    #[serde(serialize_with = "not_deciding")]
    pub force: bool,

    /// Only continue an unfinished run; fail if there is none
    ///
    /// The same command without this flag also continues what an interrupted run left in --save: finished layers are checked, the
    /// samples pass through them once more, and the result equals that of an uninterrupted run.
    #[arg(hide_short_help = true, long)]
    #[serde(serialize_with = "not_deciding")]
    pub resume: bool,

    /// Print memory at the original's checkpoints and after each layer, and write SAVE/memory_log.csv
    ///
    /// Memory of this process in GiB; the column names say GB, as the original's do. 01_start, 02_model_loaded (headers read, texts
    /// tokenized), 03_before_pruning, layer_0 and so on, 04_after_pruning, 05_before_eval and 06_after_eval (the head; the rest
    /// of the evaluation happened layer by layer), 07_before_save_model and 08_after_save_model (finishing and reading back the
    /// files), 09_end.
    #[arg(hide_short_help = true, long)]
    #[serde(serialize_with = "not_deciding")]
    pub log_memory: bool,

    /// Also print where the time went, and its share of what this CPU can do
    ///
    /// Seconds, GFLOP/s and share of the peak of each part: read, pack, qkv, attention, o, mlp, statistics, score and select, output
    /// error, write, head. The time of write is what the run waits for the disk. The peak is measured first, which takes a second. Times without
    /// the peak are in every run.json.
    #[arg(hide_short_help = true, long)]
    #[serde(serialize_with = "not_deciding")]
    pub profile: bool,

    /// Checks after saving: hashes, zeros and N:M groups, or also every kept weight with the source
    #[arg(hide_short_help = true, long, value_name = "LEVEL", default_value = "quick")]
    #[serde(serialize_with = "not_deciding")]
    pub verify: VerifyLevel,
}
