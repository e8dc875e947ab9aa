//! Models: configuration, tensors, and the arithmetic of a decoder layer.
//!
//! A layer is loaded, run and dropped by itself; no type of this room holds a whole model. The table of [`family`] has a record per model
//! family.
//!
//! | file | content |
//! | --- | --- |
//! | `backward` | the backward pass: gradients of a decoder layer and of the head, from recomputed activations |
//! | `config` | `config.json` of a model: read and checked, never written |
//! | `context` | the state that all layers of a model share: rotary tables, scratch memory and memory settings |
//! | `differentiable` | a forward pass out of candle's operators, each of which has a backward pass: an oracle of the tests, with feature `synthetic` |
//! | `embedding` | token embeddings, read row by row from the file |
//! | `footprint` | memory of each phase of a run, computed from the model's shape and the `MemorySettings` |
//! | `head` | the end of the model: the last norm and the language-model head |
//! | `kv_cache` | keys and values of the tokens a model has read |
//! | `layer` | a decoder layer: its weights as stored, and the passes of a sample through it |
//! | `linears` | the linears of a decoder layer and the inputs they share |
//! | `norms` | the RMS norms of a decoder layer, by their role |
//! | `observe` | the observer that sees the inputs of a decoder layer's linears |
//! | `on_device` | decoder layers and head with candle's operators, for GPUs |
//! | `reading` | tensors of a checkpoint as vectors and matrices |
//! | `segments` | sequences that share a sample |
//! | `rotary` | rotary position tables: θ_k = rope_theta^(−2k/r), angle(t, k) = t·θ_k, with the scaling of the configuration |
//! | `shapes` | shapes of published models by name, for plans without a checkpoint |
//! | `smaller` | a smaller model made of parts of a larger model: its configuration, and the place of its tensors in the larger model |
//! | `spec` | a decoder layer as data: its sizes, the linears and norms it has, and the numbers of its arithmetic |
//! | `tensors` | the tensors of a model by name and shape, as the family's record has them |
//! | `training_footprint` | memory that layers and head share in a training of the whole model |
//! | `weight_form` | the form of a generating model's matrices in memory: with their zeros, or without them; the head as stored, or in 8-bit codes |

pub mod backward;
pub mod config;
mod context;
#[cfg(feature = "synthetic")]
pub mod differentiable;
pub mod embedding;
pub mod family;
pub mod footprint;
pub mod head;
pub mod kv_cache;
pub mod layer;
mod linears;
pub mod norms;
pub mod observe;
pub mod on_device;
mod reading;
pub mod rotary;
pub mod segments;
pub mod shapes;
pub mod smaller;
pub mod spec;
mod tensors;
pub mod training_footprint;
mod weight_form;

pub use backward::{LayerGradients, TeacherStates};
pub use config::{
    LayerKind, ModelConfig, Rope, RopeScaling, completed_settings, is_stored_dense, layer_kinds,
    layer_lists, text_settings, text_settings_mut,
};
pub use context::LayerContext;
pub use embedding::{EMBEDDING, Embedding};
pub use footprint::{Dtypes, stored_dtypes};
pub use head::{HEAD, Head};
pub use kv_cache::{CacheDtype, KvCache, LayerCache};
pub use layer::DecoderLayer;
pub use layer::sizes::KeptActivations;
pub use linears::{InputId, InputMap, LinearId, LinearRole};
pub use norms::NormRole;
pub use observe::Observer;
pub(crate) use reading::read_matrix;
pub use reading::stored_dtype;
pub use rotary::Rotary;
pub use segments::Segment;
pub use smaller::{KeptLayers, Width};
pub use spec::LayerSpec;
pub use tensors::{ModelTensor, TensorRole};
pub use weight_form::{HeadForm, KeptShares, WeightForm, WeightForms};
