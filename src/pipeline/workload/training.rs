//! Memory of a training: a layer, its gradients, the hidden states of a step, and the trained parameters.
//!
//! ```text
//! whole model   inputs (layers + 1) · examples · L·H·e, gradients examples · L·H·4, held-out states held · L·H·4
//! … always      head, buffers of layers and head (`model/training_footprint.rs`), the layer in use, which leaves its memory to the next
//! … forward     the packed layer + the next layer's frozen weights + a sample in the layer
//! … backward    the same + gradients of the layer
//! … update      the frozen weights of a layer and its values, or all of a single parameter
//! by layer      samples twice: after the recovered layers, and the targets
//! ```

use super::host::Host;
use super::shape::{F32, TeacherShape, TrainingShape, part};
use crate::bytes::ByteSize;
use crate::linalg::attention;
use crate::model::footprint::{self, SamplePass};
use crate::model::training_footprint::TrainingBuffers;
use crate::placement::PhaseMemory;
use crate::run::plan::{MemoryPart, PartKind};
use crate::run::{HiddenStatesStorage, Phase};
use crate::runtime::memory::RETURNED_AT_ONCE;

impl Host<'_> {
    /// Memory of the phases of a training.
    pub(super) fn training(&self, trains: &TrainingShape) -> Vec<PhaseMemory> {
        match trains.is_by_layer {
            true => self.training_by_layer(trains),
            false => self.training_of_whole(trains),
        }
    }

    /// The buffers of a training of the whole model.
    fn buffers<'b>(&'b self, trains: &'b TrainingShape) -> TrainingBuffers<'b> {
        let run = self.run;
        TrainingBuffers {
            config: run.config,
            dtypes: run.dtypes,
            seqlen: run.seqlen,
            threads: run.threads,
            products: run.products,
            settings: &self.option.settings,
            has_factors: trains.has_factors,
            is_kept: trains.is_kept,
            teacher: trains.teacher.as_ref().map(|of| (&*of.config, of.dtypes.head)),
        }
    }

    /// Memory of the phases of a training of the whole model, after its first step.
    fn training_of_whole(&self, trains: &TrainingShape) -> Vec<PhaseMemory> {
        let (run, settings) = (self.run, &self.option.settings);
        let (config, kernel) = (run.config, run.products.of_activations());
        let state = run.state(F32);
        let scratch = |bytes| part(PartKind::Workspace, ByteSize::of(bytes, 1));
        let states = |count: u64| part(PartKind::Workspace, ByteSize(state.0 * count));
        let packed = || {
            let is_kept = footprint::keeps_packed(run.kernel(), settings) && trains.per_step > 1;
            is_kept.then(|| {
                let bytes = footprint::layer_packed(config, run.kernel());
                part(PartKind::PackedLayer, bytes)
            })
        };
        let with = |phase, parts: Vec<MemoryPart>| {
            let mut all = self.training_always(trains);
            all.extend(parts);
            self.phase(phase, all)
        };
        let mut forward = vec![
            states(2),
            scratch(attention::scratch_bytes(
                kernel,
                config.head_dim,
                run.seqlen,
                run.seqlen,
                run.threads,
            )),
            part(PartKind::FrozenLayers, trains.masks),
        ];
        forward.extend(packed());
        match trains.teacher.as_ref() {
            Some(teacher) if *teacher.config != *config => {
                // The teacher has gone before the student begins.
                forward = larger(forward, self.teacher_pass(teacher));
            }
            Some(teacher) => forward.push(self.teacher_layer(teacher)),
            None => {}
        }
        let mut backward = vec![
            part(PartKind::Gradients, trains.gradients),
            states(3),
            scratch(attention::backward::backward_scratch_bytes(
                kernel,
                config.head_dim,
                run.seqlen,
                config.widest_scoring(),
                run.threads,
            )),
            part(PartKind::FrozenLayers, trains.masks),
        ];
        backward.extend(packed());
        // A layer is made of its frozen weights and its values. An update takes a single parameter.
        let made = trains.values + trains.read_frozen();
        let update = vec![part(PartKind::Parameters, made.max(trains.update))];
        vec![
            with(Phase::Forward, forward),
            with(Phase::Backward, backward),
            with(Phase::Update, update),
        ]
    }

    /// The memory of a training of the whole model that every phase has.
    fn training_always(&self, trains: &TrainingShape) -> Vec<MemoryPart> {
        let (run, settings) = (self.run, &self.option.settings);
        let buffers = self.buffers(trains);
        let layer = footprint::layer_weights(run.config, run.dtypes.layers, settings);
        let context = footprint::context(run.config, run.seqlen) + buffers.packed();
        let mut all = self.training_states(trains);
        all.extend([
            part(PartKind::Layer, layer),
            part(PartKind::FrozenLayers, self.frozen(trains)),
            part(PartKind::Parameters, trains.store),
            part(PartKind::KeptActivations, trains.kept),
            part(PartKind::Workspace, buffers.activations()),
            part(PartKind::Context, context),
        ]);
        let head =
            |config, dtype| part(PartKind::HeadAndLogits, footprint::head_weight(config, dtype));
        if settings.head_rows.is_none() {
            all.push(head(run.config, run.dtypes.head));
            all.extend(trains.teacher.as_ref().map(|of| head(&of.config, of.dtypes.head)));
        }
        if let Some(teacher) = &trains.teacher
            && self.option.storage == HiddenStatesStorage::Ram
        {
            // Its last hidden states wait for the head.
            let state = footprint::hidden_states(&teacher.config, run.seqlen);
            let states = state.0.saturating_mul(trains.per_step as u64);
            all.push(part(PartKind::HiddenStates, ByteSize(states)));
        }
        all
    }

    /// Memory while the loss and its gradient are computed.
    pub(super) fn training_head(&self, trains: &TrainingShape) -> PhaseMemory {
        let state = self.run.state(F32);
        let mut parts = self.training_always(trains);
        parts.push(part(PartKind::Workspace, state + state));
        self.phase(Phase::Head, parts)
    }

    /// Memory of merging what was trained into a layer, in addition to the layer that is read for the sweep.
    pub(super) fn merging(&self) -> Vec<MemoryPart> {
        let trains = self.run.trains.as_ref().filter(|of| !of.is_by_layer);
        let parts =
            trains.map(|trains| part(PartKind::Parameters, trains.values + trains.read_frozen()));
        parts.into_iter().collect()
    }

    /// A layer of the teacher, which passes the examples before the student does.
    fn teacher_layer(&self, teacher: &TeacherShape) -> MemoryPart {
        let settings = &self.option.settings;
        let layer = footprint::layer_weights(&teacher.config, teacher.dtypes.layers, settings);
        part(PartKind::Layer, layer)
    }

    /// The memory of a teacher of another shape while examples pass it: a layer, and tables, scratch and an example of its own.
    fn teacher_pass(&self, teacher: &TeacherShape) -> Vec<MemoryPart> {
        let (run, config) = (self.run, &*teacher.config);
        let kernel = run.products.of_activations();
        let pass = SamplePass { config, ..self.pass(kernel) };
        let state = footprint::hidden_states(config, run.seqlen);
        vec![
            self.teacher_layer(teacher),
            part(PartKind::Workspace, pass.forward(teacher.dtypes.layers) + state),
            part(PartKind::Context, footprint::context(config, run.seqlen) + pass.products(None)),
        ]
    }

    /// Memory of the phases of a training by layers.
    fn training_by_layer(&self, trains: &TrainingShape) -> Vec<PhaseMemory> {
        let run = self.run;
        let (config, dtype) = (run.config, run.dtypes.layers);
        let pass = self.pass(run.products.of_activations());
        let state = run.state(F32);
        // A sample, and what the layer makes of it.
        let forward = pass.forward(dtype) + state;
        // Blocks pass a sample forwards and backwards at once.
        let kept = footprint::kept_activations(config, run.seqlen);
        let backward = pass.backward(trains.is_kept) + state + state + kept;
        let packed = self
            .pass(run.kernel())
            .backward_products(run.products.of_gradients(dtype), trains.has_factors);
        let workspace = |bytes| part(PartKind::Workspace, bytes);
        let gradients = part(PartKind::Gradients, trains.gradients);
        let mut forward = vec![workspace(forward + kept)];
        if let Some(teacher) = &trains.teacher {
            forward = larger(forward, self.teacher_pass(teacher));
        }
        vec![
            self.training_phase(Phase::Forward, trains, forward),
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
        all.push(part(PartKind::Layer, layer + self.left_by_layers()));
        // The frozen weights of factors, and the layer that the sweep reads ahead.
        all.push(part(PartKind::FrozenLayers, trains.read_frozen()));
        if settings.prefetch && run.config.num_hidden_layers > 1 {
            all.push(part(PartKind::NextLayer, layer));
        }
        if footprint::keeps_packed(run.kernel(), settings) {
            let packed = footprint::layer_packed(run.config, run.kernel());
            all.push(part(PartKind::PackedLayer, packed));
        }
        all.push(part(PartKind::Parameters, trains.store + trains.values));
        all.push(self.context(false));
        all.append(&mut parts);
        self.phase(phase, all)
    }

    /// Memory that the allocator keeps of layers that are gone: their matrices below the size that goes back to the system at once.
    fn left_by_layers(&self) -> ByteSize {
        let (config, dtype) = (self.run.config, self.run.dtypes.layers);
        let bytes = config.linears().map(|id| id.elements(config) * dtype.bytes());
        ByteSize::of(bytes.filter(|&bytes| bytes < RETURNED_AT_ONCE).sum(), 1)
    }

    /// Frozen layers that stay in memory, and the layer that is read ahead where not all stay.
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
            HiddenStatesStorage::Device | HiddenStatesStorage::Ram => {
                part(PartKind::HiddenStates, trains.states(run))
            }
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

/// The parts with the larger sum.
fn larger(one: Vec<MemoryPart>, other: Vec<MemoryPart>) -> Vec<MemoryPart> {
    let sum = |parts: &[MemoryPart]| -> ByteSize { parts.iter().map(|part| part.bytes).sum() };
    if sum(&other) > sum(&one) { other } else { one }
}
