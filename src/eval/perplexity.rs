//! Perplexity over non-overlapping windows, layer by layer, within the sweep.
//!
//! For window w of L tokens: ℓ_w = (1/(L−1)) Σ_{t<L} −ln p(x_{t+1} | x_{≤t}), perplexity = exp(mean_w ℓ_w). No beginning-of-text
//! token is put back and the tail is dropped. Reference: `eval_ppl_wikitext` in locuslab/wanda (which multiplies by L and
//! divides by L again). −ln p is taken from logits in f32 with a log-sum-exp accumulated in f64. Logits exist for
//! a few hundred tokens at a time, and for a part of the vocabulary where the head is read in parts: then all windows see
//! the parts in turn, and each token keeps three numbers between parts.

use std::ops::Range;

use anyhow::{Context, Result};
use rayon::prelude::*;

use crate::linalg::exp;
use crate::model::on_device::LogSumExpPart;
use crate::model::{DecoderLayer, Head};
use crate::run::manifest::PerplexityReport;
use crate::run::phase::in_layer;
use crate::run::{Event, Phase};
use crate::runtime::{Compute, HiddenStates, Passenger, Reporter, SampleShare, Side};

/// A stream of windows, passed through the model.
pub struct Perplexity<'a> {
    side: Side,
    hidden: HiddenStates,
    tokens: &'a [u32],
    num_hidden_layers: usize,
    reporter: Reporter<'a>,
    report: Option<PerplexityReport>,
}

impl<'a> Perplexity<'a> {
    /// `hidden` are the embedded windows of `tokens` `[windows, seqlen]`.
    pub fn new(
        side: Side,
        hidden: HiddenStates,
        tokens: &'a [u32],
        num_hidden_layers: usize,
        reporter: Reporter<'a>,
    ) -> Self {
        Self { side, hidden, tokens, num_hidden_layers, reporter, report: None }
    }

    /// The result, after the sweep.
    pub fn report(&self) -> Option<PerplexityReport> {
        self.report
    }

    fn advance(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        let (Reporter { clock, events }, hidden) = (self.reporter, &mut self.hidden);
        events.emit(Event::PhaseStarted {
            phase: in_layer(layer.index(), self.num_hidden_layers, self.side.phase()),
            unit: "windows",
            steps: hidden.samples() as u64,
        });
        clock.measure(self.side.phase(), || {
            compute.forward(self.side.phase(), layer, hidden, &|window| {
                events.emit(Event::Progress { done: window as u64 + 1 });
            })
        })
    }
}

impl Passenger for Perplexity<'_> {
    fn side(&self) -> Side {
        self.side
    }

    fn layer(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.advance(layer, compute)
    }

    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let (hidden, tokens) = (&mut self.hidden, self.tokens);
        let (steps, seqlen) = (hidden.samples() as u64, hidden.seqlen());
        let (share, ranks) = (hidden.share().clone(), compute.ranks().clone());
        let phase = format!("head: {} perplexity", self.side.name());
        events.emit(Event::PhaseStarted { phase, unit: "windows", steps });
        let losses = clock.measure(Phase::Head, || -> Result<Vec<f64>> {
            let mut seen = vec![NextToken::default(); steps as usize * seqlen];
            let parts = head.chunks().len();
            for (part, rows) in head.chunks().enumerate() {
                let chunk = head.chunk(rows.clone())?;
                // A window has passed when it has seen every part.
                let passed = |window: usize| {
                    let passed = part * steps as usize + window + 1;
                    events.emit(Event::Progress { done: (passed / parts) as u64 });
                };
                if compute.has_device_for_the_head() {
                    compute.head_windows(&chunk, hidden, tokens, &mut |window, parts| {
                        let seen = &mut seen[window * seqlen..];
                        for (seen, part) in seen.iter_mut().zip(&parts) {
                            seen.merge(part);
                        }
                        passed(window);
                    })?;
                    continue;
                }
                let context = compute.context();
                let windows = share.own().iter().zip(seen.chunks_exact_mut(seqlen));
                for (window, (&number, seen)) in windows.enumerate() {
                    let tokens = &tokens[number * seqlen..(number + 1) * seqlen];
                    events.check()?;
                    chunk.logits(&hidden.get(window)?, context, |first, logits| {
                        let (seen, next) = (&mut seen[first..], &tokens[first + 1..]);
                        see(seen, logits, &rows, next);
                        Ok(())
                    })?;
                    passed(window);
                }
            }
            let group = SUMMED_AT_ONCE / head.vocab_size().max(1);
            let losses = seen.chunks_exact(seqlen).map(|seen| window_loss(seen, group));
            let losses = losses.collect::<Result<Vec<f64>>>()?;
            let by_rank = ranks.all_gather(bytemuck::cast_slice(&losses))?;
            let by_rank = by_rank.iter().map(|bytes| bytemuck::pod_collect_to_vec(bytes));
            Ok(SampleShare::in_order(share.all(), by_rank.collect()))
        })?;
        self.report = Some(summarise(&losses, seqlen));
        // No later layer needs the windows.
        self.hidden.clear();
        Ok(())
    }
}

/// The losses of this many logits' tokens are added up before they join the window's sum, even if fewer logits exist at once.
const SUMMED_AT_ONCE: usize = 1 << 25;

/// A token's prediction after some of the vocabulary's rows.
#[derive(Debug, Clone, Copy)]
struct NextToken {
    /// The largest logit so far.
    largest: f32,
    /// The logit of the token that follows, once its row was seen.
    logit: Option<f32>,
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
    fn see(&mut self, logits: &[f32], rows: &Range<usize>, next: usize) {
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
    fn merge(&mut self, part: &LogSumExpPart) {
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
    fn loss(&self) -> Option<f64> {
        Some(self.sum.ln() + f64::from(self.largest) - f64::from(self.logit?))
    }
}

/// Shows logits `[tokens, rows.len()]` to the tokens; `next` holds their next tokens. A token without a next token is left out.
fn see(seen: &mut [NextToken], logits: &[f32], rows: &Range<usize>, next: &[u32]) {
    seen.par_iter_mut()
        .zip(logits.par_chunks_exact(rows.len().max(1)))
        .zip(next)
        .for_each(|((seen, logits), &next)| seen.see(logits, rows, next as usize));
}

/// ℓ of a window; `seen` has all its tokens, the last of which predicts nothing.
fn window_loss(seen: &[NextToken], group: usize) -> Result<f64> {
    let predicting = &seen[..seen.len() - 1];
    let mut sum = 0.0;
    for group in predicting.chunks(group.max(1)) {
        let losses = group.iter().map(NextToken::loss);
        // Ids were checked against the embedding, which has as many rows as there are logits.
        let losses: Option<Vec<f64>> = losses.collect();
        sum += losses.context("a token is beyond the head's vocabulary")?.iter().sum::<f64>();
    }
    Ok(sum / predicting.len() as f64)
}

fn summarise(losses: &[f64], seqlen: usize) -> PerplexityReport {
    let windows = losses.len();
    let mean = losses.iter().sum::<f64>() / windows as f64;
    let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>()
        / windows.saturating_sub(1).max(1) as f64;
    PerplexityReport {
        perplexity: mean.exp(),
        mean_loss: mean,
        standard_error: (variance / windows as f64).sqrt(),
        windows,
        seqlen,
    }
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

    #[test]
    fn perplexity_is_the_exponential_of_the_mean_of_window_means() {
        let report = summarise(&[1.0, 3.0], 8);
        assert_eq!((report.perplexity, report.mean_loss, report.windows), (2f64.exp(), 2.0, 2));
        // Variance of (1, 3) is 2, of their mean 1.
        assert_eq!(report.standard_error, 1.0);
        assert_eq!(summarise(&[1.0], 8).standard_error, 0.0);
    }
}
