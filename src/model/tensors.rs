//! The tensors of a model by name and shape, as the family's record has them.

use super::config::ModelConfig;
use super::embedding::EMBEDDING;
use super::head::{Head, NORM};
use super::linears::LinearId;

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
    Weight(LinearId),
    /// Bias of a linear.
    Bias(LinearId),
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
        let spec = self.layer(layer);
        let norms = self.family.norm_names(layer).map(move |(role, name)| {
            ModelTensor::new(name, &[spec.norm_width(role)], TensorRole::Norm)
        });
        let linears = self.linears().flat_map(move |id| {
            let (rows, columns) = id.shape(self);
            let name = id.tensor_name(layer);
            let weight = ModelTensor::new(name, &[rows, columns], TensorRole::Weight(id));
            let bias = self.has_bias(id).then(|| {
                let name = id.bias_name(layer);
                ModelTensor::new(name, &[rows], TensorRole::Bias(id))
            });
            std::iter::once(weight).chain(bias)
        });
        norms.chain(linears)
    }
}
