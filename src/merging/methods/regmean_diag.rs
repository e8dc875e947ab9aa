//! Diagonal RegMean: the average that is closest to every expert's outputs, where inputs are uncorrelated.
//!
//! ```text
//! W_ij = Σ_t w_t a_tj² W_t,ij / Σ_t w_t a_tj²        a_tj²: mean square of input column j under expert t
//! ```
//!
//! It minimises Σ_t w_t E‖x_t (W − W_t)ᵀ‖² to diagonal order. A column that no expert uses, and tensors without statistics (embedding,
//! head, norms), get the weighted mean. The base model is not averaged.
//!
//! Source: X. Jin, X. Ren, D. Preotiuc-Pietro, P. Cheng, "Dataless knowledge fusion by merging weights of language models" (2023,
//! arXiv:2212.09849), equation 2 with the diagonal of XᵀX.

use anyhow::Result;
use pulp::{Arch, Simd, WithSimd};

use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use crate::failure::Failure;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// `regmean_diag`.
pub(super) struct RegmeanDiag;

impl MergeMethod for RegmeanDiag {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "regmean_diag",
            base_model: BaseModel::Required,
            models: 2..=usize::MAX,
            per_model: &[(Parameter::Weight, WhenMissing::Is(1.0))],
            shared: &[],
        }
    }

    fn summary(&self) -> &'static str {
        "averages by the size of each model's activations (needs --saliency experts)"
    }

    fn uses_saliency(&self) -> bool {
        true
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let experts: Vec<_> = task.experts().collect();
        let weight = |at: usize| experts[at].1.values.number(Parameter::Weight);
        let total: f64 = (0..experts.len()).map(weight).sum();
        if total == 0.0 {
            return Err(Failure::new(format!("the weights of tensor `{}` add up to 0", task.name))
                .hint("use other weights")
                .into());
        }
        let mut shares: Vec<Vec<f32>> = experts
            .iter()
            .enumerate()
            .map(|(at, _)| vec![(weight(at) / total) as f32; task.columns])
            .collect();
        let squares: Option<Vec<&[f32]>> = experts.iter().map(|(_, of)| of.squares).collect();
        for column in 0..squares.as_ref().map_or(0, |_| task.columns) {
            let part = |at: usize| {
                let squares = squares.as_ref().map_or(0.0, |of| f64::from(of[at][column]));
                weight(at) * squares
            };
            let sum: f64 = (0..experts.len()).map(part).sum();
            if sum != 0.0 {
                for (at, shares) in shares.iter_mut().enumerate() {
                    shares[column] = (part(at) / sum) as f32;
                }
            }
        }
        Ok(Box::new(Shares {
            columns: task.columns,
            of: experts.into_iter().map(|(at, _)| at).zip(shares).collect(),
        }))
    }
}

/// The merge of a tensor.
struct Shares {
    columns: usize,
    /// Per expert its source and its share of each column.
    of: Vec<(usize, Vec<f32>)>,
}

impl TensorMerge for Shares {
    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        _mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        merged.fill(0.0);
        for (source, shares) in &self.of {
            let source = rows.sources[*source].chunks(self.columns);
            for (merged, values) in merged.chunks_mut(self.columns).zip(source) {
                Arch::new().dispatch(AddShares { values, shares, merged });
            }
        }
        Ok(())
    }
}

struct AddShares<'a> {
    values: &'a [f32],
    shares: &'a [f32],
    merged: &'a mut [f32],
}

impl WithSimd for AddShares<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let pairs = self.values.iter().zip(self.shares);
        for (merged, (value, share)) in self.merged.iter_mut().zip(pairs) {
            *merged += value * share;
        }
    }
}
