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
//! | `reading` | tensors of a checkpoint as vectors and matrices |
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
mod reading;
pub mod rotary;
pub mod shapes;
pub mod smaller;
mod tensors;
pub mod training_footprint;

pub use backward::{KeptActivations, LayerGradients, TeacherStates};
pub use config::{ModelConfig, RopeScaling};
pub use context::LayerContext;
pub use embedding::{EMBEDDING, Embedding};
pub use footprint::{Dtypes, stored_dtypes};
pub use head::{HEAD, Head};
pub use kv_cache::{KvCache, LayerCache};
pub use layer::DecoderLayer;
pub use observe::{Observation, Observer};
pub use projection::Projection;
pub(crate) use reading::read_matrix;
pub use reading::stored_dtype;
pub use rotary::Rotary;
pub use smaller::{KeptLayers, Width};
pub use tensors::{ModelTensor, TensorRole};
