//! A run in numbers, for the planner: model, texts and settings become the memory of each phase and the work.
//!
//! | file | story |
//! | --- | --- |
//! | `shape` | the properties of a run that decide its memory and its time |
//! | `host` | memory of the process per phase, from `model/footprint.rs` |
//! | `training` | memory of a training per phase |
//! | `gpu` | memory of a GPU per phase, from `model/on_device/tiling.rs` |
//! | `work` | floating-point operations, and bytes of files and transfers |
//!
//! docs/dev/memory-formulas.md has the formulas and compares them with measurements.

mod gpu;
mod host;
mod shape;
mod training;
mod work;

use crate::bytes::ByteSize;
use crate::model::on_device::Tiling;
use crate::model::{WeightForm, footprint};
use crate::pipeline::{joined, solve};
use crate::placement::{Demand, ExecutionOption, PhaseMemory, Processors, Workload};
use crate::pruning::Technique;
use crate::run::HiddenStatesStorage;
use crate::run::memory_settings::{MemorySettings, WeightsHeld};
use host::Host;
pub use shape::{
    AgainstShape, Observed, RanksShape, RunShape, TaskShape, TeacherShape, TrainingShape,
};

impl RunShape<'_> {
    /// Bytes that a rank with the most samples of `of_all_ranks` sends in the whole run.
    pub fn bytes_sent(&self) -> f64 {
        let Some((kind, all)) = self.statistics().zip(self.of_all_ranks) else {
            return 0.0;
        };
        let of_layer = joined::bytes_sent(self.config, kind, all.samples, self.seqlen, all.ranks);
        let solved = |technique: &Technique| -> f64 {
            let shapes = self.config.linears().map(|id| id.shape(self.config));
            let of = |shape| solve::bytes_sent(technique, shape, self.dtypes.layers, all.ranks);
            shapes.map(of).sum()
        };
        let solved = self.techniques().map(solved).sum::<f64>();
        self.config.num_hidden_layers as f64 * (of_layer + solved)
    }
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
        let waiting = self.waiting_states(self.windows);
        let swept = ByteSize(state.0.saturating_mul(streams as u64)) + waiting;
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
            let holds_layer = settings.weights == WeightsHeld::Layer;
            match self.forms.form() {
                WeightForm::Dense => processors == Processors::Cpu || (fits_gpu && holds_layer),
                WeightForm::Compact | WeightForm::Int8 => {
                    processors == Processors::Cpu && holds_layer
                }
            }
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
