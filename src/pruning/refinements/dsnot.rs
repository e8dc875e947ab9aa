//! DSnoT: weights of a row change places with removed weights until the mean of the row's output is restored. No weight changes.
//!
//! c_ij = W_ij·m_j `[out_features, in_features]`, m_j and v_j of `column_moments.rs`. For every row i, with e = Σ c_ij over its removed
//! weights, while |e| > 0.1 and for at most `cycles` swaps:
//!
//! | | e > 0 | e < 0 |
//! | --- | --- | --- |
//! | comes back: of the removed weights in the order of c_ij / v_j | the largest, if positive | the smallest, if negative |
//! | goes: of the kept weights in ascending order of Wanda's score | the next with c_ij < 0 | the next with c_ij > 0 |
//!
//! Where no kept weight of the right sign is left, the strongest kept weight of the opposite sign goes. Then
//! e ← e + c(goes) − c(comes back). A weight moves once at most. In an N:M pattern the weakest kept weight of the group goes, and a swap
//! that would turn the sign of e is not made.
//! Zhang et al. 2023, "Dynamic Sparse No Training", arXiv:2310.08915; reference: `prune_DSnoT` in zyxxmu/DSnoT.
//!
//! Differences: a row stops where no removed weight of the sign is left. The published code then takes kept weights, in the order of
//! their columns, for removed weights, so the sparsity drifts. It also reads beyond its lists on narrow matrices and writes masks of
//! rows that have stopped. As in the reference, the matrices of the MLP are left alone by default.

use std::collections::VecDeque;

use anyhow::Result;
use rayon::prelude::*;

use crate::bytes::ByteSize;
use crate::pruning::mask::Mask;
use crate::pruning::method::Request;
use crate::pruning::methods::wanda;
use crate::pruning::options::{MethodOption, OptionValue};
use crate::pruning::refinement::{AsPruned, Refinement};
use crate::pruning::solvers::dense::{kept_of, mask_of};
use crate::pruning::statistics::column_moments::{ColumnMoments, ColumnMomentsKind};
use crate::pruning::statistics::input_gram::InputGram;
use crate::pruning::statistics::{Statistics, StatisticsKind};
use crate::pruning::target::Pattern;

/// Swaps per row, at most; the default is the reference's.
pub const DSNOT_CYCLES: MethodOption = MethodOption {
    name: "dsnot_cycles",
    value_name: "N",
    help: "Swaps per row of `--refine dsnot` at most",
    default: OptionValue::Count(50),
    least: 0,
};

/// The matrices of the MLP are refined, too.
pub const DSNOT_MLP: MethodOption = MethodOption {
    name: "dsnot_mlp",
    value_name: "",
    help: "`--refine dsnot` refines the matrices of the MLP, too",
    default: OptionValue::Switch(false),
    least: 0,
};

/// |e| at which a row is done, as in the reference. It depends on the length of the samples.
const DONE: f32 = 0.1;

/// Swaps of kept and removed weights.
#[derive(Debug, Clone, Copy)]
pub struct Dsnot;

impl Refinement for Dsnot {
    fn name(&self) -> &'static str {
        "dsnot"
    }

    fn summary(&self) -> &'static str {
        "swaps kept and removed weights of a row to restore its mean output"
    }

    fn statistics(
        &self,
        of_method: Option<&'static dyn StatisticsKind>,
    ) -> &'static dyn StatisticsKind {
        // A Gram matrix comes with the moments.
        of_method.filter(|kind| kind.is_in_place()).unwrap_or(&ColumnMomentsKind)
    }

    fn options(&self) -> &'static [MethodOption] {
        &[DSNOT_CYCLES, DSNOT_MLP]
    }

    fn changes_weights(&self) -> bool {
        false
    }

    fn restores_weights(&self) -> bool {
        true
    }

    fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize {
        ByteSize::of(out_features.saturating_mul(in_features), size_of::<bool>())
    }

    fn refine(&self, pruned: AsPruned<'_>, request: &Request<'_>) -> Result<Mask> {
        if request.name.contains(".mlp.") && !request.options.is_set(&DSNOT_MLP) {
            return Ok(pruned.mask);
        }
        let squares = wanda::input_norms(request)?;
        let statistics = request.statistics;
        let moments = statistics.and_then(Statistics::downcast::<ColumnMoments>);
        let moments = match moments {
            Some(moments) => moments,
            None => request.statistics_as::<InputGram>()?.columns(),
        };
        let columns = SwapRule {
            norms: squares,
            means: moments.mean(),
            variances: moments.variance(),
            pattern: request.target.pattern,
            cycles: request.options.count(&DSNOT_CYCLES),
        };
        let (rows, width) = (pruned.dense.rows(), pruned.dense.columns());
        let mut is_kept = kept_of(&pruned.mask);
        is_kept.par_chunks_mut(width.max(1)).enumerate().for_each_init(
            || vec![0.0f32; width],
            |weights, (row, is_kept)| {
                pruned.dense.widen_rows(row, weights);
                columns.refine(weights, is_kept);
            },
        );
        mask_of(&is_kept, rows, width)
    }
}

/// The numbers that all rows share.
struct SwapRule {
    norms: Vec<f32>,
    means: Vec<f32>,
    variances: Vec<f32>,
    pattern: Pattern,
    cycles: usize,
}

impl SwapRule {
    /// Refines a row.
    fn refine(&self, weights: &[f32], is_kept: &mut [bool]) {
        let share: Vec<f32> = weights.iter().zip(&self.means).map(|(w, m)| w * m).collect();
        let mut scores = weights.to_vec();
        scores.iter_mut().for_each(|weight| *weight = weight.abs());
        wanda::score(&mut scores, &self.norms);
        let removed = (0..weights.len()).filter(|&at| !is_kept[at]);
        let mut error: f32 = removed.map(|at| share[at]).sum();
        let keys: Vec<f32> = (0..weights.len())
            .map(|at| match share[at] / self.variances[at] {
                ratio if ratio.is_nan() || is_kept[at] => 0.0,
                ratio => ratio,
            })
            .collect();
        let mut returning: Vec<usize> = (0..weights.len()).filter(|&at| keys[at] != 0.0).collect();
        // Zero and minus zero are equal.
        returning.sort_by(|&one, &other| (keys[one] + 0.0).total_cmp(&(keys[other] + 0.0)));
        let mut kept: Vec<usize> = (0..weights.len()).filter(|&at| is_kept[at]).collect();
        kept.sort_by(|&one, &other| scores[one].total_cmp(&scores[other]));
        let of_sign = |sign: f32| -> Vec<usize> {
            let of_sign = kept.iter().copied().filter(|&at| share[at] * sign > 0.0);
            of_sign.collect()
        };
        // From the front for e > 0, from the back for e < 0.
        let mut leaving: VecDeque<usize> = of_sign(-1.0).into();
        leaving.extend(of_sign(1.0).into_iter().rev());
        let first_sign = error.signum();
        let mut is_used = vec![false; weights.len()];
        let mut returning = returning.into_iter();
        let may_return = |at: &usize, sign: f32| keys[*at] * sign > 0.0;
        for _ in 0..self.cycles {
            if error.abs() <= DONE {
                return;
            }
            let back = match error > 0.0 {
                true => returning.next_back().filter(|at| may_return(at, 1.0)),
                false => returning.next().filter(|at| may_return(at, -1.0)),
            };
            let Some(back) = back else {
                return;
            };
            let gone = match self.pattern {
                Pattern::Unstructured if error < 0.0 => leaving.pop_back(),
                Pattern::Unstructured => leaving.pop_front(),
                Pattern::NOfM { m, .. } => {
                    let first = back - back % m;
                    let stays = |at: &usize| is_kept[*at] && !is_used[*at];
                    let weaker =
                        |one: &usize, other: &usize| scores[*one].total_cmp(&scores[*other]);
                    (first..first + m).filter(stays).min_by(weaker)
                }
            };
            let Some(gone) = gone else {
                return;
            };
            let after = error + share[gone] - share[back];
            if self.pattern != Pattern::Unstructured && after.signum() != first_sign {
                return;
            }
            // A weight that came back stays.
            (is_used[back], is_used[gone]) = (true, true);
            is_kept[gone] = false;
            is_kept[back] = true;
            error = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(pattern: Pattern) -> SwapRule {
        SwapRule {
            norms: vec![1.0; 6],
            means: vec![1.0; 6],
            variances: vec![1.0; 6],
            pattern,
            cycles: 50,
        }
    }

    #[test]
    fn the_largest_contribution_comes_back_and_the_weakest_of_the_other_sign_goes() {
        // Removed are 1, 3 and 2, so e = 6. Column 1 comes back, column 4 with −4 goes: e = 6 − 4 − 3 = −1. Then the smallest removed is
        // positive, so the row is done.
        let mut is_kept = [false, false, false, true, true, true];
        columns(Pattern::Unstructured).refine(&[1.0, 3.0, 2.0, 5.0, -4.0, -6.0], &mut is_kept);
        assert_eq!(is_kept, [false, true, false, true, false, true]);
    }

    #[test]
    fn a_row_stops_where_no_removed_weight_has_the_sign() {
        // Removed are 1 and 2, so e = 3. Column 1 comes back, column 2 goes: e = 3 − 4 − 2 = −3. No removed weight is negative.
        let mut is_kept = [false, false, true, true, true];
        columns(Pattern::Unstructured).refine(&[1.0, 2.0, -4.0, 5.0, 7.0], &mut is_kept);
        assert_eq!(is_kept, [false, true, false, true, true]);
    }

    #[test]
    fn a_row_without_error_stays() {
        let mut is_kept = [false, false, true, true, true, true];
        columns(Pattern::Unstructured).refine(&[1.0, -1.0, 2.0, 5.0, -4.0, -6.0], &mut is_kept);
        assert_eq!(is_kept, [false, false, true, true, true, true]);
    }

    #[test]
    fn groups_keep_their_number() {
        let mut is_kept = [false, true, true, false, true, true];
        // e = 7; column 3 comes back, its group's weakest is column 5: e = 7 + 0.5 − 4 = 3.5. Then column 0: e = 3.5 + 1 − 3 = 1.5.
        columns(Pattern::NOfM { n: 1, m: 3 }).refine(&[3.0, 1.0, 9.0, 4.0, 8.0, 0.5], &mut is_kept);
        assert_eq!(is_kept, [true, false, true, true, true, false]);
    }
}
