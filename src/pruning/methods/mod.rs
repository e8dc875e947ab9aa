//! The pruning methods.
//!
//! A method is a file here, its `pub mod` line, and a line in [`METHODS`]. The command line, its help and the conformance test
//! (`tests/it/methods.rs`) iterate that table.
//!
//! | file | content |
//! | --- | --- |
//! | `wanda`, `variant` | Wanda: weight times norm of its input; the same with a bound per row |
//! | `magnitude` | the size of a weight |
//! | `ria` | relative importance and activations, per matrix or per row |
//! | `sparsegpt` | SparseGPT: masks and repairs block by block |
//! | `alps`, `ladder` | masks by ADMM, weights by least squares |

use super::method::PruningMethod;

pub mod alps;
pub mod ladder;
pub mod magnitude;
pub mod ria;
pub mod sparsegpt;
pub mod variant;
pub mod wanda;

/// Every pruning method, in the order of the help text.
pub static METHODS: &[&dyn PruningMethod] = &[
    &wanda::Wanda,
    &variant::WandaVariant,
    &magnitude::Magnitude,
    &ria::Ria::Matrix,
    &ria::Ria::Rows,
    &sparsegpt::SparseGpt,
    &alps::Alps,
    &ladder::Ladder,
];

/// Finds a method by its name.
pub fn method(name: &str) -> Option<&'static dyn PruningMethod> {
    METHODS.iter().copied().find(|method| method.name() == name)
}
