//! The numerical floor everything stands on: weights in their stored dtype, products, blocked attention, selection.
//!
//! Knows nothing of models, files or pruning methods. All products of the program go through [`Linear`] or
//! [`matmul::matmul`], so that kernels can change without a layer changing.

pub mod attention;
pub mod columns;
pub mod elementwise;
pub mod exp;
pub mod kernel;
pub mod lent;
pub mod linear;
pub mod matmul;
mod matvec;
pub mod parts;
pub mod peak;
pub mod product;
pub mod profile;
mod rectangles;
pub mod select;
pub mod stored;
pub mod tensor;
pub mod weight;
pub mod workspace;

pub use linear::Linear;
pub use stored::{StoredDtype, StoredMatrix};
pub use weight::{MatrixAtRest, Panel, Products, RowSource, Weight};
pub use workspace::Workspace;
