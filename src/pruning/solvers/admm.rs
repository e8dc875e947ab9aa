//! The alternating direction method of multipliers (ADMM) on the least-squares problem of pruning, shared by the methods built on it.
//!
//! With the scaled weights ws and Gs of `least_squares.rs`, minimise (ws − B) Gs (ws − B)ᵀ subject to B = D, where D has at most as many
//! weights as stay. B, D and the multipliers V are `[out_features, in_features]`. An iteration:
//!
//! ```text
//! B ← (ws·Gs − V + ρ·D) · (Gs + ρI)⁻¹
//! D ← B + V/ρ where |B + V/ρ| is largest, else 0
//! V ← V + ρ·(B − D)
//! ```
//!
//! Relaxation α, 1 without, puts α·B + (1 − α)·D in the place of B in the last two lines, with D of the iteration before.
//!
//! With S = B + V/ρ, D is S where weights stay, and the new V is ρ·S where they do not: both are kept as S and the support. A zero of
//! the source never stays, so it is outside of D in every iteration.
//! Boyd et al. 2011, "Distributed Optimization and Statistical Learning via ADMM", §9.1, relaxation §3.4.3; for pruning: ALPS,
//! arXiv:2406.07831 §3.1.
//! The inverse comes from a Cholesky factorisation for each ρ, in f32: Gs has a unit diagonal, and its damping bounds the condition.

use anyhow::{Result, anyhow};
use rayon::prelude::*;

use crate::bytes::ByteSize;
use crate::linalg::factor::inverse;
use crate::linalg::gram::GramMatrix;
use crate::linalg::product::Packed;
use crate::pruning::rows::OwnRows;
use crate::pruning::solvers::dense::{KeepRule, unmark, zeros_of};
use crate::pruning::solvers::least_squares::{ScaledGram, multiply};

/// The state between iterations.
pub(crate) struct Admm<'a> {
    gram: &'a ScaledGram,
    keeps: KeepRule,
    rows: OwnRows<'a>,
    /// The zeros of ws; empty without a zero.
    is_zero: Vec<bool>,
    /// ws·Gs.
    pub(crate) target: Vec<f32>,
    /// B of the last iteration; ws before the first.
    pub(crate) b: Vec<f32>,
    s: Vec<f32>,
    /// The support of D.
    pub(crate) is_kept: Vec<bool>,
    /// ρ of the multipliers in `s`.
    rho_of_s: f32,
    rho: f32,
    /// Inverts in f64.
    is_precise: bool,
    /// α.
    relaxation: f32,
    inverse: Vec<f32>,
    right: Vec<f32>,
    packed: Packed,
}

impl<'a> Admm<'a> {
    /// Begins with B = ws, D its largest weights and V = 0.
    ///
    /// # Errors
    /// Fails when a process that shares the rows has left, as every function here that chooses.
    pub(crate) fn begin(
        gram: &'a ScaledGram,
        scaled: Vec<f32>,
        keeps: KeepRule,
        rows: OwnRows<'a>,
    ) -> Result<Self> {
        let mut packed = Packed::default();
        let mut target = vec![0.0; scaled.len()];
        gram.product(&scaled, &mut target, &mut packed);
        let mut admm = Self {
            gram,
            keeps,
            rows,
            is_zero: zeros_of(&scaled),
            target,
            s: vec![0.0; scaled.len()],
            is_kept: vec![false; scaled.len()],
            rho_of_s: 0.0,
            rho: 0.0,
            is_precise: false,
            relaxation: 1.0,
            inverse: Vec::new(),
            right: vec![0.0; scaled.len()],
            b: scaled,
            packed,
        };
        admm.start_from_b()?;
        Ok(admm)
    }

    /// Bytes for a matrix, without the bytes of [`working_bytes`](crate::linalg::factor::working_bytes).
    pub(crate) fn bytes(out_features: usize, in_features: usize) -> ByteSize {
        let weights = out_features.saturating_mul(in_features);
        // target, b, s, right, the zeros of the source, the support and the old support.
        ByteSize::of(weights, 4 * size_of::<f32>() + 3) + GramMatrix::square_bytes(in_features)
    }

    /// Inverts in f64, and rounds the result.
    #[must_use]
    pub(crate) fn precise(self) -> Self {
        Self { is_precise: true, ..self }
    }

    /// Relaxes iterations by α, between 1 and 2.
    #[must_use]
    pub(crate) fn relaxed(self, relaxation: f32) -> Self {
        Self { relaxation, ..self }
    }

    /// D: the largest weights of B. V: 0.
    fn start_from_b(&mut self) -> Result<()> {
        self.s.copy_from_slice(&self.b);
        self.rho_of_s = 0.0;
        self.choose()
    }

    /// Marks the support of the largest S.
    fn choose(&mut self) -> Result<()> {
        let columns = self.gram.width();
        if self.is_zero.is_empty() {
            return self.keeps.largest(&self.s, columns, self.rows, &mut self.is_kept);
        }
        self.right
            .par_iter_mut()
            .zip(&self.s)
            .zip(&self.is_zero)
            .for_each(|((right, s), is_zero)| *right = if *is_zero { 0.0 } else { *s });
        self.keeps.largest(&self.right, columns, self.rows, &mut self.is_kept)?;
        unmark(&mut self.is_kept, &self.is_zero);
        Ok(())
    }

    /// Ends with the support of the largest B, and returns the target, B and the support.
    pub(crate) fn into_largest(mut self) -> Result<(Vec<f32>, Vec<f32>, Vec<bool>)> {
        self.start_from_b()?;
        Ok((self.target, self.b, self.is_kept))
    }

    /// Begins again with these scaled weights.
    pub(crate) fn restart(&mut self, scaled: &[f32]) -> Result<()> {
        self.b.copy_from_slice(scaled);
        self.start_from_b()
    }

    /// Sets ρ, and inverts Gs + ρI.
    ///
    /// # Errors
    /// Fails where this matrix is not positive definite in f32.
    pub(crate) fn set_rho(&mut self, rho: f32) -> Result<()> {
        if rho == self.rho {
            return Ok(());
        }
        let n = self.gram.width();
        let shifted = self.gram.gram.par_iter().enumerate().map(|(at, &value)| {
            // The diagonal.
            let shift = if at.is_multiple_of(n + 1) { rho } else { 0.0 };
            f64::from(value) + f64::from(shift)
        });
        let inverted = match self.is_precise {
            true => {
                let mut wide: Vec<f64> = shifted.collect();
                let inverted = inverse(&mut wide, n);
                wide.par_iter().map(|&value| value as f32).collect_into_vec(&mut self.inverse);
                inverted
            }
            false => {
                shifted.map(|value| value as f32).collect_into_vec(&mut self.inverse);
                inverse(&mut self.inverse, n)
            }
        };
        inverted.map_err(|_| anyhow!("the Gram matrix of the inputs is not positive definite"))?;
        self.rho = rho;
        Ok(())
    }

    /// Makes an iteration.
    pub(crate) fn step(&mut self) -> Result<()> {
        let (n, rho, old) = (self.gram.width(), self.rho, self.rho_of_s);
        self.right
            .par_chunks_mut(n)
            .zip(self.target.par_chunks(n))
            .zip(self.s.par_chunks(n).zip(self.is_kept.par_chunks(n)))
            .for_each(|((right, target), (s, is_kept))| {
                for at in 0..right.len() {
                    // ρ·D where weights stay, −V where they do not.
                    let factor = if is_kept[at] { rho } else { -old };
                    right[at] = target[at] + factor * s[at];
                }
            });
        multiply(&self.right, &self.inverse, n, &mut self.b, &mut self.packed);
        let (of_v, alpha) = (old / rho, self.relaxation);
        self.s
            .par_chunks_mut(n)
            .zip(self.b.par_chunks(n).zip(self.is_kept.par_chunks(n)))
            .for_each(|(s, (b, is_kept))| {
                for at in 0..s.len() {
                    // (1 − α)·D where weights stay, V/ρ where they do not.
                    let factor = if is_kept[at] { 1.0 - alpha } else { of_v };
                    s[at] = alpha * b[at] + factor * s[at];
                }
            });
        self.rho_of_s = rho;
        self.choose()
    }

    /// The support of D.
    pub(crate) fn support(&self) -> &[bool] {
        &self.is_kept
    }

    /// The number of weights in which the support differs from an earlier support.
    pub(crate) fn changes_from(&self, other: &[bool]) -> usize {
        let pairs = self.is_kept.par_chunks(1 << 16).zip(other.par_chunks(1 << 16));
        pairs
            .map(|(now, then)| now.iter().zip(then).filter(|(now, then)| now != then).count())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inverse of a small symmetric positive definite matrix plus ρI, by Gauss and Jordan in f64.
    fn inverse_of(gram: &[f32], n: usize, rho: f64) -> Vec<f64> {
        let mut left: Vec<f64> = gram.iter().map(|&value| f64::from(value)).collect();
        let mut right = vec![0.0; n * n];
        for at in 0..n {
            left[at * n + at] += rho;
            right[at * n + at] = 1.0;
        }
        for pivot in 0..n {
            let by = left[pivot * n + pivot];
            for column in 0..n {
                left[pivot * n + column] /= by;
                right[pivot * n + column] /= by;
            }
            for row in (0..n).filter(|&row| row != pivot) {
                let times = left[row * n + pivot];
                for column in 0..n {
                    left[row * n + column] -= times * left[pivot * n + column];
                    right[row * n + column] -= times * right[pivot * n + column];
                }
            }
        }
        right
    }

    #[test]
    fn iterations_follow_the_formulas_with_and_without_relaxation() {
        let (n, rows, kept) = (5_usize, 2, 4);
        let gram: Vec<f32> =
            (0..n * n).map(|at| 0.6f32.powi(((at / n) as i32 - (at % n) as i32).abs())).collect();
        let weights: Vec<f32> =
            (0..rows * n).map(|at| ((at * 37 % 61) as f32 - 30.0) / 20.0).collect();
        let scaled_gram = ScaledGram { gram: gram.clone(), scale: vec![1.0; n] };
        for alpha in [1.0, 1.5] {
            let (keeps, own) = (KeepRule::OfMatrix(kept), OwnRows::whole(rows));
            let mut admm = Admm::begin(&scaled_gram, weights.clone(), keeps, own)
                .unwrap()
                .relaxed(alpha as f32);
            let largest = |of: &[f64]| {
                let mut order: Vec<usize> = (0..of.len()).collect();
                order.sort_by(|&a, &b| of[b].abs().total_cmp(&of[a].abs()));
                let mut d = vec![0.0; of.len()];
                order[..kept].iter().for_each(|&at| d[at] = of[at]);
                d
            };
            let times = |x: &[f64], m: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
                let sum = |row: usize, column| (0..n).map(|k| x[row * n + k] * m(k, column)).sum();
                (0..rows * n).map(|at| sum(at / n, at % n)).collect()
            };
            let ws: Vec<f64> = weights.iter().map(|&value| f64::from(value)).collect();
            let target = times(&ws, &|k, column| f64::from(gram[k * n + column]));
            let (mut d, mut v) = (largest(&ws), vec![0.0; rows * n]);
            for rho in [0.1, 0.1, 0.3, 0.9] {
                admm.set_rho(rho as f32).unwrap();
                admm.step().unwrap();
                let inverse = inverse_of(&gram, n, rho);
                let right: Vec<f64> =
                    (0..rows * n).map(|at| target[at] - v[at] + rho * d[at]).collect();
                let b = times(&right, &|k, column| inverse[k * n + column]);
                let relaxed: Vec<f64> =
                    (0..rows * n).map(|at| alpha * b[at] + (1.0 - alpha) * d[at]).collect();
                let s: Vec<f64> = (0..rows * n).map(|at| relaxed[at] + v[at] / rho).collect();
                d = largest(&s);
                for at in 0..rows * n {
                    v[at] += rho * (relaxed[at] - d[at]);
                    let off = (f64::from(admm.b[at]) - b[at]).abs();
                    assert!(off < 1e-5, "{alpha}, {rho}: B of {at} is off by {off}");
                    assert_eq!(admm.support()[at], d[at] != 0.0, "{alpha}, {rho}: {at}");
                }
            }
        }
    }
}
