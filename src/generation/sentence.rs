//! A greedy sentence, as `prune demo` shows it for each model.

use anyhow::Result;

use super::generate::{GenerationRequest, generate};
use super::generator::Generator;
use super::sampler::{Sampler, Sampling};
use crate::data::Tokenizer;

/// Returns the text of the most likely tokens after `prompt`, to the end of the sentence or of the line: `.`, `!`, `?` or a newline.
pub fn sentence(
    generator: &mut Generator,
    tokenizer: &Tokenizer,
    prompt: &str,
    max_tokens: usize,
) -> Result<String> {
    let prompt = tokenizer.encode(prompt)?;
    let request = GenerationRequest { prompt: &prompt, max_tokens, stop_ids: &[] };
    let mut new = Vec::new();
    generate(generator, &request, &mut Sampler::new(&Sampling::GREEDY), |id| {
        new.push(id);
        Ok(!tokenizer.decode(&new)?.contains(['.', '!', '?', '\n']))
    })?;
    Ok(tokenizer.decode(&new)?.trim().to_owned())
}
