//! A plan. It is printed before a run and by `prune plan`, and is part of `run.json`. Schema: docs/dev/records.md.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::memory_settings::MemorySettings;
use super::phase::Phase;
use crate::bytes::ByteSize;

/// A plan: devices, settings, and predicted memory and time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Every device that is used, the CPU last.
    pub devices: Vec<DevicePlan>,
    /// Consecutive layers on the same devices.
    pub layers: Vec<LayersPlan>,
    /// The hidden states between two layers.
    pub hidden_states: HiddenStatesPlan,
    /// The settings that trade memory for time.
    #[serde(alias = "knobs")]
    pub memory_settings: MemorySettings,
    /// The predicted memory of each phase, in the order of the run.
    pub phases: Vec<PhasePlan>,
    /// The predicted time.
    pub time: TimeEstimate,
    /// Further facts, such as a GPU that is not used.
    pub notes: Vec<String>,
}

/// Returns the warning for a device that used more memory than it may, by any amount, or more than planned, by a tenth and by 32 MiB.
///
/// # Arguments
/// * `of`: the name of its memory
/// * `measured`: the peak
/// * `(budget, planned)`: the bytes that may be used, if they are known, and the predicted peak
pub fn exceeded(
    of: &str,
    measured: ByteSize,
    (budget, planned): (Option<ByteSize>, ByteSize),
) -> Option<String> {
    let expected = (planned.0 / 10).max(32 << 20).saturating_add(planned.0);
    let used = format!("{measured} of {of} were used at once");
    match budget {
        Some(budget) if measured > budget => {
            Some(format!("{used}, {budget} are allowed and {planned} were planned"))
        }
        _ if measured.0 > expected => Some(format!("{used}, {planned} were planned")),
        _ => None,
    }
}

/// The share of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// `cpu` or `cuda:0`.
    pub device: String,
    /// The usable bytes; absent if they are unknown.
    pub budget: Option<ByteSize>,
    /// The predicted peak.
    pub peak: ByteSize,
    /// The phase of the peak; absent for a plan without memory.
    pub peak_phase: Option<Phase>,
}

/// Consecutive layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayersPlan {
    /// The first layer, from 0.
    pub first: usize,
    /// The last layer.
    pub last: usize,
    /// The devices that compute them. Several devices share the samples.
    pub devices: Vec<String>,
    /// The source of their weights: `disk, read ahead`, `disk`, `disk, by matrix at every use`.
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HiddenStatesStorage {
    /// The memory of the GPUs that compute.
    #[serde(rename = "device")]
    Device,
    /// Memory.
    #[default]
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

/// The predicted memory of a phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhasePlan {
    /// The phase.
    pub phase: Phase,
    /// `cpu`, or `cuda` for every GPU that is used.
    pub device: String,
    /// The sum of its parts.
    pub bytes: ByteSize,
    /// The parts that exist together.
    pub parts: Vec<MemoryPart>,
}

/// A part of a phase's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPart {
    /// Its kind.
    #[serde(rename = "what")]
    pub kind: PartKind,
    /// Its size.
    pub bytes: ByteSize,
}

/// Kinds of memory, of the process and of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartKind {
    /// The program itself.
    Program,
    /// CUDA's libraries in the process.
    #[serde(rename = "CUDA's libraries", alias = "CUDA's own")]
    CudaOnHost,
    /// The tokenizer, and the text it works on.
    #[serde(rename = "tokenizer and texts")]
    Tokenizer,
    /// Tables of the tokenizer's pattern, which stay after tokenizing.
    #[serde(rename = "the tokenizer's pattern")]
    TokenizerPattern,
    /// Token ids of samples and windows.
    #[serde(rename = "token ids")]
    TokenIds,
    /// Hidden states in RAM.
    #[serde(rename = "hidden states")]
    HiddenStates,
    /// Hidden states on their way to and from the spill file.
    #[serde(rename = "spilled states in flight", alias = "hidden states on their way")]
    SpilledStates,
    /// Samples on their way to and from GPUs.
    #[serde(rename = "samples in flight", alias = "samples on their way")]
    SamplesInFlight,
    /// The layer in use.
    #[serde(rename = "this layer")]
    Layer,
    /// If several runs share the dense layer in use: the copy of it that is pruned for a run, or its masks.
    #[serde(rename = "a copy of this layer")]
    LayerCopy,
    /// The masks of the layer in use, whose weights stay on disk.
    #[serde(rename = "masks of this layer")]
    LayerMasks,
    /// The packed weights of the layer in use.
    #[serde(rename = "this layer, packed")]
    PackedLayer,
    /// The layer that is read ahead.
    #[serde(rename = "the next layer")]
    NextLayer,
    /// Frozen layers of a training: layers that stay in memory, and the layer that is read ahead.
    #[serde(rename = "frozen layers")]
    FrozenLayers,
    /// Layers of a training whose weights and activations stay for the backward pass.
    #[serde(rename = "kept activations")]
    KeptActivations,
    /// Rotary tables, and packed operands of products.
    #[serde(rename = "rotary tables and packing")]
    Context,
    /// Buffers for one sample in a layer.
    Workspace,
    /// Statistics of the calibration samples.
    Statistics,
    /// Calibration rows for output errors.
    #[serde(rename = "calibration rows")]
    CalibrationRows,
    /// Numbers and rows of the samples of all ranks, while they are put together.
    #[serde(rename = "messages of ranks")]
    Messages,
    /// Scores and masks of one matrix.
    #[serde(rename = "scores and masks")]
    Scores,
    /// Trained parameters, with gradients and optimizer states that are in memory.
    #[serde(rename = "trained parameters")]
    Parameters,
    /// Gradients of the layer in use.
    Gradients,
    /// The head's weight and some logits.
    #[serde(rename = "head and logits")]
    HeadAndLogits,
    /// Pieces of files that are copied or compared.
    #[serde(rename = "pieces of files")]
    FilePieces,
    /// A GPU's context and libraries.
    #[serde(rename = "context")]
    DeviceContext,
    /// Rotary tables on a GPU.
    #[serde(rename = "rotary tables")]
    RotaryTables,
    /// A matrix in its stored dtype, before it is cast.
    #[serde(rename = "a matrix as stored")]
    StoredMatrix,
    /// One sample in a layer, on a GPU.
    #[serde(rename = "one sample")]
    Sample,
    /// The head's weight on a GPU.
    Head,
    /// Rows of the tensors that are merged, and their bytes.
    #[serde(rename = "pieces of tensors")]
    TensorPieces,
    /// Counts of magnitudes.
    #[serde(rename = "counts of magnitudes")]
    MagnitudeCounts,
    /// Factors of adapters.
    #[serde(rename = "factors of adapters")]
    AdapterFactors,
    /// Rules for the rows of a merged vocabulary.
    #[serde(rename = "rows of tokens")]
    Vocabulary,
    /// One window's logits on a GPU.
    #[serde(rename = "one window")]
    Window,
}

impl fmt::Display for PartKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(formatter)
    }
}

/// Seconds by a stated model; docs/dev/memory-formulas.md has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeEstimate {
    /// The time of the run. It is less than `compute + disk + transfers` if reading overlaps computing.
    pub seconds: f64,
    /// Floating-point operations, divided by the rate of the devices.
    pub compute: f64,
    /// Bytes of files, divided by the disk's rate. Reading ahead overlaps computing.
    pub disk: f64,
    /// Bytes between memory and GPUs, divided by the link's rate.
    pub transfers: f64,
}

impl TimeEstimate {
    /// The time of work that computes while it waits for the disk.
    pub fn overlapped(compute: f64, disk: f64) -> Self {
        Self { seconds: compute.max(disk), compute, disk, transfers: 0.0 }
    }

    /// The sum of both times: the work is done in sequence.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            compute: self.compute + other.compute,
            disk: self.disk + other.disk,
            transfers: self.transfers + other.transfers,
        }
    }
}

impl PhasePlan {
    /// A phase on the CPU, with the parts that have bytes.
    pub fn on_cpu(phase: Phase, mut parts: Vec<MemoryPart>) -> Self {
        parts.retain(|part| part.bytes > ByteSize::ZERO);
        let bytes = parts.iter().map(|part| part.bytes).sum();
        Self { phase, device: "cpu".to_string(), bytes, parts }
    }
}

impl Plan {
    /// The plan of a pass over tensors on the CPU, which has no layers and no hidden states.
    pub fn on_cpu(
        budget: Option<ByteSize>,
        phases: Vec<PhasePlan>,
        time: TimeEstimate,
        note: String,
    ) -> Self {
        let most = phases.iter().max_by_key(|phase| phase.bytes);
        Self {
            devices: vec![DevicePlan {
                device: "cpu".to_string(),
                budget,
                peak: most.map_or(ByteSize::ZERO, |phase| phase.bytes),
                peak_phase: most.map(|phase| phase.phase),
            }],
            layers: Vec::new(),
            hidden_states: HiddenStatesPlan {
                storage: HiddenStatesStorage::Ram,
                bytes: ByteSize::ZERO,
            },
            memory_settings: MemorySettings::default(),
            phases,
            time,
            notes: vec![note],
        }
    }

    /// The names of the devices that compute: `cpu`, or the GPUs as `cuda:0+cuda:1`. A GPU on which nothing is planned computes nothing.
    pub fn computing(&self) -> String {
        let used = self.devices.iter().filter(|device| device.peak > ByteSize::ZERO);
        let names = used.map(|device| device.device.as_str());
        let gpus: Vec<&str> = names.filter(|name| *name != "cpu").collect();
        if gpus.is_empty() { "cpu".to_string() } else { gpus.join("+") }
    }

    /// The plan of the CPU, which is part of every plan.
    pub fn cpu(&self) -> Option<&DevicePlan> {
        self.devices.iter().find(|device| device.device == "cpu")
    }
}
