//! The solvers that several methods and refinements share.
//!
//! | file | content |
//! | --- | --- |
//! | `admm` | the iteration that chooses a support |
//! | `least_squares` | the damped Gram matrix, the refit of the kept weights, and the error of an output |
//! | `dense` | masks and weights of a matrix in f32, before they are stored |

pub(crate) mod admm;
pub(crate) mod dense;
pub(crate) mod least_squares;
