//! Ladder.
use anyhow::Result;

use super::admm::Admm;
use super::dense::{Keeps, mask_of, store, widened};
use super::input_gram::{InputGram, InputGramKind};
use super::least_squares::{ScaledGram, refit, refit_bytes};
use super::mask::Mask;
use super::method::{PruningMethod, Removes, Request};
use super::options::MethodOptions;
use super::statistics::StatisticsKind;
use super::target::{Pattern, Target};
use crate::bytes::ByteSize;
use crate::linalg::StoredMatrix;

/// ADMM on a short ladder of penalties.
#[derive(Debug, Clone, Copy)]
pub struct Ladder;

fn exp(name: &str, default: f64) -> f64 {
    std::env::var(name)
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(default)
}

impl PruningMethod for Ladder {
    fn name(&self) -> &'static str {
        "ladder"
    }

    fn summary(&self) -> &'static str {
        "ADMM on a short ladder of penalties, then least squares"
    }

    fn removes(&self, _options: &MethodOptions) -> Removes {
        Removes::NearRatio
    }

    fn statistics(&self) -> Option<&'static dyn StatisticsKind> {
        Some(&InputGramKind)
    }

    fn changes_weights(&self) -> bool {
        true
    }

    fn working_bytes(&self, out_features: usize, in_features: usize) -> ByteSize {
        ScaledGram::bytes(in_features)
            + Admm::bytes(out_features, in_features)
            + refit_bytes(out_features, in_features)
    }

    fn prune(&self, weight: &mut StoredMatrix, request: &Request<'_>) -> Result<Mask> {
        request.mean_squares()?;
        let statistics = request.statistics_as::<InputGram>()?;
        let gram = statistics.prepared(ScaledGram::of)?;
        let mut scaled = gram.scaled(widened(weight, request)?);
        let (rows, columns) = (weight.rows(), weight.columns());
        let keeps = keeps(request.target, rows, columns);
        let gamma = exp("GAMMA", 1.0);
        let norms: Vec<f32> = scaled
            .chunks(columns)
            .map(|row| {
                let mut sorted: Vec<f32> = row.iter().map(|v| v.abs()).collect();
                sorted.sort_by(f32::total_cmp);
                let t = sorted[request.target.count_of(columns).min(columns - 1)];
                if t > 0.0 { t.powf(-gamma as f32) } else { 1.0 }
            })
            .collect();
        for (row, norm) in scaled.chunks_mut(columns).zip(&norms) {
            row.iter_mut().for_each(|v| *v *= norm);
        }
        let mut admm = Admm::begin(&gram, scaled, keeps);
        let mut rho = exp("RHO", 0.05) as f32;
        let mut last = admm.support().to_vec();
        for _ in 0..exp("MOST", 5.0) as usize {
            admm.set_rho(rho)?;
            for _ in 0..exp("PER", 4.0) as usize {
                admm.step();
            }
            let changes = admm.changes_from(&last);
            last.copy_from_slice(admm.support());
            let kept = last.iter().filter(|k| **k).count();
            if (changes as f64) < exp("STOP", 0.0) * kept as f64 {
                break;
            }
            rho *= exp("GROW", 2.5) as f32;
        }
        let mut is_kept = admm.support().to_vec();
        let Admm { target, mut b, .. } = admm;
        if exp("FINALB", 0.0) > 0.0 {
            keeps.largest(&b, columns, &mut is_kept);
        }
        refit(&gram, &target, &mut b, &is_kept, exp("CG", 6.0) as usize);
        for (row, norm) in b.chunks_mut(columns).zip(&norms) {
            row.iter_mut().for_each(|v| *v /= norm);
        }
        store(weight, &gram.unscaled(b));
        mask_of(&is_kept, rows, columns)
    }
}

/// The rule for the support.
fn keeps(target: Target, rows: usize, columns: usize) -> Keeps {
    match target.pattern {
        Pattern::Unstructured if exp("ROWS", 1.0) > 0.0 => {
            Keeps::OfRows(columns - target.count_of(columns))
        }
        Pattern::Unstructured => Keeps::OfMatrix(rows * columns - target.count_of(rows * columns)),
        Pattern::NOfM { n, m } => Keeps::OfGroups { n, m },
    }
}
