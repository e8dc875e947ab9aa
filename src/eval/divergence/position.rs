//! The numbers of a position: KL(p ‖ q), the losses of the right token, and the tokens with the largest logits.
//!
//! ```text
//! KL = Σ_v p_v·(ln p_v − ln q_v) = Σ_v e^(a_v − A)·(a_v − b_v) / Σ_v e^(a_v − A)  −  lse(a) + lse(b)
//! ```
//!
//! with logits a of the dense model, b of the model (f32), A = max a, lse(a) = A + ln Σ_v e^(a_v − A). Exponentials and sums are f64: at a
//! mean KL of 10⁻³ exponentials in f32 would cost the fourth digit. The vocabulary may come in parts; sums are scaled when a part has
//! a larger logit. Definitions: ggml-org/llama.cpp, `tools/perplexity`.

use std::ops::Range;

use rayon::prelude::*;

/// Numbers of a position per value of [`PositionValues`].
pub(super) const VALUES: usize = 4;

/// A position after the whole vocabulary.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PositionValues {
    pub(super) kl: f64,
    /// −ln p(t) of the right token t.
    pub(super) dense: f64,
    /// −ln q(t).
    pub(super) model: f64,
    pub(super) is_same_top: bool,
}

impl PositionValues {
    /// The values as numbers, for messages between ranks.
    pub(super) fn numbers(self) -> [f64; VALUES] {
        [self.kl, self.dense, self.model, f64::from(u8::from(self.is_same_top))]
    }

    /// The values from [`PositionValues::numbers`].
    pub(super) fn of([kl, dense, model, same]: [f64; VALUES]) -> Self {
        Self { kl, dense, model, is_same_top: same == 1.0 }
    }
}

/// A model's side of a position after some of the vocabulary.
#[derive(Debug, Clone, Copy)]
struct SeenLogits {
    largest: f32,
    /// The token with the largest logit; the first of equals.
    top: usize,
    /// The logit of the right token.
    right: Option<f32>,
    /// Σ e^(logit − largest).
    sum: f64,
}

impl SeenLogits {
    const NOTHING: Self = Self { largest: f32::NEG_INFINITY, top: 0, right: None, sum: 0.0 };

    /// Notes the largest logit of a part and the right token's. Returns the factor of sums so far.
    fn begin(&mut self, logits: &[f32], rows: &Range<usize>, right: usize) -> f64 {
        let before = self.largest;
        for (at, &logit) in logits.iter().enumerate() {
            if logit > self.largest {
                (self.largest, self.top) = (logit, rows.start + at);
            }
        }
        if rows.contains(&right) {
            self.right = Some(logits[right - rows.start]);
        }
        let factor = match before == self.largest {
            true => 1.0,
            false => (f64::from(before) - f64::from(self.largest)).exp(),
        };
        self.sum *= factor;
        factor
    }

    fn log_sum(&self) -> f64 {
        f64::from(self.largest) + self.sum.ln()
    }
}

/// A position after some of the vocabulary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position {
    dense: SeenLogits,
    model: SeenLogits,
    /// Σ e^(a − A)·(a − b).
    cross: f64,
}

impl Default for Position {
    fn default() -> Self {
        Self { dense: SeenLogits::NOTHING, model: SeenLogits::NOTHING, cross: 0.0 }
    }
}

impl Position {
    /// Takes the logits of the vocabulary's `rows`.
    fn see(&mut self, dense: &[f32], model: &[f32], rows: &Range<usize>, right: usize) {
        self.cross *= self.dense.begin(dense, rows, right);
        self.model.begin(model, rows, right);
        let (a_max, b_max) = (f64::from(self.dense.largest), f64::from(self.model.largest));
        for (&a, &b) in dense.iter().zip(model) {
            let (a, b) = (f64::from(a), f64::from(b));
            let weight = (a - a_max).exp();
            self.dense.sum += weight;
            self.model.sum += (b - b_max).exp();
            // A token that the dense model excludes adds nothing, whatever the model gives it.
            if weight != 0.0 {
                self.cross += weight * (a - b);
            }
        }
    }

    /// The values after the whole vocabulary; `None` where the right token is beyond it.
    pub(super) fn values(&self) -> Option<PositionValues> {
        let (dense, model) = (self.dense.log_sum(), self.model.log_sum());
        Some(PositionValues {
            kl: self.cross / self.dense.sum - dense + model,
            dense: dense - f64::from(self.dense.right?),
            model: model - f64::from(self.model.right?),
            is_same_top: self.dense.top == self.model.top,
        })
    }
}

/// Shows logits `[tokens, rows.len()]` of both models to the positions; `next` holds the right tokens. A token without one is left out.
pub(super) fn see(
    positions: &mut [Position],
    [dense, model]: [&[f32]; 2],
    rows: &Range<usize>,
    next: &[u32],
) {
    let width = rows.len().max(1);
    let logits = dense.par_chunks_exact(width).zip(model.par_chunks_exact(width));
    positions.par_iter_mut().zip(logits).zip(next).for_each(
        |((position, (dense, model)), &next)| {
            position.see(dense, model, rows, next as usize);
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(dense: &[f32], model: &[f32], right: u32, at_once: usize) -> PositionValues {
        let mut seen = [Position::default()];
        for start in (0..dense.len()).step_by(at_once) {
            let rows = start..(start + at_once).min(dense.len());
            see(&mut seen, [&dense[rows.clone()], &model[rows.clone()]], &rows, &[right]);
        }
        seen[0].values().unwrap()
    }

    #[test]
    fn divergence_of_two_distributions_follows_the_formula_in_any_parts() {
        // p = (1/4, 3/4), q = (1/2, 1/2): KL = ¼·ln(½) + ¾·ln(3/2).
        let (dense, model) = ([0.0, 3f32.ln()], [7.0, 7.0]);
        for at_once in [1, 2] {
            let of = values(&dense, &model, 1, at_once);
            let kl = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
            assert!((of.kl - kl).abs() < 1e-7, "logits are f32: {} {kl}", of.kl);
            assert!((of.dense - (4f64 / 3.0).ln()).abs() < 1e-7);
            assert!((of.model - 2f64.ln()).abs() < 1e-12);
            assert!(!of.is_same_top, "the first of equal logits is token 0");
        }
        let wave =
            |pace: f32| -> Vec<f32> { (0..1000).map(|i| 20.0 * (i as f32 * pace).sin()).collect() };
        let (dense, model) = (wave(0.37), wave(0.3701));
        let whole = values(&dense, &model, 500, 1000);
        for at_once in [1, 129, 600] {
            let parts = values(&dense, &model, 500, at_once);
            assert!((parts.kl - whole.kl).abs() < 1e-12 * whole.kl, "{parts:?} {whole:?}");
            assert_eq!(parts.is_same_top, whole.is_same_top);
        }
        assert!(values(&dense, &dense, 3, 100).kl.abs() < 1e-13);
    }

    #[test]
    fn an_excluded_token_adds_nothing_and_nan_stays() {
        let (dense, model) = ([0.0, f32::NEG_INFINITY], [0.0, 0.0]);
        assert!((values(&dense, &model, 0, 2).kl - 2f64.ln()).abs() < 1e-12);
        assert!(values(&[0.0, f32::NAN], &model, 0, 1).kl.is_nan());
        assert_eq!(PositionValues::of(values(&dense, &model, 0, 2).numbers()).model, 2f64.ln());
    }
}
