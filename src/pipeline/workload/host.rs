//! Memory of the process in each phase: `model/footprint.rs` has what a piece of work takes.

use super::shape::{AgainstShape, F32, RunShape, evaluation_phases, part};
use crate::bytes::ByteSize;
use crate::linalg::parts::{LEAST_ROWS, largest_part};
use crate::linalg::product::Kernel;
use crate::model::footprint::{self, HeadTokens, SamplePass};
use crate::pipeline::{joined, output_error, solve};
use crate::placement::{ExecutionOption, PhaseMemory, Processors, Workload};
use crate::pruning::Technique;
use crate::run::memory_settings::WeightsHeld;
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{HiddenStatesStorage, Phase};
use crate::runtime::bytes_on_the_way;

/// The program before it opens a model: thread stacks, lists of tensors. Measured: 4 to 6 MiB.
const PROGRAM: ByteSize = ByteSize(6 << 20);

/// The MPI library in the process of one of several ranks. Measured with Open MPI 4.1 and 2 to 4 ranks of a machine: 3 MiB.
const MPI_LIBRARY: ByteSize = ByteSize(4 << 20);

/// CUDA's libraries in the process. An estimate, not measured.
const CUDA_ON_HOST: ByteSize = ByteSize(256 << 20);

/// Files are copied, hashed and compared in pieces, two at a time, that take this together; less for a smaller model.
const FILE_PIECES: ByteSize = ByteSize(16 << 20);

/// The streams whose hidden states exist. The calibration streams are freed after the last layer, the streams of windows after the head.
#[derive(Debug, Clone, Copy)]
enum Alive {
    All,
    Windows,
    None,
}

/// The process that executes a run with an option.
pub(super) struct Host<'r> {
    pub(super) run: &'r RunShape<'r>,
    pub(super) option: &'r ExecutionOption,
}

impl<'r> Host<'r> {
    pub(super) fn new(run: &'r RunShape<'r>, option: &'r ExecutionOption) -> Self {
        Self { run, option }
    }

    /// The pass of a sample through a layer with this kernel.
    pub(super) fn pass(&self, kernel: Kernel) -> SamplePass<'r> {
        let RunShape { config, seqlen, threads, .. } = *self.run;
        SamplePass { config, kernel, seqlen, threads, settings: &self.option.settings }
    }

    /// Memory of every phase but the head's.
    pub(super) fn layers(&self) -> Vec<PhaseMemory> {
        let (run, settings) = (self.run, &self.option.settings);
        let (config, dtype) = (run.config, run.dtypes.layers);
        let tokens = largest_part(run.seqlen, settings.mlp_tokens, LEAST_ROWS);
        let forward = self.pass(run.products.of_activations()).forward(dtype)
            + run.forms.restored_bytes(run.threads)
            + run.forms.rounded_bytes(config, run.seqlen, tokens);
        let mut phases =
            vec![self.phase(Phase::Tokenize, vec![part(PartKind::Tokenizer, run.tokenizing)])];
        if run.passes_samples() {
            phases.push(self.phase(Phase::Embed, self.samples(Alive::All)));
        }
        phases.push(self.in_layer(Phase::Read, self.merging()));
        if run.samples > 0 {
            let mut statistics = self.statistics();
            statistics.extend(self.waiting_rows());
            let mut kept = Vec::new();
            match run.statistics() {
                Some(_) => {
                    phases.push(self.passing(Phase::Calibrate, forward, statistics));
                }
                None => kept = statistics,
            }
            phases.push(self.passing(Phase::Propagate, forward, kept));
        }
        if run.technique.is_some() {
            let mut parts = vec![part(PartKind::Scores, self.score())];
            if run.passes_samples() {
                let workspace = footprint::workspace(config, dtype, run.seqlen, settings);
                parts.push(part(PartKind::Workspace, workspace));
            }
            parts.extend(self.calibration_rows(true));
            phases.push(self.in_layer(Phase::Score, parts));
        }
        if let Some(trains) = &run.trains {
            phases.extend(self.training(trains));
        }
        for phase in evaluation_phases(run) {
            phases.push(self.passing(phase, forward, Vec::new()));
        }
        if run.saves {
            let model = footprint::parameters(config).saturating_mul(dtype.bytes() as u64);
            let pieces = FILE_PIECES.min(ByteSize(model.saturating_mul(2)));
            let mut parts = self.samples(Alive::None);
            parts.push(part(PartKind::FilePieces, pieces));
            phases.push(self.phase(Phase::SaveAndVerify, parts));
        }
        phases
    }

    /// Memory while logits are computed.
    pub(super) fn head(&self) -> PhaseMemory {
        let run = self.run;
        let (windows, settings) = (run.text_windows(), &self.option.settings);
        // Of a pack of tasks, only some rows have logits.
        let with_logits = if windows > 0 { run.seqlen } else { run.tasks.scored_rows };
        let passed = HeadTokens { windows, seqlen: run.seqlen, with_logits };
        let head = footprint::head(run.config, run.dtypes, passed, settings);
        let mut parts = self.samples(Alive::Windows);
        let scoring = run.tasks.scoring;
        parts.push(part(PartKind::HeadAndLogits, head + scoring + self.divergence()));
        parts.push(self.context(true));
        parts.extend(self.in_flight());
        self.phase(Phase::Head, parts)
    }

    /// Memory of the comparison of two models at their heads, in addition to the head's.
    fn divergence(&self) -> ByteSize {
        let (run, settings) = (self.run, &self.option.settings);
        if !run.compares() {
            return ByteSize::ZERO;
        }
        let second = match run.against {
            Some(AgainstShape::Other { config, dtypes }) => {
                footprint::head_chunk(config, dtypes, settings)
            }
            Some(AgainstShape::Kept) | None => ByteSize::ZERO,
        };
        let windows = run.text_windows();
        footprint::divergence(run.config, run.seqlen, windows, settings) + second
    }

    /// A phase with `parts` in addition to the program.
    pub(super) fn phase(&self, phase: Phase, mut parts: Vec<MemoryPart>) -> PhaseMemory {
        let run = self.run;
        let of_ranks = |_| {
            let layer =
                footprint::layer_weights(run.config, run.dtypes.layers, &self.option.settings);
            MPI_LIBRARY + bytes_on_the_way(layer)
        };
        let library = run.of_all_ranks.map_or(ByteSize::ZERO, of_ranks);
        parts.insert(0, part(PartKind::Program, PROGRAM + library));
        if let Processors::Gpus(_) = self.option.processors {
            parts.push(part(PartKind::CudaOnHost, CUDA_ON_HOST));
        }
        PhaseMemory { phase, parts }
    }

    /// A phase in which a sample passes a layer, with `workspace` for it.
    fn passing(
        &self,
        phase: Phase,
        workspace: ByteSize,
        mut parts: Vec<MemoryPart>,
    ) -> PhaseMemory {
        parts.push(part(PartKind::Workspace, workspace));
        parts.extend(self.in_flight());
        self.in_layer(phase, parts)
    }

    /// A phase with a layer in memory.
    fn in_layer(&self, phase: Phase, parts: Vec<MemoryPart>) -> PhaseMemory {
        let (run, settings) = (self.run, &self.option.settings);
        let layer = run.in_form(footprint::layer_weights(run.config, run.dtypes.layers, settings));
        let mut all = self.samples(Alive::All);
        let changes = run.techniques().any(Technique::changes_weights);
        let pruned = match settings.weights {
            WeightsHeld::Layer => part(PartKind::Layer, layer),
            // Changed weights are nowhere else.
            WeightsHeld::Matrix if changes => part(PartKind::Layer, run.layer_weights()),
            WeightsHeld::Matrix => part(PartKind::LayerMasks, layer),
        };
        // The runs that share statistics prune a copy, and the dense layer stays.
        let is_shared = run.runs() > 1;
        if is_shared {
            all.push(part(PartKind::LayerCopy, pruned.bytes));
            all.push(part(PartKind::Layer, layer));
        } else {
            all.push(pruned);
        }
        if footprint::keeps_packed(run.kernel(), settings) {
            let packed = footprint::layer_packed(run.config, run.kernel());
            let layers = if is_shared { 2 } else { 1 };
            let packed = ByteSize(packed.0.saturating_mul(layers));
            all.push(part(PartKind::PackedLayer, packed));
        }
        // A model with a single layer has no next layer.
        if settings.prefetch && run.config.num_hidden_layers > 1 {
            // Its rows are made compact.
            let rows = run.forms.made_bytes(run.config, run.dtypes.layers);
            all.push(part(PartKind::NextLayer, layer + rows));
        }
        all.push(self.context(false));
        if let Some(trains) = &run.trains {
            all.push(part(PartKind::Parameters, trains.store));
        }
        all.extend(parts);
        self.phase(phase, all)
    }

    /// Token ids and the hidden states of all streams.
    pub(super) fn all_samples(&self) -> Vec<MemoryPart> {
        self.samples(Alive::All)
    }

    /// Token ids, and hidden states: all states if they stay in RAM, a state per stream if they go to disk, a single state if they go to
    /// GPUs.
    fn samples(&self, alive: Alive) -> Vec<MemoryPart> {
        let run = self.run;
        // Every rank has all token ids.
        let all = run.of_all_ranks.map(|all| all.samples + all.windows);
        let tokens = all.unwrap_or(run.samples + run.text_windows()) * run.seqlen;
        let (samples, windows) = match alive {
            Alive::All => (run.sample_states(), run.evaluated_windows()),
            Alive::Windows => (0, run.evaluated_windows()),
            Alive::None => (0, 0),
        };
        let waiting = match (windows, self.option.storage) {
            (0, _) => ByteSize::ZERO,
            (_, HiddenStatesStorage::Disk) => run.waiting_states(1),
            (_, _) => run.waiting_states(run.text_windows()),
        };
        let mut states = match self.option.storage {
            // A state is on its way to its GPU.
            HiddenStatesStorage::Device => {
                let state = footprint::hidden_states(run.config, run.seqlen);
                part(PartKind::HiddenStates, state)
            }
            HiddenStatesStorage::Ram => {
                let state = run.state(run.element(self.option.processors));
                let bytes = state.0.saturating_mul((samples + windows) as u64);
                part(PartKind::HiddenStates, ByteSize(bytes))
            }
            HiddenStatesStorage::Disk => {
                let sides = if windows > 0 { run.sides.len() } else { 0 };
                let of_samples = if samples > run.samples { 2 } else { 1 };
                let streams = if samples > 0 { of_samples } else { 0 } + sides * run.runs();
                let state = footprint::hidden_states(run.config, run.seqlen);
                part(PartKind::SpilledStates, ByteSize(state.0 * streams as u64))
            }
        };
        states.bytes = states.bytes + waiting;
        vec![
            part(PartKind::TokenizerPattern, run.retained),
            part(PartKind::TokenIds, ByteSize::of(tokens, size_of::<u32>()) + run.tasks.kept),
            states,
        ]
    }

    /// Rotary tables, and the packed operands of products; with `has_head` also the operands of the head's product.
    pub(super) fn context(&self, has_head: bool) -> MemoryPart {
        let run = self.run;
        let head = has_head.then(|| run.products.kernel(run.dtypes.head));
        let packed = self.pass(run.kernel()).products(head);
        part(PartKind::Context, footprint::context(run.config, run.seqlen) + packed)
    }

    /// Statistics of the four inputs while samples pass, and the calibration rows for output errors.
    fn statistics(&self) -> Vec<MemoryPart> {
        let run = self.run;
        let kept = run.observes.map(|observed| observed.kept);
        let Some(kind) = run.statistics() else {
            let kept = kept.map(|kept| part(PartKind::Statistics, kept));
            return kept.into_iter().collect();
        };
        let widths = run.config.input_widths();
        let each = widths.values().map(|&width| kind.bytes(width) + kind.collecting_bytes(width));
        let held = match run.passes_inputs_apart(self.option.settings.statistics) {
            true => each.max().unwrap_or_default(),
            false => each.sum(),
        };
        let adding = widths.values().map(|&width| kind.adding_bytes(width, run.products)).max();
        let mut parts = vec![part(
            PartKind::Statistics,
            held + adding.unwrap_or_default() + kept.unwrap_or_default(),
        )];
        parts.extend(self.calibration_rows(false));
        parts.extend(run.of_all_ranks.map(|all| {
            let bytes = joined::bytes(run.config, kind, [run.samples, all.samples], run.seqlen);
            part(PartKind::Messages, bytes)
        }));
        parts
    }

    /// The calibration rows for output errors, with the outputs of a matrix while errors are computed.
    fn calibration_rows(&self, has_outputs: bool) -> Option<MemoryPart> {
        let run = self.run;
        run.statistics()?;
        let samples = run.of_all_ranks.map_or(run.samples, |all| all.samples);
        let bytes = output_error::bytes(run.config, samples, run.seqlen, has_outputs);
        Some(part(PartKind::CalibrationRows, bytes))
    }

    /// Memory of scoring: the method's need for a matrix, and the statistics that exist then. The statistics of an input go when its
    /// matrices are done, unless a run that shares them still needs them.
    fn score(&self) -> ByteSize {
        let (run, settings) = (self.run, &self.option.settings);
        let config = run.config;
        let widths: Vec<usize> = config.input_widths().values().copied().collect();
        let is_apart = run.passes_inputs_apart(settings.statistics);
        let of_input = |point: usize| -> ByteSize {
            let kind = run.statistics();
            let left = match (is_apart, run.runs()) {
                (true, _) => point..point + 1,
                (false, 1) => point..widths.len(),
                (false, _) => 0..widths.len(),
            };
            let statistics = widths[left]
                .iter()
                .map(|&width| kind.map_or(ByteSize::ZERO, |kind| kind.bytes(width)));
            let working = config
                .linears()
                .filter(|id| id.input() as usize == point)
                .map(|id| id.shape(config))
                .flat_map(|(out, inner)| {
                    let of = move |technique: &_| {
                        let (dtype, ranks) = (run.dtypes.layers, run.ranks());
                        solve::working_bytes(technique, [out, inner], dtype, ranks)
                    };
                    run.techniques().map(of)
                });
            statistics.sum::<ByteSize>() + working.max().unwrap_or_default()
        };
        let most = (0..widths.len()).map(of_input).max();
        // The channels are permuted when down's input is observed, before any statistics go.
        let kinds = run.statistics();
        let mut held =
            widths.iter().map(|&width| kinds.map_or(ByteSize::ZERO, |kind| kind.bytes(width)));
        let held = match is_apart {
            true => held.next_back().unwrap_or_default(),
            false => held.sum(),
        };
        let permuting = run
            .techniques()
            .filter(|technique| technique.permutes.is_some())
            .map(|technique| held + technique.permuting_bytes(config.intermediate_size));
        let most = most.max(permuting.max());
        footprint::score(config, run.dtypes.layers, run.threads, settings)
            + most.unwrap_or_default()
    }

    /// Rows of a sample per GPU, which wait for their turn to be added to statistics in place; none where GPUs sum them up.
    fn waiting_rows(&self) -> Option<MemoryPart> {
        let Processors::Gpus(gpus) = self.option.processors else {
            return None;
        };
        self.run.statistics().filter(|kind| kind.is_in_place())?;
        if !self.run.grams_on_gpu(&self.option.settings).is_empty() {
            return None;
        }
        let row: usize = self.run.config.input_widths().values().sum();
        let rows = ByteSize::of(self.run.seqlen * row, F32);
        let bytes = rows.0.saturating_mul(gpus as u64);
        Some(part(PartKind::SamplesInFlight, ByteSize(bytes)))
    }

    /// The samples on their way to and from each GPU. The workspace of the CPU exists, too: it computes what no GPU has memory for.
    fn in_flight(&self) -> Option<MemoryPart> {
        let Processors::Gpus(gpus) = self.option.processors else {
            return None;
        };
        let (state, wide) =
            (self.run.state(self.run.element(self.option.processors)), self.run.state(F32));
        let each = state.0.saturating_mul(2).saturating_add(wide.0.saturating_mul(2));
        let bytes = each.saturating_mul(gpus as u64);
        Some(part(PartKind::SamplesInFlight, ByteSize(bytes)))
    }
}
