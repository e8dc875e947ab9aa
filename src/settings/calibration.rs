//! Settings of the calibration samples, or of the text of a training.

use clap::Args;
use serde::Serialize;

use super::deciding::text_not_deciding;
use super::defaults::{DATASET, NSAMPLES};
use crate::data::DatasetSpec;

/// Calibration flags.
#[derive(Debug, Clone, Args, Serialize)]
#[command(next_help_heading = "Calibration")]
pub struct CalibrationSettings {
    /// Calibration text
    ///
    /// NAME, NAME:PATH or a path. `wikitext2:PATH` (raw text, parquet, or a folder holding the train split; rows joined with a space), `c4:SHARD.json.gz`
    /// (documents longer than a sample), `ptb:PATH` (sentences joined with a space), or a path: plain text as it stands, or documents (.jsonl, .json,
    /// .gz, .parquet, .arrow, or a data set's folder). Conversations go through the model's chat template. `wikitext2` and `c4` alone are
    /// downloaded from the hub, and so is a file of any data set, `hub:OWNER/NAME:FILE`; `demo` is a text inside the program.
    #[arg(long, value_name = "TEXT", default_value = DATASET)]
    #[serde(serialize_with = "text_not_deciding")]
    pub dataset: DatasetSpec,

    /// Calibration samples
    #[arg(long, value_name = "N", default_value_t = NSAMPLES, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub nsamples: u32,

    /// Seed of the sampling; the same seed picks the reference's samples
    #[arg(hide_short_help = true, long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
}

impl Default for CalibrationSettings {
    fn default() -> Self {
        super::defaults::without_flags()
    }
}
