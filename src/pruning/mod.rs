//! Pruning methods: scores, selection rules, masks, statistics. Pure mathematics on one matrix at a time.
//!
//! | file | content |
//! | --- | --- |
//! | [`methods`] | one file per method; Wanda's formula is in `methods/wanda.rs` |
//! | [`refinements`] | one file per refinement |
//! | `solvers` | iterations and least squares that they share |
//! | [`statistics`] | what calibration collects of a linear's input |
//! | `method`, `refinement`, `options` | the traits, their checks, and the options that they may read |
//! | `technique` | a method, a refinement and a permutation together |
//! | `rows` | rows of a matrix that several processes solve together |
//! | `select` | scores → mask |
//! | `width` | scores of whole input channels, and the refit of the remaining channels |
//! | `permutation` | scores → an order of columns for N:M patterns |
//! | `target`, `mask` | ratio and pattern; the bits of a mask |

pub mod mask;
pub mod method;
pub mod methods;
pub mod options;
pub mod permutation;
pub mod refinement;
pub mod refinements;
pub mod rows;
pub mod select;
mod solvers;
pub mod statistics;
pub mod target;
pub mod technique;
pub mod width;

pub use mask::Mask;
pub use method::{PruningMethod, Request, SparsityRule, prune};
pub use methods::{METHODS, method};
pub use options::{MethodOption, MethodOptions, OptionValue};
pub use permutation::ChannelOrder;
pub use refinement::Refinement;
pub use refinements::{REFINEMENTS, refinement};
pub use statistics::column_moments::ColumnMoments;
pub use statistics::column_squares::ColumnSquares;
pub use statistics::input_gram::InputGram;
pub use statistics::{
    InPlaceStatistics, MergedStatistics, SamplePart, Statistics, StatisticsKind, StatisticsRank,
};
pub use target::{Pattern, Target};
pub use technique::Technique;
