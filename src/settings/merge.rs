//! Settings of a merge.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::calibration::CalibrationSettings;
use super::defaults::DATASET;
use super::device::DeviceSettings;
use super::evaluation::EvaluationSettings;
use super::model::ModelSettings;
use super::output::OutputSettings;
use super::run::Settings;
use crate::adapter::MajoritySign;
use crate::bytes::ByteSize;
use crate::data::DatasetSpec;
use crate::merging::methods::{Scope, Semantics};
use crate::merging::recipe::FlagRecipe;

/// Elements of a piece per model: its widened rows stay in a cache of the CPU.
pub const PIECE_ELEMENTS: usize = 1 << 16;

/// Samples of the statistics, as in the tool that this command covers.
const NSAMPLES: u32 = 64;

/// Headings of flags.
const RECIPE: &str = "Recipe";
const DEFINITION: &str = "Definition";
const SALIENCY: &str = "Saliency";
const EVALUATION: &str = "Evaluation";
const OUTPUT: &str = "Output";

/// Settings of `prune merge`.
#[derive(Debug, Clone, Args)]
pub struct MergeSettings {
    /// The command line, for messages that repeat it.
    #[arg(skip)]
    pub arguments: Vec<String>,

    /// Recipe in mergekit's YAML; without it the flags below are the recipe
    #[arg(value_name = "CONFIG")]
    pub config: Option<PathBuf>,

    /// The recipe in flags; with a file, only `--vocab` is read.
    #[command(flatten)]
    pub recipe: FlagRecipe,

    /// Cut all embeddings to the smallest vocabulary, as mergekit's flag does
    ///
    /// Rows are cut by number, so tokens may change their meaning. `--vocab` keeps tokens and rows together.
    #[arg(hide_short_help = true, long, conflicts_with = "tokenizer", help_heading = RECIPE)]
    pub unsafe_truncate_embeddings: bool,

    /// Folder of the hub's files [default: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub]
    #[arg(hide_short_help = true, long, value_name = "DIR", help_heading = RECIPE)]
    pub cache_dir: Option<PathBuf>,

    /// Source of the definition of the method
    ///
    /// mergekit, the paper and peft differ for some methods.
    #[arg(long, value_name = "WHOSE", default_value = "mergekit", help_heading = DEFINITION)]
    pub semantics: Semantics,

    /// Tensors that are trimmed together [default: tensor for mergekit, model for the paper]
    #[arg(hide_short_help = true, long, value_name = "SCOPE", help_heading = DEFINITION)]
    pub trim_scope: Option<Scope>,

    /// Elections of signs in ties and dare_ties of peft [default: total]
    #[arg(hide_short_help = true, long, value_name = "MEASURE", help_heading = DEFINITION)]
    pub majority_sign: Option<MajoritySign>,

    /// Seed of random masks, and of calibration samples
    #[arg(long, value_name = "SEED", default_value_t = 0, help_heading = DEFINITION)]
    pub seed: u64,

    /// Weights that are zero in every model stay zero
    #[arg(hide_short_help = true, long, help_heading = DEFINITION)]
    pub keep_zeros: bool,

    /// Weigh differences by activations of these models
    ///
    /// Samples pass through each measured model, and the mean squares of every linear's inputs are kept.
    #[arg(long, value_name = "MODELS", help_heading = SALIENCY)]
    pub saliency: Option<SaliencySource>,

    /// Text of the samples
    ///
    /// NAME, NAME:PATH or a path; once for all measured models, or once for each.
    #[arg(long, value_name = "TEXT", default_value = DATASET, help_heading = SALIENCY)]
    pub dataset: Vec<DatasetSpec>,

    /// Samples per measured model
    #[arg(hide_short_help = true, long, value_name = "N", default_value_t = NSAMPLES, value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = SALIENCY)]
    pub nsamples: u32,

    /// Tokens per sample, and per evaluation window [default: 2048, or the model's limit]
    #[arg(hide_short_help = true, long, value_name = "TOKENS", help_heading = SALIENCY)]
    pub seqlen: Option<usize>,

    /// File of the statistics; measured and written if it does not exist [default: SAVE/saliency.safetensors]
    #[arg(hide_short_help = true, long, value_name = "FILE", help_heading = SALIENCY)]
    pub saliency_file: Option<PathBuf>,

    /// Models that perplexity is measured of
    ///
    /// The default is `all` with --eval-dataset, else `none`.
    #[arg(long, value_name = "MODELS", default_value = "none", default_value_if("eval_dataset", clap::builder::ArgPredicate::IsPresent, "all"), hide_default_value = true, help_heading = EVALUATION)]
    pub eval: MergeEval,

    /// Evaluation text, as in prune eval
    #[arg(long, value_name = "TEXT", help_heading = EVALUATION)]
    pub eval_dataset: Option<DatasetSpec>,

    /// Only the first N windows, for a quick look
    #[arg(hide_short_help = true, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = EVALUATION)]
    pub eval_windows: Option<u64>,

    /// Folder of token ids and unpacked corpora [default: PRUNE_CACHE, else XDG_CACHE_HOME/prune, else ~/.cache/prune]
    #[arg(hide_short_help = true, long, value_name = "DIR", help_heading = EVALUATION)]
    pub text_cache: Option<PathBuf>,

    /// Devices and memory.
    #[command(flatten)]
    pub device: DeviceSettings,

    /// Run folder: model/, run.json
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub save: Option<PathBuf>,

    /// Folder for the merged model [default: SAVE/model]
    #[arg(hide_short_help = true, long, value_name = "DIR", help_heading = OUTPUT)]
    pub save_model: Option<PathBuf>,

    /// Largest file of the output, like 5GB or 2GiB
    #[arg(hide_short_help = true, long, value_name = "SIZE", default_value = "5GB", help_heading = OUTPUT)]
    pub out_shard_size: ByteSize,

    /// Write no README.md for the hub into the model's folder
    #[arg(hide_short_help = true, long, help_heading = OUTPUT)]
    pub no_model_card: bool,

    /// Replace a finished run and its model files
    ///
    /// Also replaces an unfinished run of a different recipe.
    #[arg(long, help_heading = OUTPUT)]
    pub force: bool,

    /// Only continue an unfinished merge; fail if there is none
    #[arg(hide_short_help = true, long, help_heading = OUTPUT)]
    pub resume: bool,

    /// Print memory at the steps of the run, and write SAVE/memory_log.csv
    #[arg(hide_short_help = true, long, help_heading = OUTPUT)]
    pub log_memory: bool,

    /// Elements of a piece per model, for tests
    #[arg(long, value_name = "N", hide = true)]
    pub piece_elements: Option<usize>,
}

impl MergeSettings {
    /// The settings of the files that are written.
    pub fn output(&self) -> OutputSettings {
        OutputSettings {
            save: self.save.clone(),
            save_model: self.save_model.clone(),
            no_model_card: self.no_model_card,
            force: self.force,
            resume: self.resume,
            log_memory: self.log_memory,
            ..OutputSettings::default()
        }
    }

    /// A run that measures a model of the merge, without calibration and evaluation.
    pub fn measuring(&self, model: ModelSettings) -> Settings {
        let mut settings = Settings { seqlen: self.seqlen, ..Settings::measuring(model) };
        settings.evaluation.eval_dataset = self.evaluation_text();
        settings.evaluation.eval_windows = self.eval_windows;
        settings.evaluation.text_cache.clone_from(&self.text_cache);
        settings.device = self.device.clone();
        settings
    }

    /// The text of `--eval-dataset`, the default without the flag.
    pub fn evaluation_text(&self) -> DatasetSpec {
        let asked = self.eval_dataset.clone();
        asked.unwrap_or_else(|| EvaluationSettings::default().eval_dataset)
    }

    /// The calibration samples of a measured model.
    pub fn calibration(&self, dataset: DatasetSpec) -> CalibrationSettings {
        CalibrationSettings { dataset, nsamples: self.nsamples, seed: self.seed }
    }
}

/// Models whose activations weigh the merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SaliencySource {
    /// The base model: they decide trimming
    Base,
    /// Each expert: they also weigh signs and averages
    Experts,
}

impl SaliencySource {
    /// `base` or `experts`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Experts => "experts",
        }
    }
}

/// Models that perplexity is measured of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MergeEval {
    /// Nothing; needs no evaluation text
    None,
    /// The merged model
    Merged,
    /// The base, the experts and the merged model
    All,
}
