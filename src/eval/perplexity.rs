//! Perplexity over non-overlapping windows, layer by layer, within the sweep.
//!
//! For window w of L tokens: ℓ_w = (1/(L−1)) Σ_{t<L} −ln p(x_{t+1} | x_{≤t}), perplexity = exp(mean_w ℓ_w). No beginning-of-text
//! token is put back and the tail is dropped. Reference: `eval_ppl_wikitext` in locuslab/wanda (which multiplies by L and
//! divides by L again). −ln p is taken from logits in f32 with a log-sum-exp accumulated in f64. Logits exist for
//! a few hundred tokens at a time, and for a part of the vocabulary where the head is read in parts: then all windows see
//! the parts in turn, and each token keeps three numbers between parts.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::DType;

use super::divergence::{DenseHead, HeadPair, Meeting, MeetingRole, compare};
use super::named::NamedModel;
use super::next_token::{NextToken, see};
use crate::model::{DecoderLayer, Head};
use crate::run::divergence::DivergenceReport;
use crate::run::manifest::PerplexityReport;
use crate::run::phase::in_layer;
use crate::run::{Event, Phase};
use crate::runtime::{Compute, HiddenStates, Passenger, Reporter, SampleShare, Side};

/// A stream of windows, passed through the model.
pub struct Perplexity<'a> {
    side: Side,
    named: NamedModel,
    hidden: HiddenStates,
    tokens: &'a [u32],
    num_hidden_layers: usize,
    reporter: Reporter<'a>,
    report: Option<PerplexityReport>,
    /// The comparison with the other model, and the part of these windows in it.
    meeting: Option<(Arc<Meeting>, MeetingRole)>,
    /// The final states are left for other runs.
    keeps_states: bool,
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
        Self {
            side,
            named: NamedModel::Only,
            hidden,
            tokens,
            num_hidden_layers,
            reporter,
            report: None,
            meeting: None,
            keeps_states: false,
        }
    }

    /// The same windows, with the name that the run has for their model.
    #[must_use]
    pub fn named(self, named: NamedModel) -> Self {
        Self { named, ..self }
    }

    /// The same windows, compared with the windows of a second model.
    #[must_use]
    pub fn in_meeting(self, meeting: Option<(Arc<Meeting>, MeetingRole)>) -> Self {
        Self { meeting, ..self }
    }

    /// The same windows, whose final states are left for other runs if `keeps_states`.
    #[must_use]
    pub fn keeping_states(self, keeps_states: bool) -> Self {
        Self { keeps_states, ..self }
    }

    /// The states of the windows, between two layers; after the sweep only if they are kept.
    pub fn states(&mut self) -> &mut HiddenStates {
        &mut self.hidden
    }

    /// The divergence from the dense model, after both sweeps; `None` without a comparison, and for the dense model.
    pub fn divergence(&self) -> Option<DivergenceReport> {
        match &self.meeting {
            Some((meeting, MeetingRole::Model)) => meeting.report(),
            _ => None,
        }
    }

    /// The result, after the sweep.
    pub fn report(&self) -> Option<PerplexityReport> {
        match &self.meeting {
            Some((meeting, MeetingRole::Dense)) => self.report.or(meeting.dense_perplexity()),
            _ => self.report,
        }
    }

    /// Measures the perplexity at the head.
    fn measure(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let (hidden, tokens) = (&mut self.hidden, self.tokens);
        let (steps, seqlen) = (hidden.samples() as u64, hidden.seqlen());
        let share = hidden.share().clone();
        let phase = format!("head: {}", self.named.of("perplexity"));
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
            all_losses(&seen, (seqlen, group), &share, compute)
        })?;
        self.report = Some(summarise(&losses, seqlen));
        Ok(())
    }

    /// Measures the divergence from the dense states that wait, and both perplexities unless a device has measured them.
    fn compare(&mut self, meeting: &Meeting, head: &Head, compute: &mut Compute<'_>) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let mut dense = meeting.take().context("the dense states wait for the model")?;
        let (share, seqlen) = (self.hidden.share().clone(), dense.seqlen());
        let (hidden, tokens) = (&mut self.hidden, self.tokens);
        events.emit(Event::PhaseStarted {
            phase: "head: divergence".to_string(),
            unit: "windows",
            steps: hidden.samples() as u64,
        });
        clock.measure(Phase::Head, || -> Result<()> {
            let own = match meeting.head() {
                DenseHead::Same => None,
                DenseHead::Of(source, config) => {
                    let rows = compute.settings().head_rows;
                    Some(Head::open(source, config, rows).context("in the dense model")?)
                }
            };
            let heads = HeadPair {
                dense: (own.as_ref().unwrap_or(head), &mut dense),
                model: (head, hidden),
            };
            let compared = compare(heads, tokens, meeting.positions, compute, &mut |window| {
                events.emit(Event::Progress { done: window as u64 });
                Ok(events.check()?)
            })?;
            meeting.measured(compared.report);
            let group = SUMMED_AT_ONCE / head.vocab_size().max(1);
            if meeting.dense_perplexity().is_none() {
                let losses = all_losses(&compared.dense, (seqlen, group), &share, compute)?;
                meeting.measured_dense(summarise(&losses, seqlen));
            }
            if self.report.is_none() {
                let losses = all_losses(&compared.model, (seqlen, group), &share, compute)?;
                self.report = Some(summarise(&losses, seqlen));
            }
            Ok(())
        })
    }

    fn advance(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        let (Reporter { clock, events }, hidden) = (self.reporter, &mut self.hidden);
        events.emit(Event::PhaseStarted {
            phase: in_layer(layer.index(), self.num_hidden_layers, self.named.evaluate()),
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
        let Some((meeting, role)) = self.meeting.clone() else {
            self.measure(head, compute)?;
            // No later layer needs the windows.
            if !self.keeps_states {
                self.hidden.clear();
            }
            return Ok(());
        };
        if compute.has_device_for_the_head() {
            self.measure(head, compute)?;
        }
        match role {
            MeetingRole::Dense => {
                if let Some(report) = self.report {
                    meeting.measured_dense(report);
                }
                let none = HiddenStates::new(None, 0, [0, 0], DType::F32)?;
                meeting.leave(std::mem::replace(&mut self.hidden, none));
            }
            MeetingRole::Model => {
                self.compare(&meeting, head, compute)?;
                self.hidden.clear();
            }
        }
        Ok(())
    }
}

/// The losses of this many logits' tokens are added up before they join the window's sum, even if fewer logits exist at once.
const SUMMED_AT_ONCE: usize = 1 << 25;

/// ℓ of every window of all ranks, from the tokens of the windows of this rank.
fn all_losses(
    seen: &[NextToken],
    (seqlen, group): (usize, usize),
    share: &SampleShare,
    compute: &Compute<'_>,
) -> Result<Vec<f64>> {
    let losses = seen.chunks_exact(seqlen).map(|seen| window_loss(seen, group));
    let losses = losses.collect::<Result<Vec<f64>>>()?;
    share.gathered(&losses, compute.ranks())
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

    #[test]
    fn perplexity_is_the_exponential_of_the_mean_of_window_means() {
        let report = summarise(&[1.0, 3.0], 8);
        assert_eq!((report.perplexity, report.mean_loss, report.windows), (2f64.exp(), 2.0, 2));
        // Variance of (1, 3) is 2, of their mean 1.
        assert_eq!(report.standard_error, 1.0);
        assert_eq!(summarise(&[1.0], 8).standard_error, 0.0);
    }
}
