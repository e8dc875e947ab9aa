//! The tensors of a model by name and shape, as the family's record has them.

use super::config::ModelConfig;
use super::embedding::EMBEDDING;
use super::head::{Head, NORM};
use super::projection::Projection;

/// A tensor of a model.
#[derive(Debug)]
pub struct ModelTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its part in the model.
    pub role: TensorRole,
}

/// The part of a tensor in a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// Embedding, or a head that is not the embedding.
    Vocabulary,
    /// Weight of an RMS norm.
    Norm,
    /// Matrix of a linear.
    Weight(Projection),
    /// Bias of a linear.
    Bias(Projection),
}

impl ModelTensor {
    fn new(name: impl Into<String>, shape: &[usize], role: TensorRole) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), role }
    }
}

impl ModelConfig {
    /// All tensors of a model, in the order of a forward pass.
    pub fn tensors(&self) -> impl Iterator<Item = ModelTensor> {
        let vocabulary = |name: &str| {
            let shape = [self.vocab_size, self.hidden_size];
            ModelTensor::new(name, &shape, TensorRole::Vocabulary)
        };
        let head = (!self.tie_word_embeddings).then(|| vocabulary(Head::tensor_name(self)));
        let layers = 0..self.num_hidden_layers;
        let norm = ModelTensor::new(NORM, &[self.hidden_size], TensorRole::Norm);
        std::iter::once(vocabulary(EMBEDDING))
            .chain(layers.flat_map(move |layer| self.layer_tensors(layer)))
            .chain(std::iter::once(norm))
            .chain(head)
    }

    /// The tensors of a decoder layer: norms, then each linear's weight and bias.
    pub fn layer_tensors(&self, layer: usize) -> impl Iterator<Item = ModelTensor> {
        let norms = self.family.norms.map(|norm| {
            let name = format!("model.layers.{layer}.{norm}.weight");
            ModelTensor::new(name, &[self.hidden_size], TensorRole::Norm)
        });
        let linears = self.projections().flat_map(move |projection| {
            let (rows, columns) = projection.shape(self);
            let name = projection.tensor_name(layer);
            let weight = ModelTensor::new(name, &[rows, columns], TensorRole::Weight(projection));
            let bias = self.has_bias(projection).then(|| {
                let name = projection.bias_name(layer);
                ModelTensor::new(name, &[rows], TensorRole::Bias(projection))
            });
            std::iter::once(weight).chain(bias)
        });
        norms.into_iter().chain(linears)
    }
}
