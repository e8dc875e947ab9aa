//! Checkpoints whose decoder linears are stored as a bit mask and the kept values, in the layout of compressed-tensors (to 0.14.0.1).
//!
//! | file | content |
//! | --- | --- |
//! | `matrix` | [`PackedMatrix`]: names, forms and sizes of the tensors that store a matrix |
//! | `config` | `quantization_config` in `config.json` |
//! | `record` | `packed.json`: what the layout cannot say, so that the original folder can be restored byte for byte |
//! | `scan` | one read of the original files in order: their hashes, and the kept elements of each matrix |
//! | `choice` | the form of each matrix: mask, 2:4, or dense where packing does not make it smaller |
//! | `pass` | the writing of a packed checkpoint, matrix by matrix |
//! | `restore` | the writing of the original checkpoint |
//! | `rows` | [`CompactRows`]: the parts of some rows, read and checked |
//! | `source` | [`PackedSource`], which reads a packed checkpoint as if its matrices were dense |
//!
//! The bit mask itself is `linalg::bitmask`. Embedding, head, norms and biases stay as they are.

pub mod choice;
pub mod config;
pub mod matrix;
pub mod pass;
pub mod record;
pub mod restore;
pub mod rows;
pub mod scan;
pub mod source;

pub use choice::PackChoice;
pub use matrix::{PackForm, PackedMatrix, PackedValues};
pub use pass::{LEAST_PIECE, PIECE, PackPass};
pub use record::{PACKED_FILE, PackedRecord};
pub use restore::RestorePass;
pub use rows::CompactRows;
pub use scan::{PackJournal, PackScan};
pub use source::PackedSource;
