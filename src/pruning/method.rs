//! The trait of pruning methods: a method's declarations, and its function from a weight to a mask.

use std::fmt::Debug;

use anyhow::{Context, Result};

use super::mask::Mask;
use super::methods::wanda;
use super::options::{MethodOption, MethodOptions};
use super::rows::OwnRows;
use super::statistics::column_moments::ColumnMoments;
use super::statistics::column_squares::ColumnSquares;
use super::statistics::input_gram::InputGram;
use super::statistics::{Statistics, StatisticsKind};
use super::target::{Pattern, Target};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::StoredMatrix;

/// A score: turns a row of |W| `[in_features]`, widened to f32, into scores in place. The weights are finite; scores must be
/// finite and ≥ 0. The lowest are removed first.
pub type Score<'a> = dyn Fn(&mut [f32]) + Sync + 'a;

/// Weights that an unstructured mask removes from a matrix `[out_features, in_features]` at a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SparsityRule {
    /// Exactly `int(in_features · ratio)` from every row.
    FromRows,
    /// From the whole matrix every score up to and including the score at position `int(elements · ratio)` of the ascending order: one
    /// weight more than the ratio says, and all ties of that score.
    FromMatrix,
    /// The same rule within each block of this many columns over all rows; the last block may be narrower.
    FromBlocks {
        /// Columns of a block.
        columns: usize,
    },
    /// A number near the ratio. A run warns where it is missed.
    NearRatio,
}

/// A pruning method.
pub trait PruningMethod: Debug + Sync {
    /// The value of `--prune-method`.
    fn name(&self) -> &'static str;

    /// A line for the help text.
    fn summary(&self) -> &'static str;

    /// The number of weights that an unstructured mask removes.
    fn removes(&self, options: &MethodOptions) -> SparsityRule;

    /// The statistics it needs of a linear's input; `None` needs no calibration text and no forward pass.
    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        None
    }

    /// The options it reads.
    fn options(&self) -> &'static [MethodOption] {
        &[]
    }

    /// States that [`PruningMethod::prune`] changes the weights it keeps. These weights stay in memory until their layer is done,
    /// `--verify full` is refused, and `prune inspect --against` accepts that they differ.
    fn changes_weights(&self) -> bool {
        false
    }

    /// States that [`PruningMethod::prune`] gives rows the same bits whether it gets the whole matrix or a part of its rows
    /// ([`Request::rows`]). Then processes share the rows of a matrix.
    fn can_share_rows(&self) -> bool {
        false
    }

    /// The searches of an unstructured [`PruningMethod::prune`] among all weights of a matrix with this many columns, where processes share
    /// its rows.
    fn searches(&self, _in_features: usize, _options: &MethodOptions) -> usize {
        0
    }

    /// States that the method has no N:M form.
    fn is_unstructured_only(&self) -> bool {
        false
    }

    /// Bytes that [`PruningMethod::prune`] holds for a matrix, beyond the mask, a few numbers per column and two rows per thread.
    fn working_bytes(&self, _out_features: usize, _in_features: usize) -> ByteSize {
        ByteSize::ZERO
    }

    /// Floating-point operations of [`PruningMethod::prune`] in products and factorisations, for the estimate of time.
    fn operations(&self, _out_features: usize, _in_features: usize) -> f64 {
        0.0
    }

    /// The score of a weight by which input channels are permuted; the method's own, where it has one. By default Wanda's, or the
    /// magnitude without statistics.
    ///
    /// # Errors
    /// Fails on statistics that are not finite, naming matrix and column.
    fn importance(
        &self,
        _dense: &StoredMatrix,
        request: &Request<'_>,
    ) -> Result<Box<Score<'static>>> {
        if request.statistics.is_none() {
            return Ok(Box::new(|_| ()));
        }
        let norms = wanda::input_norms(request)?;
        Ok(Box::new(move |row| wanda::score(row, &norms)))
    }

    /// The factors of columns `[in_features]`, where the method removes the lowest |W_ij| · factor_j of every row or group, of equal scores
    /// the lower columns, and does nothing else: a device can choose the same weights.
    ///
    /// # Errors
    /// Fails on statistics that are not finite, naming matrix and column.
    fn column_factors(&self, _request: &Request<'_>) -> Result<Option<Vec<f32>>> {
        Ok(None)
    }

    /// Chooses the weights to remove from `weight` `[out_features, in_features]`, and changes the kept weights where the method does
    /// that. The caller writes the zeros. Call [`prune`], which makes the checks that all methods share.
    ///
    /// # Errors
    /// Fails on weights or statistics that are not finite, naming matrix, row and column.
    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask>;
}

/// A matrix to prune.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The module's full name, for errors.
    pub name: &'a str,
    /// Statistics of the matrix's input, of the kind the method names.
    pub statistics: Option<&'a Statistics>,
    /// The ratio and the pattern.
    pub target: Target,
    /// Options of the method.
    pub options: &'a MethodOptions,
    /// Takes warnings.
    pub warn: &'a (dyn Fn(String) + Sync),
    /// The rows of the matrix that this process solves; `None` for all.
    pub rows: Option<OwnRows<'a>>,
}

impl<'a> Request<'a> {
    /// A matrix to prune with default options, whose warnings nobody hears.
    pub fn new(name: &'a str, statistics: Option<&'a Statistics>, target: Target) -> Self {
        static DEFAULT: MethodOptions = MethodOptions::DEFAULT;
        Self { name, statistics, target, options: &DEFAULT, warn: &|_| (), rows: None }
    }

    /// The place of a weight's rows in its matrix.
    pub fn rows_of(&self, weight: &StoredMatrix) -> OwnRows<'a> {
        self.rows.unwrap_or_else(|| OwnRows::whole(weight.rows()))
    }

    /// The statistics as the type that the method's kind begins.
    ///
    /// # Errors
    /// Fails where the caller has collected no statistics, or a different kind.
    pub fn statistics_as<T: 'static>(&self) -> Result<&'a T> {
        let statistics = self.statistics.and_then(Statistics::downcast);
        statistics.with_context(|| format!("`{}` has no statistics of its input", self.name))
    }

    /// s_j in whichever statistics have it.
    fn column_squares(&self) -> Result<&'a ColumnSquares> {
        let statistics = self.statistics;
        let of_moments = || statistics.and_then(Statistics::downcast::<ColumnMoments>);
        let of_gram = || statistics.and_then(Statistics::downcast::<InputGram>);
        let moments = of_moments().or_else(|| of_gram().map(InputGram::columns));
        match moments {
            Some(moments) => Ok(moments.squares()),
            None => self.statistics_as(),
        }
    }

    /// s_j of [`ColumnSquares`], `[in_features]`, all finite.
    ///
    /// # Errors
    /// Fails on a value that is not finite, naming its column, and without these statistics.
    pub fn mean_squares(&self) -> Result<&'a [f32]> {
        let mean = self.column_squares()?.mean();
        match mean.iter().position(|value| !value.is_finite()) {
            None => Ok(mean),
            Some(column) => Err(Failure::new(format!(
                "the input of `{}` is not finite: column {column} has a mean square of {}",
                self.name, mean[column]
            ))
            .hint("the checkpoint or its arithmetic overflows: add --dtype f32, or look for weights that are not finite with `prune inspect DIR`")
            .lasting()
            .into()),
        }
    }
}

/// Prunes a matrix: the rules that hold for every method, then the method. A ratio of 0 removes nothing and asks no method.
pub fn prune(
    method: &dyn PruningMethod,
    weight: &mut StoredMatrix,
    request: &Request<'_>,
) -> Result<Mask> {
    if request.target.removes_nothing() {
        return Ok(Mask::none(weight.rows(), weight.columns()));
    }
    let pattern = request.target.pattern;
    check_pattern(method, request.name, weight.columns(), pattern)?;
    method.prune(weight, request)
}

/// Checks that a method can prune a matrix in a pattern.
///
/// # Errors
/// Fails for an N:M pattern where the method has none, and where M does not divide in_features.
pub fn check_pattern(
    method: &dyn PruningMethod,
    name: &str,
    in_features: usize,
    pattern: Pattern,
) -> Result<()> {
    let Pattern::NOfM { n, m } = pattern else {
        return Ok(());
    };
    if method.is_unstructured_only() {
        let method = method.name();
        return Err(Failure::usage(format!(
            "{method} has no {pattern} form: it prunes unstructured only"
        ))
        .hint("leave --sparsity-type out, or choose another --prune-method")
        .into());
    }
    if !in_features.is_multiple_of(m) {
        let short = name.rsplit('.').next().unwrap_or(name);
        return Err(Failure::new(format!("`{name}` has {in_features} input features, which {m} does not divide"))
            .detail(format!("a {n}:{m} pattern prunes {n} of each aligned group of {m}; a shorter last group would break it"))
            .hint(format!("use an M that divides {in_features}, or leave the matrix out with --exclude '*{short}'"))
            .into());
    }
    Ok(())
}
