//! Models: configuration, tensors, and the arithmetic of a decoder layer.
//!
//! A layer is loaded, run and dropped by itself; no type of this room holds a whole model. The table of [`family`] has a record per model
//! family.
//!
//! | file | content |
//! | --- | --- |
//! | `attention_layout` | buffers of attention: the groups of key/value heads it is computed in, and their place in the workspace |
//! | `backward` | the backward pass: gradients of a decoder layer and of the head, from recomputed activations |
//! | `config` | `config.json` of a model: read and checked, never written |
//! | `context` | the state that all layers of a model share: rotary tables, scratch memory and memory settings |
//! | `differentiable` | the forward pass out of candle's operators, each of which has a backward pass |
//! | `embedding` | token embeddings, read row by row from the file |
//! | `footprint` | memory of each phase of a run, computed from the model's shape and the `MemorySettings` |
//! | `head` | the end of the model: the last norm and the language-model head |
//! | `kv_cache` | keys and values of the tokens a model has read |
//! | `layer` | a decoder layer: its weights as stored, and its forward pass with four observation points |
//! | `observe` | observation points of a decoder layer, and the observer that sees the inputs of its linears there |
//! | `on_device` | decoder layers and head with candle's operators, for GPUs |
//! | `projection` | the linears of a decoder layer: names, shapes and the inputs they share |
//! | `rotary` | rotary position tables: θ_i = rope_theta^(−2i/head_dim), angle(t, i) = t·θ_i, with the scaling of the configuration |
//! | `shapes` | shapes of published models by name, for plans without a checkpoint |
//! | `smaller` | a smaller model made of parts of a larger model: its configuration, and the place of its tensors in the larger model |
//! | `tensors` | the tensors of a model by name and shape, as the family's record has them |
//! | `training_footprint` | memory that layers and head share in a training of the whole model |

mod attention_layout;
pub mod backward;
pub mod config;
mod context;
pub mod differentiable;
pub mod embedding;
pub mod family;
pub mod footprint;
pub mod head;
pub mod kv_cache;
pub mod layer;
pub mod observe;
pub mod on_device;
pub mod projection;
pub mod rotary;
pub mod shapes;
pub mod smaller;
mod tensors;
pub mod training_footprint;

pub use backward::{KeptActivations, LayerGradients, TeacherStates};
pub use config::{ModelConfig, RopeScaling};
pub use context::LayerContext;
pub use embedding::{EMBEDDING, Embedding};
pub use footprint::Dtypes;
pub use head::{HEAD, Head};
pub use kv_cache::{KvCache, LayerCache};
pub use layer::DecoderLayer;
pub use observe::{Observation, Observer};
pub use projection::Projection;
pub use rotary::Rotary;
pub use smaller::{KeptLayers, Width};
pub use tensors::{ModelTensor, TensorRole};

use std::sync::Arc;

use anyhow::Result;

use crate::checkpoint::{TensorEntry, WeightSource};
use crate::failure::Failure;
use crate::linalg::{MatrixAtRest, RowSource, StoredDtype, StoredMatrix};

/// The dtype of a stored tensor.
///
/// # Errors
/// Fails for all dtypes but f32, f16 and bf16, and names the tensor.
pub fn stored_dtype(entry: &TensorEntry) -> Result<StoredDtype> {
    match entry.dtype {
        safetensors::Dtype::F32 => Ok(StoredDtype::F32),
        safetensors::Dtype::F16 => Ok(StoredDtype::F16),
        safetensors::Dtype::BF16 => Ok(StoredDtype::Bf16),
        other => Err(Failure::new(format!("tensor `{}` is stored as {other:?}", entry.name))
            .detail("weights of f32, f16 or bf16 can be pruned")
            .hint("use the unquantised checkpoint of this model")
            .into()),
    }
}

/// Dtypes of a checkpoint's decoder layers and head, for plans, without tensors that [`DecoderLayer::check`] and [`Head::check`] refuse.
pub fn stored_dtypes(source: &dyn WeightSource, config: &ModelConfig) -> Dtypes {
    let of = |name: &str| stored_dtype(source.entry(name)?).ok();
    let layers = (0..config.num_hidden_layers)
        .flat_map(|layer| config.projections().map(move |one| one.tensor_name(layer)))
        .filter_map(|name| of(&name))
        .reduce(StoredDtype::wider)
        .unwrap_or(StoredDtype::F32);
    Dtypes { layers, head: of(Head::tensor_name(config)).unwrap_or(layers) }
}

/// Reads a `[rows, columns]` weight in its stored dtype.
pub(crate) fn read_matrix(
    source: &dyn WeightSource,
    name: &str,
    rows: usize,
    columns: usize,
) -> Result<StoredMatrix> {
    let entry = source.require(name, &[rows, columns])?;
    let mut matrix = StoredMatrix::zeros(stored_dtype(entry)?, rows, columns)?;
    source.read(entry, 0, matrix.as_bytes_mut())?;
    Ok(matrix)
}

struct TensorRows {
    source: Arc<dyn WeightSource>,
    entry: TensorEntry,
    row_bytes: u64,
}

impl RowSource for TensorRows {
    fn read_rows(&self, first_row: usize, bytes: &mut [u8]) -> Result<()> {
        self.source.read(&self.entry, first_row as u64 * self.row_bytes, bytes)
    }
}

/// Opens a `[rows, columns]` weight that stays in the checkpoint until a product reads it.
pub(crate) fn matrix_at_rest(
    source: &Arc<dyn WeightSource>,
    name: &str,
    rows: usize,
    columns: usize,
) -> Result<MatrixAtRest> {
    let entry = source.require(name, &[rows, columns])?.clone();
    let dtype = stored_dtype(&entry)?;
    let tensor = TensorRows {
        source: Arc::clone(source),
        entry,
        row_bytes: (columns * dtype.bytes()) as u64,
    };
    Ok(MatrixAtRest::new(Arc::new(tensor), dtype, rows, columns))
}

/// Reads a vector (a norm's weight, a bias) widened to f32.
pub(crate) fn read_vector(
    source: &dyn WeightSource,
    name: &str,
    length: usize,
) -> Result<Vec<f32>> {
    let entry = source.require(name, &[length])?;
    let mut stored = StoredMatrix::zeros(stored_dtype(entry)?, 1, length)?;
    source.read(entry, 0, stored.as_bytes_mut())?;
    let mut wide = vec![0.0; length];
    stored.widen_rows(0, &mut wide);
    Ok(wide)
}
