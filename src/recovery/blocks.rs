//! An editor that trains layer by layer: each layer learns to reproduce what the dense model computes there.
//!
//! ```text
//! loss = mean over tokens and elements of (layer'(x) − y)²
//! x    the sample after the layers that are recovered already
//! y    the dense model's own hidden state after this layer
//! ```
//!
//! A model without some layers of the dense model learns from more than a layer at a time: y is then the state before the next layer that
//! both have, and after the last layer for the last.
//!
//! The memory holds one layer with its gradients and optimizer states, and two sets of hidden states, which may be on disk. Every layer
//! has its own optimizer and schedule.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};

use super::base::BaseLayers;
use super::closing::ClosingMasks;
use super::merger::{LayerOutput, zeros};
use super::parameters::{BaseLayer, LayerParameters, TrainedPart, masked};
use super::parts::Diverged;
use super::reuse::BufferReuse;
use super::store::ChangedParameter;
use crate::checkpoint::WeightSource;
use crate::linalg::derivatives::squared_error_backward;
use crate::linalg::tensor;
use crate::model::{DecoderLayer, LayerGradients, ModelConfig};
use crate::recovery::optimizers::clip::{clip_factor, scale, sum_of_squares};
use crate::recovery::optimizers::rounding::Bf16Rounding;
use crate::recovery::optimizers::{Optimizer, Schedule, TrainingStep};
use crate::run::phase::in_layer;
use crate::run::recovery::BlockLoss;
use crate::run::{Event, Events, Phase};
use crate::runtime::{Clock, Compute, Editor, HiddenStates, OrderedSums, gathered, memory};

/// The dense model that layers learn from.
pub struct BlockTeacher {
    /// Its weights.
    pub source: Arc<dyn WeightSource>,
    /// Its shape.
    pub config: Arc<ModelConfig>,
    /// By layer of the trained model, the end of the dense layers that it stands for. They begin where the dense layers of the layer before
    /// end.
    pub ends: Vec<usize>,
}

impl BlockTeacher {
    /// The dense layers that a layer of the trained model stands for.
    fn layers(&self, index: usize) -> Range<usize> {
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        begin..self.ends[index]
    }
}

/// Trains the layers in their order.
pub struct BlockTrainer<'a> {
    /// The dense model.
    pub teacher: BlockTeacher,
    /// The shape of the trained model.
    pub config: Arc<ModelConfig>,
    /// The frozen weights of layers.
    pub base: BaseLayers,
    /// The part of each layer that is trained.
    pub part: &'a TrainedPart,
    /// The rule of updates.
    pub optimizer: Box<dyn Optimizer>,
    /// Masks that close in the steps of each layer; `None` where they stand still.
    pub closing: Option<ClosingMasks>,
    /// The largest norm of a layer's gradients; `None` for no limit.
    pub max_grad_norm: Option<f64>,
    /// The learning rates of a layer's steps.
    pub schedule: Schedule,
    /// The samples of a step of a layer.
    pub batch: Box<dyn Fn(usize, u64) -> Vec<usize> + 'a>,
    /// Seed of low-rank factors.
    pub seed: u64,
    /// The samples after the recovered layers.
    pub states: HiddenStates,
    /// The samples after the dense layers: the targets of this layer once they have passed the dense layer.
    pub targets: HiddenStates,
    /// The rounding to bf16 of the written weights.
    pub rounding: Bf16Rounding,
    /// The receivers of layers.
    pub output: LayerOutput<'a>,
    /// Memory that each step uses again.
    pub spare: BufferReuse,
    /// The clock of the run.
    pub clock: &'a Clock,
    /// The receiver of events.
    pub events: &'a dyn Events,
}

/// Values, masks and optimizer states of a layer.
struct TrainedBlock {
    parameters: LayerParameters,
    states: Vec<Vec<u8>>,
}

impl TrainedBlock {
    fn values(&self) -> Vec<Cow<'_, [f32]>> {
        let values = self.parameters.values.iter();
        values.map(|values| Cow::Borrowed(values.as_slice())).collect()
    }
}

impl BlockTrainer<'_> {
    /// Passes the dense samples through the dense layers that a layer stands for. The CPU computes a dense model of another shape.
    fn make_targets(&mut self, index: usize, compute: &mut Compute<'_>) -> Result<()> {
        let teacher = &self.teacher;
        let is_of_other_shape = *teacher.config != *self.config;
        let mut own =
            is_of_other_shape.then(|| compute.on_cpu_for(&teacher.config, self.targets.seqlen()));
        let compute = own.as_mut().unwrap_or(compute);
        for index in teacher.layers(index) {
            let layer = self.clock.measure(Phase::Read, || {
                DecoderLayer::load(&*teacher.source, &teacher.config, index)
                    .context("in the teacher")
            })?;
            let layer = self.spare.as_new_version(layer);
            compute.forward_each(Phase::Propagate, &layer, &mut self.targets, self.clock)?;
            // Values and gradients of the layer take their place.
            drop(layer);
            memory::release_freed();
        }
        Ok(())
    }

    fn layer(&mut self, base: &BaseLayer, trained: &TrainedBlock) -> Result<DecoderLayer> {
        let (values, rounding) = (trained.values(), Bf16Rounding::Nearest);
        let base = base.clone();
        let (part, spare) = (self.part, &mut self.spare);
        let made = part.applied(&self.config, base, &values, rounding, spare)?;
        Ok(made.layer)
    }

    /// Performs a step on some samples. Returns their mean squared error before the step. Gradients are added up in the order of the samples,
    /// each of which is on one rank.
    fn step(
        &mut self,
        base: &BaseLayer,
        trained: &mut TrainedBlock,
        samples: &[usize],
        at: TrainingStep,
        compute: &mut Compute<'_>,
    ) -> Result<f64> {
        let clock = self.clock;
        let layer = clock.measure(Phase::Update, || self.layer(base, trained))?;
        let ranks = compute.ranks().clone();
        let share = self.states.share();
        let (makers, places): (Vec<usize>, Vec<Option<usize>>) =
            samples.iter().map(|&sample| share.rank_and_place(sample)).unzip();
        let own: Vec<(usize, usize)> =
            (0..).zip(&places).filter_map(|(term, &place)| Some((term, place?))).collect();
        // A device adds up all of its samples.
        let (terms, makers_of_terms) = match compute.has_device_for(&layer) {
            true => (vec![(0, &own[..])], vec![0]),
            false => (own.chunks(1).map(|one| (one[0].0, one)).collect(), makers.clone()),
        };
        let lengths = trained.parameters.values.iter().map(Vec::len).collect();
        let mut sums = OrderedSums::new(&ranks, makers_of_terms, lengths);
        let elements = samples.len() * self.states.seqlen() * self.config.hidden_size;
        let factor = 1.0 / elements as f32;
        let mut errors = Vec::new();
        let mut gradients = self.part.gradients(&self.config, base, &trained.values())?;
        for (term, samples) in terms {
            for &(_, place) in samples {
                errors.push(self.backward(&layer, place, factor, (compute, &mut gradients))?);
            }
            compute.collect_gradients(&mut gradients)?;
            clock.measure(Phase::Backward, || {
                sums.add(term, self.part.collected(&self.config, &mut gradients)?)?;
                gradients.clear();
                anyhow::Ok(())
            })?;
        }
        drop(gradients);
        let kept = &trained.parameters.kept;
        let mut collected =
            clock.measure(Phase::Backward, || anyhow::Ok(masked(sums.finish()?, kept)))?;
        let sum = gathered(&makers, &errors, &ranks)?.into_iter().sum::<f64>();
        let LayerParameters { values, kept } = &mut trained.parameters;
        let squares = collected.iter().map(|one| sum_of_squares(one)).sum::<f64>();
        if !(sum.is_finite() && squares.is_finite()) {
            return Err(Diverged {
                what: format!("loss or gradients of layer {} are not finite", layer.index()),
                at,
            }
            .into());
        }
        let index = layer.index();
        self.spare.take(layer, &self.part.ids);
        let factor = self.max_grad_norm.and_then(|limit| clip_factor(squares.sqrt(), limit));
        clock.measure(Phase::Update, || {
            for (place, values) in values.iter_mut().enumerate() {
                let (gradient, kept) = (&mut collected[place][..], kept[place].as_mut());
                if let Some(factor) = factor {
                    scale(gradient, factor);
                }
                let state = &mut trained.states[place][..];
                self.optimizer.update(at, values, gradient, kept.as_deref(), state);
                if let Some(closing) = &self.closing {
                    let changed = ChangedParameter { place, values, gradient, kept, state };
                    closing.close(at.number, index, changed, &*self.optimizer);
                }
            }
        });
        Ok(sum / elements as f64)
    }

    /// Passes a sample forwards and backwards, and adds its gradients. Returns its squared error.
    ///
    /// # Arguments
    /// * `place`: its place among the samples of this rank
    /// * `factor`: the factor of its squared error in the loss
    fn backward(
        &mut self,
        layer: &DecoderLayer,
        place: usize,
        factor: f32,
        (compute, gradients): (&mut Compute<'_>, &mut LayerGradients),
    ) -> Result<f64> {
        self.events.check()?;
        let clock = self.clock;
        let (x, y) = (self.states.get(place)?, self.targets.get(place)?);
        let (out, kept) = clock.measure(Phase::Forward, || {
            // A device computes activations again.
            if compute.has_device_for(layer) {
                let out = compute.forward_one(Phase::Forward, layer, place, &x)?;
                return anyhow::Ok((out, None));
            }
            let spare = self.spare.activations.pop();
            let (out, kept) = layer.forward_keeping(&x, spare, compute.context())?;
            Ok((out, Some(kept)))
        })?;
        let mut dy = vec![0.0; out.elem_count()];
        let error = tensor::with_slice(&out, |out| {
            tensor::with_slice(&y, |y| squared_error_backward(out, y, factor, &mut dy))
        })??;
        let dy = tensor::from_vec(dy, x.dims())?;
        clock.measure(Phase::Backward, || {
            let Some(mut kept) = kept else {
                return compute.backward_one(layer, (place, &x, &dy), gradients);
            };
            let context = compute.context();
            let dx = layer.backward_kept(&x, &dy, &mut kept, gradients, context);
            self.spare.activations.push(kept);
            dx
        })?;
        Ok(error)
    }

    /// Trains a layer.
    fn train(
        &mut self,
        base: &BaseLayer,
        compute: &mut Compute<'_>,
    ) -> Result<(TrainedBlock, BlockLoss)> {
        let parameters = self.part.initial(&self.config, base, self.seed)?;
        let states = parameters.values.iter();
        let states = states.map(|values| vec![0; self.optimizer.state_bytes(values.len())]);
        let mut trained = TrainedBlock { states: states.collect(), parameters };
        let index = base.layer.index();
        let mut losses = Vec::new();
        self.events.emit(Event::PhaseStarted {
            phase: in_layer(index, self.config.num_hidden_layers, "train"),
            unit: "steps",
            steps: self.schedule.steps,
        });
        let start = Instant::now();
        for step in 0..self.schedule.steps {
            let samples = (self.batch)(index, step);
            let at = TrainingStep { number: step + 1, rate: self.schedule.rate_of(step) };
            let error = self.step(base, &mut trained, &samples, at, compute)?;
            losses.push(error);
            self.events.emit(Event::TrainingStep {
                step: step + 1,
                steps: self.schedule.steps,
                layer: Some(index),
                loss: error,
                rate: at.rate,
                tokens: (samples.len() * self.states.seqlen()) as u64,
            });
            self.events.emit(Event::Progress { done: step + 1 });
        }
        self.events.emit(Event::PhaseDone {
            phase: in_layer(index, self.config.num_hidden_layers, "train"),
            elapsed: start.elapsed(),
        });
        let loss = BlockLoss {
            first: losses.first().copied().unwrap_or(f64::NAN),
            last: losses.last().copied().unwrap_or(f64::NAN),
            losses,
        };
        Ok((trained, loss))
    }
}

impl Editor for BlockTrainer<'_> {
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let (start, index) = (Instant::now(), layer.index());
        let before = zeros(self.part, &layer)?;
        drop(layer);
        self.make_targets(index, compute)?;
        let base = self.base.take(index, None)?;
        let (trained, loss) = self.train(&base, compute)?;
        let recovered = self
            .part
            .applied(&self.config, base, &trained.values(), self.rounding, &mut self.spare)?
            .layer;
        drop(trained);
        self.output.finish(self.part, &recovered, &before, (start, Some(loss)))?;
        self.forward_states(&recovered, compute)?;
        Ok(recovered)
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.make_targets(layer.index(), compute)?;
        self.forward_states(layer, compute)
    }

    fn has_samples(&self) -> bool {
        true
    }
}

impl BlockTrainer<'_> {
    /// Passes the samples through a recovered layer, unless no layer follows.
    fn forward_states(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        if layer.index() + 1 == self.config.num_hidden_layers {
            self.states.clear();
            self.targets.clear();
            return Ok(());
        }
        compute.forward_each(Phase::Propagate, layer, &mut self.states, self.clock)
    }
}
