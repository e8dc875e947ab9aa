//! The loop: read the prompt, pick a token, read it, pick the next.

use std::time::Instant;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::generator::{Generator, Sequence};
use super::sampler::Sampler;
use crate::failure::Failure;

/// What is to be written.
#[derive(Debug, Clone, Copy)]
pub struct Order<'a> {
    /// What it goes on from.
    pub prompt: &'a [u32],
    /// New tokens, at most.
    pub max_tokens: usize,
    /// Tokens that end it; empty goes on to the limit.
    pub stop_ids: &'a [u32],
}

/// Why it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model said so.
    Eos,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The model has no positions left.
    Positions,
    /// Whoever looked on wanted no more.
    Stopped,
}

impl Finish {
    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::MaxTokens => "max_tokens",
            Self::Positions => "positions",
            Self::Stopped => "stopped",
        }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// The new tokens, one that ended it included.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Reading the prompt, up to the first token.
    pub prompt_seconds: f64,
    /// From the first token to the last.
    pub seconds: f64,
}

impl Order<'_> {
    /// Tokens of prompt and text together, at most: what a [`Sequence`] needs room for.
    ///
    /// # Errors
    /// Fails for an empty prompt, and for one that leaves the model's `positions` no place for a token.
    pub fn capacity(&self, positions: usize) -> Result<usize, Failure> {
        let prompt = self.prompt.len();
        if prompt == 0 {
            return Err(Failure::usage("the prompt is empty: it has no tokens")
                .hint("write a few words: --prompt \"Once upon a time\""));
        }
        if prompt >= positions {
            return Err(Failure::new(format!(
                "the prompt has {prompt} tokens, and the model {positions} positions for prompt and text together"
            ))
            .hint(format!(
                "shorten the prompt to {} tokens or less",
                positions.saturating_sub(1)
            )));
        }
        Ok(prompt.saturating_add(self.max_tokens).min(positions))
    }
}

/// Writes until one of the reasons of [`Finish`]. `see` is shown every new token and says whether to go on.
///
/// # Errors
/// Fails as [`Order::capacity`], [`Generator::read`] and [`Sampler::pick`] do, and when `see` does.
pub fn write(
    generator: &mut Generator,
    order: &Order<'_>,
    sampler: &mut Sampler,
    see: impl FnMut(u32) -> Result<bool> + Send,
) -> Result<Written> {
    // On a thread of the pool: handing each of a token's hundreds of products over from outside would cost as much as the
    // products of a small model.
    rayon::scope(|_| write_here(generator, order, sampler, see))
}

fn write_here(
    generator: &mut Generator,
    order: &Order<'_>,
    sampler: &mut Sampler,
    mut see: impl FnMut(u32) -> Result<bool>,
) -> Result<Written> {
    let capacity = order.capacity(generator.config().max_position_embeddings)?;
    let room = capacity - order.prompt.len();
    let mut sequence: Sequence = generator.begin(capacity)?;
    let mut ids = Vec::with_capacity(room);
    let began = Instant::now();
    let mut next = sampler.pick(generator.read(&mut sequence, order.prompt)?)?;
    let prompt_seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let finish = loop {
        ids.push(next);
        let wants_more = see(next)?;
        if order.stop_ids.contains(&next) {
            break Finish::Eos;
        }
        if !wants_more {
            break Finish::Stopped;
        }
        if ids.len() == room {
            break if room < order.max_tokens {
                Finish::Positions
            } else {
                Finish::MaxTokens
            };
        }
        next = sampler.pick(generator.read(&mut sequence, &[next])?)?;
    };
    Ok(Written {
        ids,
        finish,
        prompt_seconds,
        seconds: began.elapsed().as_secs_f64(),
    })
}

impl Written {
    /// Tokens of the prompt per second.
    pub fn prompt_rate(&self, prompt_tokens: usize) -> f64 {
        rate(prompt_tokens, self.prompt_seconds)
    }

    /// New tokens per second, the first one aside, which came with the prompt; none where it is the only one.
    pub fn rate(&self) -> Option<f64> {
        (self.ids.len() > 1).then(|| rate(self.ids.len() - 1, self.seconds))
    }
}

fn rate(tokens: usize, seconds: f64) -> f64 {
    tokens as f64 / seconds.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(prompt: &[u32], max_tokens: usize) -> Order<'_> {
        Order {
            prompt,
            max_tokens,
            stop_ids: &[],
        }
    }

    #[test]
    fn prompt_and_text_share_the_positions() {
        assert_eq!(order(&[1, 2], 5).capacity(10), Ok(7));
        assert_eq!(order(&[1, 2], 8).capacity(10), Ok(10));
        assert_eq!(order(&[1, 2], usize::MAX).capacity(10), Ok(10));
        let failure = order(&[1, 2, 3], 5).capacity(3).unwrap_err();
        assert_eq!(
            failure.message,
            "the prompt has 3 tokens, and the model 3 positions for prompt and text together"
        );
        assert!(order(&[], 5).capacity(10).unwrap_err().is_usage);
    }

    #[test]
    fn rates_leave_the_first_token_to_the_prompt() {
        let written = Written {
            ids: vec![1, 2, 3],
            finish: Finish::Eos,
            prompt_seconds: 0.5,
            seconds: 4.0,
        };
        assert_eq!(written.prompt_rate(10), 20.0);
        assert_eq!(written.rate(), Some(0.5));
    }
}
