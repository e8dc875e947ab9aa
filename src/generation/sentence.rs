//! One sentence, greedily: what `prune demo` shows of a model.

use anyhow::Result;

use super::generator::Generator;
use super::sampler::{Sampler, Sampling};
use super::writing::{Order, write};
use crate::data::Tokenizer;

/// Goes on after `prompt` with the likeliest tokens to the end of the sentence, or of the line: `.`, `!`, `?` or a newline.
/// Returns what was added.
///
/// # Errors
/// Fails as [`write()`], and when the tokenizer cannot express the prompt.
pub fn sentence(
    generator: &mut Generator,
    tokenizer: &Tokenizer,
    prompt: &str,
    max_tokens: usize,
) -> Result<String> {
    let prompt = tokenizer.encode(prompt)?;
    let order = Order {
        prompt: &prompt,
        max_tokens,
        stop_ids: &[],
    };
    let mut new = Vec::new();
    write(
        generator,
        &order,
        &mut Sampler::new(&Sampling::GREEDY),
        |id| {
            new.push(id);
            Ok(!tokenizer.decode(&new)?.contains(['.', '!', '?', '\n']))
        },
    )?;
    Ok(tokenizer.decode(&new)?.trim().to_owned())
}
