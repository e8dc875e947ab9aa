//! Memory of a training: a layer, its gradients, the hidden states of a step, and the trained parameters.
//!
//! ```text
//! whole model   inputs (layers + 1) · examples · L·H·e, gradients examples · L·H·4, held-out states held · L·H·4
//! by layer      samples twice: behind the recovered layers, and the targets
//! forward       layer + frozen layers + a sample in the layer
//! backward      the same + gradients of the layer + activations and their gradients
//! update        values of a layer, or values, gradient, mask and optimizer state of one parameter
//! ```

use super::host::Host;
use super::{F32, RunShape, part};
use crate::bytes::ByteSize;
use crate::model::on_device::TrainedSizes;
use crate::model::{Dtypes, footprint};
use crate::placement::PhaseMemory;
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{HiddenStatesStorage, Phase, Plan};

/// A training in numbers.
#[derive(Debug, Clone, Default)]
pub struct TrainingShape {
    /// Layers are trained one by one, on the calibration samples.
    pub is_by_layer: bool,
    /// Factors are trained, not weights.
    pub has_factors: bool,
    /// Examples of a step; of a training by layers 0.
    pub per_step: usize,
    /// Examples in memory, held-out ones included.
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
    pub shelf: ByteSize,
    /// Values and masks of a layer in use that are not on the shelf in memory.
    pub values: ByteSize,
    /// Gradients of a layer in use.
    pub gradients: ByteSize,
    /// No layer computes activations again.
    pub is_kept: bool,
    /// The dtypes of the dense model whose logits are learned; `None` without one.
    pub teacher: Option<Dtypes>,
    /// Weights and activations that stay from the forward sweep to the reverse sweep.
    pub kept: ByteSize,
    /// The part of an update that is not on the shelf in memory.
    pub update: ByteSize,
    /// Frozen weights of a layer, as they are read.
    pub base: ByteSize,
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

    /// Values and masks of a layer that exist in a phase: those of a layer that is trained alone exist always, others only while they
    /// become the weights of the layer.
    fn in_use(&self, phase: Phase) -> ByteSize {
        match self.is_by_layer || phase == Phase::Update {
            true => self.values,
            false => ByteSize::ZERO,
        }
    }

    /// Memory of the hidden states of a training of the whole model.
    pub(super) fn states(&self, run: &RunShape<'_>) -> ByteSize {
        let state = |element: usize, count: usize| {
            ByteSize(run.state(element).0.saturating_mul(count as u64))
        };
        let inputs = (run.config.num_hidden_layers + 1).saturating_mul(self.per_step);
        state(self.state_element, inputs) + state(F32, self.per_step + self.held_out)
    }
}

impl Host<'_> {
    /// Memory of the phases of a training.
    pub(super) fn training(&self, trains: &TrainingShape) -> Vec<PhaseMemory> {
        let (run, settings) = (self.run, &self.option.settings);
        let (config, dtype) = (run.config, run.dtypes.layers);
        let kernel = run.products.of_activations();
        let state = run.state(F32);
        // A sample, and what the layer makes of it.
        let forward =
            footprint::forward(config, dtype, run.seqlen, run.threads, settings, kernel) + state;
        // Blocks pass a sample forwards and backwards at once.
        let kept = match trains.is_by_layer {
            true => footprint::kept_activations(config, run.seqlen),
            false => ByteSize::ZERO,
        };
        let backward = footprint::backward(
            config,
            run.seqlen,
            run.threads,
            settings,
            kernel,
            trains.is_kept,
        ) + state
            + state
            + kept;
        let packed = footprint::backward_products(
            config,
            (run.kernel(), run.products.of_gradients(dtype)),
            run.seqlen,
            run.threads,
            settings,
            trains.has_factors,
        );
        let workspace = |bytes| part(PartKind::Workspace, bytes);
        let gradients = part(PartKind::Gradients, trains.gradients);
        vec![
            self.training_phase(Phase::Forward, trains, vec![workspace(forward + kept)]),
            self.training_phase(
                Phase::Backward,
                trains,
                vec![gradients, workspace(backward + packed)],
            ),
            self.training_phase(
                Phase::Update,
                trains,
                vec![part(PartKind::Parameters, trains.update)],
            ),
        ]
    }

    fn training_phase(
        &self,
        phase: Phase,
        trains: &TrainingShape,
        mut parts: Vec<MemoryPart>,
    ) -> PhaseMemory {
        let (run, settings) = (self.run, &self.option.settings);
        let layer = footprint::layer_weights(run.config, run.dtypes.layers, settings);
        let mut all = self.training_states(trains);
        all.push(part(PartKind::Layer, layer));
        all.push(part(PartKind::FrozenLayers, self.frozen(trains)));
        if footprint::keeps_packed(run.kernel(), settings) && trains.per_step != 1 {
            let packed = footprint::layer_packed(run.config, run.kernel());
            all.push(part(PartKind::PackedLayer, packed));
        }
        all.push(part(
            PartKind::Parameters,
            trains.shelf + trains.in_use(phase),
        ));
        all.push(part(PartKind::KeptActivations, trains.kept));
        all.extend(self.teacher(trains, false));
        if !trains.is_by_layer && settings.head_rows.is_none() {
            let head = footprint::head_weight(run.config, run.dtypes.head);
            all.push(part(PartKind::HeadAndLogits, head));
        }
        all.push(self.context(false));
        all.append(&mut parts);
        self.phase(phase, all)
    }

    /// Memory while the loss and its gradient are computed.
    pub(super) fn training_head(&self, trains: &TrainingShape) -> PhaseMemory {
        let (run, settings) = (self.run, &self.option.settings);
        let mut parts = self.training_states(trains);
        // The memory of a layer's weights stays for the next one.
        let layer = footprint::layer_weights(run.config, run.dtypes.layers, settings);
        parts.push(part(PartKind::Layer, layer));
        let head = footprint::head(run.config, run.dtypes, run.seqlen, 0, settings);
        parts.push(part(PartKind::HeadAndLogits, head));
        parts.extend(self.teacher(trains, true));
        let state = run.state(F32);
        let gradient = state + state;
        let workspace = footprint::backward(
            run.config,
            run.seqlen,
            run.threads,
            settings,
            run.products.of_activations(),
            trains.is_kept,
        );
        // The workspace of the layers stays.
        parts.push(part(PartKind::Workspace, gradient + workspace));
        parts.push(part(PartKind::Parameters, trains.shelf));
        parts.push(part(PartKind::KeptActivations, trains.kept));
        parts.push(part(PartKind::FrozenLayers, self.frozen(trains)));
        parts.push(self.context(true));
        self.phase(Phase::Head, parts)
    }

    /// Memory of a teacher whose logits are learned: its head; before a step a layer of it, else its last hidden states.
    fn teacher(&self, trains: &TrainingShape, is_head: bool) -> Vec<MemoryPart> {
        let (run, settings) = (self.run, &self.option.settings);
        let Some(dtypes) = trains.teacher else {
            return Vec::new();
        };
        let mut parts = Vec::new();
        if settings.head_rows.is_none() {
            let head = footprint::head_weight(run.config, dtypes.head);
            parts.push(part(PartKind::HeadAndLogits, head));
        }
        if !is_head {
            let layer = footprint::layer_weights(run.config, dtypes.layers, settings);
            parts.push(part(PartKind::Layer, layer));
        }
        if self.option.storage == HiddenStatesStorage::Ram {
            let states = run.state(F32).0.saturating_mul(trains.per_step as u64);
            parts.push(part(PartKind::HiddenStates, ByteSize(states)));
        }
        parts
    }

    /// Frozen layers that stay in memory, and the one that is read ahead where not all stay.
    fn frozen(&self, trains: &TrainingShape) -> ByteSize {
        let all_stay = trains.resident_layers >= self.run.config.num_hidden_layers;
        let ahead = self.option.settings.prefetch && !all_stay;
        let layers = trains.resident_layers + usize::from(ahead);
        ByteSize(trains.base.0.saturating_mul(layers as u64))
    }

    /// Token ids, and the hidden states of a step.
    fn training_states(&self, trains: &TrainingShape) -> Vec<MemoryPart> {
        if trains.is_by_layer {
            return self.all_samples();
        }
        let run = self.run;
        let states = match self.option.storage {
            HiddenStatesStorage::Ram => part(PartKind::HiddenStates, trains.states(run)),
            HiddenStatesStorage::Disk => {
                let state = run.state(F32);
                part(PartKind::SpilledStates, state + state)
            }
        };
        let tokens = (trains.examples * 5 + run.windows * 4).saturating_mul(run.seqlen);
        vec![
            part(PartKind::TokenizerPattern, run.retained),
            part(PartKind::TokenIds, ByteSize::of(tokens, 1)),
            states,
        ]
    }
}
