//! Numerics: weights in their stored dtype, products, blocked attention, selection.
//!
//! This room does not know models, files or pruning methods. All products of the program go through [`Linear`] or
//! [`matmul::matmul`], so kernels can change without a change of layers.

pub mod assignment;
pub mod attention;
pub mod buffer_pool;
pub mod columns;
pub mod convert;
pub mod derivatives;
pub mod distillation;
pub mod dynamic_map;
pub mod elementwise;
pub mod exp;
pub mod factor;
#[cfg(test)]
pub(crate) mod golden_tests;
pub mod gradient;
pub mod gram;
pub mod kernel;
pub mod linear;
pub mod low_rank;
pub mod matmul;
mod matvec;
pub mod nf4;
pub mod parts;
pub mod peak;
pub mod permute;
pub mod product;
pub mod profile;
mod rectangles;
pub mod select;
pub mod stored;
pub mod tensor;
pub mod triangular;
pub mod update;
pub mod weight;
pub mod workspace;

pub use linear::Linear;
pub use low_rank::{MaskedLowRank, factor_parts_elements};
pub use stored::{StoredDtype, StoredMatrix};
pub use weight::{MatrixAtRest, ProductContext, Products, RowSource, Weight};
pub use workspace::Workspace;
