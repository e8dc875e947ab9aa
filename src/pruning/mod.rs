//! What to remove: scores, selection rules, masks, statistics. Pure mathematics on one matrix at a time.
//!
//! A method is one file here and one line in [`METHODS`]; the command line, its help, the docs and the conformance tests
//! iterate that table. Wanda's formula is in `wanda.rs`.

pub mod magnitude;
pub mod mask;
pub mod method;
pub mod select;
pub mod statistics;
pub mod target;
pub mod variant;
pub mod wanda;

pub use mask::Mask;
pub use method::{Needs, PruningMethod, Request, ScoreTime};
pub use statistics::{ColumnSquares, SampleSquares};
pub use target::{Pattern, Target};

/// Every pruning method, in the order of the help text.
pub static METHODS: &[&dyn PruningMethod] = &[&wanda::Wanda, &magnitude::Magnitude];

/// Finds a method by its name.
pub fn method(name: &str) -> Option<&'static dyn PruningMethod> {
    METHODS.iter().copied().find(|method| method.name() == name)
}
