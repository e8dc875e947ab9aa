//! Perplexity over non-overlapping windows, layer by layer, as a passenger of the sweep.
//!
//! For window w of L tokens: ℓ_w = (1/(L−1)) Σ_{t<L} −ln p(x_{t+1} | x_{≤t}), perplexity = exp(mean_w ℓ_w). No beginning-of-text
//! token is put back and the tail is dropped. Reference: `eval_ppl_wikitext` in locuslab/wanda (which multiplies by L and
//! divides by L again). −ln p is taken from logits in f32 with a log-sum-exp accumulated in f64. Logits exist for
//! a few hundred tokens at a time.

use anyhow::Result;
use rayon::prelude::*;

use crate::linalg::exp;
use crate::model::{DecoderLayer, Head, LayerContext};
use crate::run::manifest::PerplexityReport;
use crate::run::{Event, Events};
use crate::runtime::{Clock, HiddenStates, Passenger};

/// Which version of each layer the windows pass through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// As read.
    Dense,
    /// As the editor left it.
    Pruned,
}

impl Side {
    /// `dense` or `pruned`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Pruned => "pruned",
        }
    }

    /// The phase its time is booked under.
    fn phase(self) -> &'static str {
        match self {
            Self::Dense => "evaluate dense",
            Self::Pruned => "evaluate pruned",
        }
    }
}

/// One stream of windows on its way through the model.
pub struct Perplexity<'a> {
    side: Side,
    hidden: HiddenStates,
    tokens: &'a [u32],
    seqlen: usize,
    num_hidden_layers: usize,
    clock: &'a Clock,
    events: &'a dyn Events,
    report: Option<PerplexityReport>,
}

impl<'a> Perplexity<'a> {
    /// # Arguments
    /// * `hidden`: the embedded windows
    /// * `tokens`: `[windows, seqlen]`
    pub fn new(
        side: Side,
        hidden: HiddenStates,
        tokens: &'a [u32],
        seqlen: usize,
        num_hidden_layers: usize,
        clock: &'a Clock,
        events: &'a dyn Events,
    ) -> Self {
        Self {
            side,
            hidden,
            tokens,
            seqlen,
            num_hidden_layers,
            clock,
            events,
            report: None,
        }
    }

    /// The result, after the sweep.
    pub fn report(&self) -> Option<PerplexityReport> {
        self.report
    }

    fn advance(&mut self, layer: &DecoderLayer, context: &mut LayerContext) -> Result<()> {
        self.events.emit(Event::PhaseStarted {
            phase: format!(
                "layer {}/{}: {}",
                layer.index() + 1,
                self.num_hidden_layers,
                self.side.phase()
            ),
            unit: "windows",
            steps: self.hidden.samples() as u64,
        });
        let (clock, events, hidden) = (self.clock, self.events, &mut self.hidden);
        clock.measure(self.side.phase(), || {
            hidden.advance(|window, state| {
                let next = layer.forward(state, context)?;
                events.emit(Event::Progress {
                    done: window as u64 + 1,
                });
                Ok(next)
            })
        })
    }
}

impl Passenger for Perplexity<'_> {
    fn dense(&mut self, layer: &DecoderLayer, context: &mut LayerContext) -> Result<()> {
        if self.side == Side::Dense {
            self.advance(layer, context)
        } else {
            Ok(())
        }
    }

    fn pruned(&mut self, layer: &DecoderLayer, context: &mut LayerContext) -> Result<()> {
        if self.side == Side::Pruned {
            self.advance(layer, context)
        } else {
            Ok(())
        }
    }

    fn finish(&mut self, head: &Head, context: &mut LayerContext) -> Result<()> {
        let steps = self.hidden.samples() as u64;
        let phase = format!("head: {} perplexity", self.side.name());
        self.events.emit(Event::PhaseStarted {
            phase,
            unit: "windows",
            steps,
        });
        let (clock, events, hidden, seqlen) =
            (self.clock, self.events, &mut self.hidden, self.seqlen);
        let tokens = self.tokens;
        let losses = clock.measure("head", || -> Result<Vec<f64>> {
            let mut logits = Vec::new();
            let panel = context.workspace().panel();
            let mut losses = Vec::with_capacity(hidden.samples());
            for (window, tokens) in tokens.chunks_exact(seqlen).enumerate() {
                let mut sum = 0.0;
                head.logits(&hidden.get(window)?, &mut logits, panel, |first, logits| {
                    sum += next_token_losses(logits, head.vocab_size(), &tokens[first + 1..])
                        .iter()
                        .sum::<f64>();
                    Ok(())
                })?;
                losses.push(sum / (seqlen - 1) as f64);
                events.emit(Event::Progress {
                    done: window as u64 + 1,
                });
            }
            Ok(losses)
        })?;
        self.report = Some(summarise(&losses, self.seqlen));
        Ok(())
    }
}

/// −ln softmax(logits_t)[next_t] for each row that has a next token, in order.
fn next_token_losses(logits: &[f32], vocab_size: usize, next: &[u32]) -> Vec<f64> {
    logits
        .par_chunks_exact(vocab_size)
        .zip(next)
        .map(|(row, &next)| {
            let largest = exp::largest(row);
            let sum = exp::sum_exp_minus(row, largest);
            // Ids were checked against the embedding, which has as many rows as there are logits.
            sum.ln() + f64::from(largest) - f64::from(row[next as usize])
        })
        .collect()
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

    #[test]
    fn losses_are_negative_log_probabilities_of_the_next_token() {
        // Row 0: p = softmax(0, ln 3) = (1/4, 3/4). Row 1: p = (1/2, 1/2), far from zero. Row 2 has no next token.
        let logits = [0.0, 3f32.ln(), 1e4, 1e4, 5.0, 6.0];
        let losses = next_token_losses(&logits, 2, &[1, 0]);
        assert_eq!(losses.len(), 2);
        assert!((losses[0] - (4.0f64 / 3.0).ln()).abs() < 1e-7, "f32 logits");
        assert!((losses[1] - 2f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn perplexity_is_the_exponential_of_the_mean_of_window_means() {
        let report = summarise(&[1.0, 3.0], 8);
        assert_eq!(
            (report.perplexity, report.mean_loss, report.windows),
            (2f64.exp(), 2.0, 2)
        );
        // Variance of (1, 3) is 2, of their mean 1.
        assert_eq!(report.standard_error, 1.0);
        assert_eq!(summarise(&[1.0], 8).standard_error, 0.0);
    }
}
