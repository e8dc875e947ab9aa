//! Token ids to text, token by token, with whole characters only.
//!
//! The stream of the `tokenizers` crate does the work: it decodes a window of the last tokens, because a character may be
//! spread over several tokens, and decoders drop the space at the beginning of a text. It has no end for bytes that never become a
//! character, and fails when a decoder changes text that was already given out (byte fallback does). Here such tokens are
//! decoded alone, and the stream begins again.

use anyhow::Result;

use super::tokenizer::{DecodeStream, Tokenizer};

/// Tokens without a text after which the text is given out as it is. A character has at most four bytes.
const HELD_TOKENS: usize = 16;
/// Tokens of the prompt that the stream decodes before the first token.
const CONTEXT_TOKENS: usize = 16;

/// The text of tokens as they come.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    stream: DecodeStream<'t>,
    /// The tokens since the last text.
    held: Vec<u32>,
}

impl<'t> TextStream<'t> {
    /// A stream that continues `prompt`, whose own text is not given out.
    ///
    /// # Errors
    /// Fails when the tokenizer's decoder refuses a token.
    pub fn after(tokenizer: &'t Tokenizer, prompt: &[u32]) -> Result<Self> {
        let context = &prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..];
        Ok(Self { tokenizer, stream: stream_after(tokenizer, context)?, held: Vec::new() })
    }

    /// Takes a token. Returns the text it completes, which may be empty.
    ///
    /// # Errors
    /// Fails when the tokenizer's decoder refuses the token.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if !self.tokenizer.has_text(id) {
            return Ok(String::new());
        }
        self.held.push(id);
        match self.tokenizer.step(&mut self.stream, id)? {
            Ok(Some(text)) => {
                self.held.clear();
                Ok(text)
            }
            Ok(None) if self.held.len() < HELD_TOKENS => Ok(String::new()),
            Ok(None) | Err(_) => self.finish(),
        }
    }

    /// Returns the text of the tokens that are still held; half a character is U+FFFD.
    ///
    /// # Errors
    /// Fails when the tokenizer's decoder refuses the tokens.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.held)?;
        self.stream = stream_after(self.tokenizer, &self.held)?;
        self.held.clear();
        Ok(text)
    }
}

/// A stream that has read the tokens of `context`, or an empty stream if they have no whole character.
fn stream_after<'t>(tokenizer: &'t Tokenizer, context: &[u32]) -> Result<DecodeStream<'t>> {
    let mut stream = tokenizer.decode_stream();
    let mut has_text = false;
    for &id in context.iter().filter(|&&id| tokenizer.has_text(id)) {
        has_text |= matches!(tokenizer.step(&mut stream, id)?, Ok(Some(_)));
    }
    Ok(if has_text { stream } else { tokenizer.decode_stream() })
}
