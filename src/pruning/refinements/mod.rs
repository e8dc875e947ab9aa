//! The refinements: steps after a method that change its mask or repair the kept weights.
//!
//! | file | content |
//! | --- | --- |
//! | `refit_weights` | least squares for the kept weights of a row |
//! | `dsnot` | DSnoT: kept and removed weights change places |

use super::refinement::Refinement;

pub mod dsnot;
pub mod refit_weights;

/// Every refinement, in the order of the help text.
pub static REFINEMENTS: &[&dyn Refinement] = &[&refit_weights::RefitWeights, &dsnot::Dsnot];

/// Finds a refinement by its name.
pub fn refinement(name: &str) -> Option<&'static dyn Refinement> {
    let mut all = REFINEMENTS.iter().copied();
    all.find(|refinement| refinement.name() == name)
}
