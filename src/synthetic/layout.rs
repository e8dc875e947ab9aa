//! The tensors of a random checkpoint: names, shapes, means and deviations, and the file each of them is in.

use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::model::{LinearRole, ModelConfig, TensorRole};

/// Deviation of fresh weights: transformers' `initializer_range`.
const DEVIATION: f32 = 0.02;

#[derive(Debug)]
pub(super) struct RandomTensor {
    pub(super) name: String,
    /// Its dimensions, outermost first.
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
    /// Its place in the list, which is the number of its random stream.
    pub(super) number: u64,
    /// The mean of its elements: 1 for norms, 0 for the rest.
    pub(super) mean: f32,
    pub(super) deviation: f32,
}

/// Lists every tensor of a model in the order of a forward pass.
pub(super) fn tensors(
    config: &ModelConfig,
    dtype: StoredDtype,
) -> Result<Vec<RandomTensor>, Failure> {
    // The two matrices that write to the residual stream are smaller (GPT-2's rule).
    let residual = DEVIATION / (2.0 * config.num_hidden_layers as f32).sqrt();
    let mut total = 0u64;
    let mut tensors = Vec::new();
    for (number, tensor) in config.tensors().enumerate() {
        let (mean, deviation) = match tensor.role {
            TensorRole::Norm if config.family.norms_add_one => (0.0, DEVIATION),
            TensorRole::Norm => (1.0, DEVIATION),
            TensorRole::Weight(id) | TensorRole::Bias(id)
                if matches!(id.roles(), [LinearRole::O | LinearRole::Down]) =>
            {
                (0.0, residual)
            }
            TensorRole::Vocabulary | TensorRole::Weight(_) | TensorRole::Bias(_) => {
                (0.0, DEVIATION)
            }
        };
        let elements: usize = tensor.shape.iter().product();
        let bytes = elements as u64 * dtype.bytes() as u64;
        total = total.saturating_add(bytes);
        tensors.push(RandomTensor {
            name: tensor.name,
            shape: tensor.shape,
            bytes,
            number: number as u64,
            mean,
            deviation,
        });
    }
    // Some readers keep the offsets of a header in signed 64-bit numbers.
    if i64::try_from(total).is_err() {
        return Err(Failure::new("cannot write a random checkpoint: its size overflows"));
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
