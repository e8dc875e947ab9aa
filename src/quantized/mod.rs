//! Checkpoints whose decoder linears are NF4, in the layout of bitsandbytes, which transformers loads.
//!
//! | file | content |
//! | --- | --- |
//! | `stored` | names and forms of the tensors of a matrix, and its `quant_state` |
//! | `pass` | the writing of such a checkpoint, matrix by matrix |
//! | `source` | [`QuantizedSource`], which reads it as if its matrices were dense |
//! | `config` | `quantization_config` in `config.json` |
//!
//! The codec itself is `linalg::nf4`. Embedding, head, norms and biases stay as they are.

pub mod config;
pub mod pass;
pub mod source;
pub mod stored;

pub use pass::{LEAST_PIECE, PIECE, Quantization, QuantizeJournal, QuantizePass, pass_bytes};
pub use source::QuantizedSource;
pub use stored::FourBitFormat;
