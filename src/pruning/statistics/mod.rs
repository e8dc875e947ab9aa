//! Statistics of a linear's input: all that a method knows about the calibration samples.
//!
//! A method names a [`StatisticsKind`]. The pipeline keeps an accumulator per distinct input (q, k and v share an input, and so
//! do gate and up) and hands it to the method together with each weight. Samples enter in either of two ways:
//!
//! | | [`MergedStatistics`] | [`InPlaceStatistics`] |
//! | --- | --- | --- |
//! | made for | a few numbers per column | large matrices, like XᵀX |
//! | a sample | a part of its own; several are collected at the same time | its rows |
//! | order | parts are merged in the order of the samples | rows are added in the order of the samples, XᵀX block by block |
//! | memory | an accumulator, and a part per sample on its way | an accumulator, and a second for the current block |
//! | GPUs | send column sums where a part consists of them, else all rows | keep XᵀX of a block if there is room, else send all rows |
//!
//! The order is fixed either way, so statistics depend neither on threads nor on the number of GPUs.
//!
//! | file | content |
//! | --- | --- |
//! | `column_squares` | Σ x² of every column: Wanda's |
//! | `column_moments` | means and variances of every column: DSnoT's |
//! | `input_gram` | XᵀX: SparseGPT's, ALPS' and ladder's |

use std::any::Any;
use std::fmt::Debug;

use crate::bytes::ByteSize;
use crate::linalg::Products;
use crate::linalg::columns::ColumnSums;
use crate::linalg::gram::GramMatrix;

pub mod column_moments;
pub mod column_squares;
pub mod input_gram;

/// A kind of statistics: its cost, and empty accumulators.
pub trait StatisticsKind: Debug + Sync {
    /// Bytes held for an input with this many columns, a sample's part included.
    fn bytes(&self, in_features: usize) -> ByteSize;

    /// Bytes beside [`StatisticsKind::bytes`] while samples are collected.
    fn collecting_bytes(&self, _in_features: usize) -> ByteSize {
        ByteSize::ZERO
    }

    /// Bytes beside both while a sample's rows are added; one input at a time needs them.
    fn adding_bytes(&self, _in_features: usize, _products: Products) -> ByteSize {
        ByteSize::ZERO
    }

    /// The rank among the kinds that serve several methods. A kind contains the statistics of all lower ranks, with the same bits.
    /// `None` for a kind that serves its own method only.
    fn rank(&self) -> Option<StatisticsRank> {
        None
    }

    /// Floating-point operations of a product kernel per row of an input with this many columns.
    fn operations(&self, _in_features: usize) -> f64 {
        0.0
    }

    /// The part of a sample whose XᵀX is computed on a GPU, with all that these statistics need beside it; `None` for statistics that need
    /// the rows.
    fn part_beside_gram(&self, _in_features: usize) -> Option<Box<dyn SamplePart>> {
        None
    }

    /// Statistics of an input with this many columns, before any sample; `products` is the arithmetic of the layer.
    fn begin(&self, in_features: usize, products: Products) -> Statistics;
}

/// The order of the kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatisticsRank {
    /// Mean squares of the columns.
    ColumnSquares,
    /// These, means and variances of the columns.
    ColumnMoments,
    /// These and the Gram matrix.
    Gram,
}

impl dyn StatisticsKind {
    /// Returns whether samples enter in place.
    pub fn is_in_place(&self) -> bool {
        matches!(self.begin(0, Products::default()), Statistics::InPlace(_))
    }
}

/// The accumulator for an input.
pub enum Statistics {
    /// Small statistics: every sample has a part of its own.
    Merged(Box<dyn MergedStatistics>),
    /// Large statistics: rows enter the accumulator directly.
    InPlace(Box<dyn InPlaceStatistics>),
}

impl Statistics {
    /// Reorders the columns by `order[new] = old`, after all samples.
    pub fn permute(&mut self, order: &[usize]) {
        match self {
            Self::Merged(statistics) => statistics.permute(order),
            Self::InPlace(statistics) => statistics.permute(order),
        }
    }

    /// Ends a block of samples.
    pub fn end_block(&mut self) {
        if let Self::InPlace(statistics) = self {
            statistics.end_block();
        }
    }

    /// The accumulator as its own type, which the method that asked for it knows.
    pub fn downcast<T: 'static>(&self) -> Option<&T> {
        let any: &dyn Any = match self {
            Self::Merged(statistics) => &**statistics,
            Self::InPlace(statistics) => &**statistics,
        };
        any.downcast_ref()
    }

    /// Frees the values that methods have derived from the statistics.
    pub fn forget_derived(&self) {
        if let Self::InPlace(statistics) = self {
            statistics.forget_derived();
        }
    }
}

/// Statistics that are merged from a part per sample.
pub trait MergedStatistics: Any + Send + Sync {
    /// An empty part for a sample.
    fn part(&self) -> Box<dyn SamplePart>;

    /// Merges the numbers of the next sample's part. Called in the order of the samples.
    fn merge(&mut self, numbers: &[f64]);

    /// Reorders the columns by `order[new] = old`. Called after all samples.
    fn permute(&mut self, order: &[usize]);
}

/// The part of a sample. It counts only once the sample is whole: a part that was interrupted is dropped.
pub trait SamplePart: Send + Sync {
    /// Adds the sample's next rows `[tokens, in_features]`; a sample may arrive in several calls.
    fn add_rows(&mut self, rows: &[f32]);

    /// Returns whether the part consists of column sums alone: of values, and of squares. A GPU then sends these instead of rows.
    fn takes_sums(&self) -> bool {
        false
    }

    /// Adds the column sums of the sample's next rows, for a part that takes them.
    fn add_sums(&mut self, _sums: &ColumnSums<'_>) {}

    /// The numbers to merge.
    fn numbers(&self) -> &[f64];
}

/// Statistics that rows are added to directly.
pub trait InPlaceStatistics: Any + Send + Sync {
    /// Adds the next rows `[tokens, in_features]` of the current sample. Called in the order of the samples.
    fn add_rows(&mut self, rows: &[f32]);

    /// Ends the current sample: all its rows were added.
    fn end_sample(&mut self) {}

    /// Ends the current block of samples: sums over samples are added up block by block.
    fn end_block(&mut self) {}

    /// Merges the numbers of the next sample's [`StatisticsKind::part_beside_gram`].
    fn merge_beside_gram(&mut self, _numbers: &[f64]) {
        unreachable!("for kinds with a part beside XᵀX")
    }

    /// Adds some rows of the upper triangle of XᵀX, of the next block or blocks, as [`GramMatrix::add_upper`].
    fn add_gram(&mut self, _first: usize, _sums: &[f32]) {
        unreachable!("for kinds with a part beside XᵀX")
    }

    /// Ends the current sample, and returns its numbers for [`InPlaceStatistics::merge_beside_gram`] in place of merging them.
    fn take_sample(&mut self) -> Vec<f64> {
        unreachable!("for kinds with a part beside XᵀX")
    }

    /// XᵀX, for a caller that adds up its blocks.
    fn gram_mut(&mut self) -> &mut GramMatrix {
        unreachable!("for kinds with a part beside XᵀX")
    }

    /// Ends the collection: all samples were added.
    fn finish(&mut self) {}

    /// Frees the values that methods have derived from the statistics.
    fn forget_derived(&self) {}

    /// Reorders the columns by `order[new] = old`. Called after [`InPlaceStatistics::finish`].
    fn permute(&mut self, order: &[usize]);
}
