//! Everything that a step of a training over the whole model works with: its parts, its examples, its outcome.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use candle_core::DType;

use super::base::BaseLayers;
use super::closing::ClosingMasks;
use super::distill::Distillation;
use super::parameters::TrainedPart;
use super::store::ParameterStore;
use crate::checkpoint::WeightSource;
use crate::model::ModelConfig;
use crate::recovery::optimizers::{Optimizer, TrainingStep};
use crate::run::Events;
use crate::runtime::{Clock, Compute};

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOutcome {
    /// Mean loss over the predicted tokens, in nat, before the update.
    pub loss: f64,
    /// The norm of all gradients before clipping.
    pub norm: f64,
    /// Predicted tokens.
    pub predicted: usize,
}

/// Everything that a trainer works with.
pub struct TrainerParts<'a> {
    /// Embedding, head and frozen weights.
    pub source: Arc<dyn WeightSource>,
    /// The model's shape.
    pub config: Arc<ModelConfig>,
    /// The frozen weights of layers.
    pub base: BaseLayers,
    /// The part of each layer that is trained.
    pub part: TrainedPart,
    /// Its parameters.
    pub store: ParameterStore,
    /// The rule of updates.
    pub optimizer: Box<dyn Optimizer>,
    /// Masks that close; `None` where they stand still.
    pub closing: Option<ClosingMasks>,
    /// The dense model whose logits are learned, too.
    pub distillation: Option<Distillation>,
    /// The largest norm of the gradients; `None` for no limit.
    pub max_grad_norm: Option<f64>,
    /// The CPU and the devices that compute layers.
    pub compute: Compute<'a>,
    /// The folder of hidden states on disk; `None` keeps them in memory.
    pub spill_folder: Option<PathBuf>,
    /// The dtype of stored hidden states.
    pub states: DType,
    /// The number of last layers whose activations are kept in place of being computed again.
    pub kept_layers: usize,
    /// Tokens per example.
    pub seqlen: usize,
    /// The clock of the run.
    pub clock: &'a Clock,
    /// The receiver of events.
    pub events: &'a dyn Events,
}

impl TrainerParts<'_> {
    /// The shape of an example's hidden states: seqlen, hidden_size.
    pub(super) fn shape_of_states(&self) -> [usize; 2] {
        [self.seqlen, self.config.hidden_size]
    }
}

/// The end of a training that leads nowhere: a number that is not finite, or a held-out loss that exploded.
#[derive(Debug, Clone)]
pub struct Diverged {
    /// The number and its name: `the loss is NaN`.
    pub what: String,
    /// The step in which it was noticed.
    pub at: TrainingStep,
}

impl fmt::Display for Diverged {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TrainingStep { number, rate } = self.at;
        write!(formatter, "{} in step {number}, with a learning rate of {rate:e}", self.what)
    }
}

impl std::error::Error for Diverged {}
