//! The trait of merge methods, and what they are told of a tensor.

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

use super::group::Group;
use super::mixer::Mixer;
use crate::failure::Failure;
use crate::merging::recipe::{Declaration, ParameterValues};

/// The merge of a tensor by any method.
pub type BoxedMerge<'a> = Box<dyn TensorMerge + 'a>;

/// A merge method.
pub trait MergeMethod: Sync {
    /// Its name, parameters and inputs.
    fn declaration(&self) -> Declaration;

    /// A line for the help text.
    fn summary(&self) -> &'static str;

    /// The tensors that are trimmed together.
    fn scope(&self, _settings: &MethodSettings) -> Scope {
        Scope::Tensor
    }

    /// States that the method uses the statistics of a linear's input.
    fn uses_saliency(&self) -> bool {
        false
    }

    /// Order statistics that the merge of a tensor searches at a time. Each needs tables of counts.
    fn searches(&self, _experts: usize) -> usize {
        0
    }

    /// Begins the merge of a tensor, as part of `group`.
    ///
    /// # Errors
    /// Fails for values that the method has no result for, naming tensor and value.
    fn begin<'a>(&self, task: &TensorTask<'a>, group: &'a Group) -> Result<BoxedMerge<'a>>;
}

/// The merge of a tensor. Rows come in order, in pieces of any size; every read begins with row 0.
pub trait TensorMerge: Send {
    /// Reads of all rows before the merge. In a group, every tensor has its read before the next read begins.
    fn reads(&self) -> usize {
        0
    }

    /// Measures rows in read number `read`, from 0.
    fn measure(&mut self, _read: usize, _rows: &RowBlock<'_>) {}

    /// Ends a read: adds the measurements of this tensor to its group.
    fn measured(&mut self, _read: usize) {}

    /// Computes the merged rows, `[rows, columns]`; `mixer` computes the elementwise end of it where it is a [`Formula`].
    ///
    /// [`Formula`]: super::Formula
    ///
    /// # Errors
    /// Fails when the mixer fails.
    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()>;

    /// The entries of each expert that were kept in the merge, for methods that trim.
    fn kept(&self) -> Vec<u64> {
        Vec::new()
    }
}

/// Some rows of a tensor, of every source.
#[derive(Debug, Clone, Copy)]
pub struct RowBlock<'a> {
    /// The index of the first row in the tensor.
    pub first_row: usize,
    /// Per source `[rows, columns]`.
    pub sources: &'a [&'a [f32]],
}

/// A tensor to merge. Vectors have one row.
#[derive(Debug, Clone, Copy)]
pub struct TensorTask<'a> {
    /// The name in the output.
    pub name: &'a str,
    /// Rows of the output.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// The models, in the recipe's order.
    pub sources: &'a [SourceTask<'a>],
    /// The index of the base model in `sources`.
    pub base: Option<usize>,
    /// Values for all models.
    pub shared: &'a ParameterValues,
    /// Settings of the whole merge.
    pub settings: &'a MethodSettings,
}

impl<'a> TensorTask<'a> {
    /// The sources without the base, with their indices.
    pub fn experts(&self) -> impl Iterator<Item = (usize, &'a SourceTask<'a>)> + use<'a> {
        let base = self.base;
        self.sources.iter().enumerate().filter(move |(at, _)| Some(*at) != base)
    }

    /// The indices of the base and of the first model beside it, for a method of two models.
    ///
    /// # Errors
    /// Fails where either is missing.
    pub fn base_and_other(&self, method: &str) -> Result<[usize; 2], Failure> {
        match (self.base, self.experts().next()) {
            (Some(base), Some((other, _))) => Ok([base, other]),
            _ => Err(Failure::new(format!(
                "{method} of tensor `{}` needs the base model and another one",
                self.name
            ))
            .detail(format!("{} models are given", self.sources.len()))),
        }
    }

    /// Elements of the tensor.
    pub fn elements(&self) -> u64 {
        self.rows as u64 * self.columns as u64
    }
}

/// A source of a tensor.
#[derive(Debug, Clone, Copy)]
pub struct SourceTask<'a> {
    /// The number of the model in the recipe; it selects the random numbers.
    pub model: usize,
    /// Values for this model.
    pub values: &'a ParameterValues,
    /// Means of x² per input column of this linear, `[columns]`; `None` without statistics.
    pub squares: Option<&'a [f32]>,
}

/// Settings of a merge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MethodSettings {
    /// The tool or paper whose definition is followed where they differ.
    pub semantics: Semantics,
    /// The tensors that are trimmed together; `None` for what the semantics say.
    pub scope: Option<Scope>,
    /// True if statistics of the experts weigh election and average. Statistics of the base serve trimming alone.
    pub squares_vote: bool,
    /// The seed of random masks.
    pub seed: u64,
}

/// Definitions of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Semantics {
    /// mergekit 0.1.5
    Mergekit,
    /// The method's paper: ties trims over the whole model, dare divides by the density
    Paper,
    /// Adapters of one base are combined factor by factor, as add_weighted_adapter does
    // Methods compute models by mergekit's definitions.
    Peft,
}

/// Tensors that are trimmed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Each tensor alone
    Tensor,
    /// The tensors of one layer
    Layer,
    /// All tensors
    Model,
}
