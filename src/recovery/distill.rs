//! The dense model in a training of the whole model: its logits are learned together with the tokens (`linalg/distillation`).
//!
//! Before each step, the examples pass the dense model layer by layer. Its last hidden states are kept, and become logits part by part in
//! the head, beside the logits of the trained model. So a step reads each layer of the dense model once, and holds one layer in memory.
//!
//! A dense model of another shape, as before layers or width were dropped, has rotary tables and scratch memory of its own, which are gone
//! before the trained model begins. The CPU computes it.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::DType;

use super::example::Example;
use crate::checkpoint::WeightSource;
use crate::model::{DecoderLayer, Embedding, Head, ModelConfig};
use crate::run::Phase;
use crate::runtime::{Clock, Compute, HiddenStates, memory};

/// The dense model in a training of the whole model.
pub struct Distillation {
    source: Arc<dyn WeightSource>,
    config: Arc<ModelConfig>,
    /// The trained model has another shape.
    is_of_other_shape: bool,
    /// The dense model's norm and head.
    pub head: Head,
    /// The share of the divergence from the dense model in the loss, from 0 to 1.
    pub weight: f32,
}

impl Distillation {
    /// Opens the head of a dense model.
    ///
    /// # Arguments
    /// * `configs`: the shapes of the dense model and of the trained model
    /// * `head_rows`: rows of the vocabulary in memory at once; `None` for all
    ///
    /// # Errors
    /// Fails when the head cannot be read.
    pub fn open(
        source: Arc<dyn WeightSource>,
        [config, trained]: [&Arc<ModelConfig>; 2],
        weight: f32,
        head_rows: Option<usize>,
    ) -> Result<Self> {
        let config = Arc::clone(config);
        let head = Head::open(&source, &config, head_rows).context("in the teacher's head")?;
        let is_of_other_shape = *config != **trained;
        Ok(Self { head, source, is_of_other_shape, config, weight })
    }

    /// Returns the last hidden states of the dense model for some examples, in f32.
    ///
    /// # Arguments
    /// * `folder`: the folder of hidden states on disk; `None` keeps them in memory
    ///
    /// # Errors
    /// Fails when the run is asked to stop, and where files cannot be read or written.
    pub fn states(
        &self,
        examples: &[Example<'_>],
        (folder, seqlen): (Option<&Path>, usize),
        compute: &mut Compute<'_>,
        clock: &Clock,
    ) -> Result<HiddenStates> {
        let shape = [seqlen, self.config.hidden_size];
        let mut states = HiddenStates::new(folder, examples.len(), shape, DType::F32)?;
        clock.measure(Phase::Embed, || {
            let embedding = Embedding::open(&*self.source, &self.config)?;
            let mut examples = examples.iter().enumerate();
            examples.try_for_each(|(at, example)| states.put(at, embedding.rows(example.tokens)?))
        })?;
        let mut own = self.is_of_other_shape.then(|| compute.on_cpu_for(&self.config, seqlen));
        let compute = own.as_mut().unwrap_or(compute);
        for index in 0..self.config.num_hidden_layers {
            let layer = clock
                .measure(Phase::Read, || DecoderLayer::load(&*self.source, &self.config, index));
            let layer = layer.context("in the teacher")?;
            compute.forward_each(Phase::Forward, &layer, &mut states, clock)?;
            drop(layer);
            memory::release_freed();
        }
        Ok(states)
    }
}
