//! `unfinished.json`: the finished work of a run that has not ended, so that a later process can continue it.
//!
//! The file is replaced after every layer, once the layer's bytes are on the disk. So it is true at any moment, however the
//! process ends. Its first line has the length and the hash of the rest. docs/dev/records.md documents the schema.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::allocation::AllocationReport;
use super::layer_drop::LayerDropReport;
use super::manifest::{LayerReport, MemorySample, Perplexities, PhaseReport, SessionReport};
use super::merging::{MergedTensor, ModelPerplexity};
use super::packing::ScannedFile;
use super::quantization::QuantizedMatrix;
use super::recovery::Divergence;
use super::tasks::TaskResults;
use super::width_drop::WidthDropReport;

/// The version of the schema. A run with a different version cannot be continued.
pub const SCHEMA: u32 = 1;

/// The file's name in the run folder.
pub const FILE: &str = "unfinished.json";

/// The name of the file that holds a training between two steps. It lies beside [`FILE`].
pub const TRAINING_FILE: &str = "training.state";

/// The name of the file that holds an evaluation between two layers. It lies in the run folder, without [`FILE`].
pub const EVALUATION_FILE: &str = "evaluation.state";

/// The same of the dense model that is compared with.
pub const EVALUATION_FILE_OF_DENSE: &str = "evaluation.dense.state";

/// The settings that may change where a training continues from its best state after its loss exploded.
pub const OF_THE_RATE: [&str; 4] = ["lr", "max_grad_norm", "schedule", "warmup"];

/// Facts beside the settings that are compared once texts are tokenized and the work is planned.
pub const KNOWN_LATER: [&str; 7] = [
    "calibration tokens",
    "training tokens",
    "held-out tokens",
    "evaluation tokens",
    "task tokens",
    "arithmetic",
    "devices",
];

/// A run between two layers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RunState {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The command line of the first process.
    pub arguments: Vec<String>,
    /// The beginning of the run, in seconds since 1970 (UTC).
    pub started_unix_seconds: u64,
    /// All settings that decide the outcome, by name. Two processes can work on the same run only with equal settings.
    pub settings: BTreeMap<String, String>,
    /// The layers that are dropped, with their scores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer_drop: Option<LayerDropReport>,
    /// The width that is dropped; its matrices are in the run folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width_drop: Option<WidthDropReport>,
    /// The ratios of the layers, where they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<AllocationReport>,
    /// The finished layers, in order.
    pub layers: Vec<LayerReport>,
    /// Written tensors → SHA-256 of their bytes, in hex.
    pub tensors: BTreeMap<String, String>,
    /// The finished tensors of a merge.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub merged: Vec<MergedTensor>,
    /// Matrices of a quantisation whose scales are known, by tensor name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub quantized: BTreeMap<String, QuantizedMatrix>,
    /// Weight files of a packing that are counted and hashed, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub scanned: BTreeMap<String, ScannedFile>,
    /// The perplexities of the models of a merge.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub perplexities_of_models: Vec<ModelPerplexity>,
    /// The model folder holds an earlier model of this run, which the run will replace: a diverged training continues.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaces_model: bool,
    /// The perplexities, once all are measured.
    pub perplexity: Option<Perplexities>,
    /// The accuracies of tasks, once all are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<TaskResults>,
    /// The end of a training whose loss exploded: its best state is the model of the run, and the run can be continued from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divergence: Option<Divergence>,
    /// All warnings.
    pub warnings: Vec<String>,
    /// The processes that worked on the run, in order, the current process last.
    pub sessions: Vec<SessionReport>,
    /// Time and peak memory per phase, of all sessions.
    pub phases: Vec<PhaseReport>,
    /// Memory at the checkpoints of all sessions.
    pub memory: Vec<MemorySample>,
}

/// Settings of version 0.1 that exist no more, with the values that changed nothing.
const REMOVED: [(&str, &str); 3] =
    [("aim", "none"), ("block_target", "dense"), ("dsnot_published", "false")];

impl RunState {
    /// A run that begins with these deciding settings.
    pub fn begin(
        arguments: &[String],
        started_unix_seconds: u64,
        settings: &BTreeMap<String, String>,
    ) -> Self {
        Self {
            schema: SCHEMA,
            arguments: arguments.to_vec(),
            started_unix_seconds,
            settings: settings.clone(),
            ..Self::default()
        }
    }

    /// Returns the differences between this run's settings and `settings`: name, value of this run, value in `settings`. A setting that
    /// one of them does not name is "none" there. `settings` may lack what is known later.
    pub fn differences(
        &self,
        settings: &BTreeMap<String, String>,
    ) -> Vec<(String, String, String)> {
        const NONE: &str = "none";
        let different = settings.iter().filter_map(|(name, now)| {
            let then = self.settings.get(name).map_or(NONE, String::as_str);
            (then != now).then(|| (name.clone(), then.to_string(), now.clone()))
        });
        let left_out = self.settings.iter().filter(|(name, then)| {
            let is_usual = REMOVED.contains(&(name.as_str(), then.as_str())) || *then == NONE;
            !is_usual && !settings.contains_key(*name) && !KNOWN_LATER.contains(&name.as_str())
        });
        let left_out = left_out.map(|(name, then)| (name.clone(), then.clone(), NONE.to_string()));
        different.chain(left_out).collect()
    }

    /// The same run before its first layer: the processes that worked on it stay, and what they measured of time and memory.
    #[must_use]
    pub fn begun_again(self) -> Self {
        Self {
            layers: Vec::new(),
            tensors: BTreeMap::new(),
            perplexity: None,
            divergence: None,
            ..self
        }
    }
}

/// Adds up phases of several sessions: seconds are summed, peaks are the largest.
pub fn merge_phases(before: &[PhaseReport], now: &[PhaseReport]) -> Vec<PhaseReport> {
    let mut phases = before.to_vec();
    for phase in now {
        match phases.iter_mut().find(|known| known.phase == phase.phase) {
            Some(known) => {
                known.seconds += phase.seconds;
                known.peak_anonymous = known.peak_anonymous.max(phase.peak_anonymous);
            }
            None => phases.push(phase.clone()),
        }
    }
    phases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Phase;

    #[test]
    fn settings_that_differ_are_named_with_both_values() {
        let settings = |values: &[(&str, &str)]| -> BTreeMap<String, String> {
            let pairs = values.iter();
            pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let removed = [("aim", "0.4"), ("block_target", "dense")];
        let absent = [("e", "none"), ("arithmetic", "f32")];
        let state = RunState {
            settings: settings(
                &[&[("a", "1"), ("b", "2"), ("c", "3")], &removed[..], &absent[..]].concat(),
            ),
            ..RunState::default()
        };
        let now = settings(&[("a", "1"), ("b", "3"), ("d", "4"), ("f", "none")]);
        let found = state.differences(&now);
        let expected =
            [("b", "2", "3"), ("d", "none", "4"), ("aim", "0.4", "none"), ("c", "3", "none")];
        assert_eq!(
            found,
            expected.map(|(name, then, now)| (name.to_string(), then.to_string(), now.to_string()))
        );
    }

    #[test]
    fn phases_of_sessions_add_up() {
        let phase = |phase, seconds, peak| PhaseReport {
            phase,
            seconds,
            peak_anonymous: Some(crate::bytes::ByteSize(peak)),
        };
        let merged = merge_phases(
            &[phase(Phase::Read, 1.0, 5), phase(Phase::Write, 2.0, 1)],
            &[phase(Phase::Read, 0.5, 7), phase(Phase::Head, 1.0, 2)],
        );
        let expected =
            [phase(Phase::Read, 1.5, 7), phase(Phase::Write, 2.0, 1), phase(Phase::Head, 1.0, 2)];
        assert_eq!(merged, expected);
    }
}
