//! A training in numbers, for the memory plan and the check of disks; and the line that announces it.

use std::path::PathBuf;

use super::super::settled_run::{RunTask, SettledRun, offload_folder};
use super::resolved::Recovery;
use super::saved;
use super::steps::states_dtype;
use super::teacher::Teacher;
use crate::bytes::ByteSize;
use crate::linalg::{StoredDtype, factor_parts_elements};
use crate::model::on_device::TrainedSizes;
use crate::model::{LinearId, ModelConfig, footprint};
use crate::pipeline::{RunShape, TrainingShape};
use crate::recovery::optimizers::choice::CHOICE_BYTES;
use crate::recovery::{ParameterSpec, ParameterStore, TrainedForm};
use crate::report;
use crate::run::{Events, MemorySettings};
use crate::runtime::blocks::SampleBlocks;

impl Recovery {
    /// The training of a run in numbers, before its text is known.
    ///
    /// # Arguments
    /// * `samples`: the number of samples of a training by layers
    /// * `ranks`: the ranks that share the examples of a step
    pub(in crate::job) fn shape(
        &self,
        run: &RunShape<'_>,
        samples: usize,
        ranks: usize,
    ) -> TrainingShape {
        let per_step = SampleBlocks::new(self.settings.per_step()).most_of(ranks);
        let (config, optimizer) = (run.config, self.optimizer());
        let specs = self.part.parameters(config);
        let mask = |spec: &ParameterSpec| {
            if spec.has_mask() { spec.elements() / 8 } else { 0 }
        };
        let whole = |spec: &ParameterSpec| {
            8 * spec.elements() + optimizer.state_bytes(spec.elements()) + mask(spec)
        };
        let values: usize = specs.iter().map(|spec| 4 * spec.elements() + mask(spec)).sum();
        let states: usize = specs.iter().map(|spec| optimizer.state_bytes(spec.elements())).sum();
        let is_whole = self.is_whole();
        let choice = self.settings.closing.close_to.map_or(0, |_| CHOICE_BYTES);
        let store = match (is_whole, self.is_paged()) {
            (true, false) => self.store_bytes(config),
            _ => 0,
        };
        let steps = match (is_whole, self.settings.epochs) {
            // The number of examples is not known yet.
            (true, Some(_)) => 0,
            _ => self.settings.steps_of(samples),
        };
        TrainingShape {
            passes: steps * self.settings.per_step() as u64,
            epochs: self.settings.epochs.filter(|_| is_whole),
            is_by_layer: !is_whole,
            has_factors: matches!(self.part.form, TrainedForm::Factors { .. }),
            ranks,
            per_step: if is_whole { per_step } else { 0 },
            examples: self.settings.per_step() + self.settings.held_out,
            held_out: self.settings.held_out,
            state_element: states_dtype(run.products).bytes(),
            store: ByteSize(store),
            values: ByteSize(match (is_whole, self.is_paged()) {
                (true, false) => 0,
                (true, true) => values as u64,
                // The values of the layer that is trained, and its states.
                (false, _) => (values + states + choice) as u64,
            }),
            gradients: ByteSize::of(
                self.gradient_elements(run) + self.summed_elements(run, ranks),
                4,
            ),
            update: ByteSize(match (is_whole, self.is_paged()) {
                (true, true) => (specs.iter().map(whole).max().unwrap_or(0) + choice) as u64,
                (true, false) => choice as u64,
                _ => 0,
            }),
            is_kept: !is_whole || self.settings.keep_activations >= config.num_hidden_layers,
            teacher: self
                .teacher
                .as_ref()
                .filter(|teacher| is_whole || *teacher.config != *config)
                .map(Teacher::shape),
            kept: self.kept_bytes(run, per_step),
            base: self.base_bytes(run),
            masks: self.mask_bytes(config),
            resident_layers: 0,
            sizes: self.trained_sizes(config),
        }
    }

    /// Trained parameters of the whole model.
    pub(in crate::job) fn trained_parameters(&self, config: &ModelConfig) -> u64 {
        let specs = self.part.parameters(config);
        let each: usize = specs.iter().map(ParameterSpec::elements).sum();
        each as u64 * config.num_hidden_layers as u64
    }

    /// The sizes of the trained part of a layer.
    fn trained_sizes(&self, config: &ModelConfig) -> TrainedSizes {
        let specs = self.part.parameters(config);
        let elements = specs.iter().map(ParameterSpec::elements);
        let matrices = self.part.ids.iter();
        let matrices = matrices.map(|id| id.elements(config));
        let largest_matrix = matrices.clone().max().unwrap_or(0);
        let (rank, masked) = match self.part.form {
            TrainedForm::Weights => (None, 0),
            TrainedForm::Factors { rank, .. } => (Some(rank), matrices.sum()),
        };
        let parameters = |id: &LinearId| match rank {
            None => id.elements(config),
            Some(rank) => {
                let (out, inner) = id.shape(config);
                rank * (out + inner)
            }
        };
        let ids = self.part.ids.iter();
        TrainedSizes {
            parameters: elements.sum(),
            most_parameters: ids.clone().map(parameters).max().unwrap_or(0),
            of_mlp: ids.filter(|id| !id.is_attention()).map(parameters).sum(),
            largest_matrix,
            masked,
        }
    }

    /// Bytes of the files of a training in the offload folder: paged parameters, and the quantised base.
    pub(in crate::job) fn offloaded(
        &self,
        config: &ModelConfig,
        dtype: StoredDtype,
    ) -> [ByteSize; 2] {
        let paged = match self.is_whole() && self.is_paged() {
            true => ByteSize(self.store_bytes(config)),
            false => ByteSize::ZERO,
        };
        let base = match self.settings.base_quant {
            Some(_) => quantised_bytes(config, dtype),
            None => ByteSize::ZERO,
        };
        [paged, base]
    }

    /// Bytes of the parameters of all layers.
    fn store_bytes(&self, config: &ModelConfig) -> u64 {
        let specs = self.part.parameters(config);
        let has_best = self.settings.held_out > 0;
        ParameterStore::bytes(&specs, &*self.optimizer(), config.num_hidden_layers, has_best)
    }

    /// Elements of the gradients of a layer, and for factors of their parts of the largest matrix.
    fn gradient_elements(&self, run: &RunShape<'_>) -> usize {
        let config = run.config;
        let specs = self.part.parameters(config);
        let own: usize = specs.iter().map(ParameterSpec::elements).sum();
        match self.part.form {
            TrainedForm::Weights => own,
            TrainedForm::Factors { rank, .. } => {
                let kernel = run.products.of_gradients(run.dtypes.layers);
                let parts = |id: &LinearId| {
                    let (out, inner) = id.shape(config);
                    factor_parts_elements(kernel, [out, inner], rank)
                };
                let largest = self.part.ids.iter().map(parts).max();
                // The gradients are collected into copies, and the changes have copies of the factors.
                3 * own + largest.unwrap_or(0)
            }
        }
    }

    /// Elements of the sums of a layer's gradients, beside the gradients of an example.
    fn summed_elements(&self, run: &RunShape<'_>, ranks: usize) -> usize {
        let specs = self.part.parameters(run.config);
        let own: usize = specs.iter().map(ParameterSpec::elements).sum();
        // A training of the whole model in memory has a place for the sums, and a single example is the sum.
        let is_counted = self.is_whole() && !self.is_paged() || self.settings.per_step() == 1;
        let sums = if is_counted { 0 } else { own };
        match ranks {
            1 => sums,
            // Parts on their way to other ranks and from them, and the own part of the sums.
            2.. => sums + 3 * own,
            0 => 0,
        }
    }

    /// Bytes of the layers whose weights and activations stay for the backward pass, but for the weights of the layer in use.
    fn kept_bytes(&self, run: &RunShape<'_>, per_step: usize) -> ByteSize {
        let config = run.config;
        let layers = self.settings.keep_activations.min(config.num_hidden_layers);
        let layer = footprint::layer_weights(config, run.dtypes.layers, &MemorySettings::default());
        let of_example = footprint::kept_activations(config, run.seqlen);
        let activations = of_example.0.saturating_mul(per_step as u64);
        let kept = activations.saturating_mul(layers as u64);
        let weights = layer.0.saturating_mul(layers.saturating_sub(1) as u64);
        ByteSize(kept.saturating_add(weights))
    }

    /// Bytes of a layer's frozen weights in memory.
    fn base_bytes(&self, run: &RunShape<'_>) -> ByteSize {
        let config = run.config;
        let layer = footprint::layer_weights(config, run.dtypes.layers, &MemorySettings::default());
        let trained = self.part.ids.iter();
        let trained: usize = trained.map(|id| id.elements(config)).sum();
        match self.part.form {
            TrainedForm::Weights => {
                let stored = ByteSize::of(trained, run.dtypes.layers.bytes());
                ByteSize(layer.0.saturating_sub(stored.0))
            }
            TrainedForm::Factors { .. } => layer + self.mask_bytes(config),
        }
    }

    /// Bytes of the masks of a layer's trained matrices.
    fn mask_bytes(&self, config: &ModelConfig) -> ByteSize {
        let trained = self.part.ids.iter();
        let trained = trained.map(|id| id.elements(config) / 8);
        ByteSize::of(trained.sum(), 1)
    }

    /// Tells the settings of the training.
    pub(in crate::job) fn announce(&self, job: &SettledRun, events: &dyn Events) {
        let config = &*job.model.config;
        let settings = &self.settings;
        let of = match self.part.form {
            TrainedForm::Weights => "kept weights".to_string(),
            TrainedForm::Factors { rank, alpha } => {
                format!("factors of rank {rank}, alpha {alpha}")
            }
        };
        events.note(format!(
            "recovery     {}: {of} of {} matrices, {} parameters",
            settings.how.name(),
            self.part.ids.len() * config.num_hidden_layers,
            report::millions(self.trained_parameters(config)),
        ));
        let examples = match &job.texts.examples {
            Some((examples, _)) => examples.len(),
            None => job.texts.samples(),
        };
        let schedule = self.schedule(examples);
        let per_layer = if self.is_whole() { "" } else { " per layer" };
        events.note(format!(
            "training     {}, rate {:.3e} ({}), {} steps{per_layer} of {} x {} tokens",
            settings.optim,
            schedule.rate,
            schedule.shape.name(),
            schedule.steps,
            settings.per_step(),
            job.model.seqlen,
        ));
        if let Some(closing) = self.closing_report(schedule.steps, config) {
            let (before, end) = (report::trimmed(closing.before), closing.end());
            events.note(match closing.choices.len() {
                0 => format!("masks        stand still: the model is at {end} already"),
                choices => format!(
                    "masks        close from {before} to {end} in {choices} choices by step {}",
                    closing.last_step
                ),
            });
        }
        if let Some((examples, held)) = &job.texts.examples {
            let held = held.as_ref().map_or(0, |held| held.len());
            events.note(format!(
                "examples     {} of {} tokens, {held} held out",
                examples.len(),
                examples.seqlen()
            ));
        }
        if let Some(teacher) = self.teacher_folder() {
            events.note(format!(
                "teacher      {}, {}",
                teacher.display(),
                match self.is_whole() {
                    true => format!("logits, share {} of the loss", self.distill_weight()),
                    false => "hidden states of every layer".to_string(),
                }
            ));
        }
    }
}

impl SettledRun {
    /// The seed of samples, examples and factors.
    pub(super) fn seed(&self) -> u64 {
        let calibration = self.settings.calibration.as_ref();
        calibration.map_or(0, |calibration| calibration.seed)
    }

    /// The folder of `--save-adapter`: beside the model in the run folder.
    pub(super) fn adapter_folder(&self, recovery: &Recovery) -> Option<PathBuf> {
        let run = self.folder.run.as_ref().filter(|_| recovery.settings.save_adapter);
        run.map(|run| run.join("adapter"))
    }

    /// Files of a training: the saved state, twice while it is replaced, and the files of the offload folder.
    pub(in crate::job) fn recovery_files(&self) -> Vec<(PathBuf, ByteSize, &'static str)> {
        let RunTask::Recover(recovery) = &self.task else {
            return Vec::new();
        };
        if !recovery.is_whole() {
            return Vec::new();
        }
        let store = ByteSize(recovery.store_bytes(&self.model.config));
        let mut needs = Vec::new();
        if let Some(folder) = self.folder.state() {
            let saved = match saved::path(folder).exists() {
                true => store,
                false => store + store,
            };
            needs.push((folder.to_path_buf(), saved, "the state of the training"));
        }
        let config = &self.model.config;
        let [paged, base] = recovery.offloaded(config, self.model.dtype());
        for (bytes, what) in
            [(paged, "the parameters of the training"), (base, "the quantised base")]
        {
            if bytes > ByteSize::ZERO {
                needs.push((offload_folder(&self.settings), bytes, what));
            }
        }
        needs
    }
}

/// Bytes of a quantised base: half a byte per weight, its scale, and a bit of its mask; embedding, head and norms as they are.
fn quantised_bytes(config: &ModelConfig, dtype: StoredDtype) -> ByteSize {
    let layers = config.num_hidden_layers as u64;
    let of_layer: usize = config.linears().map(|one| one.elements(config)).sum();
    let weights = layers * of_layer as u64;
    let others = footprint::parameters(config).saturating_sub(weights);
    let others = others.saturating_mul(dtype.bytes() as u64);
    ByteSize(weights / 2 + weights / 16 + weights / 8 + others)
}
