//! Linear averaging: W = Σ_t w_t W_t / Σ_t w_t; without `normalize`, the sum alone.
//!
//! Source: M. Wortsman et al., "Model soups" (2022, arXiv:2203.05482); mergekit 0.1.5, `merge_methods/linear.py`. mergekit
//! rounds each product and its sum once (a fused multiply-add). Here both are rounded, as on every device, so last bits differ.

use anyhow::Result;

use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::{Formula, Mixer, WeightedSum};
use crate::failure::Failure;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// `linear`.
pub(super) struct LinearAverage;

impl MergeMethod for LinearAverage {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "linear",
            base_model: BaseModel::Optional,
            models: 1..=usize::MAX,
            per_model: &[(Parameter::Weight, WhenMissing::Required)],
            shared: &[(Parameter::Normalize, WhenMissing::Is(1.0))],
        }
    }

    fn summary(&self) -> &'static str {
        "averages the models"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let weights = task.sources.iter();
        let weights: Vec<f32> =
            weights.map(|source| source.values.number(Parameter::Weight) as f32).collect();
        let sum: f32 = weights.iter().sum();
        let divisor = if task.shared.is_on(Parameter::Normalize) { sum } else { 1.0 };
        if divisor == 0.0 {
            return Err(Failure::new(format!("the weights of tensor `{}` add up to 0", task.name))
                .detail(format!("their sum is the divisor: {weights:?}"))
                .hint("use other weights, or `normalize: false`")
                .into());
        }
        Ok(Box::new(Average { columns: task.columns, weights, divisor }))
    }
}

/// Σ_t w_t W_t / divisor.
pub(super) struct Average {
    pub(super) columns: usize,
    pub(super) weights: Vec<f32>,
    pub(super) divisor: f32,
}

impl TensorMerge for Average {
    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        let sum = WeightedSum {
            columns: self.columns,
            sources: rows.sources.to_vec(),
            weights: &self.weights,
            divisor: self.divisor,
        };
        mixer.mix(&Formula::Sum(sum), merged)
    }
}
