//! The tensors of a random checkpoint: names, shapes, means and deviations, and the file each of them is in.

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::model::config::TensorRole;
use crate::model::embedding::EMBEDDING;
use crate::model::head::NORM;
use crate::model::{Head, ModelConfig, Projection};

/// Deviation of fresh weights: transformers' `initializer_range`.
const DEVIATION: f32 = 0.02;

/// A tensor to write.
#[derive(Debug)]
pub(super) struct RandomTensor {
    /// Its transformers name.
    pub(super) name: String,
    /// Its dimensions, outermost first.
    pub(super) shape: Vec<usize>,
    /// Its stored bytes.
    pub(super) bytes: u64,
    /// Its place in the list, which is the number of its random stream.
    pub(super) number: u64,
    /// The mean of its elements: 1 for norms, 0 for the rest.
    pub(super) mean: f32,
    /// The deviation of its elements.
    pub(super) deviation: f32,
}

/// Lists every tensor of a model in the order of a forward pass.
///
/// # Errors
/// Fails when the bytes of all tensors overflow.
pub(super) fn tensors(
    config: &ModelConfig,
    dtype: StoredDtype,
) -> Result<Vec<RandomTensor>, Failure> {
    // The two matrices that write to the residual stream are smaller (GPT-2's rule).
    let residual = DEVIATION / (2.0 * config.num_hidden_layers as f32).sqrt();
    let vocabulary = vec![config.vocab_size, config.hidden_size];
    let mut all = vec![(EMBEDDING.to_owned(), vocabulary.clone(), 0.0, DEVIATION)];
    for layer in 0..config.num_hidden_layers {
        for tensor in config.layer_tensors(layer) {
            let (mean, deviation) = match tensor.role {
                TensorRole::Norm => (1.0, DEVIATION),
                TensorRole::Weight(Projection::O | Projection::Down)
                | TensorRole::Bias(Projection::O | Projection::Down) => (0.0, residual),
                TensorRole::Weight(_) | TensorRole::Bias(_) => (0.0, DEVIATION),
            };
            all.push((tensor.name, tensor.shape, mean, deviation));
        }
    }
    all.push((NORM.to_owned(), vec![config.hidden_size], 1.0, DEVIATION));
    if !config.tie_word_embeddings {
        all.push((
            Head::tensor_name(config).to_owned(),
            vocabulary,
            0.0,
            DEVIATION,
        ));
    }
    let mut total = 0u64;
    let mut tensors = Vec::with_capacity(all.len());
    for (number, (name, shape, mean, deviation)) in all.into_iter().enumerate() {
        let elements: usize = shape.iter().product();
        let bytes = elements as u64 * dtype.bytes() as u64;
        total = total.saturating_add(bytes);
        tensors.push(RandomTensor {
            name,
            shape,
            bytes,
            number: number as u64,
            mean,
            deviation,
        });
    }
    // Offsets in a header are signed 64-bit numbers in some readers.
    if i64::try_from(total).is_err() {
        return Err(Failure::new(
            "cannot write a random checkpoint: its size overflows",
        ));
    }
    Ok(tensors)
}

/// Assigns the tensors to files in their order, each file filled up to `max_shard`.
pub(super) fn shards(tensors: &[RandomTensor], max_shard: ByteSize) -> Vec<&[RandomTensor]> {
    let mut shards = Vec::new();
    let (mut first, mut held) = (0, 0);
    for (at, tensor) in tensors.iter().enumerate() {
        if at > first && held + tensor.bytes > max_shard.0 {
            shards.push(&tensors[first..at]);
            (first, held) = (at, 0);
        }
        held += tensor.bytes;
    }
    shards.push(&tensors[first..]);
    shards
}
