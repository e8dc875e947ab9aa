//! Model stock: the point between the base and the average of the experts that the angle between them suggests.
//!
//! ```text
//! W = τ mean(W_t) + (1 − τ) W₀        τ = n cos θ / (1 + (n − 1) cos θ)
//! cos θ: the mean over all pairs of experts of D_s·D_t / (|D_s| |D_t|), D_t = W_t − W₀, n experts
//! ```
//!
//! The angle belongs to the whole tensor, or to a row with `filter_wise`. Products of norms below 1e-6 count as 1e-6. If the denominator
//! is below 1e-6, the base stays.
//!
//! Source: D.-H. Jang, S. Yun, D. Han, "Model stock" (2024, arXiv:2403.19522), equation 2; mergekit 0.1.5, `merge_methods/model_stock.py`.

use anyhow::Result;

use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use super::products::ScalarProducts;
use crate::failure::Failure;
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// Smaller denominators count as this, or leave the base.
const SMALLEST: f64 = 1e-6;

/// `model_stock`.
pub(super) struct ModelStock;

impl MergeMethod for ModelStock {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "model_stock",
            base_model: BaseModel::Required,
            models: 3..=usize::MAX,
            per_model: &[],
            shared: &[(Parameter::FilterWise, WhenMissing::Is(0.0))],
        }
    }

    fn summary(&self) -> &'static str {
        "moves from the base towards the average, by the angle between the experts"
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let experts: Vec<usize> = task.experts().map(|(at, _)| at).collect();
        let Some(base) = task.base.filter(|_| experts.len() > 1) else {
            return Err(Failure::new(format!(
                "model_stock of tensor `{}` needs the base model and two others",
                task.name
            ))
            .detail(format!("{} models are given", task.sources.len()))
            .into());
        };
        Ok(Box::new(Stock {
            columns: task.columns,
            base,
            products: ScalarProducts::new(task.columns, Some(base), experts.clone()),
            experts,
            is_by_row: task.shared.is_on(Parameter::FilterWise),
        }))
    }
}

/// The merge of a tensor.
struct Stock {
    columns: usize,
    base: usize,
    experts: Vec<usize>,
    is_by_row: bool,
    /// D_s·D_t of the tensor or of the current row.
    products: ScalarProducts,
}

impl Stock {
    /// τ, from the products.
    fn ratio(&self) -> f32 {
        let count = self.experts.len();
        let product = |first: usize, second: usize| self.products.of(first, second);
        let (mut sum, mut pairs) = (0.0, 0.0);
        for first in 0..count {
            for second in first + 1..count {
                let norms = (product(first, first) * product(second, second)).sqrt();
                sum += (product(first, second) / norms.max(SMALLEST)).clamp(-1.0, 1.0);
                pairs += 1.0;
            }
        }
        let (cosine, count) = (sum / pairs, count as f64);
        let denominator = 1.0 + (count - 1.0) * cosine;
        if denominator.abs() < SMALLEST {
            return 0.0;
        }
        (count * cosine / denominator) as f32
    }
}

impl TensorMerge for Stock {
    fn reads(&self) -> usize {
        usize::from(!self.is_by_row)
    }

    fn measure(&mut self, _read: usize, rows: &RowBlock<'_>) {
        self.products.measure(rows);
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        _mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        let mut ratio = 0.0;
        if self.is_by_row {
            self.products.take(rows);
        } else {
            ratio = self.ratio();
        }
        let count = self.experts.len() as f32;
        for (row, merged) in merged.chunks_mut(self.columns).enumerate() {
            let start = row * self.columns;
            if self.is_by_row {
                self.products.clear();
                self.products.add(rows, row);
                ratio = self.ratio();
            }
            let range = start..start + merged.len();
            merged.fill(0.0);
            for &expert in &self.experts {
                let values = &rows.sources[expert][range.clone()];
                for (merged, value) in merged.iter_mut().zip(values) {
                    *merged += value;
                }
            }
            for (merged, base) in merged.iter_mut().zip(&rows.sources[self.base][range]) {
                *merged = ratio * (*merged / count) + (1.0 - ratio) * base;
            }
        }
        Ok(())
    }
}
