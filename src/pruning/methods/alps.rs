//! ALPS: the support by ADMM with a growing penalty, then least squares on the weights that are kept.
//!
//! Meng, Behdin, Wang, Mazumder 2024, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for Large Language Models",
//! arXiv:2406.07831; reference: `ALPS_prune.ALPS_admm` in mazumder-lab/ALPS. The iteration is in `admm.rs`, the least squares in
//! `least_squares.rs`; W `[out_features, in_features]`, k = round((1 − ratio)·weights) weights of the matrix stay, or M − N per group.
//!
//! ρ begins at 0.1. After every third iteration, with Δ the number of weights that entered or left the support of D since the last look:
//!
//! | Δ | ρ |
//! | --- | --- |
//! | > 0.1·k | × 1.3 |
//! | > 0.005·k | × 1.2 |
//! | ≥ 1 | × 1.1; before any growth: / 5, and start again |
//! | 0 | done; before any growth: / 5 |
//!
//! It also ends when Δ < 0.0003·k after more than 30 iterations, and after 300. Then the k largest weights of B stay, and ten steps of
//! conjugate gradients fit them.
//!
//! Differences: (Gs + ρI)⁻¹ is a Cholesky inverse for each ρ, in f64 and rounded to f32, where the reference forms it from eigenvectors in
//! f64. A step of `cg_batch` makes one product, where the reference makes three of the same result.

use anyhow::Result;

use crate::bytes::ByteSize;
use crate::linalg::StoredMatrix;
use crate::linalg::factor;
use crate::pruning::mask::Mask;
use crate::pruning::method::{PruningMethod, Request, SparsityRule};
use crate::pruning::options::MethodOptions;
use crate::pruning::rows::OwnRows;
use crate::pruning::solvers::admm::Admm;
use crate::pruning::solvers::dense::{KeepRule, mask_of, widened};
use crate::pruning::solvers::least_squares::{STEPS, ScaledGram, operations, refit, refit_bytes};
use crate::pruning::statistics::StatisticsKind;
use crate::pruning::statistics::input_gram::{InputGram, InputGramKind};
use crate::pruning::target::{Pattern, Target};

/// Iterations between two looks at the support.
const EVERY: usize = 3;
/// Iterations at most.
const ITERATIONS: usize = 300;
/// Iterations after which small changes end the loop.
const PATIENCE: usize = 30;

/// ADMM with the published schedule.
#[derive(Debug, Clone, Copy)]
pub struct Alps;

impl PruningMethod for Alps {
    fn name(&self) -> &'static str {
        "alps"
    }

    fn summary(&self) -> &'static str {
        "ADMM chooses, least squares repairs; the published schedule"
    }

    fn removes(&self, _options: &MethodOptions) -> SparsityRule {
        SparsityRule::NearRatio
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&InputGramKind)
    }

    fn changes_weights(&self) -> bool {
        true
    }

    fn can_share_rows(&self) -> bool {
        true
    }

    fn searches(&self, _in_features: usize, _options: &MethodOptions) -> usize {
        // It mostly ends after some 60 iterations.
        62
    }

    fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize {
        // The inverse is made in f64.
        let square = in_features.saturating_mul(in_features);
        ScaledGram::bytes(in_features)
            + ByteSize::of(square, size_of::<f64>())
            + factor::working_bytes::<f64>(in_features)
            + Admm::bytes(out_features, in_features)
            + refit_bytes(out_features, in_features)
            + ByteSize::of(out_features.saturating_mul(in_features), size_of::<f32>())
    }

    fn operations(&self, out_features: usize, in_features: usize) -> f64 {
        // It ends when the support rests, mostly after some 60 iterations; ρ changes every third. Inverses in f64 take twice the time.
        operations(out_features, in_features, 60 + STEPS + 2, 2 * 60 / 3)
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        request.mean_squares()?;
        let statistics = request.statistics_as::<InputGram>()?;
        let gram = statistics.prepared(ScaledGram::of)?;
        let scaled = gram.scaled(widened(weight, request)?);
        let (rows, columns) = (weight.rows(), weight.columns());
        let own = request.rows_of(weight);
        let keeps = keeps(request.target, own.all, columns);
        let mut admm = Admm::begin(&gram, scaled.clone(), keeps, own)?.precise();
        schedule(&mut admm, &scaled, kept(request.target, own.all * columns), own)?;
        let (target, mut b, is_kept) = admm.into_largest()?;
        refit(&gram, &target, &mut b, &is_kept, STEPS);
        weight.set_f32(&gram.unscaled(b));
        mask_of(&is_kept, rows, columns)
    }
}

/// Weights that stay.
fn kept(target: Target, weights: usize) -> usize {
    match target.pattern {
        // `round` of NumPy: halves go to the even neighbour.
        Pattern::Unstructured => ((1.0 - target.ratio) * weights as f64).round_ties_even() as usize,
        Pattern::NOfM { n, m } => weights / m * (m - n),
    }
}

/// The reference's rule for the support.
fn keeps(target: Target, rows: usize, columns: usize) -> KeepRule {
    match target.pattern {
        Pattern::Unstructured => KeepRule::OfMatrix(kept(target, rows * columns)),
        Pattern::NOfM { n, m } => KeepRule::OfGroups { n, m },
    }
}

/// Iterates until the support settles.
fn schedule(admm: &mut Admm<'_>, scaled: &[f32], kept: usize, own: OwnRows<'_>) -> Result<()> {
    let (mut rho, mut has_grown) = (0.1f32, false);
    let mut last = admm.support().to_vec();
    for iteration in 1..=ITERATIONS {
        admm.set_rho(rho)?;
        admm.step()?;
        if !iteration.is_multiple_of(EVERY) {
            continue;
        }
        let changes = own.gathered([admm.changes_from(&last) as u64])?;
        let changes: u64 = changes.as_flattened().iter().sum();
        let share = changes as f64 / kept.max(1) as f64;
        last.copy_from_slice(admm.support());
        match (changes, share) {
            (_, share) if share > 0.1 => (rho, has_grown) = (rho * 1.3, true),
            (_, share) if share > 0.005 => (rho, has_grown) = (rho * 1.2, true),
            (1.., _) if has_grown => rho *= 1.1,
            (1.., _) => {
                rho /= 5.0;
                admm.restart(scaled)?;
            }
            (0, _) if has_grown => break,
            (0, _) => rho /= 5.0,
        }
        rho = rho.min(1e6);
        if iteration > PATIENCE && share < 0.0003 {
            break;
        }
    }
    Ok(())
}
