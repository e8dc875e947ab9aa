//! The trait of refinements: steps that improve what a method left of a matrix.

use std::fmt::Debug;

use anyhow::Result;

use super::mask::Mask;
use super::method::Request;
use super::options::MethodOption;
use super::statistics::StatisticsKind;
use crate::bytes::ByteSize;
use crate::linalg::StoredMatrix;

/// The matrix as a method left it.
pub struct AsPruned<'a> {
    /// The weights before pruning.
    pub dense: &'a StoredMatrix,
    /// The weights after it; the caller writes the zeros.
    pub weight: &'a mut StoredMatrix,
    /// The weights that the method removed.
    pub mask: Mask,
}

/// A refinement.
pub trait Refinement: Debug + Sync {
    /// The value of `--refine`.
    fn name(&self) -> &'static str;

    /// A line for the help text.
    fn summary(&self) -> &'static str;

    /// The statistics it needs after a method that needs the statistics `of_method`.
    fn statistics(
        &self,
        of_method: Option<&'static dyn StatisticsKind>,
    ) -> &'static dyn StatisticsKind;

    /// The options it reads.
    fn options(&self) -> &'static [MethodOption] {
        &[]
    }

    /// States that it changes the weights that stay.
    fn changes_weights(&self) -> bool;

    /// States that it takes removed weights back. Their values are the source's, so it needs a method that changes no weight: a method
    /// that does has moved their share into the kept weights.
    fn restores_weights(&self) -> bool {
        false
    }

    /// Bytes for a matrix, the copy of the dense weights not included.
    fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize;

    /// Floating-point operations in products, for the estimate of time.
    fn operations(&self, _out_features: usize, _in_features: usize) -> f64 {
        0.0
    }

    /// States that rows get the same bits whether it gets the whole matrix or a part of its rows.
    fn can_share_rows(&self) -> bool {
        false
    }

    /// Refines a matrix, and returns its mask.
    ///
    /// # Errors
    /// Fails on weights that are not finite, and without the statistics.
    fn refine(&self, pruned: AsPruned<'_>, request: &Request<'_>) -> Result<Mask>;
}
