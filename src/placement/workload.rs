//! A run in numbers: the memory of its phases and its work, for the settings a plan chooses from.
//!
//! The planner knows nothing of models. `pipeline/workload.rs` knows them and implements [`Workload`].

use crate::bytes::ByteSize;
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{HiddenStatesStorage, MemorySettings, Phase};

/// A run in numbers.
///
/// The head's phase follows the layers. So a plan chooses the settings of the layers first and the settings of the head afterwards.
pub trait Workload {
    /// Decoder layers.
    fn num_hidden_layers(&self) -> usize;

    /// The weights of a layer, for maps that fill GPUs.
    fn layer_weights(&self) -> ByteSize;

    /// The bytes of all hidden states.
    fn hidden_states(&self, processors: Processors) -> ByteSize;

    /// The places for hidden states, in order of preference.
    fn storages(&self, processors: Processors) -> Vec<HiddenStatesStorage>;

    /// The settings a plan chooses from for the layers, in order of preference. Empty where no GPU can compute the layers.
    fn layer_settings(&self, processors: Processors) -> Vec<MemorySettings>;

    /// `settings` with each choice for the head, in order of preference.
    fn head_settings(&self, settings: &MemorySettings) -> Vec<MemorySettings>;

    /// Memory and work of all phases but the head's.
    fn layers(&self, option: &ExecutionOption) -> Demand;

    /// Memory and work of the head's phase.
    fn head(&self, option: &ExecutionOption) -> Demand;
}

/// The devices that compute a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processors {
    /// The CPU.
    Cpu,
    /// So many GPUs, which share the samples.
    Gpus(usize),
}

/// A way to execute a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutionOption {
    /// The settings that trade memory for time.
    pub settings: MemorySettings,
    /// The place of hidden states between two layers.
    pub storage: HiddenStatesStorage,
    /// The devices that compute.
    pub processors: Processors,
}

/// Memory and work of some phases.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Demand {
    /// Memory of the process.
    pub host: Vec<PhaseMemory>,
    /// Memory of each GPU, its context included; empty on the CPU.
    pub device: Vec<PhaseMemory>,
    /// Operations and bytes.
    pub work: Work,
}

impl Demand {
    /// Both demands together, their phases in the order of a run.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.host.extend(other.host);
        self.device.extend(other.device);
        self.host.sort_by_key(|memory| memory.phase);
        self.device.sort_by_key(|memory| memory.phase);
        self
    }
}

/// The memory that is in use at once during a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PhaseMemory {
    /// The phase.
    pub phase: Phase,
    /// The parts that exist together.
    pub parts: Vec<MemoryPart>,
}

impl PhaseMemory {
    /// The sum of the parts.
    pub fn bytes(&self) -> ByteSize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Returns the bytes of the parts of a kind.
    pub fn of(&self, kind: PartKind) -> ByteSize {
        let parts = self.parts.iter().filter(|part| part.kind == kind);
        parts.map(|part| part.bytes).sum()
    }
}

/// Operations and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Floating-point operations of a layer, all samples.
    pub layer_flop: f64,
    /// Operations of a layer that the CPU does, whatever computes the layer; not part of `layer_flop`.
    pub layer_host_flop: f64,
    /// Bytes of weights read for a layer, and written beside the pass of its samples. They overlap computing where the settings prefetch.
    pub layer_beside: f64,
    /// Bytes of weights and hidden states moved to and from files for a layer. Nothing overlaps them.
    pub layer_moved: f64,
    /// Bytes of weights copied to each GPU for a layer.
    pub layer_uploaded: f64,
    /// Bytes of hidden states moved between memory and GPUs for a layer, all GPUs together.
    pub layer_states: f64,
    /// Floating-point operations before and after the layers.
    pub once_flop: f64,
    /// Bytes of files before and after the layers.
    pub once_moved: f64,
}

/// Returns the largest memory of a phase, and the phase; zero without phases.
pub fn peak(phases: &[PhaseMemory]) -> (ByteSize, Option<Phase>) {
    let mut highest = (ByteSize::ZERO, None);
    for memory in phases {
        let bytes = memory.bytes();
        if bytes > highest.0 {
            highest = (bytes, Some(memory.phase));
        }
    }
    highest
}

/// Returns the least memory of a GPU; zero where no GPU can compute.
pub(super) fn least_gpu(workload: &dyn Workload) -> ByteSize {
    let demands = demands(workload, Processors::Gpus(1), None);
    let peaks = demands.map(|demand| peak(&demand.device).0);
    peaks.min().unwrap_or_default()
}

/// The demand of every option on the given processors.
pub(super) fn demands<'w>(
    workload: &'w dyn Workload,
    processors: Processors,
    storage: Option<HiddenStatesStorage>,
) -> impl Iterator<Item = Demand> + 'w {
    let storages = workload.storages(processors).into_iter();
    let storages = storages.filter(move |one| storage.is_none_or(|only| only == *one));
    storages.flat_map(move |storage| {
        let layers = workload.layer_settings(processors).into_iter();
        layers.flat_map(move |settings| {
            let option = move |settings| ExecutionOption { settings, storage, processors };
            let heads = workload.head_settings(&settings).into_iter();
            let layers = workload.layers(&option(settings));
            heads.map(move |settings| layers.clone().and(workload.head(&option(settings))))
        })
    })
}
