//! The choice of the next token: the most likely token, or a token drawn by its probability.
//!
//! p_i = exp(l_i / T) / Σ_j exp(l_j / T) over the logits l at temperature T. Of the tokens in order of p, only the first `top_k`
//! and the smallest set that reaches `top_p` may be drawn (Holtzman et al. 2020, arXiv:1904.09751 §3.1). Without `top_k`, a
//! seed draws the tokens that candle-transformers' `LogitsProcessor` draws, the oracle of the tests; with `top_k` that crate lists
//! the tokens in an order of its own. The crate is not a dependency because it would take a tenth of the time of a clean build.

use anyhow::{Context, Result};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use rand::SeedableRng;
use rand::distr::{Distribution, weighted::WeightedIndex};
use rand::rngs::StdRng;
use serde::Serialize;

use crate::failure::Failure;

/// The settings of the choice.
#[derive(Debug, Clone, Copy, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Writing")]
pub struct Sampling {
    /// 0 takes the likeliest token each time; 1 draws by the model's probabilities, less makes it surer
    // Of equally likely tokens, the lowest id.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: f64,

    /// Draw from the smallest set of tokens whose probabilities reach P [default: from all]
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = top_p)]
    pub top_p: Option<f64>,

    /// Draw from the K likeliest tokens [default: from all]
    #[arg(long, value_name = "K", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub top_k: Option<usize>,

    /// Seed of the draws; the same seed writes the same text
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
}

/// A temperature of the command line.
fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("it is 0, for the likeliest token, or more; 0.7 is a usual choice".to_string()),
    }
}

/// A probability of the command line.
fn top_p(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("it is a probability above 0 and up to 1; 0.9 is a usual choice".to_string()),
    }
}

impl Sampling {
    /// The most likely token each time.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: None, top_k: None, seed: 0 };

    /// Below this temperature, divided logits could overflow f32, and only the most likely token would be drawn anyway.
    const LOWEST_TEMPERATURE: f64 = 1e-7;

    fn is_greedy(&self) -> bool {
        self.temperature < Self::LOWEST_TEMPERATURE
    }
}

/// Picks the next token of a text.
pub struct Sampler {
    sampling: Sampling,
    random: StdRng,
}

impl Sampler {
    /// A sampler at the beginning of its random numbers.
    pub fn new(sampling: &Sampling) -> Self {
        Self { sampling: *sampling, random: StdRng::seed_from_u64(sampling.seed) }
    }

    /// Picks a token by its logits `[vocab_size]`.
    ///
    /// # Errors
    /// Fails when a logit is NaN or infinite, because the model is broken then, and when there are no logits.
    pub fn pick(&mut self, logits: &[f32]) -> Result<u32> {
        if let Some(id) = logits.iter().position(|logit| !logit.is_finite()) {
            return Err(Failure::new("the model's logits are not finite")
                .detail(format!("that of token id {id} is {}", logits[id]))
                .hint("`prune inspect DIR` finds weights that are not finite")
                .into());
        }
        let token = if self.sampling.is_greedy() {
            first_of_the_largest(logits)
        } else {
            let mut weights = probabilities(logits, self.sampling.temperature);
            self.keep_most_likely(&mut weights);
            let choice = WeightedIndex::new(&weights).context("there is no token to draw")?;
            choice.sample(&mut self.random)
        };
        Ok(u32::try_from(token)?)
    }

    /// Sets the probabilities that `top_k` and `top_p` exclude to 0. Among equal probabilities, the lower id comes first.
    fn keep_most_likely(&self, probabilities: &mut [f32]) {
        let Sampling { top_p, top_k, .. } = self.sampling;
        let top_p = top_p.filter(|&p| p > 0.0 && p < 1.0);
        if top_p.is_none() && top_k.is_none_or(|k| k >= probabilities.len()) {
            return;
        }
        let mut by_probability: Vec<usize> = (0..probabilities.len()).collect();
        by_probability.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
        let mut sum = 0.0;
        for (rank, &token) in by_probability.iter().enumerate() {
            // The most likely token stays, even if P is 0 in f32.
            let is_enough = rank > 0 && top_p.is_some_and(|p| sum >= p as f32);
            if is_enough || top_k.is_some_and(|k| rank >= k.max(1)) {
                probabilities[token] = 0.0;
            } else {
                sum += probabilities[token];
            }
        }
    }
}

fn first_of_the_largest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best
}

fn probabilities(logits: &[f32], temperature: f64) -> Vec<f32> {
    let colder = (1.0 / temperature) as f32;
    let scaled = logits.iter().map(|logit| logit * colder);
    let largest = scaled.clone().fold(f32::NEG_INFINITY, f32::max);
    let mut probabilities: Vec<f32> = scaled.map(|logit| (logit - largest).exp()).collect();
    let sum: f32 = probabilities.iter().sum();
    for probability in &mut probabilities {
        *probability /= sum;
    }
    probabilities
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picks(sampling: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(&sampling);
        (0..count).map(|_| sampler.pick(logits).unwrap()).collect()
    }

    const HOT: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    #[test]
    fn the_likeliest_token_is_the_first_of_the_largest() {
        assert_eq!(picks(Sampling::GREEDY, &[-3.0, 2.0, 2.0, -1.0], 2), [1, 1]);
        let cold = Sampling { temperature: 1e-9, ..HOT };
        assert_eq!(picks(cold, &[-3.0, 2.0, 2.0, 1.999], 1), [1]);
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error_under_every_rule() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for sampling in [Sampling::GREEDY, HOT] {
                let error = Sampler::new(&sampling).pick(&[1.0, bad]).unwrap_err();
                assert!(error.to_string().contains("token id 1"), "{error}");
            }
        }
    }

    #[test]
    fn a_seed_fixes_the_draws_and_another_changes_them() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let draws = picks(HOT, &logits, 40);
        assert_eq!(draws, picks(HOT, &logits, 40));
        assert_ne!(draws, picks(Sampling { seed: 1, ..HOT }, &logits, 40));
    }

    #[test]
    fn draws_follow_the_probabilities() {
        // p = 1/8, 1/8, 6/8; 800 draws are within five deviations of 12 of 600.
        let logits = [0.0, 0.0, 6f32.ln()];
        let draws = picks(HOT, &logits, 800);
        let last = draws.iter().filter(|&&id| id == 2).count();
        assert!((540..=660).contains(&last), "{last}");
    }

    #[test]
    fn top_k_and_top_p_leave_the_rest_undrawn() {
        // p = 0.5, 0.25, 0.125, 0.125
        let logits = [4f32, 2.0, 1.0, 1.0].map(f32::ln);
        let drawn = |sampling: Sampling| {
            let mut ids = picks(sampling, &logits, 300);
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        let (top_k, top_p) = (Some(2), Some(0.6));
        assert_eq!(drawn(HOT), [0, 1, 2, 3]);
        assert_eq!(drawn(Sampling { top_k, ..HOT }), [0, 1]);
        assert_eq!(drawn(Sampling { top_p, ..HOT }), [0, 1]);
        let top_p = Some(0.4);
        assert_eq!(drawn(Sampling { top_k, top_p, ..HOT }), [0]);
        assert_eq!(drawn(Sampling { top_p: Some(1.0), ..HOT }), [0, 1, 2, 3]);
    }

    #[test]
    fn a_seed_draws_what_it_draws_with_candle() {
        use candle_core::{Device, Tensor};
        use candle_transformers::generation::{LogitsProcessor, Sampling as Rule};
        let logits: Vec<f32> = (0..300).map(|i| 3.0 * (i as f32 * 0.37).sin()).collect();
        let tensor = Tensor::from_slice(&logits, logits.len(), &Device::Cpu).unwrap();
        let (temperature, seed) = (0.8, 7);
        for (top_p, rule) in [
            (None, Rule::All { temperature }),
            (Some(0.7), Rule::TopP { p: 0.7, temperature }),
            (None, Rule::ArgMax),
        ] {
            let greedy = rule == Rule::ArgMax;
            let mut candle = LogitsProcessor::from_sampling(seed, rule);
            let theirs: Vec<u32> = (0..200).map(|_| candle.sample(&tensor).unwrap()).collect();
            let sampling = Sampling {
                temperature: if greedy { 0.0 } else { temperature },
                top_p,
                top_k: None,
                seed,
            };
            assert_eq!(picks(sampling, &logits, 200), theirs, "{top_p:?}");
        }
    }
}
