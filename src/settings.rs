//! Settings of a run: everything a command line can ask for, as plain structs. Each default is written here once.
//!
//! A serialised [`Settings`] is the `settings` of `run.json`. The settings that decide the result ([`Settings::deciding`]) are the
//! metadata of the mask file, and a resumed run is compared by them. A setting that is added here takes part in all three.

mod device;
mod grid;
mod layer_drop;
mod merge;
mod output;
mod quantize;
mod recovery;
mod width_drop;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::data::DatasetSpec;
use crate::generation::Sampling;
use crate::pipeline::allocation::Allocation;
use crate::pipeline::{Flow, ObservationOrder, Propagation, Selection};
use crate::pruning::{self, MethodOptions, Pattern, Technique};
use crate::runtime::Side;
pub use device::{DeviceChoice, DeviceMapChoice, DeviceSettings, check_device};
pub use grid::{GridSettings, GridShard, ShardOrder};
pub use layer_drop::{DropCount, LayerDropSettings};
pub use merge::{
    MajorityOf, MergeEval, MergeSemantics, MergeSettings, PIECE_ELEMENTS, RecipeSettings,
    SaliencySource, TrimScope,
};
pub use output::OutputSettings;
pub use quantize::QuantizeSettings;
pub use recovery::{ALL_LINEAR, DISTILL_WEIGHT, RecoverySettings, RecoveryWay, TrainedKind};
pub use width_drop::{WidthDropSettings, WidthOf, WidthShare};

/// Pruning method by default.
pub const PRUNE_METHOD: &str = "wanda";
/// Calibration samples, as in the reference.
pub const NSAMPLES: u32 = 128;
/// Tokens per sample and window where the model allows as many: the context length of most published comparisons.
pub const SEQLEN: usize = 2048;
/// Calibration and evaluation text.
pub const DATASET: &str = "wikitext2";

/// Settings of `prune`, `prune eval` and `prune recover`.
#[derive(Debug, Clone, Serialize)]
pub struct Settings {
    /// The command line, for messages that repeat it.
    #[serde(skip)]
    pub arguments: Vec<String>,
    /// The checkpoint and its arithmetic.
    #[serde(flatten)]
    pub model: ModelSettings,
    /// Method, ratio and matrices; `None` for `prune eval`.
    #[serde(flatten)]
    pub sparsity: Option<SparsitySettings>,
    /// Layers that are dropped before anything else; `None` where all stay.
    #[serde(flatten)]
    pub layer_drop: Option<LayerDropSettings>,
    /// Width that is dropped after layers and before anything else; `None` where layers keep their shapes.
    #[serde(flatten)]
    pub width_drop: Option<WidthDropSettings>,
    /// A recovery training; `None` without a training.
    #[serde(flatten)]
    pub recovery: Option<RecoverySettings>,
    /// Calibration samples, or the text of a training; `None` where the method uses none.
    #[serde(flatten)]
    pub calibration: Option<CalibrationSettings>,
    /// Tokens per sample and window; `None` for the smaller of [`SEQLEN`] and the model's limit.
    pub seqlen: Option<usize>,
    /// Perplexity.
    #[serde(flatten)]
    pub evaluation: EvaluationSettings,
    /// Devices and memory.
    #[serde(flatten)]
    pub device: DeviceSettings,
    /// Files that are written.
    #[serde(flatten)]
    pub output: OutputSettings,
}

/// Settings that do not decide the masks and the model: either they change nothing in the result, or what they lead to is
/// compared in their place (the fingerprint of the checkpoint, the hashes of the tokens, the arithmetic).
const NOT_DECIDING: [&str; 26] = [
    "model",
    "revision",
    "cache_dir",
    "dtype",
    "dataset",
    "eval_dataset",
    "eval_windows",
    "max_perplexity",
    "text_cache",
    "use_cpu",
    "device",
    "device_map",
    "threads",
    "max_memory",
    "hidden_states",
    "offload_folder",
    "memory_settings",
    "simulate",
    "save",
    "save_model",
    "no_model_card",
    "force",
    "resume",
    "log_memory",
    "profile",
    "verify",
];

/// Settings of a recovery training that do not decide its result. The teacher is compared by the fingerprint of its files.
const NOT_DECIDING_OF_RECOVERY: [&str; 4] =
    ["teacher", "keep_activations", "save_adapter", "save_every"];

impl Settings {
    /// Settings of `prune` with the defaults of the command line.
    pub fn pruning(model: impl Into<PathBuf>) -> Self {
        Self {
            arguments: Vec::new(),
            model: ModelSettings::of(model),
            sparsity: Some(SparsitySettings::default()),
            layer_drop: None,
            width_drop: None,
            recovery: None,
            calibration: Some(CalibrationSettings::default()),
            seqlen: None,
            evaluation: EvaluationSettings::default(),
            device: DeviceSettings::default(),
            output: OutputSettings::default(),
        }
    }

    /// All settings by name, as JSON.
    pub fn by_name(&self) -> Result<BTreeMap<String, Value>> {
        Ok(serde_json::from_value(serde_json::to_value(self)?)?)
    }

    /// The settings that decide the masks and the model, as text by name. A run is resumed only where all of them are equal.
    pub fn deciding(&self) -> Result<BTreeMap<String, String>> {
        let text = |value: Value| match value {
            Value::Null => "none".to_string(),
            Value::String(text) => text,
            Value::Array(values) if values.is_empty() => "none".to_string(),
            other => other.to_string(),
        };
        let all = self.by_name()?.into_iter();
        let passed_over = [&NOT_DECIDING[..], &NOT_DECIDING_OF_RECOVERY].concat();
        let deciding = all.filter(|(name, _)| !passed_over.contains(&name.as_str()));
        Ok(deciding.map(|(name, value)| (name, text(value))).collect())
    }

    /// Returns whether the run trains the whole model by the loss of the next token.
    pub fn trains_whole(&self) -> bool {
        let recovery = self.recovery.as_ref();
        recovery.is_some_and(|recovery| recovery.how != RecoveryWay::Blocks)
    }

    /// The names of the deciding settings that differ from the defaults of `prune`.
    pub fn changed(&self) -> Result<Vec<String>> {
        let default = Self::pruning("").deciding()?;
        let deciding = self.deciding()?.into_iter();
        let changed = deciding.filter(|(name, value)| default.get(name) != Some(value));
        Ok(changed.map(|(name, _)| name).collect())
    }
}

/// Model flags.
#[derive(Debug, Clone, Serialize)]
pub struct ModelSettings {
    /// `--model`: a checkpoint folder, or an id on the hub.
    pub model: PathBuf,
    /// `--revision`: branch, tag or commit on the hub; `None` for `main`.
    pub revision: Option<String>,
    /// `--cache-dir`: folder of the hub's files; `None` for the environment's folder.
    pub cache_dir: Option<PathBuf>,
    /// `--dtype`.
    pub dtype: ComputeDtype,
}

impl ModelSettings {
    /// A checkpoint with default settings.
    pub fn of(model: impl Into<PathBuf>) -> Self {
        Self { model: model.into(), revision: None, cache_dir: None, dtype: ComputeDtype::Auto }
    }
}

/// Arithmetic of the forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// The fastest the CPU has for the checkpoint's dtype.
    Auto,
    /// A single chain of f32 multiply-adds.
    F32,
    /// f32 as sums of products of bf16 parts, on AMX tiles.
    Bf16x3,
    /// bf16 products with f32 sums, for bf16 checkpoints.
    Bf16,
    /// f16 on GPUs and the CPU's fastest f32, for f16 checkpoints.
    F16,
}

/// Sparsity flags.
#[derive(Debug, Clone, Serialize)]
pub struct SparsitySettings {
    /// `--prune-method`.
    pub prune_method: String,
    /// Options of the method.
    #[serde(flatten)]
    pub options: MethodOptions,
    /// `--refine`: a refinement after the method.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refine: Option<String>,
    /// `--permute-channels`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub permute_channels: bool,
    /// `--propagate`.
    pub propagate: Propagation,
    /// `--true-sequential`.
    pub true_sequential: bool,
    /// `--allocate`.
    pub allocate: Allocation,
    /// `--ratio-band`; `None` for the allocation's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio_band: Option<f64>,
    /// `--owl-outliers`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owl_outliers: Option<f64>,
    /// Ratio, pattern and matrices.
    #[serde(flatten)]
    pub selection: Selection,
}

impl SparsitySettings {
    /// The technique that the settings name.
    ///
    /// # Errors
    /// Fails for a method or a refinement that does not exist, and for options that do not fit.
    pub fn technique(&self) -> Result<Technique> {
        let method = pruning::method(&self.prune_method)
            .with_context(|| format!("there is no method `{}`", self.prune_method))?;
        let refinement = self.refine.as_ref().map(|name| {
            pruning::refinement(name).with_context(|| format!("there is no refinement `{name}`"))
        });
        let technique = Technique {
            method,
            options: self.options.clone(),
            refinement: refinement.transpose()?,
            permutes: match self.selection.sparsity_type {
                Pattern::NOfM { m, .. } if self.permute_channels => Some(m),
                _ => None,
            },
        };
        technique.check()?;
        Ok(technique)
    }
}

impl SparsitySettings {
    /// The way of the calibration samples.
    pub fn flow(&self) -> Flow {
        Flow {
            propagation: self.propagate,
            sequence: match self.true_sequential {
                true => ObservationOrder::Inputs,
                false => ObservationOrder::Layer,
            },
        }
    }

    /// Takes a ratio of 0 where no flag names a ratio or a pattern.
    pub fn prune_nothing_unless_asked(&mut self) {
        let selection = &mut self.selection;
        let is_free = selection.sparsity_type == Default::default();
        if is_free && selection.layer_ratios.is_none() && selection.sparsity_ratio.is_none() {
            selection.sparsity_ratio = Some(0.0);
        }
    }
}

impl Default for SparsitySettings {
    fn default() -> Self {
        Self {
            prune_method: PRUNE_METHOD.to_string(),
            options: MethodOptions::default(),
            refine: None,
            permute_channels: false,
            propagate: Propagation::default(),
            true_sequential: false,
            allocate: Allocation::default(),
            ratio_band: None,
            owl_outliers: None,
            selection: Selection::default(),
        }
    }
}

/// Calibration flags.
#[derive(Debug, Clone, Serialize)]
pub struct CalibrationSettings {
    /// `--dataset`.
    #[serde(serialize_with = "as_text")]
    pub dataset: DatasetSpec,
    /// `--nsamples`.
    pub nsamples: u32,
    /// `--seed` of the sampling.
    pub seed: u64,
}

impl Default for CalibrationSettings {
    fn default() -> Self {
        Self { dataset: default_dataset(), nsamples: NSAMPLES, seed: 0 }
    }
}

fn default_dataset() -> DatasetSpec {
    DATASET.parse().expect("the default names a dataset")
}

/// Evaluation flags.
#[derive(Debug, Clone, Serialize)]
pub struct EvaluationSettings {
    /// `--eval`.
    pub eval: EvalSides,
    /// `--eval-dataset`.
    #[serde(serialize_with = "as_text")]
    pub eval_dataset: DatasetSpec,
    /// `--eval-windows`: the first N windows; `None` for all.
    pub eval_windows: Option<u64>,
    /// `--max-perplexity`: the gate.
    pub max_perplexity: Option<f64>,
    /// `--text-cache`: folder of token ids; `None` for the environment's folder.
    pub text_cache: Option<PathBuf>,
}

impl Default for EvaluationSettings {
    fn default() -> Self {
        Self {
            eval: EvalSides::Pruned,
            eval_dataset: default_dataset(),
            eval_windows: None,
            max_perplexity: None,
            text_cache: None,
        }
    }
}

/// Models that perplexity is measured of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EvalSides {
    /// The pruned model.
    Pruned,
    /// The checkpoint as it is read.
    Dense,
    /// The dense and the pruned model, in the same sweep.
    Both,
    /// No evaluation.
    None,
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

/// Settings of `prune generate`.
#[derive(Debug, Clone)]
pub struct GenerateSettings {
    /// The checkpoints that write, in this order.
    pub models: Vec<ModelSettings>,
    /// Threads and memory.
    pub device: DeviceSettings,
    /// The text to continue, or with `chat` the user's message.
    pub prompt: String,
    /// `--chat`: the prompt goes through the model's chat template.
    pub chat: bool,
    /// `--system`: the system's message of the chat.
    pub system: Option<String>,
    /// Choice of tokens.
    pub sampling: Sampling,
    /// `--max-tokens`.
    pub max_tokens: usize,
    /// `--ignore-eos`.
    pub ignore_eos: bool,
}

/// Settings of `prune plan`.
#[derive(Debug, Clone)]
pub struct PlanSettings {
    /// The models to plan for.
    pub subject: PlanSubject,
    /// The run to plan.
    pub run: Settings,
    /// `--inventory`: a file that describes the machine to plan for; `None` for this machine.
    pub inventory: Option<PathBuf>,
    /// `--rank` of the factors of trainings; the default of `prune recover` if absent.
    pub rank: Option<usize>,
    /// `--batch-size` of trainings; the default of `prune recover` if absent.
    pub batch_size: Option<usize>,
}

/// Models of `prune plan`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanSubject {
    /// The checkpoint of the settings.
    Model,
    /// A published shape by its name.
    Shape(String),
    /// All published shapes.
    Table,
}

fn as_text<T: fmt::Display, S: Serializer>(
    value: &T,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_decides_unless_it_is_listed() {
        let settings = Settings::pruning("m");
        let all = settings.by_name().unwrap();
        for name in NOT_DECIDING {
            assert!(all.contains_key(name), "{name} is no setting");
        }
        let deciding: Vec<String> = settings.deciding().unwrap().into_keys().collect();
        assert_eq!(deciding.len() + NOT_DECIDING.len(), all.len());
        let expected =
            ["allocate", "eval", "exclude", "include", "layer_ratios", "no_save_model", "nsamples"];
        assert_eq!(deciding[..7], expected);

        let recovery = Settings {
            sparsity: None,
            recovery: Some(RecoverySettings::of(RecoveryWay::Lora)),
            ..settings
        };
        let (all, deciding) = (recovery.by_name().unwrap(), recovery.deciding().unwrap());
        for name in NOT_DECIDING_OF_RECOVERY {
            assert!(all.contains_key(name), "{name} is no setting");
        }
        let passed_over = NOT_DECIDING.len() + NOT_DECIDING_OF_RECOVERY.len();
        assert_eq!(deciding.len() + passed_over, all.len());
        assert_eq!(deciding["how"], "lora");
    }
}
