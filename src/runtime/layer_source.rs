//! [`LayerSource`]: a checkpoint whose decoder layers are read, with the form that their matrices get in memory.

use std::sync::Arc;

use anyhow::Result;

use crate::checkpoint::WeightSource;
use crate::model::{DecoderLayer, ModelConfig, WeightForms};
use crate::run::WeightsHeld;

/// The checkpoint of the layers, and the form of their matrices in memory.
#[derive(Clone)]
pub struct LayerSource {
    /// The tensors.
    pub source: Arc<dyn WeightSource>,
    /// The model's shape.
    pub config: Arc<ModelConfig>,
    /// The forms of matrices in memory.
    pub forms: Arc<WeightForms>,
}

impl LayerSource {
    /// Layers whose matrices are held as stored.
    pub fn as_stored(source: Arc<dyn WeightSource>, config: Arc<ModelConfig>) -> Self {
        Self { source, config, forms: Arc::new(WeightForms::dense()) }
    }

    /// Reads a layer, or opens it where weights are held by matrix.
    ///
    /// # Errors
    /// Fails when a tensor is missing or cannot be read, and where a weight has no 8-bit code.
    pub fn layer(&self, held: WeightsHeld, index: usize) -> Result<DecoderLayer> {
        let Self { source, config, forms } = self;
        match held {
            WeightsHeld::Layer => DecoderLayer::load_in(&**source, config, index, forms),
            WeightsHeld::Matrix => DecoderLayer::at_rest(source, config, index),
        }
    }
}
