//! Pruning methods: scores, selection rules, masks, statistics. Pure mathematics on one matrix at a time.
//!
//! A method is one file here, its `pub mod` line, and one line in [`METHODS`]. The command line, its help and the conformance test
//! (`tests/it/methods.rs`) iterate that table. Wanda's formula is in `wanda.rs`.
//!
//! | file | content |
//! | --- | --- |
//! | `wanda`, `variant`, `magnitude`, `ria` | the methods |
//! | `method` | the trait they implement, and the checks they share |
//! | `statistics`, `column_squares` | statistics of a linear's input: the two ways to collect them, and Wanda's |
//! | `select` | scores → mask |
//! | `width` | scores of whole input channels, and the refit of those that stay |
//! | `permutation` | scores → an order of columns for N:M patterns |
//! | `target`, `mask` | ratio and pattern; the bits of a mask |

mod admm;
pub mod alps;
pub mod column_moments;
pub mod column_squares;
mod dense;
pub mod dsnot;
pub mod input_gram;
pub mod ladder;
mod least_squares;
pub mod magnitude;
pub mod mask;
pub mod method;
pub mod options;
pub mod permutation;
pub mod refinement;
pub mod refit_weights;
pub mod ria;
pub mod select;
pub mod sparsegpt;
pub mod statistics;
pub mod target;
pub mod technique;
pub mod variant;
pub mod wanda;
pub mod width;

pub use column_moments::ColumnMoments;
pub use column_squares::ColumnSquares;
pub use input_gram::InputGram;
pub use mask::Mask;
pub use method::{PruningMethod, Removes, Request, prune};
pub use options::{MethodOption, MethodOptions};
pub use permutation::ChannelOrder;
pub use refinement::Refinement;
pub use statistics::{
    InPlaceStatistics, MergedStatistics, SamplePart, Statistics, StatisticsKind, StatisticsRank,
};
pub use target::{Pattern, Target};
pub use technique::Technique;

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

/// Every refinement, in the order of the help text.
pub static REFINEMENTS: &[&dyn Refinement] = &[&refit_weights::RefitWeights, &dsnot::Dsnot];

/// Finds a refinement by its name.
pub fn refinement(name: &str) -> Option<&'static dyn Refinement> {
    let mut all = REFINEMENTS.iter().copied();
    all.find(|refinement| refinement.name() == name)
}

/// Finds a method by its name.
pub fn method(name: &str) -> Option<&'static dyn PruningMethod> {
    METHODS.iter().copied().find(|method| method.name() == name)
}
