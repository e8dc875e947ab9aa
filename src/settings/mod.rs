//! Settings of a run: everything a command line can ask for, as plain structs. Each default is written here once.
//!
//! A serialised [`Settings`] is the `settings` of `run.json`. The settings that decide the result ([`Settings::deciding`]) are the
//! metadata of the mask file, and a resumed run is compared by them. A setting that is added here takes part in all three.

mod calibration;
mod deciding;
mod device;
mod evaluation;
mod grid;
mod layer_drop;
mod merge;
mod model;
mod output;
mod quantize;
mod recovery;
mod sparsity;
mod values;
mod width_drop;

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use crate::generation::Sampling;
pub use calibration::CalibrationSettings;
use deciding::without_mark;
pub use device::{DeviceChoice, DeviceMapChoice, DeviceSettings, HiddenStatesChoice, check_device};
pub use evaluation::{EvalSides, EvaluationSettings};
pub use grid::{GridSettings, GridShard, ShardOrder};
pub use layer_drop::{DropCount, LayerDropSettings};
pub use merge::{MajorityOf, MergeEval, MergeSettings, PIECE_ELEMENTS, SaliencySource};
pub use model::{ComputeDtype, ModelSettings};
pub use output::OutputSettings;
pub use quantize::QuantizeSettings;
pub use recovery::{ALL_LINEAR, DISTILL_WEIGHT, RecoverySettings, RecoveryWay, TEXT, TrainedKind};
pub use sparsity::SparsitySettings;
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

/// The settings of a group as a command line with these flags has them.
fn parsed<T: Args>(flags: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("prune").no_binary_name(true));
    let matches = command.try_get_matches_from(flags);
    let settings = matches.and_then(|matches| T::from_arg_matches(&matches));
    settings.expect("the flags and their defaults are valid")
}

/// The settings of a group without any flag.
fn defaults<T: Args>() -> T {
    parsed(&[])
}

impl Settings {
    /// A run without calibration and evaluation, with the defaults of the command line.
    pub fn measuring(model: ModelSettings) -> Self {
        Self {
            arguments: Vec::new(),
            model,
            sparsity: None,
            layer_drop: None,
            width_drop: None,
            recovery: None,
            calibration: None,
            seqlen: None,
            evaluation: EvaluationSettings {
                eval: EvalSides::None,
                ..EvaluationSettings::default()
            },
            device: DeviceSettings::default(),
            output: OutputSettings::default(),
        }
    }

    /// Settings of `prune` with the defaults of the command line.
    pub fn pruning(model: impl Into<PathBuf>) -> Self {
        Self {
            sparsity: Some(SparsitySettings::default()),
            calibration: Some(CalibrationSettings::default()),
            evaluation: EvaluationSettings::default(),
            ..Self::measuring(ModelSettings::of(model))
        }
    }

    /// All settings by name, each with whether it decides the result.
    fn all(&self) -> Result<BTreeMap<String, (Value, bool)>> {
        let marked: BTreeMap<String, Value> = serde_json::from_value(serde_json::to_value(self)?)?;
        let all = marked.into_iter().map(|(name, value)| {
            let (value, is_marked) = without_mark(value);
            (name, (value, !is_marked))
        });
        Ok(all.collect())
    }

    /// All settings by name, as JSON.
    pub fn by_name(&self) -> Result<BTreeMap<String, Value>> {
        Ok(self.all()?.into_iter().map(|(name, (value, _))| (name, value)).collect())
    }

    /// The settings that decide the masks and the model, as text by name. A run is resumed only where all of them are equal.
    pub fn deciding(&self) -> Result<BTreeMap<String, String>> {
        let text = |value: Value| match value {
            Value::Null => "none".to_string(),
            Value::String(text) => text,
            Value::Array(values) if values.is_empty() => "none".to_string(),
            other => other.to_string(),
        };
        let deciding = self.all()?.into_iter().filter(|(_, (_, decides))| *decides);
        Ok(deciding.map(|(name, (value, _))| (name, text(value))).collect())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings of `prune` that decide nothing, and settings of `prune recover` that do not either.
    const NOT_DECIDING: [&str; 26] = [
        "cache_dir",
        "dataset",
        "device",
        "device_map",
        "dtype",
        "eval_dataset",
        "eval_windows",
        "force",
        "hidden_states",
        "log_memory",
        "max_memory",
        "max_perplexity",
        "memory_settings",
        "model",
        "no_model_card",
        "offload_folder",
        "profile",
        "resume",
        "revision",
        "save",
        "save_model",
        "simulate",
        "text_cache",
        "threads",
        "use_cpu",
        "verify",
    ];
    const NOT_DECIDING_OF_RECOVERY: [&str; 4] =
        ["keep_activations", "save_adapter", "save_every", "teacher"];

    fn passed_over(settings: &Settings) -> Vec<String> {
        let all = settings.all().unwrap().into_iter();
        all.filter(|(_, (_, decides))| !decides).map(|(name, _)| name).collect()
    }

    #[test]
    fn every_setting_decides_unless_its_field_says_otherwise() {
        let settings = Settings::pruning("m");
        assert_eq!(passed_over(&settings), NOT_DECIDING);
        let deciding: Vec<String> = settings.deciding().unwrap().into_keys().collect();
        let expected =
            ["allocate", "eval", "exclude", "include", "layer_ratios", "no_save_model", "nsamples"];
        assert_eq!(deciding[..7], expected);

        let recovery = Settings {
            sparsity: None,
            recovery: Some(RecoverySettings::of(RecoveryWay::Lora)),
            ..settings
        };
        let of_recovery = passed_over(&recovery).into_iter();
        let of_recovery: Vec<String> =
            of_recovery.filter(|name| !NOT_DECIDING.contains(&name.as_str())).collect();
        assert_eq!(of_recovery, NOT_DECIDING_OF_RECOVERY);
        assert_eq!(recovery.deciding().unwrap()["how"], "lora");
    }

    #[test]
    fn the_mark_is_not_part_of_records() {
        let by_name = Settings::pruning("m").by_name().unwrap();
        assert_eq!(by_name["model"], "m");
        assert_eq!(by_name["threads"], Value::Null);
        assert_eq!(by_name["max_memory"], "");
    }
}
