//! Reads decoder layers, the next one while this one is in use.
//!
//! What waits is the layer in its stored dtype, nothing wider; at most two layers exist at a time.

use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Result, anyhow};

use crate::checkpoint::WeightSource;
use crate::model::{DecoderLayer, LlamaConfig};

/// Hands out layers in ascending order.
pub struct LayerLoader {
    source: Arc<dyn WeightSource>,
    config: Arc<LlamaConfig>,
    ahead: Option<(usize, JoinHandle<Result<DecoderLayer>>)>,
}

impl LayerLoader {
    /// Begins to read layer 0.
    pub fn new(source: Arc<dyn WeightSource>, config: Arc<LlamaConfig>) -> Self {
        let mut loader = Self {
            source,
            config,
            ahead: None,
        };
        loader.prefetch(0);
        loader
    }

    /// The layer `index`, and starts reading the one after it.
    ///
    /// # Errors
    /// Fails when the layer cannot be read.
    pub fn take(&mut self, index: usize) -> Result<DecoderLayer> {
        let layer = match self.ahead.take() {
            Some((ahead, reading)) if ahead == index => reading
                .join()
                .map_err(|_| anyhow!("the reader of layer {index} panicked"))??,
            _ => DecoderLayer::load(&*self.source, &self.config, index)?,
        };
        self.prefetch(index + 1);
        Ok(layer)
    }

    fn prefetch(&mut self, index: usize) {
        if index < self.config.num_hidden_layers {
            let (source, config) = (Arc::clone(&self.source), Arc::clone(&self.config));
            let reading = std::thread::spawn(move || DecoderLayer::load(&*source, &config, index));
            self.ahead = Some((index, reading));
        }
    }
}
