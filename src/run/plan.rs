//! A plan, as it is printed before a run, stands in `run.json` and is printed by `prune plan --json`. Schema: docs/run-json.md.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::memory_settings::MemorySettings;
use crate::bytes::ByteSize;

/// Where everything will be, how it will be done, and what that takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Every device that is used, the CPU last.
    pub devices: Vec<DevicePlan>,
    /// Runs of consecutive layers that are treated alike.
    pub layers: Vec<LayersPlan>,
    /// Where hidden states rest between layers.
    pub hidden_states: HiddenStatesPlan,
    /// How the work is cut up.
    #[serde(alias = "knobs")]
    pub memory_settings: MemorySettings,
    /// What each phase is predicted to take, in the order of the run.
    pub phases: Vec<PhasePlan>,
    /// How long it may take.
    pub time: TimeEstimate,
    /// What else is worth a line: a GPU that is not used and why.
    pub notes: Vec<String>,
}

/// One device's share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// `cpu` or `cuda:0`.
    pub device: String,
    /// What may be used; absent where nobody knows.
    pub budget: Option<ByteSize>,
    /// The most that will be used at once.
    pub peak: ByteSize,
    /// The phase of the peak.
    pub peak_phase: String,
}

/// Consecutive layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayersPlan {
    /// The first one, from 0.
    pub first: usize,
    /// The last one.
    pub last: usize,
    /// Where they are computed; several devices share the samples.
    pub devices: Vec<String>,
    /// Where their weights come from: `disk, read ahead`, `disk`, `disk, by matrix`.
    pub weights: String,
}

/// The hidden states of all samples between two layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HiddenStatesPlan {
    /// The place of the states between two layers.
    #[serde(alias = "rest")]
    pub storage: HiddenStatesStorage,
    /// All streams together.
    pub bytes: ByteSize,
}

/// The place of hidden states between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HiddenStatesStorage {
    /// Memory.
    #[serde(rename = "ram")]
    Ram,
    /// A spill file on disk.
    #[serde(rename = "spill")]
    Disk,
}

impl fmt::Display for HiddenStatesStorage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(formatter)
    }
}

/// One phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhasePlan {
    /// As the manifest's phases are called.
    pub phase: String,
    /// `cpu`, or `cuda` for every GPU that is used.
    pub device: String,
    /// The sum of its parts.
    pub bytes: ByteSize,
    /// What is in memory at once.
    pub parts: Vec<Part>,
}

/// A part of what a phase holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// What it is.
    pub what: Cow<'static, str>,
    /// What it takes.
    pub bytes: ByteSize,
}

/// Seconds by a stated model; docs/memory-model.md has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeEstimate {
    /// All of it.
    pub seconds: f64,
    /// Floating-point operations over the rate of the devices that compute.
    pub compute: f64,
    /// Bytes read from and written to files over the disk's rate; reading weights overlaps computing where they are read ahead.
    pub disk: f64,
    /// Bytes between memory and GPUs over the link's rate.
    pub transfers: f64,
}

impl Plan {
    /// The CPU's share; every plan has one.
    pub fn cpu(&self) -> Option<&DevicePlan> {
        self.devices.iter().find(|device| device.device == "cpu")
    }
}
