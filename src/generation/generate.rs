//! The generation loop: read the prompt, pick a token, read it, pick the next.

use std::time::Instant;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::generator::{Generator, Sequence};
use super::sampler::Sampler;
use crate::failure::Failure;

/// A prompt and the limits of its continuation.
#[derive(Debug, Clone, Copy)]
pub struct GenerationRequest<'a> {
    /// Token ids of the prompt.
    pub prompt: &'a [u32],
    /// New tokens at most.
    pub max_tokens: usize,
    /// Tokens that end the text; without them it ends at the limit.
    pub stop_ids: &'a [u32],
}

/// The reason for the end of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model picked a stop token.
    Eos,
    /// The request's number of tokens is reached.
    MaxTokens,
    /// The model has no position left.
    Positions,
    /// The caller stopped.
    Stopped,
}

impl FinishReason {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::MaxTokens => "max_tokens",
            Self::Positions => "positions",
            Self::Stopped => "stopped",
        }
    }
}

/// The generated tokens and the times they took.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The new tokens. A stop token at the end is included.
    pub ids: Vec<u32>,
    /// The reason for the end.
    pub finish: FinishReason,
    /// Seconds from the start to the first token.
    pub prompt_seconds: f64,
    /// Seconds from the first token to the last.
    pub seconds: f64,
}

impl GenerationRequest<'_> {
    /// Tokens of prompt and text together, at most: the capacity of the [`Sequence`].
    ///
    /// # Errors
    /// Fails for an empty prompt, and for a prompt that takes all of the model's `positions`.
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

/// Generates tokens until a [`FinishReason`] applies. `on_token` receives every new token, and returns false to stop.
pub fn generate(
    generator: &mut Generator,
    request: &GenerationRequest<'_>,
    sampler: &mut Sampler,
    on_token: impl FnMut(u32) -> Result<bool> + Send,
) -> Result<Generated> {
    // The loop runs on a thread of the pool. From outside the pool, starting each of a token's hundreds of products would cost as
    // much as the products of a small model.
    rayon::scope(|_| generate_here(generator, request, sampler, on_token))
}

fn generate_here(
    generator: &mut Generator,
    request: &GenerationRequest<'_>,
    sampler: &mut Sampler,
    mut on_token: impl FnMut(u32) -> Result<bool>,
) -> Result<Generated> {
    let capacity = request.capacity(generator.config().max_position_embeddings)?;
    let room = capacity - request.prompt.len();
    let mut sequence: Sequence = generator.begin(capacity)?;
    let mut ids = Vec::with_capacity(room);
    let began = Instant::now();
    let mut next = sampler.pick(generator.read(&mut sequence, request.prompt)?)?;
    let prompt_seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let finish = loop {
        ids.push(next);
        let wants_more = on_token(next)?;
        if request.stop_ids.contains(&next) {
            break FinishReason::Eos;
        }
        if !wants_more {
            break FinishReason::Stopped;
        }
        if ids.len() == room {
            break if room < request.max_tokens {
                FinishReason::Positions
            } else {
                FinishReason::MaxTokens
            };
        }
        next = sampler.pick(generator.read(&mut sequence, &[next])?)?;
    };
    Ok(Generated { ids, finish, prompt_seconds, seconds: began.elapsed().as_secs_f64() })
}

impl Generated {
    /// Tokens of the prompt per second.
    pub fn prompt_rate(&self, prompt_tokens: usize) -> f64 {
        rate(prompt_tokens, self.prompt_seconds)
    }

    /// New tokens per second, without the first token, which belongs to the prompt. `None` for fewer than two tokens.
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

    fn request(prompt: &[u32], max_tokens: usize) -> GenerationRequest<'_> {
        GenerationRequest { prompt, max_tokens, stop_ids: &[] }
    }

    #[test]
    fn prompt_and_text_share_the_positions() {
        assert_eq!(request(&[1, 2], 5).capacity(10), Ok(7));
        assert_eq!(request(&[1, 2], 8).capacity(10), Ok(10));
        assert_eq!(request(&[1, 2], usize::MAX).capacity(10), Ok(10));
        let failure = request(&[1, 2, 3], 5).capacity(3).unwrap_err();
        assert_eq!(
            failure.message,
            "the prompt has 3 tokens, and the model 3 positions for prompt and text together"
        );
        assert!(request(&[], 5).capacity(10).unwrap_err().is_usage);
    }

    #[test]
    fn rates_leave_the_first_token_to_the_prompt() {
        let written = Generated {
            ids: vec![1, 2, 3],
            finish: FinishReason::Eos,
            prompt_seconds: 0.5,
            seconds: 4.0,
        };
        assert_eq!(written.prompt_rate(10), 20.0);
        assert_eq!(written.rate(), Some(0.5));
    }
}
