//! Fusion of the entries that matter: differences from the base at the entries with the largest importance.
//!
//! ```text
//! I_ij = |W₁ − W₀|_ij · KL_i,  KL_i = Σ_j p log(p / q),  p = softmax(row i of W₁) + 1e-8,  q = softmax(row i of W₀) + 1e-8
//! W = W₁ where I ≥ median + 1.5 (q₃ − q₁), else W₀              q₁, q₃: the quartiles of I
//! ```
//!
//! Quartiles are the order statistics at ⌊q (elements − 1)⌋ of the whole tensor, found in two reads. mergekit draws a million entries at random
//! from larger tensors; here all entries count. An importance close to the threshold falls on either side by its rounding, so I is
//! computed in the order of `softmax`.
//!
//! Source: mergekit 0.1.5, `merge_methods/arcee_fusion.py`.

use anyhow::Result;

use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use super::softmax::SoftmaxDivergence;
use crate::linalg::order_statistics::{Counts, Search, from_signed_key, signed_key};
use crate::merging::recipe::{BaseModel, Declaration};

/// `arcee_fusion`.
pub(super) struct ArceeFusion;

impl MergeMethod for ArceeFusion {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "arcee_fusion",
            base_model: BaseModel::Required,
            models: 2..=2,
            per_model: &[],
            shared: &[],
        }
    }

    fn summary(&self) -> &'static str {
        "takes the other model's weights that changed most, by row and entry"
    }

    fn searches(&self, _experts: usize) -> usize {
        3
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let [base, other] = task.base_and_other("arcee_fusion")?;
        let last = task.elements() - 1;
        Ok(Box::new(Fusion {
            columns: task.columns,
            base,
            other,
            search: Search::new(vec![last / 4, last / 2, last * 3 / 4]),
            counts: None,
            threshold: f32::INFINITY,
            divergence: SoftmaxDivergence::default(),
            importances: Vec::new(),
        }))
    }
}

/// The merge of a tensor.
struct Fusion {
    columns: usize,
    base: usize,
    other: usize,
    search: Search,
    counts: Option<Counts>,
    threshold: f32,
    divergence: SoftmaxDivergence,
    /// I of the current rows.
    importances: Vec<f32>,
}

impl Fusion {
    /// Computes I of some rows.
    fn weigh(&mut self, rows: &RowBlock<'_>) {
        let [base, other] = [self.base, self.other].map(|of| rows.sources[of]);
        self.importances.clear();
        for (base, other) in base.chunks(self.columns).zip(other.chunks(self.columns)) {
            let divergence = self.divergence.of(other, base);
            let pairs = other.iter().zip(base);
            self.importances.extend(pairs.map(|(other, base)| (other - base).abs() * divergence));
        }
    }
}

impl TensorMerge for Fusion {
    fn reads(&self) -> usize {
        2
    }

    fn measure(&mut self, _read: usize, rows: &RowBlock<'_>) {
        if rows.first_row == 0 {
            self.counts = Some(Counts::of(&self.search));
        }
        self.weigh(rows);
        if let Some(counts) = &mut self.counts {
            counts.add_keys(&self.importances, signed_key);
        }
    }

    fn measured(&mut self, _read: usize) {
        if let Some(counts) = self.counts.take() {
            self.search.add(&counts);
            self.search.advance();
        }
        if let Some(&[first, median, third]) = self.search.found() {
            let [first, median, third] =
                [first, median, third].map(|found| from_signed_key(found.key));
            self.threshold = median + 1.5 * (third - first);
        }
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        _mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        self.weigh(rows);
        let [base, other] = [self.base, self.other].map(|of| rows.sources[of]);
        for (at, merged) in merged.iter_mut().enumerate() {
            let is_taken = self.importances[at] >= self.threshold;
            // As in mergekit; the sum may differ from the other model's entry in the last bit.
            *merged = base[at] + if is_taken { other[at] - base[at] } else { 0.0 };
        }
        Ok(())
    }
}
