//! The hidden states of a step: the input of every layer for every example, and the gradient that comes back.

use std::path::Path;

use anyhow::Result;
use candle_core::{DType, Tensor};

use crate::runtime::HiddenStates;

/// The inputs of all layers and the output of the last layer, for some examples.
pub(super) struct LayerInputs {
    states: HiddenStates,
    examples: usize,
}

impl LayerInputs {
    /// Makes room for the states of `examples` examples at `layers` + 1 places.
    ///
    /// # Arguments
    /// * `folder`: the folder of the spill file; `None` keeps the states in memory
    /// * `shape`: tokens of an example, hidden_size
    /// * `dtype`: the dtype of the stored states
    ///
    /// # Errors
    /// Fails when the spill file cannot be created.
    pub(super) fn new(
        folder: Option<&Path>,
        layers: usize,
        examples: usize,
        shape: [usize; 2],
        dtype: DType,
    ) -> Result<Self> {
        let count = (layers + 1) * examples;
        Ok(Self { states: HiddenStates::new(folder, count, shape, dtype)?, examples })
    }

    /// The number of examples.
    pub(super) fn examples(&self) -> usize {
        self.examples
    }

    /// The state of an example at the input of a layer, in f32. The index after the last layer stands for the output.
    pub(super) fn get(&mut self, layer: usize, example: usize) -> Result<Tensor> {
        self.states.get(layer * self.examples + example)
    }

    /// Stores the state of an example.
    pub(super) fn put(&mut self, layer: usize, example: usize, state: Tensor) -> Result<()> {
        self.states.put(layer * self.examples + example, state)
    }
}
