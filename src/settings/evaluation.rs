//! Settings of the perplexity, of the divergence from the dense model, and of tasks.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::deciding::{not_deciding, text_not_deciding};
use super::defaults::DATASET;
use super::tasks::TaskSettings;
use super::values::{not_negative, perplexity};
use crate::data::DatasetSpec;
use crate::run::divergence::KlPositions;
use crate::run::manifest::{LimitReport, Perplexities};
use crate::run::tasks::TaskResults;
use crate::runtime::Side;

/// Evaluation flags.
#[derive(Debug, Clone, Args, Serialize)]
#[command(next_help_heading = "Evaluation")]
pub struct EvaluationSettings {
    /// The models that perplexity is measured of; commands have their own flag for them.
    #[arg(skip = EvalSides::Pruned)]
    pub eval: EvalSides,

    /// Evaluation text
    ///
    /// NAME, NAME:PATH or a path. `wikitext2:PATH` (raw text, parquet, or a folder holding the test split; rows joined with two newlines), `c4:SHARD.json.gz`
    /// (the first 1100 documents), `ptb:PATH` (sentences joined with a space), or a path: plain text as it stands, or documents (.jsonl, .json, .gz,
    /// .parquet, .arrow, or a data set's folder). Conversations go through the model's chat template. `wikitext2` and `c4` alone are
    /// downloaded from the hub, and so is a file of any data set, `hub:OWNER/NAME:FILE`; `demo` is a text inside the program.
    #[arg(long, value_name = "TEXT", default_value = DATASET)]
    #[serde(serialize_with = "text_not_deciding")]
    pub eval_dataset: DatasetSpec,

    /// Only the first N windows, for a quick look
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    #[serde(serialize_with = "not_deciding")]
    pub eval_windows: Option<u64>,

    /// Gate: exit with code 4 where the perplexity is above X, or not a number
    ///
    /// Of the pruned model where one is made. Everything is written and printed all the same.
    #[arg(hide_short_help = true, long, value_name = "X", value_parser = perplexity)]
    #[serde(serialize_with = "not_deciding")]
    pub max_perplexity: Option<f64>,

    /// The dense model that `prune eval` compares with; the command has its own flag for it.
    #[arg(skip)]
    #[serde(serialize_with = "not_deciding")]
    pub against: Option<PathBuf>,

    /// The file of the dense model's final states in a sweep: the run of the dense model writes it, and the cells compare with it.
    #[arg(skip)]
    #[serde(serialize_with = "not_deciding")]
    pub dense_states: Option<PathBuf>,

    /// Positions of a window at which two models are compared
    ///
    /// With `prune eval --against` and `--eval both`. `second-half` leaves out tokens with little context, as llama.cpp does.
    #[arg(hide_short_help = true, long, value_name = "POSITIONS", default_value = "all")]
    #[serde(serialize_with = "not_deciding")]
    pub kl_positions: KlPositions,

    /// Gate: exit with code 4 where the mean divergence from the dense model is above X nat, or not a number
    #[arg(hide_short_help = true, long, value_name = "X", value_parser = not_negative)]
    #[serde(serialize_with = "not_deciding")]
    pub max_kl: Option<f64>,

    /// The perplexity is measured; a command may measure tasks only.
    #[arg(skip = true)]
    #[serde(serialize_with = "not_deciding")]
    pub measures_text: bool,

    /// Multiple-choice tasks.
    #[command(flatten)]
    #[serde(flatten)]
    pub tasks: TaskSettings,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(hide_short_help = true, long, value_name = "DIR")]
    #[serde(serialize_with = "not_deciding")]
    pub text_cache: Option<PathBuf>,
}

impl EvaluationSettings {
    /// The outcomes of the gates besides `--max-perplexity`.
    pub fn limits(&self, measured: &Perplexities, tasks: Option<&TaskResults>) -> Vec<LimitReport> {
        let of_divergence = LimitReport::of_divergence(self.max_kl, measured.divergence);
        let accuracy = tasks.and_then(|tasks| TaskResults::mean(tasks.of_result()));
        let of_tasks = LimitReport::of_accuracy(self.tasks.min_accuracy, accuracy);
        of_divergence.into_iter().chain(of_tasks).collect()
    }

    /// Returns whether windows of a text are measured.
    pub fn needs_text(&self) -> bool {
        self.measures_text && self.eval != EvalSides::None
    }
}

impl Default for EvaluationSettings {
    fn default() -> Self {
        super::defaults::without_flags()
    }
}

/// Models that perplexity is measured of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EvalSides {
    /// The pruned model
    Pruned,
    /// The dense and the pruned model, in one sweep
    Both,
    /// Nothing; needs no evaluation text
    None,
    /// The checkpoint as it is read: the choice of `prune eval`, which has no such flag
    #[value(skip)]
    Dense,
}

impl EvalSides {
    /// The models in the order of the report.
    pub fn sides(self) -> &'static [Side] {
        match self {
            Self::Pruned => &[Side::Pruned],
            Self::Dense => &[Side::Dense],
            Self::Both => &[Side::Dense, Side::Pruned],
            Self::None => &[],
        }
    }
}
