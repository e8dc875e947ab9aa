//! A run in numbers, for the planner: model, texts and settings become the memory of each phase and the work.
//!
//! | file | story |
//! | --- | --- |
//! | `host` | memory of the process per phase, from `model/footprint.rs` |
//! | `training` | memory of a training per phase |
//! | `gpu` | memory of a GPU per phase, from `model/on_device/tiling.rs` |
//! | `work` | floating-point operations, and bytes of files and transfers |
//!
//! docs/memory-model.md has the formulas and compares them with measurements.

mod gpu;
mod host;
mod training;
mod work;

use super::flow::{Flow, ObservationOrder, Propagation};
use super::output_error;
use crate::bytes::ByteSize;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype};
use crate::model::on_device::Tiling;
use crate::model::{Dtypes, ModelConfig, footprint};
use crate::placement::{Demand, ExecutionOption, PhaseMemory, Processors, Workload};
use crate::pruning::{StatisticsKind, Technique};
use crate::run::memory_settings::{GramsHeld, MemorySettings, StatisticsHeld, WeightsHeld};
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{HiddenStatesStorage, Phase};
use crate::runtime::Side;
use host::Host;
pub use training::TrainingShape;

/// Bytes per element of hidden states on the CPU.
const F32: usize = size_of::<f32>();

/// The properties of a run that decide its memory and its time.
#[derive(Debug, Clone)]
pub struct RunShape<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// The dtypes of its weights.
    pub dtypes: Dtypes,
    /// Tokens per sample and window.
    pub seqlen: usize,
    /// The dtype GPUs compute in.
    pub gpu_dtype: StoredDtype,
    /// Calibration samples; 0 for a method without calibration.
    pub samples: usize,
    /// Evaluation windows of a side.
    pub windows: usize,
    /// Sides that are evaluated.
    pub sides: &'a [Side],
    /// The technique; `None` where nothing is pruned.
    pub technique: Option<Technique>,
    /// The techniques of further runs that share the sweep and its statistics (`pipeline/shared.rs`); each run has windows of its own.
    pub shared_with: Vec<Technique>,
    /// The way of the calibration samples.
    pub flow: Flow,
    /// Measurements of a run that prunes nothing.
    pub observes: Option<Observed>,
    /// A training.
    pub trains: Option<TrainingShape>,
    /// The model is written.
    pub saves: bool,
    /// Worker threads.
    pub threads: usize,
    /// The arithmetic of products on the CPU.
    pub products: Products,
    /// The peak of tokenizing, tokenizer included.
    pub tokenizing: ByteSize,
    /// The memory that tokenizing leaves until the run ends.
    pub retained: ByteSize,
    /// Settings given by the user; `None` leaves the choice to the plan.
    pub settings: Option<MemorySettings>,
}

/// Measurements for a later use.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// The kind of statistics; `None` where samples pass through the layers only.
    pub kind: Option<&'static dyn StatisticsKind>,
    /// Bytes that are kept of all layers, and of their file while it is written.
    pub kept: ByteSize,
}

impl Workload for RunShape<'_> {
    fn num_hidden_layers(&self) -> usize {
        self.config.num_hidden_layers
    }

    fn layer_weights(&self) -> ByteSize {
        footprint::layer_weights(self.config, self.dtypes.layers, &MemorySettings::default())
    }

    fn hidden_states(&self, processors: Processors) -> ByteSize {
        let streams = self.sample_states() + self.evaluated_windows();
        let state = self.state(self.element(processors));
        let swept = ByteSize(state.0.saturating_mul(streams as u64));
        // The states of a training are gone before the sweep begins.
        match &self.trains {
            Some(trains) => swept.max(trains.states(self)),
            None => swept,
        }
    }

    fn storages(&self, processors: Processors) -> Vec<HiddenStatesStorage> {
        let mut storages = vec![HiddenStatesStorage::Ram];
        if self.passes_samples() {
            storages.push(HiddenStatesStorage::Disk);
            // A training keeps the inputs of many layers, and reads them on the host.
            if processors != Processors::Cpu && self.trains.is_none() {
                storages.insert(0, HiddenStatesStorage::Device);
            }
        }
        storages
    }

    fn layer_settings(&self, processors: Processors) -> Vec<MemorySettings> {
        let fits_gpu = Tiling::can_index(self.config, self.seqlen);
        let is_possible = |settings: &MemorySettings| {
            // Trained layers are made in memory.
            if self.trains.is_some() && settings.weights != WeightsHeld::Layer {
                return false;
            }
            processors == Processors::Cpu || (fits_gpu && settings.weights == WeightsHeld::Layer)
        };
        if let Some(settings) = &self.settings {
            return Vec::from_iter(Some(settings.clone()).filter(is_possible));
        }
        let mut all = Vec::new();
        for settings in self.statistics_settings(processors) {
            for mlp_tokens in [settings.mlp_tokens, 512, 256, 128, 64] {
                for attention_heads in self.attention_heads() {
                    let settings =
                        MemorySettings { mlp_tokens, attention_heads, ..settings.clone() };
                    let is_packed = footprint::keeps_packed(self.kernel(), &settings);
                    let repacked = is_packed
                        .then(|| MemorySettings { keep_packed: false, ..settings.clone() });
                    all.push(settings);
                    all.extend(repacked);
                }
            }
        }
        all.retain(is_possible);
        match self.trains_whole() {
            // Its layers pass while the head is in memory.
            true => all.iter().flat_map(|one| self.with_heads(one)).collect(),
            false => all,
        }
    }

    fn head_settings(&self, settings: &MemorySettings) -> Vec<MemorySettings> {
        if self.settings.is_some() || self.windows == 0 || self.trains_whole() {
            return vec![settings.clone()];
        }
        self.with_heads(settings)
    }

    fn layers(&self, option: &ExecutionOption) -> Demand {
        Demand {
            host: Host::new(self, option).layers(),
            device: match option.processors {
                Processors::Cpu => Vec::new(),
                Processors::Gpus(_) => gpu::layers(self, option),
            },
            work: work::layers(self, option),
        }
    }

    fn head(&self, option: &ExecutionOption) -> Demand {
        let host = Host::new(self, option);
        let trains = self.trains.as_ref().filter(|_| self.trains_whole());
        let of_training = trains.map(|trains| host.training_head(trains));
        let of_windows = (self.windows > 0).then(|| host.head());
        let both = of_training.into_iter().chain(of_windows);
        let total =
            |phase: &PhaseMemory| phase.parts.iter().map(|part| part.bytes).sum::<ByteSize>();
        let Some(largest) = both.max_by_key(total) else {
            return Demand::default();
        };
        Demand {
            host: vec![largest],
            device: match option.processors {
                Processors::Cpu => Vec::new(),
                Processors::Gpus(_) => {
                    let of_windows = (self.windows > 0).then(|| gpu::head(self, option));
                    let of_training = gpu::training_head(self, &option.settings);
                    let both = of_windows.into_iter().chain(of_training);
                    Vec::from_iter(both.max_by_key(total))
                }
            },
            work: work::head(self, option),
        }
    }
}

impl RunShape<'_> {
    /// The choices for a layer's weights: two layers in memory, one layer, or one matrix.
    fn weight_settings(&self) -> [MemorySettings; 3] {
        let default = MemorySettings::default();
        let one_layer = MemorySettings { prefetch: false, ..default.clone() };
        let one_matrix = MemorySettings { weights: WeightsHeld::Matrix, ..one_layer.clone() };
        [default, one_layer, one_matrix]
    }

    /// The choices for the head: bytes of logits, and rows in memory.
    fn with_heads(&self, settings: &MemorySettings) -> Vec<MemorySettings> {
        let rows = |parts: usize| Some(self.config.vocab_size.div_ceil(parts));
        let mut all = Vec::new();
        for logits_bytes in [settings.logits_bytes, ByteSize(32 << 20), ByteSize(8 << 20)] {
            for head_rows in [None, rows(4), rows(16)] {
                all.push(MemorySettings { logits_bytes, head_rows, ..settings.clone() });
            }
        }
        all
    }

    /// The choices for weights and statistics: all statistics of a layer at the same time, then the statistics of a single input; Gram
    /// matrices on GPUs, then on the host.
    fn statistics_settings(&self, processors: Processors) -> Vec<MemorySettings> {
        let mut all: Vec<_> = self.weight_settings().into();
        if self.passes_inputs_apart(StatisticsHeld::Input) && !self.is_sequential() {
            let apart = self
                .weight_settings()
                .map(|settings| MemorySettings { statistics: StatisticsHeld::Input, ..settings });
            all.extend(apart);
        }
        if processors != Processors::Cpu && self.sums_grams_on_gpus() {
            let on_host = all
                .iter()
                .map(|settings| MemorySettings { grams: GramsHeld::Host, ..settings.clone() });
            let on_host: Vec<_> = on_host.collect();
            all.extend(on_host);
        }
        all
    }

    /// The numbers of columns of the inputs whose Gram matrices a GPU holds at the same time.
    pub(super) fn grams_on_gpu(&self, settings: &MemorySettings) -> Vec<usize> {
        let on_gpu = settings.grams == GramsHeld::Device && self.sums_grams_on_gpus();
        let mut widths = output_error::widths(self.config).to_vec();
        if self.passes_inputs_apart(settings.statistics) {
            // The inputs are observed in turn, so the room of the largest serves all of them.
            widths.sort_unstable();
            widths.drain(..widths.len() - 1);
        }
        widths.retain(|_| on_gpu);
        widths
    }

    /// Returns whether GPUs can sum up the statistics of large inputs.
    fn sums_grams_on_gpus(&self) -> bool {
        let kind = self.statistics();
        kind.is_some_and(|kind| kind.part_beside_gram(0).is_some())
    }

    fn is_sequential(&self) -> bool {
        self.flow.sequence == ObservationOrder::Inputs
    }

    /// Returns whether the samples pass a layer once for each of its inputs.
    fn passes_inputs_apart(&self, held: StatisticsHeld) -> bool {
        let is_large = self.statistics().is_some_and(|kind| kind.is_in_place());
        let may_wait = self.flow.propagation == Propagation::Pruned;
        self.is_sequential() || (is_large && may_wait && held == StatisticsHeld::Input)
    }

    /// The choices for key/value heads that attention computes at once: all, a half, a quarter, an eighth.
    fn attention_heads(&self) -> Vec<Option<usize>> {
        let groups = self.config.num_key_value_heads;
        let parts = [2, 4, 8].into_iter().filter(|&parts| parts <= groups);
        let parts = parts.map(|parts| Some(groups.div_ceil(parts)));
        std::iter::once(None).chain(parts).collect()
    }

    /// Bytes of the hidden states of a sample, with elements of this size.
    fn state(&self, element: usize) -> ByteSize {
        ByteSize::of(self.seqlen.saturating_mul(self.config.hidden_size), element)
    }

    /// Bytes per element of hidden states.
    fn element(&self, processors: Processors) -> usize {
        match processors {
            Processors::Cpu => F32,
            Processors::Gpus(_) => self.gpu_dtype.bytes(),
        }
    }

    /// The number of hidden states of calibration samples. A training by layers also keeps the target of each sample.
    fn sample_states(&self) -> usize {
        match &self.trains {
            Some(trains) if trains.is_by_layer => 2 * self.samples,
            _ => self.samples,
        }
    }

    fn trains_whole(&self) -> bool {
        self.trains.as_ref().is_some_and(|trains| !trains.is_by_layer)
    }

    /// The runs of the sweep.
    fn runs(&self) -> usize {
        1 + self.shared_with.len()
    }

    /// The techniques of all runs of the sweep.
    fn techniques(&self) -> impl Iterator<Item = &Technique> {
        self.technique.iter().chain(&self.shared_with)
    }

    /// Windows of all sides and runs.
    fn evaluated_windows(&self) -> usize {
        self.windows * self.sides.len() * self.runs()
    }

    fn passes_samples(&self) -> bool {
        self.samples + self.evaluated_windows() > 0 || self.trains.is_some()
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        let of_method = Technique::statistics_of_all(self.techniques());
        let kind = of_method.or(self.observes.and_then(|observed| observed.kind));
        kind.filter(|_| self.samples > 0)
    }

    fn kernel(&self) -> Kernel {
        self.products.kernel(self.dtypes.layers)
    }
}

fn part(kind: PartKind, bytes: ByteSize) -> MemoryPart {
    MemoryPart { kind, bytes }
}

/// Returns the phase in which the windows of a side pass the layers.
fn evaluation_phases(run: &RunShape<'_>) -> impl Iterator<Item = Phase> {
    let is_evaluated = run.windows > 0;
    let sides = run.sides.iter().filter(move |_| is_evaluated);
    sides.map(|side| side.phase())
}
