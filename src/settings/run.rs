//! Settings of a run: `prune`, `prune eval` and `prune recover`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::calibration::CalibrationSettings;
use super::deciding::without_mark;
use super::device::DeviceSettings;
use super::evaluation::{EvalSides, EvaluationSettings};
use super::generate::WeightSettings;
use super::layer_drop::LayerDropSettings;
use super::model::ModelSettings;
use super::output::OutputSettings;
use super::recovery::{RecoverySettings, RecoveryWay};
use super::sparsity::SparsitySettings;
use super::target_size::TargetSizeSettings;
use super::width_drop::WidthDropSettings;

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
    /// A size that decides how much is dropped; `None` once it has decided, and where numbers are named.
    #[serde(flatten)]
    pub target_size: Option<TargetSizeSettings>,
    /// A recovery training; `None` without a training.
    #[serde(flatten)]
    pub recovery: Option<RecoverySettings>,
    /// Calibration samples, or the text of a training; `None` where the method uses none.
    #[serde(flatten)]
    pub calibration: Option<CalibrationSettings>,
    /// Tokens per sample and window; `None` for the smaller of [`SEQLEN`](super::SEQLEN) and the model's limit.
    pub seqlen: Option<usize>,
    /// Perplexity.
    #[serde(flatten)]
    pub evaluation: EvaluationSettings,
    /// The form of the weights in memory; `None` where only dense weights serve.
    #[serde(flatten)]
    pub weights: Option<WeightSettings>,
    /// Devices and memory.
    #[serde(flatten)]
    pub device: DeviceSettings,
    /// Files that are written.
    #[serde(flatten)]
    pub output: OutputSettings,
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
            target_size: None,
            recovery: None,
            calibration: None,
            seqlen: None,
            evaluation: EvaluationSettings {
                eval: EvalSides::None,
                ..EvaluationSettings::default()
            },
            weights: None,
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings of `prune` that decide nothing, and settings of `prune recover` that do not either.
    const NOT_DECIDING: [&str; 39] = [
        "add_bos",
        "against",
        "cache_dir",
        "dataset",
        "dense_states",
        "device",
        "device_map",
        "dtype",
        "eval_dataset",
        "eval_windows",
        "eval_zero_shot",
        "force",
        "hidden_states",
        "kl_positions",
        "limit",
        "log_memory",
        "log_samples",
        "max_kl",
        "max_memory",
        "max_perplexity",
        "measures_text",
        "memory_settings",
        "min_accuracy",
        "model",
        "no_model_card",
        "num_fewshot",
        "offload_folder",
        "profile",
        "resume",
        "revision",
        "save",
        "save_model",
        "simulate",
        "tasks",
        "tasks_from",
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
