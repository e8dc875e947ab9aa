//! Settings of a merge.

use std::path::PathBuf;

use serde::Serialize;

use super::{CalibrationSettings, DeviceSettings, EvaluationSettings, OutputSettings};
use crate::data::DatasetSpec;
use crate::merging::recipe::{FlagRecipe, TokenizerSource};

/// Elements of a piece per model: its widened rows stay in a cache of the CPU.
pub const PIECE_ELEMENTS: usize = 1 << 16;

/// Settings of `prune merge`.
#[derive(Debug, Clone)]
pub struct MergeSettings {
    /// The command line, for messages that repeat it.
    pub arguments: Vec<String>,
    /// The recipe: a file of mergekit's form, or flags.
    pub recipe: RecipeSettings,
    /// `--cache-dir`: folder of the hub's files; `None` for the environment's folder.
    pub cache_dir: Option<PathBuf>,
    /// `--semantics`.
    pub semantics: MergeSemantics,
    /// `--trim-scope`; `None` for what the semantics say.
    pub trim_scope: Option<TrimScope>,
    /// `--majority-sign`; `None` for the sum.
    pub majority_sign: Option<MajorityOf>,
    /// `--seed` of random masks and of calibration samples.
    pub seed: u64,
    /// `--keep-zeros`.
    pub keep_zeros: bool,
    /// `--unsafe-truncate-embeddings`.
    pub truncates_embeddings: bool,
    /// `--saliency`.
    pub saliency: Option<SaliencySource>,
    /// `--saliency-file`; `None` for a file in the run folder.
    pub saliency_file: Option<PathBuf>,
    /// `--dataset`, once for all models or once per measured model.
    pub datasets: Vec<DatasetSpec>,
    /// Samples of the statistics.
    pub calibration: CalibrationSettings,
    /// Tokens per sample and window; `None` for the smaller of the default and the model's limit.
    pub seqlen: Option<usize>,
    /// Models that perplexity is measured of.
    pub eval: MergeEval,
    /// Text and windows of the evaluation.
    pub evaluation: EvaluationSettings,
    /// Devices and memory.
    pub device: DeviceSettings,
    /// `--out-shard-size`, in bytes.
    pub shard_bytes: u64,
    /// Elements of a piece per model, for tests; `None` for [`PIECE_ELEMENTS`] and what the memory allows.
    pub piece_elements: Option<usize>,
    /// Files that are written.
    pub output: OutputSettings,
}

/// The origin of a recipe.
#[derive(Debug, Clone)]
pub enum RecipeSettings {
    /// A file, and `--vocab`.
    File(PathBuf, Option<TokenizerSource>),
    /// Flags.
    Flags(Box<FlagRecipe>),
}

/// The tool or paper whose definition of a method is followed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeSemantics {
    /// mergekit's.
    #[default]
    Mergekit,
    /// The paper's and its authors' code.
    Paper,
    /// peft's: adapters are combined factor by factor.
    Peft,
}

/// The measure by which a combination of adapters elects signs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MajorityOf {
    /// The sum of the elements.
    #[default]
    Total,
    /// The number of adapters with the sign.
    Frequency,
}

impl MajorityOf {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::Frequency => "frequency",
        }
    }
}

/// Tensors that are trimmed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TrimScope {
    /// Each tensor alone.
    Tensor,
    /// The tensors of a layer together.
    Layer,
    /// All tensors of the model together.
    Model,
}

/// Models whose activations weigh the merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SaliencySource {
    /// The base model.
    Base,
    /// Each expert.
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeEval {
    /// None.
    #[default]
    None,
    /// The merged model.
    Merged,
    /// The base, the experts and the merged model.
    All,
}
