//! Reads decoder layers, the next one while this one is in use if there is memory for both.
//!
//! What waits is the layer in its stored dtype, nothing wider; at most two layers exist at a time, and one without reading ahead.
//! Where weights are held matrix by matrix, a layer has only its norms and biases in memory.

use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Result, anyhow};

use crate::checkpoint::WeightSource;
use crate::model::{DecoderLayer, LlamaConfig};
use crate::run::knobs::{Knobs, WeightsHeld};

/// Hands out layers in ascending order.
pub struct LayerLoader {
    source: Arc<dyn WeightSource>,
    config: Arc<LlamaConfig>,
    knobs: Knobs,
    ahead: Option<(usize, JoinHandle<Result<DecoderLayer>>)>,
}

impl LayerLoader {
    /// Begins to read layer 0, where it may read ahead.
    pub fn new(source: Arc<dyn WeightSource>, config: Arc<LlamaConfig>, knobs: Knobs) -> Self {
        let mut loader = Self {
            source,
            config,
            knobs,
            ahead: None,
        };
        loader.prefetch(0);
        loader
    }

    /// The layer `index`; where it may read ahead, it starts reading the one after it.
    ///
    /// # Errors
    /// Fails when the layer cannot be read.
    pub fn take(&mut self, index: usize) -> Result<DecoderLayer> {
        let layer = match self.ahead.take() {
            Some((ahead, reading)) if ahead == index => reading
                .join()
                .map_err(|_| anyhow!("the reader of layer {index} panicked"))??,
            _ => load(&self.source, &self.config, self.knobs.weights, index)?,
        };
        self.prefetch(index + 1);
        Ok(layer)
    }

    fn prefetch(&mut self, index: usize) {
        if self.knobs.prefetch && index < self.config.num_hidden_layers {
            let (source, config) = (Arc::clone(&self.source), Arc::clone(&self.config));
            let held = self.knobs.weights;
            let reading = std::thread::spawn(move || load(&source, &config, held, index));
            self.ahead = Some((index, reading));
        }
    }
}

fn load(
    source: &Arc<dyn WeightSource>,
    config: &LlamaConfig,
    held: WeightsHeld,
    index: usize,
) -> Result<DecoderLayer> {
    match held {
        WeightsHeld::Layer => DecoderLayer::load(&**source, config, index),
        WeightsHeld::Matrix => DecoderLayer::at_rest(source, config, index),
    }
}
