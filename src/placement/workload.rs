//! What a job asks of a machine, in numbers: the ways it can be done, and what each takes.
//!
//! The planner knows nothing of models. Whoever does (`pipeline/workload.rs`) lists the ways, the one it likes best first, each
//! with the bytes of every phase and the work of one layer; the planner weighs them against budgets and rates.

use crate::bytes::ByteSize;
use crate::run::HiddenStatesStorage;
use crate::run::memory_settings::MemorySettings;
use crate::run::plan::Part;

/// A job.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Workload {
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Ways with every layer computed on the CPU, the preferred one first.
    pub on_cpu: Vec<Way>,
    /// Ways with layers computed on GPUs; empty where that is not asked for.
    pub on_gpu: Vec<Way>,
    /// The weights of one layer, for maps that fill GPUs.
    pub layer: ByteSize,
}

/// One way to do the job.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// How the work is cut up.
    pub settings: MemorySettings,
    /// The place of hidden states between two layers.
    pub storage: HiddenStatesStorage,
    /// The hidden states of all streams.
    pub hidden_states: ByteSize,
    /// What the process holds in each phase.
    pub host: Vec<Need>,
    /// What each GPU holds in each phase, its context included; empty on the CPU.
    pub device: Vec<Need>,
    /// What has to be done.
    pub work: Work,
}

/// What is in memory at once during a phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// As the run's clock calls the phase.
    pub phase: &'static str,
    /// The parts.
    pub parts: Vec<Part>,
}

impl Need {
    /// The sum of the parts.
    pub fn bytes(&self) -> ByteSize {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

/// Operations and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Floating-point operations of one layer, all streams, with what the settings add.
    pub layer_flop: f64,
    /// Bytes of weights read for one layer. They are read while the layer before is computed, if the settings say so.
    pub layer_read: f64,
    /// Bytes of weights and hidden states moved to and from files for one layer that nothing overlaps.
    pub layer_moved: f64,
    /// Bytes between memory and GPUs for one layer: weights to each, hidden states once in all.
    pub layer_uploaded: f64,
    /// The hidden states among them.
    pub layer_states: f64,
    /// Floating-point operations before and after the layers.
    pub once_flop: f64,
    /// Bytes of files before and after the layers.
    pub once_moved: f64,
}

/// The most that `needs` hold at once, and in which phase.
pub fn peak(needs: &[Need]) -> (ByteSize, &'static str) {
    let mut highest = (ByteSize::ZERO, "");
    for need in needs {
        let bytes = need.bytes();
        if bytes > highest.0 {
            highest = (bytes, need.phase);
        }
    }
    highest
}
