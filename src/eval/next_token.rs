//! The prediction of the next token, from logits that come in parts of the vocabulary.
//!
//! −ln p(next) = ln Σ_v e^(l_v − max) + max − l_next, with logits l in f32 and sums in f64. A token keeps three numbers between two parts.

use std::ops::Range;

use rayon::prelude::*;

use crate::linalg::exp;
use crate::model::on_device::LogSumExpPart;

/// A token's prediction after some of the vocabulary's rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct NextToken {
    /// The largest logit so far.
    pub(super) largest: f32,
    /// The logit of the token that follows, once its row was seen.
    pub(super) logit: Option<f32>,
    /// Σ e^(logit − largest) so far.
    sum: f64,
}

impl Default for NextToken {
    fn default() -> Self {
        Self { largest: f32::NEG_INFINITY, logit: None, sum: 0.0 }
    }
}

impl NextToken {
    /// Takes the logits of the vocabulary's `rows`. With all rows at once this is a plain log-sum-exp.
    pub(super) fn see(&mut self, logits: &[f32], rows: &Range<usize>, next: usize) {
        let largest = exp::largest(logits).max(self.largest);
        // The sum relative to a smaller maximum is scaled, and new exponentials are relative to the largest logit so far:
        // once the row's maximum was seen, they equal the exponentials of a log-sum-exp over the whole row.
        if largest != self.largest {
            self.sum *= (f64::from(self.largest) - f64::from(largest)).exp();
            self.largest = largest;
        }
        self.sum += exp::sum_exp_minus(logits, largest);
        if rows.contains(&next) {
            self.logit = Some(logits[next - rows.start]);
        }
    }

    /// Adds a device's result for further rows of the vocabulary.
    pub(super) fn merge(&mut self, part: &LogSumExpPart) {
        let largest = part.largest.max(self.largest);
        let scaled = |sum: f64, to: f32| match to == largest {
            true => sum,
            false => sum * (f64::from(to) - f64::from(largest)).exp(),
        };
        self.sum = scaled(self.sum, self.largest) + scaled(part.sum, part.largest);
        self.largest = largest;
        self.logit = self.logit.or(part.logit);
    }

    /// −ln p of the token that follows, after all rows.
    pub(super) fn loss(&self) -> Option<f64> {
        Some(self.sum.ln() + f64::from(self.largest) - f64::from(self.logit?))
    }
}

/// Shows logits `[tokens, rows.len()]` to the tokens; `next` holds their next tokens. A token without a next token is left out.
pub(super) fn see(seen: &mut [NextToken], logits: &[f32], rows: &Range<usize>, next: &[u32]) {
    seen.par_iter_mut()
        .zip(logits.par_chunks_exact(rows.len().max(1)))
        .zip(next)
        .for_each(|((seen, logits), &next)| seen.see(logits, rows, next as usize));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses of tokens whose logits are `[next.len() + 1, vocabulary]`, seen `at_once` rows of the vocabulary at a time.
    fn losses(logits: &[f32], vocabulary: usize, next: &[u32], at_once: usize) -> Vec<f64> {
        let mut seen = vec![NextToken::default(); next.len() + 1];
        for start in (0..vocabulary).step_by(at_once) {
            let rows = start..(start + at_once).min(vocabulary);
            let part: Vec<f32> = logits
                .chunks(vocabulary)
                .flat_map(|logits| logits[rows.clone()].to_vec())
                .collect();
            see(&mut seen, &part, &rows, next);
        }
        let seen = &seen[..next.len()];
        seen.iter().map(|seen| seen.loss().unwrap()).collect()
    }

    #[test]
    fn losses_are_negative_log_probabilities_of_the_next_token() {
        // Row 0: p = softmax(0, ln 3) = (1/4, 3/4). Row 1: p = (1/2, 1/2), far from zero. Row 2 has no next token.
        let logits = [0.0, 3f32.ln(), 1e4, 1e4, 5.0, 6.0];
        for at_once in [2, 1] {
            let losses = losses(&logits, 2, &[1, 0], at_once);
            assert!((losses[0] - (4.0f64 / 3.0).ln()).abs() < 1e-7, "f32 logits");
            assert!((losses[1] - 2f64.ln()).abs() < 1e-12);
        }
    }

    #[test]
    fn a_vocabulary_in_parts_gives_the_losses_of_the_whole() {
        let (vocabulary, next) = (1000, [3, 999, 500, 0]);
        let logits: Vec<f32> =
            (0..5 * vocabulary).map(|i| 30.0 * (i as f32 * 0.37).sin()).collect();
        let whole = losses(&logits, vocabulary, &next, vocabulary);
        for (row, (loss, &next)) in whole.iter().zip(&next).enumerate() {
            let logits = &logits[row * vocabulary..][..vocabulary];
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let exact = sum.ln() - f64::from(logits[next as usize]);
            // Two units in the last place of an f32 exponential.
            assert!((loss - exact).abs() < 1e-6, "{loss} {exact}");
        }
        for at_once in [1, 129, 600] {
            let parts = losses(&logits, vocabulary, &next, at_once);
            for (part, whole) in parts.iter().zip(&whole) {
                // Before the part with the maximum, exponentials are rounded relative to a smaller maximum.
                assert!((part - whole).abs() < 1e-6, "{at_once}: {part} {whole}");
            }
        }
    }

    #[test]
    fn what_is_not_a_number_is_not_lost_between_parts() {
        let logits = [1.0, f32::NAN, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0];
        for at_once in [1, 2, 4] {
            assert!(losses(&logits, 4, &[2], at_once)[0].is_nan(), "{at_once}");
        }
    }
}
