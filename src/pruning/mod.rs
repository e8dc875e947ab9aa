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
//! | `target`, `mask` | ratio and pattern; the bits of a mask |

pub mod column_squares;
pub mod magnitude;
pub mod mask;
pub mod method;
pub mod ria;
pub mod select;
pub mod statistics;
pub mod target;
pub mod variant;
pub mod wanda;

pub use column_squares::ColumnSquares;
pub use mask::Mask;
pub use method::{PruningMethod, Removes, Request, prune};
pub use statistics::{InPlaceStatistics, MergedStatistics, SamplePart, Statistics, StatisticsKind};
pub use target::{Pattern, Target};

/// Every pruning method, in the order of the help text.
pub static METHODS: &[&dyn PruningMethod] = &[
    &wanda::Wanda,
    &variant::WandaVariant,
    &magnitude::Magnitude,
    &ria::Ria::Matrix,
    &ria::Ria::Rows,
];

/// Finds a method by its name.
pub fn method(name: &str) -> Option<&'static dyn PruningMethod> {
    METHODS.iter().copied().find(|method| method.name() == name)
}
