//! Select, calculate, erase: differences from the base at the entries where the experts vary most, weighted by their energy.
//!
//! ```text
//! D_t = W_t − W₀, and 0 outside the k entries with the largest variance over t        k = ⌊select_topk · entries with a variance⌋
//! e_t = mean of D_t²,  e_t / Σ e                    1 / n each where Σ e < 1e-6
//! s   = sign(Σ_t D_t), zero counts as plus
//! W   = W₀ + Σ_t e_t D_t [sign D_t = s] / Σ_t e_t [sign D_t = s]                      the divisor is at least 1e-6
//! ```
//!
//! The variance of the n values of an entry (divided by n) is computed in f64 by Welford's recurrence and rounded to f32, as PyTorch computes it. k is
//! an f32 product. Of equal variances at the edge, the first in the tensor are kept; PyTorch keeps any of them. Two reads find the edge,
//! a third adds up the energies. Without a selection, one read is enough.
//!
//! Source: F. Wan et al., "FuseChat" (2024, arXiv:2408.07990), section 3.3; mergekit 0.1.5, `merge_methods/sce.py`.

use anyhow::Result;

use super::differences::subtract;
use super::group::Group;
use super::method::{BoxedMerge, MergeMethod, RowBlock, TensorMerge, TensorTask};
use super::mixer::Mixer;
use super::sums::dot;
use super::trim::{Edge, Trim, Trimmer};
use crate::failure::Failure;
use crate::linalg::order_statistics::{Counts, Search};
use crate::merging::recipe::{BaseModel, Declaration, Parameter, WhenMissing};

/// Sums of energies below this give all experts one weight, and smaller divisors count as this.
const SMALLEST: f64 = 1e-6;

/// `sce`.
pub(super) struct Sce;

impl MergeMethod for Sce {
    fn declaration(&self) -> Declaration {
        Declaration {
            name: "sce",
            base_model: BaseModel::Required,
            models: 2..=usize::MAX,
            per_model: &[],
            shared: &[
                (Parameter::Int8Mask, WhenMissing::Is(0.0)),
                (Parameter::SelectTopk, WhenMissing::Is(1.0)),
            ],
        }
    }

    fn summary(&self) -> &'static str {
        "adds the differences that vary most, weighted by their squares"
    }

    fn searches(&self, _experts: usize) -> usize {
        1
    }

    fn begin<'a>(&self, task: &TensorTask<'a>, _group: &'a Group) -> Result<BoxedMerge<'a>> {
        let Some(base) = task.base else {
            return Err(Failure::new(format!(
                "sce of tensor `{}` needs the base model",
                task.name
            ))
            .detail(format!("{} models are given", task.sources.len()))
            .into());
        };
        let experts: Vec<usize> = task.experts().map(|(at, _)| at).collect();
        let share = task.shared.get(Parameter::SelectTopk).unwrap_or(1.0);
        Ok(Box::new(VarianceSelection {
            columns: task.columns,
            base,
            energies: vec![0.0; experts.len()],
            weights: Vec::new(),
            differences: vec![Vec::new(); experts.len()],
            experts,
            elements: task.elements(),
            share,
            search: Search::new(Vec::new()),
            counts: None,
            varying: 0,
            kept: if share >= 1.0 { Trim::All } else { Trim::Nothing },
            trimmer: None,
            variances: Vec::new(),
        }))
    }
}

/// The merge of a tensor.
struct VarianceSelection {
    columns: usize,
    base: usize,
    experts: Vec<usize>,
    /// D_t of the current rows.
    differences: Vec<Vec<f32>>,
    elements: u64,
    /// `select_topk`.
    share: f64,
    search: Search,
    counts: Option<Counts>,
    /// Entries with a variance.
    varying: u64,
    /// The entries that are kept, by variance.
    kept: Trim,
    trimmer: Option<Trimmer>,
    /// Variances of the current rows; 0 where nothing is kept.
    variances: Vec<f32>,
    /// Σ D_t².
    energies: Vec<f64>,
    /// e_t.
    weights: Vec<f32>,
}

impl VarianceSelection {
    /// True if some entries are kept and others are not.
    fn selects(&self) -> bool {
        self.share > 0.0 && self.share < 1.0
    }

    fn subtract(&mut self, rows: &RowBlock<'_>) {
        for (&expert, difference) in self.experts.iter().zip(&mut self.differences) {
            subtract(rows.sources[expert], rows.sources[self.base], difference);
        }
    }

    /// Computes the variance of every entry of the current rows.
    fn vary(&mut self) {
        let Self { differences, variances, .. } = self;
        variances.clear();
        variances.extend((0..differences[0].len()).map(|at| {
            let (mut mean, mut squares) = (0.0f64, 0.0f64);
            for (of, difference) in differences.iter().enumerate() {
                let value = f64::from(difference[at]);
                let step = value - mean;
                mean += step / (of + 1) as f64;
                squares += step * (value - mean);
            }
            (squares / differences.len() as f64) as f32
        }));
    }

    /// Computes D_t of the entries that are kept.
    fn select(&mut self, rows: &RowBlock<'_>) {
        if rows.first_row == 0 {
            self.trimmer = Some(Trimmer::new(self.kept.clone()));
        }
        self.subtract(rows);
        if self.kept == Trim::All {
            return;
        }
        self.vary();
        let Self { differences, variances, trimmer, columns, .. } = self;
        if let Some(trimmer) = trimmer {
            trimmer.trim(rows.first_row, *columns, variances);
        }
        for difference in differences {
            for (value, variance) in difference.iter_mut().zip(&*variances) {
                *value = if *variance > 0.0 { *value } else { 0.0 };
            }
        }
    }

    /// Ends a read of the search.
    fn found(&mut self) {
        let Some(counts) = self.counts.take() else {
            return;
        };
        self.search.add(&counts);
        // An f32 product, as in the reference.
        let kept = (self.varying as f32 * self.share as f32) as u64;
        if kept == 0 {
            return;
        }
        self.search.aim(self.elements - kept);
        self.search.advance();
        if let Some(&[edge]) = self.search.found() {
            let equal = edge.below + edge.equal - (self.elements - kept);
            self.kept = Trim::Between { lower: Edge::first(edge, equal), upper: None };
        }
    }
}

impl TensorMerge for VarianceSelection {
    fn reads(&self) -> usize {
        if self.selects() { 3 } else { 1 }
    }

    fn measure(&mut self, read: usize, rows: &RowBlock<'_>) {
        if read + 1 < self.reads() {
            if rows.first_row == 0 {
                self.counts = Some(Counts::of(&self.search));
                self.varying = 0;
            }
            self.subtract(rows);
            self.vary();
            self.varying +=
                self.variances.iter().filter(|variance| **variance > 0.0).count() as u64;
            if let Some(counts) = &mut self.counts {
                counts.add(&self.variances);
            }
            return;
        }
        if rows.first_row == 0 {
            self.energies.fill(0.0);
        }
        self.select(rows);
        for (difference, energy) in self.differences.iter().zip(&mut self.energies) {
            *energy += difference.chunks(self.columns).map(|row| dot(row, row)).sum::<f64>();
        }
    }

    fn measured(&mut self, read: usize) {
        if read + 1 < self.reads() {
            return self.found();
        }
        let means = self.energies.iter().map(|energy| energy / self.elements as f64);
        let means: Vec<f64> = means.collect();
        let sum: f64 = means.iter().sum();
        let equal = 1.0 / means.len() as f64;
        let weight = |mean: &f64| if sum < SMALLEST { equal } else { mean / sum };
        self.weights = means.iter().map(|mean| weight(mean) as f32).collect();
    }

    fn merge(
        &mut self,
        rows: &RowBlock<'_>,
        _mixer: &mut dyn Mixer,
        merged: &mut [f32],
    ) -> Result<()> {
        self.select(rows);
        for (at, (merged, base)) in merged.iter_mut().zip(rows.sources[self.base]).enumerate() {
            let of = self.differences.iter().map(|difference| difference[at]);
            let sign = if of.clone().sum::<f32>() >= 0.0 { 1.0 } else { -1.0 };
            let (mut mixed, mut weights) = (0.0f32, 0.0f32);
            for (value, weight) in of.zip(&self.weights) {
                if value * sign > 0.0 {
                    mixed += value * weight;
                    weights += weight;
                }
            }
            *merged = base + mixed / weights.max(SMALLEST as f32);
        }
        Ok(())
    }
}
