//! Wanda's variant: rows give up an equal *share of their score* instead of an equal number of weights.
//!
//! Scores are Wanda's. For one α: row i, scores ascending c_1 ≤ c_2 ≤ …, C_k = c_1 + … + c_k, S_i = Σ_j score_ij; with
//! t = #{k : C_k ≤ α·S_i}, the row loses every score ≤ c_t. α is found by bisection of [0, 0.8] from 0.4 until the matrix's
//! sparsity is within 0.001 of the ratio or the bracket is narrower than 0.001. Ratios that need a larger α are missed: a run
//! warns of that. Reference: `return_given_alpha` and `prune_wanda` in locuslab/wanda
//! (the paper, arXiv:2306.11695, mentions the variant in its appendix). Cumulative sums run in f64 and are rounded to f32
//! as PyTorch's do on the CPU. Where no C_k qualifies the reference indexes with −1; here such a row loses nothing.
//!
//! The reference evaluates the whole matrix again for every α. The α that the bisection can reach are known beforehand (a binary
//! tree of depth 11), so each row is sorted once, the weights that every reachable α would prune are counted, and the tree is
//! walked afterwards.

use anyhow::Result;
use rayon::prelude::*;

use crate::linalg::StoredMatrix;
use crate::pruning::mask::Mask;
use crate::pruning::method::{PruningMethod, Request, SparsityRule};
use crate::pruning::methods::wanda;
use crate::pruning::options::MethodOptions;
use crate::pruning::select::Scorer;
use crate::pruning::statistics::StatisticsKind;
use crate::pruning::statistics::column_squares::ColumnSquaresKind;

/// The reference's start, bracket and tolerances.
const FIRST_ALPHA: f64 = 0.4;
const BRACKET: (f64, f64) = (0.0, 0.8);
const TOLERANCE: f64 = 0.001;

/// Wanda's scores, of which every row gives up the same share.
#[derive(Debug, Clone, Copy)]
pub struct WandaVariant;

impl PruningMethod for WandaVariant {
    fn name(&self) -> &'static str {
        "wanda-variant"
    }

    fn summary(&self) -> &'static str {
        "wanda's scores, of which every row gives up the same share"
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::NearRatio
    }

    fn is_unstructured_only(&self) -> bool {
        true
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&ColumnSquaresKind)
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        let norms = wanda::input_norms(request)?;
        let score = |row: &mut [f32]| wanda::score(row, &norms);
        let scorer = Scorer::new(weight, request, &score);
        let mut alphas = Vec::new();
        reachable(FIRST_ALPHA, BRACKET, &mut alphas);
        alphas.sort_by(f64::total_cmp);
        alphas.dedup();
        let pruned = count_pruned(&scorer, weight.rows(), &alphas)?;
        let sparsity_at = |alpha: f64| {
            let index = alphas.partition_point(|&candidate| candidate < alpha);
            (pruned[index] as f64 / weight.elements() as f64) as f32
        };
        let alpha = bisect(request.target.ratio, sparsity_at);
        scorer.mask(|scratch, bits| {
            let scores = scratch.scores.as_slice();
            if let Some(threshold) = SortedRow::new(scores).threshold(alpha) {
                bits.set_where(|column| scores[column] <= threshold);
            }
        })
    }
}

/// The reference's bisection, given the sparsity any reachable α leads to.
fn bisect(ratio: f64, sparsity_at: impl Fn(f64) -> f32) -> f64 {
    let (mut alpha, mut bracket) = (FIRST_ALPHA, BRACKET);
    loop {
        // The reference compares an f32 tensor with Python floats, which are rounded to f32 for it.
        let sparsity = sparsity_at(alpha);
        let is_close = (sparsity - ratio as f32).abs() <= TOLERANCE as f32;
        if is_close || bracket.1 - bracket.0 < TOLERANCE {
            return alpha;
        }
        (alpha, bracket) = step(alpha, bracket, sparsity > ratio as f32);
    }
}

fn step(alpha: f64, bracket: (f64, f64), is_too_sparse: bool) -> (f64, (f64, f64)) {
    if is_too_sparse {
        ((alpha + bracket.0) / 2.0, (bracket.0, alpha))
    } else {
        ((alpha + bracket.1) / 2.0, (alpha, bracket.1))
    }
}

/// Every α the bisection may visit, by the same arithmetic.
fn reachable(alpha: f64, bracket: (f64, f64), alphas: &mut Vec<f64>) {
    alphas.push(alpha);
    if bracket.1 - bracket.0 >= TOLERANCE {
        for is_too_sparse in [true, false] {
            let (alpha, bracket) = step(alpha, bracket, is_too_sparse);
            reachable(alpha, bracket, alphas);
        }
    }
}

/// The number of weights of the matrix that each α prunes; `alphas` ascending.
fn count_pruned(scorer: &Scorer<'_>, rows: usize, alphas: &[f64]) -> Result<Vec<u64>> {
    const ROWS_PER_TASK: usize = 64;
    (0..rows)
        .into_par_iter()
        .step_by(ROWS_PER_TASK)
        .map(|first| {
            let (mut counts, mut scores) = (vec![0u64; alphas.len()], Vec::new());
            for row in first..rows.min(first + ROWS_PER_TASK) {
                scorer.score(row, &mut scores)?;
                let sorted = SortedRow::new(&scores);
                for (count, &alpha) in counts.iter_mut().zip(alphas) {
                    *count += sorted.pruned(alpha) as u64;
                }
            }
            Ok(counts)
        })
        .try_reduce(
            || vec![0; alphas.len()],
            |mut one, other| {
                one.iter_mut().zip(&other).for_each(|(count, more)| *count += more);
                Ok(one)
            },
        )
}

struct SortedRow {
    ascending: Vec<f32>,
    cumulative: Vec<f32>,
    sum: f32,
}

impl SortedRow {
    fn new(scores: &[f32]) -> Self {
        let mut ascending = scores.to_vec();
        ascending.sort_unstable_by(f32::total_cmp);
        let mut running = 0.0f64;
        let cumulative = ascending
            .iter()
            .map(|&score| {
                running += f64::from(score);
                running as f32
            })
            .collect();
        Self {
            ascending,
            cumulative,
            sum: scores.iter().map(|&score| f64::from(score)).sum::<f64>() as f32,
        }
    }

    /// c_t, or `None` where even the lowest score is more than the share.
    fn threshold(&self, alpha: f64) -> Option<f32> {
        let share = self.sum * alpha as f32;
        let count = self.cumulative.partition_point(|&cumulative| cumulative <= share);
        count.checked_sub(1).map(|last| self.ascending[last])
    }

    fn pruned(&self, alpha: f64) -> usize {
        self.threshold(alpha)
            .map_or(0, |threshold| self.ascending.partition_point(|&score| score <= threshold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_loses_the_scores_that_make_up_its_share() {
        // Cumulative 1, 3, 6, 10 of 10: a share of 0.35 holds the first two.
        let row = SortedRow::new(&[4.0, 1.0, 3.0, 2.0]);
        assert_eq!((row.threshold(0.35), row.pruned(0.35)), (Some(2.0), 2));
        assert_eq!((row.threshold(0.05), row.pruned(0.05)), (None, 0));
        let ties = SortedRow::new(&[1.0, 1.0, 1.0, 1.0]);
        assert_eq!(ties.pruned(0.3), 4, "everything up to the threshold's value is removed");
    }

    #[test]
    fn every_alpha_the_bisection_visits_was_counted() {
        let mut alphas = Vec::new();
        reachable(FIRST_ALPHA, BRACKET, &mut alphas);
        for target in [0.01, 0.3, 0.5, 0.777, 0.99] {
            let alpha = bisect(target, |alpha| {
                assert!(alphas.contains(&alpha), "{alpha}");
                (alpha / 0.8) as f32
            });
            assert!((alpha / 0.8 - target).abs() < 0.002, "{alpha} for {target}");
        }
    }
}
