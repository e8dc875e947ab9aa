//! A step of a training over the whole model, with the weights of one layer in memory at a time.
//!
//! ```text
//! forward sweep    h_0 = embedding;  h_{l+1} = layer_l(h_l)               every h_l is stored
//! head             loss, dh_L                              with a teacher, of its logits too (`distill`)
//! reverse sweep    dh_l, dθ_l = vector-Jacobian product of layer_l at h_l  activations are computed again
//! clipping         factor = min(1, limit / ‖dθ‖)                          the norm over all layers
//! update           θ_l by the optimizer; some of its masks close (`closing`)
//! ```
//!
//! The loss is the mean over all predicted tokens of the step, so the number of examples that pass at once changes nothing. Gradients are
//! added up block by block (`runtime/blocks`), so several ranks share the examples of a step and get the bits of a single process. This is
//! gradient checkpointing with a checkpoint per layer (Chen et al. 2016, arXiv:1604.06174), and layers outside, examples inside.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};

use super::example::Example;
use super::parameters::{BaseLayer, LayerParameters, ParameterSpec, TrainedForm, masked};
use super::parts::{Diverged, StepOutcome, TrainerParts};
use super::reuse::BufferReuse;
use super::states::LayerInputs;
use super::store::{ChangedParameter, ParameterStore};
use crate::model::{DecoderLayer, Embedding, Head, KeptActivations, TeacherStates};
use crate::recovery::optimizers::TrainingStep;
use crate::recovery::optimizers::clip::{clip_factor, scale, sum_of_squares};
use crate::recovery::optimizers::rounding::Bf16Rounding;
use crate::run::Phase;
use crate::runtime::{HiddenStates, OrderedSums, SampleShare, SweepReport, memory};

/// A layer whose weights and activations stay in memory from the forward sweep to the reverse sweep.
struct KeptLayer {
    layer: BaseLayer,
    /// Empty if the activations are computed again.
    of_examples: Vec<KeptActivations>,
}

/// A training over the whole model.
pub struct Trainer<'a> {
    parts: TrainerParts<'a>,
    head: Head,
    inputs: Option<LayerInputs>,
    gradients: Option<HiddenStates>,
    spare: BufferReuse,
    is_updating: bool,
    /// Steps before the states of the optimizer were fresh.
    restarted_after: u64,
}

impl<'a> Trainer<'a> {
    /// Opens the head.
    ///
    /// # Errors
    /// Fails when the head cannot be read.
    pub fn new(parts: TrainerParts<'a>) -> Result<Self> {
        let rows = parts.compute.settings().head_rows;
        let head =
            (parts.clock).measure(Phase::Read, || Head::open(&parts.source, &parts.config, rows));
        Ok(Self {
            parts,
            head: head.context("in the head")?,
            inputs: None,
            gradients: None,
            spare: BufferReuse::default(),
            is_updating: false,
            restarted_after: 0,
        })
    }

    /// Returns whether the last step is finished for all parameters. It is not where an update failed, as on a full disk.
    pub fn is_between_steps(&self) -> bool {
        !self.is_updating
    }

    /// Puts the parameters of every layer before the first step.
    ///
    /// # Arguments
    /// * `seed`: the seed of low-rank factors
    /// * `given`: parameters of a layer that take the place of the initial parameters
    ///
    /// # Errors
    /// Fails when a layer cannot be read.
    pub fn initialise(
        &mut self,
        seed: u64,
        given: &dyn Fn(usize, LayerParameters) -> LayerParameters,
    ) -> Result<()> {
        let layers = self.parts.config.num_hidden_layers;
        for index in 0..layers {
            let base = self.base(index, (index + 1 < layers).then_some(index + 1))?;
            let parts = &mut self.parts;
            let initial = parts.part.initial(&parts.config, &base, seed)?;
            parts.store.put(index, given(index, initial))?;
            drop(base);
            memory::release_freed();
        }
        Ok(())
    }

    /// Counts the optimizer's steps from the step after `step`, because its states are fresh.
    pub fn restart_after(&mut self, step: u64) {
        self.restarted_after = step;
    }

    /// The parameters.
    pub fn store(&self) -> &ParameterStore {
        &self.parts.store
    }

    /// The parameters, for a change.
    pub fn parameters_mut(&mut self) -> &mut ParameterStore {
        &mut self.parts.store
    }

    /// Ends the training. Returns the parameters, and what the devices report.
    pub fn finish(self) -> (ParameterStore, SweepReport) {
        (self.parts.store, self.parts.compute.finish())
    }

    /// Performs a step. Every rank gets the same examples.
    ///
    /// # Errors
    /// Fails when the run is asked to stop, before the update; with [`Diverged`] for a loss or gradient that is not finite, also before
    /// the update; where files cannot be read or written, and when a rank has left.
    pub fn step(&mut self, all: &[Example<'_>], at: TrainingStep) -> Result<StepOutcome> {
        let predicted: usize = all.iter().map(Example::predicted).sum();
        let share = SampleShare::here(all.len(), self.parts.compute.ranks());
        let examples = &own(all, &share)[..];
        let layers = self.parts.config.num_hidden_layers;
        let taught = self.taught(examples)?;
        let mut inputs = self.inputs_for(examples.len())?;
        self.embed(examples, &mut |example, state| inputs.put(0, example, state))?;
        let mut kept = Vec::new();
        for index in 0..layers {
            // After the last layer, the next layer to read is the last layer that is not kept.
            let first_kept = layers.saturating_sub(self.parts.kept_layers);
            let next = match index + 1 {
                next if next < layers => next,
                _ => first_kept.saturating_sub(1),
            };
            let mut layer = self.layer(index, Some(next))?;
            let is_kept = index >= first_kept;
            let mut of_examples = Vec::new();
            for example in 0..examples.len() {
                let state = inputs.get(index, example)?;
                let (next, kept) = self.forward(&layer.layer, example, &state, is_kept)?;
                of_examples.extend(kept);
                inputs.put(index + 1, example, next)?;
            }
            match is_kept {
                true => {
                    layer.layer.drop_packed();
                    kept.push(KeptLayer { layer, of_examples });
                }
                false => {
                    self.spare.take(layer.layer, &self.parts.part.ids);
                    memory::release_freed();
                }
            }
        }
        let mut gradients = self.gradients_for(examples.len())?;
        let losses =
            self.head_gradients((examples, predicted), taught, &mut inputs, &mut gradients)?;
        let losses = share.gathered(&losses, self.parts.compute.ranks())?;
        let loss = losses.iter().sum::<f64>() / predicted as f64;
        check_finite("loss", loss, at)?;
        let squares = self.reverse(&share, &mut inputs, &mut gradients, kept)?;
        (self.inputs, self.gradients) = (Some(inputs), Some(gradients));
        let norm = squares.sqrt();
        check_finite("norm of the gradients", norm, at)?;
        // Between here and the end of the update nothing may stop the run.
        self.parts.events.check()?;
        self.update(norm, at)?;
        Ok(StepOutcome { loss, norm, predicted })
    }

    /// Returns the mean loss over the predicted tokens of examples, in nat. Every rank gets the same examples.
    ///
    /// # Errors
    /// Fails when the run is asked to stop, where files cannot be read or written, and when a rank has left.
    pub fn loss(&mut self, all: &[Example<'_>]) -> Result<f64> {
        let predicted: usize = all.iter().map(Example::predicted).sum();
        let share = SampleShare::here(all.len(), self.parts.compute.ranks());
        let examples = &own(all, &share)[..];
        let parts = &self.parts;
        let folder = parts.spill_folder.as_deref();
        let shape = parts.shape_of_states();
        let mut states = HiddenStates::new(folder, examples.len(), shape, DType::F32)?;
        self.embed(examples, &mut |example, state| states.put(example, state))?;
        let layers = self.parts.config.num_hidden_layers;
        for index in 0..layers {
            let next = (index + 1) % layers;
            let layer = self.layer(index, Some(next))?;
            let TrainerParts { compute, clock, .. } = &mut self.parts;
            compute.forward_each(Phase::Forward, &layer.layer, &mut states, clock)?;
            self.spare.take(layer.layer, &self.parts.part.ids);
            memory::release_freed();
        }
        let mut losses = Vec::new();
        let Self { parts, head, .. } = self;
        for (at, example) in examples.iter().enumerate() {
            parts.events.check()?;
            let state = states.get(at)?;
            losses.push(parts.clock.measure(Phase::Head, || {
                head.loss(&state, example.targets, parts.compute.context())
            })?);
        }
        let losses = share.gathered(&losses, parts.compute.ranks())?;
        Ok(losses.iter().sum::<f64>() / predicted as f64)
    }

    /// The dense model's last hidden states.
    fn taught(&mut self, examples: &[Example<'_>]) -> Result<Option<HiddenStates>> {
        let parts = &mut self.parts;
        let Some(teacher) = &parts.distillation else {
            return Ok(None);
        };
        let place = (parts.spill_folder.as_deref(), parts.seqlen);
        let states = teacher.states(examples, place, &mut parts.compute, parts.clock)?;
        Ok(Some(states))
    }

    fn inputs_for(&mut self, examples: usize) -> Result<LayerInputs> {
        let fits = |inputs: &LayerInputs| inputs.examples() == examples;
        if let Some(inputs) = self.inputs.take().filter(fits) {
            return Ok(inputs);
        }
        let parts = &self.parts;
        LayerInputs::new(
            parts.spill_folder.as_deref(),
            parts.config.num_hidden_layers,
            examples,
            parts.shape_of_states(),
            parts.states,
        )
    }

    fn gradients_for(&mut self, examples: usize) -> Result<HiddenStates> {
        let fits = |states: &HiddenStates| states.samples() == examples;
        if let Some(states) = self.gradients.take().filter(fits) {
            return Ok(states);
        }
        let parts = &self.parts;
        let folder = parts.spill_folder.as_deref();
        HiddenStates::new(folder, examples, parts.shape_of_states(), DType::F32)
    }

    fn base(&mut self, index: usize, next: Option<usize>) -> Result<BaseLayer> {
        let parts = &mut self.parts;
        parts.clock.measure(Phase::Read, || parts.base.take(index, next))
    }

    /// The layer that the current values make, with its masks.
    fn layer(&mut self, index: usize, next: Option<usize>) -> Result<BaseLayer> {
        let base = self.base(index, next)?;
        let (parts, spare) = (&self.parts, &mut self.spare);
        parts.clock.measure(Phase::Update, || {
            let (values, rounding) = (parts.store.values(index)?, Bf16Rounding::Nearest);
            let layer = parts.part.applied(&parts.config, base, &values, rounding, spare)?;
            // The frozen weights are gone, unless they stay for the next step.
            memory::release_freed();
            Ok(layer)
        })
    }

    fn embed(
        &self,
        examples: &[Example<'_>],
        put: &mut dyn FnMut(usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let parts = &self.parts;
        parts.clock.measure(Phase::Embed, || {
            let embedding = Embedding::open(&*parts.source, &parts.config)?;
            for (at, example) in examples.iter().enumerate() {
                put(at, embedding.rows(example.tokens)?)?;
            }
            Ok(())
        })
    }

    /// Passes a state through a layer, and keeps its activations if they are wanted.
    fn forward(
        &mut self,
        layer: &DecoderLayer,
        example: usize,
        state: &Tensor,
        keeps: bool,
    ) -> Result<(Tensor, Option<KeptActivations>)> {
        let TrainerParts { compute, clock, events, .. } = &mut self.parts;
        events.check()?;
        clock.measure(Phase::Forward, || {
            if !keeps {
                let next = compute.forward_one(Phase::Forward, layer, example, state)?;
                return Ok((next, None));
            }
            let spare = self.spare.activations.pop();
            let (next, kept) = layer.forward_keeping(state, spare, compute.context())?;
            Ok((next, Some(kept)))
        })
    }

    /// The loss of every example; the gradients of the mean loss over the `predicted` tokens of a step with respect to the last hidden
    /// states go to `gradients`.
    fn head_gradients(
        &mut self,
        (examples, predicted): (&[Example<'_>], usize),
        mut taught: Option<HiddenStates>,
        inputs: &mut LayerInputs,
        gradients: &mut HiddenStates,
    ) -> Result<Vec<f64>> {
        let Self { parts, head, .. } = self;
        let last = parts.config.num_hidden_layers;
        let scale = 1.0 / predicted as f32;
        let mut losses = Vec::new();
        for (at, example) in examples.iter().enumerate() {
            parts.events.check()?;
            let state = inputs.get(last, at)?;
            let (targets, compute) = (example.targets, &mut parts.compute);
            let (loss, gradient) = parts.clock.measure(Phase::Head, || {
                let Some((teacher, states)) = parts.distillation.as_ref().zip(taught.as_mut())
                else {
                    return compute.head_one(head, at, (&state, targets, scale));
                };
                let teacher = TeacherStates {
                    head: &teacher.head,
                    hidden: &states.get(at)?,
                    weight: teacher.weight,
                };
                let context = compute.context();
                head.distillation_gradient(&state, teacher, targets, scale, context)
            })?;
            losses.push(loss);
            gradients.put(at, gradient)?;
        }
        Ok(losses)
    }

    /// Passes the gradients through the layers from the last to the first. Returns the sum of the squares of all parameters' gradients.
    fn reverse(
        &mut self,
        share: &SampleShare,
        inputs: &mut LayerInputs,
        gradients: &mut HiddenStates,
        mut kept: Vec<KeptLayer>,
    ) -> Result<f64> {
        let mut squares = 0.0;
        for index in (0..self.parts.config.num_hidden_layers).rev() {
            let mut kept = match kept.pop() {
                Some(kept) => kept,
                None => KeptLayer {
                    // After the first layer the next step begins with it.
                    layer: self.layer(index, Some(index.saturating_sub(1)))?,
                    of_examples: Vec::new(),
                },
            };
            let sums = self.layer_gradients(share, &mut kept, inputs, gradients)?;
            self.spare.take(kept.layer.layer, &self.parts.part.ids);
            squares += sums.iter().map(|one| sum_of_squares(one)).sum::<f64>();
            self.parts.store.put_gradients(index, sums)?;
            memory::release_freed();
        }
        Ok(squares)
    }

    /// Passes the gradients of the examples through a layer. Returns the gradients of its parameters, over the examples of all ranks.
    fn layer_gradients(
        &mut self,
        share: &SampleShare,
        kept: &mut KeptLayer,
        inputs: &mut LayerInputs,
        gradients: &mut HiddenStates,
    ) -> Result<Vec<Vec<f32>>> {
        let parts = &mut self.parts;
        let index = kept.layer.layer.index();
        let ranks = parts.compute.ranks().clone();
        // A device adds up all of its examples.
        let is_one_block = parts.compute.has_device_for(&kept.layer.layer);
        let (makers, blocks) = match is_one_block {
            true => (vec![0], vec![(0, 0..share.own().len())]),
            false => (share.makers(), share.own_blocks()),
        };
        let lengths = parts.part.parameters(&parts.config);
        let lengths = lengths.iter().map(ParameterSpec::elements);
        let mut sums = OrderedSums::new(&ranks, makers, lengths.collect());
        // Only gradients of factors depend on the values.
        let values = match parts.part.form {
            TrainedForm::Weights => Vec::new(),
            TrainedForm::Factors { .. } => parts.store.values(index)?,
        };
        let mut of_examples = std::mem::take(&mut kept.of_examples).into_iter();
        let mut of_block = parts.part.gradients(&parts.config, &kept.layer, &values)?;
        for (block, places) in blocks {
            for example in places {
                parts.events.check()?;
                let (state, dy) = (inputs.get(index, example)?, gradients.get(example)?);
                let (layer, compute) = (&kept.layer.layer, &mut parts.compute);
                let dx = parts.clock.measure(Phase::Backward, || match of_examples.next() {
                    Some(mut kept) => {
                        let context = compute.context();
                        let dx =
                            layer.backward_kept(&state, &dy, &mut kept, &mut of_block, context);
                        self.spare.activations.push(kept);
                        dx
                    }
                    None => {
                        let sample = (example, &state, &dy);
                        compute.backward_one(layer, sample, &mut of_block)
                    }
                })?;
                gradients.put(example, dx)?;
            }
            parts.compute.collect_gradients(&mut of_block)?;
            parts.clock.measure(Phase::Backward, || {
                sums.add(block, parts.part.collected(&parts.config, &mut of_block)?)?;
                of_block.clear();
                anyhow::Ok(())
            })?;
        }
        drop(of_block);
        let masks = parts.store.kept(index)?;
        parts.clock.measure(Phase::Backward, || Ok(masked(sums.finish()?, &masks)))
    }

    fn update(&mut self, norm: f64, at: TrainingStep) -> Result<()> {
        self.is_updating = true;
        let TrainerParts { store, optimizer, closing, max_grad_norm, clock, .. } = &mut self.parts;
        let factor = max_grad_norm.and_then(|limit| clip_factor(norm, limit));
        let (step, optimizer) = (at.number, &**optimizer);
        // Bias corrections count the steps of the states.
        let at = TrainingStep { number: at.number - self.restarted_after, ..at };
        clock.measure(Phase::Update, || {
            (0..store.layers()).try_for_each(|layer| {
                store.update(layer, &mut |mut changed| {
                    let ChangedParameter { values, gradient, kept, state, .. } = &mut changed;
                    if let Some(factor) = factor {
                        scale(gradient, factor);
                    }
                    optimizer.update(at, values, gradient, kept.as_deref(), state);
                    if let Some(closing) = closing {
                        closing.close(step, layer, changed, optimizer);
                    }
                })
            })
        })?;
        self.is_updating = false;
        Ok(())
    }
}

/// The examples of a rank.
fn own<'e>(all: &[Example<'e>], share: &SampleShare) -> Vec<Example<'e>> {
    share.own().iter().map(|&example| all[example]).collect()
}

/// Refuses a number that is not finite.
fn check_finite(what: &str, value: f64, at: TrainingStep) -> Result<()> {
    if value.is_finite() {
        return Ok(());
    }
    Err(Diverged { what: format!("the {what} is {value}"), at }.into())
}
