//! The pass that scores layers: samples go through the dense model, and every layer's output is compared with its input.
//!
//! [`LayerMeter`] takes the editor's place in the sweep, but leaves the layers as they are. `layer_drop.rs` has the formulas. Of each
//! sample the meter keeps the last token's states of a few layers, and nothing else.

use std::collections::VecDeque;

use anyhow::{Context, Result};
use rayon::prelude::*;

use super::layer_drop::{LayerScores, angular_distance, cosine};
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::linalg::tensor;
use crate::model::{DecoderLayer, ModelConfig};
use crate::run::phase::in_layer;
use crate::run::{Event, Phase};
use crate::runtime::{Compute, Editor, HiddenStates, Reporter};

/// Bytes that the meter keeps for spans of up to `longest` layers, with the input of a sample while its output exists.
pub fn bytes(config: &ModelConfig, samples: usize, seqlen: usize, longest: usize) -> ByteSize {
    let states = samples.saturating_mul(longest + 1).saturating_add(seqlen);
    ByteSize::of(states.saturating_mul(config.hidden_size), size_of::<f32>())
}

/// Scores the layers of a model.
pub struct LayerMeter<'a> {
    samples: HiddenStates,
    /// The longest span whose angular distance is measured.
    longest: usize,
    /// Per sample, the last token before each of the last layers, the earliest first.
    last_tokens: Vec<VecDeque<Vec<f32>>>,
    scores: LayerScores,
    config: &'a ModelConfig,
    reporter: Reporter<'a>,
}

impl<'a> LayerMeter<'a> {
    /// Measures with `samples`, which are embedded already, for spans of up to `longest` layers.
    pub fn new(
        samples: HiddenStates,
        longest: usize,
        config: &'a ModelConfig,
        reporter: Reporter<'a>,
    ) -> Self {
        Self {
            last_tokens: vec![VecDeque::new(); samples.samples()],
            samples,
            longest,
            scores: LayerScores { influence: Vec::new(), angles: vec![Vec::new(); longest] },
            config,
            reporter,
        }
    }

    /// The scores, after the sweep.
    pub fn into_scores(self) -> LayerScores {
        self.scores
    }

    /// Passes all samples through the layer. Returns the sum of the cosines of each sample.
    fn compare(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<Vec<f64>> {
        let Reporter { clock, events } = self.reporter;
        let Self { samples, last_tokens, config, .. } = self;
        events.emit(Event::PhaseStarted {
            phase: in_layer(layer.index(), config.num_hidden_layers, "influence"),
            unit: "samples",
            steps: samples.samples() as u64,
        });
        let width = config.hidden_size;
        let mut sums = vec![0.0; samples.samples()];
        clock.measure(Phase::Propagate, || {
            compute.forward_and_compare(
                layer,
                samples,
                &mut |sample, before, after| {
                    let last = &mut last_tokens[sample];
                    sums[sample] = tensor::with_slice(before, |before| {
                        tensor::with_slice(after, |after| {
                            if last.is_empty() {
                                last.push_back(last_row(before, width));
                            }
                            last.push_back(last_row(after, width));
                            sum_of_cosines(before, after, width)
                        })
                    })??;
                    Ok(())
                },
                &|sample| {
                    let done = sample as u64 + 1;
                    events.emit(Event::Progress { done });
                },
            )
        })?;
        Ok(sums)
    }

    /// Adds the distances of the spans that end with the newest layer, and forgets states that no later span needs.
    fn measure_spans(&mut self) -> Result<()> {
        for (at, distances) in self.scores.angles.iter_mut().enumerate() {
            let mut sum = 0.0;
            for states in &self.last_tokens {
                let newest = states.len().checked_sub(1).context("a sample has passed")?;
                let Some(first) = newest.checked_sub(at + 1) else {
                    // The span would begin before the first layer.
                    return Ok(());
                };
                sum += angular_distance(&states[first], &states[newest]);
            }
            distances.push(sum / self.last_tokens.len() as f64);
        }
        Ok(())
    }
}

impl Editor for LayerMeter<'_> {
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let sums = self.compare(&layer, compute)?;
        let tokens = (self.samples.samples() * self.samples.seqlen()) as f64;
        // BI_i = 1 − (1/T) Σ_t cos
        let influence = 1.0 - sums.iter().sum::<f64>() / tokens;
        check(influence, layer.index())?;
        self.scores.influence.push(influence);
        self.measure_spans()?;
        for states in &mut self.last_tokens {
            while states.len() > self.longest.max(1) {
                states.pop_front();
            }
        }
        Ok(layer)
    }

    fn pass(&mut self, _layer: &DecoderLayer, _compute: &mut Compute<'_>) -> Result<()> {
        Err(anyhow::anyhow!("layers are scored in one sweep"))
    }

    fn has_samples(&self) -> bool {
        true
    }
}

fn last_row(state: &[f32], width: usize) -> Vec<f32> {
    state[state.len() - width..].to_vec()
}

/// Σ_t cos over the tokens of a sample, in their order.
fn sum_of_cosines(before: &[f32], after: &[f32], width: usize) -> f64 {
    let rows = before.par_chunks_exact(width).zip(after.par_chunks_exact(width));
    let cosines: Vec<f64> = rows.map(|(before, after)| cosine(before, after)).collect();
    cosines.iter().sum()
}

/// Refuses an influence that is not a number.
fn check(influence: f64, layer: usize) -> Result<()> {
    if influence.is_finite() {
        return Ok(());
    }
    Err(Failure::new(format!("the hidden states before or after layer {layer} are not finite"))
        .detail(format!("its block influence is {influence}"))
        .hint("check the weights of this model with prune inspect")
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosines_are_added_over_tokens() {
        let (before, after) = ([1.0, 0.0, 0.0, 2.0], [2.0, 0.0, 3.0, 0.0]);
        assert_eq!(sum_of_cosines(&before, &after, 2), 1.0);
        assert_eq!(last_row(&before, 2), [0.0, 2.0]);
        assert!(check(f64::NAN, 3).unwrap_err().to_string().contains("layer 3"));
    }
}
