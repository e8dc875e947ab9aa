//! A technique: everything that decides how the matrices of a run are pruned, except their ratios.

use anyhow::Result;

use super::METHODS;
use super::mask::Mask;
use super::method::{self, PruningMethod, Request, SparsityRule};
use super::options::{MethodOption, MethodOptions};
use super::permutation;
use super::refinement::{AsPruned, Refinement};
use super::statistics::StatisticsKind;
use super::target::Pattern;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;
use crate::linalg::select::Quota;

/// The refusal of a refinement that needs weights as the source has them.
fn undefined(method: &dyn PruningMethod, refinement: &dyn Refinement) -> Failure {
    let unchanged = METHODS.iter().filter(|method| !method.changes_weights());
    let names: Vec<_> = unchanged.map(|method| method.name()).collect();
    let (method, refinement) = (method.name(), refinement.name());
    Failure::usage(format!(
        "--refine {refinement} is not defined after --prune-method {method}"
    ))
    .detail(format!(
        "{refinement} takes removed weights back with their values in the source, and {method} changes the weights that it keeps"
    ))
    .hint(format!(
        "leave --refine {refinement} out, or use --prune-method {}",
        names.join(" or ")
    ))
}

/// A method, its options, and what refines its result.
#[derive(Debug, Clone)]
pub struct Technique {
    /// The method.
    pub method: &'static dyn PruningMethod,
    /// Its options.
    pub options: MethodOptions,
    /// The refinement.
    pub refinement: Option<&'static dyn Refinement>,
    /// The input channels of down_proj are permuted for groups of so many columns before pruning (`permutation.rs`).
    pub permutes: Option<usize>,
}

impl Technique {
    /// A method with default options, and no refinement.
    pub fn of(method: &'static dyn PruningMethod) -> Self {
        Self { method, options: MethodOptions::default(), refinement: None, permutes: None }
    }

    /// Checks that method and refinement go together, and the options.
    ///
    /// # Errors
    /// Fails for a refinement that is not defined after this method, for an option that neither reads, and for values that make no sense.
    pub fn check(&self) -> Result<(), Failure> {
        if let Some(refinement) = self.refinement
            && refinement.restores_weights()
            && self.method.changes_weights()
        {
            return Err(undefined(self.method, refinement));
        }
        self.options.check(&self.name(), &self.read_options())
    }

    /// The options that method and refinement read.
    pub fn read_options(&self) -> Vec<MethodOption> {
        let of_refinement = self.refinement.map_or(&[][..], Refinement::options);
        [self.method.options(), of_refinement].concat()
    }

    /// The name for reports: the method's name, or method and refinement joined by a plus sign.
    pub fn name(&self) -> String {
        match self.refinement {
            None => self.method.name().to_string(),
            Some(refinement) => format!("{}+{}", self.method.name(), refinement.name()),
        }
    }

    /// The statistics that method and refinement need; `None` needs no calibration.
    pub fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        let of_method = self.method.statistics();
        match self.refinement {
            None => of_method,
            Some(refinement) => Some(refinement.statistics(of_method)),
        }
    }

    /// The statistics that serve all of these techniques: the needed statistics of the highest rank.
    pub fn statistics_of_all<'t>(
        techniques: impl Iterator<Item = &'t Self>,
    ) -> Option<&'static dyn StatisticsKind> {
        let kinds = techniques.filter_map(Self::statistics);
        kinds.max_by_key(|kind| kind.rank())
    }

    /// The number of weights that an unstructured mask removes.
    pub fn removes(&self) -> SparsityRule {
        self.method.removes(&self.options)
    }

    /// States that a kept weight may differ from the source's weight at its place: it changes, or the columns are permuted.
    pub fn changes_weights(&self) -> bool {
        self.method.changes_weights()
            || self.refinement.is_some_and(Refinement::changes_weights)
            || self.permutes.is_some()
    }

    /// Bytes of the search for an order of this many input channels, and of putting their statistics into this order.
    pub fn permuting_bytes(&self, channels: usize) -> ByteSize {
        let Some(m) = self.permutes else {
            return ByteSize::ZERO;
        };
        let statistics = self.statistics().map(|kind| kind.bytes(channels));
        permutation::working_bytes(channels, m).max(statistics.unwrap_or_default())
    }

    /// Bytes for a matrix, beyond the mask, a few numbers per column and two rows per thread.
    pub fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize {
        let of_method = self.method.working_bytes(out_features, in_features);
        let Some(refinement) = self.refinement else {
            return of_method;
        };
        // The dense weights, in the widest dtype.
        let dense = ByteSize::of(out_features.saturating_mul(in_features), size_of::<f32>());
        of_method.max(refinement.working_bytes(out_features, in_features)) + dense
    }

    /// Floating-point operations for a matrix in products and factorisations.
    pub fn operations(&self, out_features: usize, in_features: usize) -> f64 {
        let of_method = self.method.operations(out_features, in_features);
        let refinement = self.refinement;
        of_method
            + refinement.map_or(0.0, |refinement| refinement.operations(out_features, in_features))
    }

    /// Returns whether processes share the rows of a matrix: where rows do not depend on each other, and take more than scores.
    pub fn shares_rows(&self) -> bool {
        self.method.can_share_rows()
            && self.refinement.is_none_or(Refinement::can_share_rows)
            && self.operations(1, 1) > 0.0
    }

    /// The searches among all weights of a matrix, whose rows processes share.
    pub fn searches(&self, in_features: usize) -> usize {
        self.method.searches(in_features, &self.options)
    }

    /// The factors of columns and the number of the lowest |W_ij| · factor_j that [`Technique::prune`] would remove from a matrix with
    /// `columns` columns, so that a device can choose; `None` where it does more.
    ///
    /// # Errors
    /// Fails on statistics that are not finite, naming matrix and column, and for a pattern that the matrix cannot have.
    pub fn lowest(
        &self,
        columns: usize,
        request: &Request<'_>,
    ) -> Result<Option<(Vec<f32>, Quota)>> {
        if self.refinement.is_some() || request.target.removes_nothing() {
            return Ok(None);
        }
        let request = Request { options: &self.options, ..*request };
        method::check_pattern(self.method, request.name, columns, request.target.pattern)?;
        let quota = match request.target.pattern {
            Pattern::Unstructured => Quota::OfRow(request.target.count_of(columns)),
            Pattern::NOfM { n, m } => Quota::OfGroup { n, m },
        };
        Ok(self.method.column_factors(&request)?.map(|factors| (factors, quota)))
    }

    /// Prunes and refines a matrix. The caller writes the zeros.
    ///
    /// # Errors
    /// Fails on weights or statistics that are not finite, naming matrix, row and column.
    pub fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        let request = Request { options: &self.options, ..*request };
        let refinement = self.refinement.filter(|_| !request.target.removes_nothing());
        let Some(refinement) = refinement else {
            return method::prune(self.method, weight, &request);
        };
        let dense = weight.clone();
        let mask = method::prune(self.method, weight, &request)?;
        let pruned = AsPruned { dense: &dense, weight, mask };
        refinement.refine(pruned, &request)
    }
}
