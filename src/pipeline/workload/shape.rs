//! [`RunShape`] and [`TrainingShape`]: the properties of a run that decide its memory and its time.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::linalg::product::Kernel;
use crate::linalg::{Products, StoredDtype};
use crate::model::on_device::TrainedSizes;
use crate::model::{Dtypes, ModelConfig, WeightForm, WeightForms};
use crate::pipeline::flow::{Flow, ObservationOrder, Propagation};
use crate::placement::Processors;
use crate::pruning::{StatisticsKind, Technique};
use crate::run::memory_settings::{GramsHeld, MemorySettings, StatisticsHeld, WeightsHeld};
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{Phase, Plan};
use crate::runtime::Side;
use crate::runtime::blocks::SampleBlocks;

/// Bytes per element of hidden states on the CPU.
pub(super) const F32: usize = size_of::<f32>();

/// The properties of a run that decide its memory and its time.
#[derive(Debug, Clone)]
pub struct RunShape<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// The dtypes of its weights.
    pub dtypes: Dtypes,
    /// The form of the matrices of a layer in memory.
    pub forms: &'a WeightForms,
    /// Tokens per sample and window.
    pub seqlen: usize,
    /// The dtype GPUs compute in.
    pub gpu_dtype: StoredDtype,
    /// Calibration samples; 0 for a method without calibration.
    pub samples: usize,
    /// Evaluation windows of a side.
    pub windows: usize,
    /// The packs of tasks.
    pub tasks: TaskShape,
    /// All ranks. `samples` and `windows` count the largest share of a rank then. `None` for a run of a single process.
    pub of_all_ranks: Option<RanksShape>,
    /// Sides that are evaluated.
    pub sides: &'a [Side],
    /// The dense model that has passed the windows before.
    pub against: Option<AgainstShape<'a>>,
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

/// All ranks of a run in numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RanksShape {
    /// Their number.
    pub ranks: usize,
    /// The calibration samples of all of them.
    pub samples: usize,
    /// The evaluation windows of all of them, on a side.
    pub windows: usize,
    /// The time of reading weights, relative to a rank that has the storage for itself.
    pub reading: f64,
}

/// The packs of tasks in numbers. They are also counted as windows with as many tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct TaskShape {
    /// The windows that are packs.
    pub windows: usize,
    /// Rows of a pack that have logits, at most.
    pub scored_rows: usize,
    /// Memory of packs and questions until the run ends. Every rank has all of them.
    pub kept: ByteSize,
    /// Memory of scored tokens at the head.
    pub scoring: ByteSize,
}

/// A dense model that has passed the windows, whose final states wait for the windows of the model.
#[derive(Debug, Clone, Copy)]
pub enum AgainstShape<'a> {
    /// It passes in a sweep of its own, and has a head of its own.
    Other {
        /// Its shape.
        config: &'a ModelConfig,
        /// The dtypes of its weights.
        dtypes: Dtypes,
    },
    /// It is the source of this run, and an earlier run has left its states in a file.
    Kept,
}

/// Measurements for a later use.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// The kind of statistics; `None` where samples pass through the layers only.
    pub kind: Option<&'static dyn StatisticsKind>,
    /// Bytes that are kept of all layers, and of their file while it is written.
    pub kept: ByteSize,
}

/// The dense model of a training of the whole model, whose logits are learned.
#[derive(Debug, Clone)]
pub struct TeacherShape {
    /// Its shape.
    pub config: Arc<ModelConfig>,
    /// The dtypes of its weights.
    pub dtypes: Dtypes,
}

/// A training in numbers.
#[derive(Debug, Clone, Default)]
pub struct TrainingShape {
    /// Each layer is trained by itself, on the calibration samples.
    pub is_by_layer: bool,
    /// Factors are trained, not weights.
    pub has_factors: bool,
    /// The ranks that share the examples.
    pub ranks: usize,
    /// Examples of a step on a rank; of a training by layers 0.
    pub per_step: usize,
    /// Examples in memory, including the held-out examples.
    pub examples: usize,
    /// Held-out examples.
    pub held_out: usize,
    /// Examples that pass each layer forwards and backwards in the whole training.
    pub passes: u64,
    /// Passes over all examples, where these decide the number of steps.
    pub epochs: Option<u64>,
    /// Bytes of an element of a stored input.
    pub state_element: usize,
    /// Parameters with their gradients, states and masks that are in memory until the end.
    pub store: ByteSize,
    /// Values and masks of a layer that are not on the store in memory. In a training by layers they exist always, in a training of the
    /// whole model only while they become the weights of the layer.
    pub values: ByteSize,
    /// Gradients of a layer in use.
    pub gradients: ByteSize,
    /// No layer computes activations again.
    pub is_kept: bool,
    /// The dense model whose logits are learned; `None` without a teacher.
    pub teacher: Option<TeacherShape>,
    /// Weights and activations that stay from the forward sweep to the reverse sweep.
    pub kept: ByteSize,
    /// The part of an update that is not on the store in memory.
    pub update: ByteSize,
    /// Frozen weights of a layer, as they are read.
    pub base: ByteSize,
    /// Masks of the trained matrices of a layer.
    pub masks: ByteSize,
    /// Layers whose frozen weights stay in memory.
    pub resident_layers: usize,
    /// The trained part of a layer, for devices.
    pub sizes: TrainedSizes,
}

impl TrainingShape {
    /// Notes the number of examples, once the text is tokenized.
    pub fn known_examples(&mut self, examples: usize, held_out: usize) {
        (self.examples, self.held_out) = (examples, held_out);
        if let Some(epochs) = self.epochs {
            self.passes = epochs * (examples - held_out) as u64;
        }
    }

    /// Layers whose frozen weights have room beside the peak of a plan without them.
    pub fn fitting(&self, plan: &Plan, layers: usize) -> usize {
        let cpu = plan.cpu();
        let room = cpu.and_then(|cpu| Some(cpu.budget?.0.saturating_sub(cpu.peak.0)));
        let fitting = room.unwrap_or(0) / self.base.0.max(1);
        layers.min(usize::try_from(fitting).unwrap_or(usize::MAX))
    }

    /// Frozen weights of a layer while they become its weights, unless they stay in memory anyway.
    pub(super) fn read_frozen(&self) -> ByteSize {
        match self.has_factors {
            true => self.base,
            false => ByteSize::ZERO,
        }
    }

    /// Memory of the hidden states of a training of the whole model.
    pub(super) fn states(&self, run: &RunShape<'_>) -> ByteSize {
        let state = |element: usize, count: usize| {
            ByteSize(run.state(element).0.saturating_mul(count as u64))
        };
        let inputs = (run.config.num_hidden_layers + 1).saturating_mul(self.per_step);
        let held_out = SampleBlocks::new(self.held_out).most_of(self.ranks);
        state(self.state_element, inputs) + state(F32, self.per_step + held_out)
    }
}

impl RunShape<'_> {
    /// The number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.of_all_ranks.map_or(1, |of| of.ranks)
    }

    /// The choices for a layer's weights: two layers in memory, one layer, or one matrix. Compact matrices are not read one at a time,
    /// and no product keeps them packed.
    pub(super) fn weight_settings(&self) -> Vec<MemorySettings> {
        let is_dense = self.forms.form() == WeightForm::Dense;
        let default = MemorySettings::default();
        let default = MemorySettings { keep_packed: is_dense && default.keep_packed, ..default };
        let one_layer = MemorySettings { prefetch: false, ..default.clone() };
        let mut all = vec![default, one_layer.clone()];
        if is_dense {
            all.push(MemorySettings { weights: WeightsHeld::Matrix, ..one_layer });
        }
        all
    }

    /// The choices for the head: bytes of logits, and rows in memory.
    pub(super) fn with_heads(&self, settings: &MemorySettings) -> Vec<MemorySettings> {
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
    pub(super) fn statistics_settings(&self, processors: Processors) -> Vec<MemorySettings> {
        let mut all = self.weight_settings();
        if self.passes_inputs_apart(StatisticsHeld::Input) && !self.is_sequential() {
            let apart = self.weight_settings().into_iter();
            all.extend(
                apart.map(|settings| MemorySettings {
                    statistics: StatisticsHeld::Input,
                    ..settings
                }),
            );
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
    pub(in crate::pipeline) fn grams_on_gpu(&self, settings: &MemorySettings) -> Vec<usize> {
        let on_gpu = settings.grams == GramsHeld::Device && self.sums_grams_on_gpus();
        let mut widths: Vec<usize> = self.config.input_widths().values().copied().collect();
        if self.passes_inputs_apart(settings.statistics) {
            // The inputs are observed in turn, so the room of the largest serves all of them.
            widths.sort_unstable();
            widths.drain(..widths.len() - 1);
        }
        widths.retain(|_| on_gpu);
        widths
    }

    /// Returns whether GPUs can sum up the statistics of large inputs.
    pub(super) fn sums_grams_on_gpus(&self) -> bool {
        let kind = self.statistics();
        kind.is_some_and(|kind| kind.part_beside_gram(0).is_some())
    }

    pub(super) fn is_sequential(&self) -> bool {
        self.flow.sequence == ObservationOrder::Inputs
    }

    /// Returns whether the samples pass a layer once for each of its inputs.
    pub(super) fn passes_inputs_apart(&self, held: StatisticsHeld) -> bool {
        let is_large = self.statistics().is_some_and(|kind| kind.is_in_place());
        let may_wait = self.flow.propagation == Propagation::Pruned;
        self.is_sequential() || (is_large && may_wait && held == StatisticsHeld::Input)
    }

    /// Returns whether a layer is written while the samples pass through it.
    pub(super) fn writes_beside(&self, settings: &MemorySettings) -> bool {
        let passes_after_pruning = self.flow.propagation == Propagation::Pruned;
        let has_samples = self.technique.is_some() && self.samples > 0;
        has_samples && passes_after_pruning && settings.weights != WeightsHeld::Matrix
    }

    /// The choices for key/value heads that attention computes at once: all, a half, a quarter, an eighth.
    pub(super) fn attention_heads(&self) -> Vec<Option<usize>> {
        let groups = self.config.num_key_value_heads;
        let parts = [2, 4, 8].into_iter().filter(|&parts| parts <= groups);
        let parts = parts.map(|parts| Some(groups.div_ceil(parts)));
        std::iter::once(None).chain(parts).collect()
    }

    /// The memory of the largest layer in its form, from the memory of a dense layer.
    pub(super) fn in_form(&self, dense: ByteSize) -> ByteSize {
        if self.forms.form() == WeightForm::Dense {
            return dense;
        }
        let (config, dtype) = (self.config, self.dtypes.layers);
        let matrices = WeightForms::dense().layer_bytes(config, dtype);
        ByteSize(dense.0 - matrices.0) + self.forms.largest_layer_bytes(config, dtype)
    }

    /// Bytes of the hidden states of a sample, with elements of this size.
    pub(super) fn state(&self, element: usize) -> ByteSize {
        ByteSize::of(self.seqlen.saturating_mul(self.config.hidden_size), element)
    }

    /// Bytes per element of hidden states.
    pub(super) fn element(&self, processors: Processors) -> usize {
        match processors {
            Processors::Cpu => F32,
            Processors::Gpus(_) => self.gpu_dtype.bytes(),
        }
    }

    /// The number of hidden states of calibration samples. A training by layers also keeps the target of each sample.
    pub(super) fn sample_states(&self) -> usize {
        match &self.trains {
            Some(trains) if trains.is_by_layer => 2 * self.samples,
            _ => self.samples,
        }
    }

    pub(super) fn trains_whole(&self) -> bool {
        self.trains.as_ref().is_some_and(|trains| !trains.is_by_layer)
    }

    /// The runs of the sweep.
    pub(super) fn runs(&self) -> usize {
        1 + self.shared_with.len()
    }

    /// The techniques of all runs of the sweep.
    pub(super) fn techniques(&self) -> impl Iterator<Item = &Technique> {
        self.technique.iter().chain(&self.shared_with)
    }

    /// Bytes of the final states of the dense model's windows.
    pub(super) fn waiting_states(&self, windows: usize) -> ByteSize {
        let (windows, hidden_size) = match self.against {
            None => return ByteSize::ZERO,
            Some(AgainstShape::Other { config, .. }) => (windows, config.hidden_size),
            // A state is read where it is compared.
            Some(AgainstShape::Kept) => (1, self.config.hidden_size),
        };
        ByteSize::of(windows * self.seqlen * hidden_size, F32)
    }

    /// Returns whether the states of two models meet at their heads.
    pub(super) fn compares(&self) -> bool {
        self.against.is_some() || (self.sides.len() > 1 && self.technique.is_some())
    }

    /// Windows of a side that are no packs of tasks.
    pub(super) fn text_windows(&self) -> usize {
        self.windows.saturating_sub(self.tasks.windows)
    }

    /// Windows of all sides and runs.
    pub(super) fn evaluated_windows(&self) -> usize {
        self.windows * self.sides.len() * self.runs()
    }

    pub(super) fn passes_samples(&self) -> bool {
        self.samples + self.evaluated_windows() > 0 || self.trains.is_some()
    }

    pub(super) fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        let of_method = Technique::statistics_of_all(self.techniques());
        let kind = of_method.or(self.observes.and_then(|observed| observed.kind));
        kind.filter(|_| self.samples > 0)
    }

    pub(super) fn kernel(&self) -> Kernel {
        self.products.kernel(self.dtypes.layers)
    }
}

/// A part of a phase.
pub(super) fn part(kind: PartKind, bytes: ByteSize) -> MemoryPart {
    MemoryPart { kind, bytes }
}

/// Returns the phase in which the windows of a side pass the layers.
pub(super) fn evaluation_phases(run: &RunShape<'_>) -> impl Iterator<Item = Phase> {
    let is_evaluated = run.windows > 0;
    let sides = run.sides.iter().filter(move |_| is_evaluated);
    sides.map(|side| side.phase())
}
