//! Swap of near weights: a weight of the other model replaces the base's weight where both are close together.
//!
//! ```text
//! W = s W₁ + (1 − s) W₀        s = t / |W₀ − W₁|, between 0 and 1; distances below 1e-6 count as 1e-6
//! ```
//!
//! All arithmetic is f32, in mergekit's order: t times the reciprocal of the distance.
//!
//! Source: mergekit 0.1.5, `merge_methods/nearswap.py`, after alchemonaut's QuartetAnemoi-70B.

use anyhow::Result;

use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// Smaller distances count as this.
const SMALLEST: f32 = 1e-6;

/// `nearswap`.
pub(super) struct Nearswap;

impl MergeMethod for Nearswap {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "nearswap",
            base_model: BaseModel::Required,
            models: 2..=2,
            per_model: &[],
            shared: &[(Parameter::T, WhenMissing::Required)],
        }
    }

    fn summary(&self) -> &'static str {
        "takes the other model's weights where they are close to the base's"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let [base, other] = task.base_and_other("nearswap")?;
        Ok(Box::new(Swap { reach: task.shared.number(Parameter::T) as f32, base, other }))
    }
}

/// The merge of a tensor.
struct Swap {
    reach: f32,
    base: usize,
    other: usize,
}

impl TensorMerge for Swap {
    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        _mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        let pairs = rows.sources[self.base].iter().zip(rows.sources[self.other]);
        for (merged, (base, other)) in merged.iter_mut().zip(pairs) {
            let distance = (base - other).abs().max(SMALLEST);
            let share = (distance.recip() * self.reach).clamp(0.0, 1.0);
            *merged = share * other + (1.0 - share) * base;
        }
        Ok(())
    }
}
