//! Tokens to text as they come, no character printed in halves.
//!
//! Decoders look beyond one token: a character may be spread over several (each alone decodes to U+FFFD), and some drop the
//! space a text begins with. So a window of the last tokens is decoded again with each new one, and what it has more than
//! before is given out; a tail that may still become a character waits.

use anyhow::Result;

/// What stands for bytes that are no character, or not yet.
const REPLACEMENT: char = '\u{fffd}';

/// A character has at most four bytes; a decoder that is still at U+FFFD after so many tokens means it.
const HELD_TOKENS: usize = 16;

/// Tokens of the prompt that the first new ones are decoded behind.
const CONTEXT_TOKENS: usize = 16;

/// The text of a growing list of tokens.
pub struct TextStream<D> {
    decode: D,
    /// The tokens whose text can still change, and some before them.
    window: Vec<u32>,
    /// Of the window, those before the last place where the text was whole.
    settled: usize,
    /// What the window's text had when something was last given out.
    shown: String,
}

impl<D: Fn(&[u32]) -> Result<String>> TextStream<D> {
    /// A stream that goes on after `prompt`, of whose text nothing is given out.
    ///
    /// # Errors
    /// Fails when `decode` does.
    pub fn after(prompt: &[u32], decode: D) -> Result<Self> {
        let window = prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        let shown = decode(&window)?;
        Ok(Self {
            decode,
            settled: window.len(),
            window,
            shown,
        })
    }

    /// Takes a token; returns what the text has more, which may be nothing.
    ///
    /// # Errors
    /// Fails when `decode` does.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = (self.decode)(&self.window)?;
        let is_held = self.window.len() - self.settled <= HELD_TOKENS;
        let whole = if is_held {
            text.trim_end_matches(REPLACEMENT)
        } else {
            text.as_str()
        };
        let more = beyond(&self.shown, whole).to_owned();
        if !more.is_empty() {
            whole.clone_into(&mut self.shown);
        }
        if whole.len() == text.len() && !more.is_empty() {
            // The text is whole here: what lies before the last such place is needed no more.
            self.window.drain(..self.settled);
            self.settled = self.window.len();
            self.shown = (self.decode)(&self.window)?;
        } else if !is_held && text == self.shown {
            // A model that says nothing for long (special tokens, ids without a text) is not decoded again and again.
            self.window.truncate(self.settled);
        }
        Ok(more)
    }

    /// The end: what was held back, as the decoder sees it.
    ///
    /// # Errors
    /// Fails when `decode` does.
    pub fn finish(&mut self) -> Result<String> {
        let text = (self.decode)(&self.window)?;
        let more = beyond(&self.shown, &text).to_owned();
        self.shown = text;
        Ok(more)
    }
}

/// What `text` has more than `shown`. A decoder that changes its mind about what was shown is followed by count.
fn beyond<'a>(shown: &str, text: &'a str) -> &'a str {
    if let Some(more) = text.strip_prefix(shown) {
        return more;
    }
    let count = shown.chars().count();
    text.char_indices()
        .nth(count)
        .map_or("", |(at, _)| &text[at..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// One byte per id, as byte-level tokenizers do it.
    fn bytes(ids: &[u32]) -> Result<String> {
        let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Words that bring their space, which the decoder drops at the beginning, as sentencepiece's does.
    fn words(ids: &[u32]) -> Result<String> {
        let text: String = ids.iter().map(|id| format!(" w{id}")).collect();
        Ok(text.trim_start().to_owned())
    }

    fn pushed<D: Fn(&[u32]) -> Result<String>>(
        stream: &mut TextStream<D>,
        ids: &[u32],
    ) -> Vec<String> {
        ids.iter().map(|&id| stream.push(id).unwrap()).collect()
    }

    fn ids(text: &[u8]) -> Vec<u32> {
        text.iter().map(|&byte| u32::from(byte)).collect()
    }

    #[test]
    fn a_character_in_several_tokens_comes_whole() {
        let mut stream = TextStream::after(&[], bytes).unwrap();
        let parts = pushed(&mut stream, &ids("aé🦀b".as_bytes()));
        assert_eq!(parts, ["a", "", "é", "", "", "", "🦀", "b"]);
        assert_eq!(stream.finish().unwrap(), "");
    }

    #[test]
    fn half_a_character_at_the_end_is_said_at_the_end() {
        let mut stream = TextStream::after(&[], bytes).unwrap();
        assert_eq!(pushed(&mut stream, &ids(b"a\xf0\x9f")), ["a", "", ""]);
        assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    }

    #[test]
    fn the_space_between_prompt_and_text_is_kept() {
        let mut stream = TextStream::after(&[1, 2], words).unwrap();
        assert_eq!(pushed(&mut stream, &[3, 4]), [" w3", " w4"]);
        let mut alone = TextStream::after(&[], words).unwrap();
        assert_eq!(pushed(&mut alone, &[3, 4]), ["w3", " w4"]);
    }

    #[test]
    fn a_prompt_that_ends_within_a_character_is_gone_on_with() {
        let mut stream = TextStream::after(&ids(b"x\xc3"), bytes).unwrap();
        // What the prompt showed as U+FFFD is a character now; it cannot be shown again.
        assert_eq!(pushed(&mut stream, &ids(b"\xa9y")), ["", "y"]);
    }

    #[test]
    fn tokens_without_text_and_decoders_that_change_their_mind_do_no_harm() {
        let silent = |ids: &[u32]| {
            let spoken: Vec<u32> = ids.iter().copied().filter(|&id| id > 9).collect();
            words(&spoken)
        };
        let mut stream = TextStream::after(&[], silent).unwrap();
        assert_eq!(
            pushed(&mut stream, &[1, 11, 2, 3, 12]),
            ["", "w11", "", "", " w12"]
        );
        assert_eq!(pushed(&mut stream, &[1; 1000]).concat(), "");
        assert!(stream.window.len() <= 20, "{}", stream.window.len());
        assert_eq!(stream.push(13).unwrap(), " w13");
        // All or nothing per run of bytes, as byte fallback does it.
        let strict = |ids: &[u32]| {
            let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
            Ok(String::from_utf8(bytes).unwrap_or_else(|_| "\u{fffd}".repeat(ids.len())))
        };
        let mut stream = TextStream::after(&[], strict).unwrap();
        let parts = pushed(&mut stream, &ids(b"\xc3\xa9\x80ab"));
        assert_eq!(parts[..2], ["", "é"]);
    }

    proptest! {
        #[test]
        fn the_parts_are_the_whole(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut stream = TextStream::after(&[], bytes).unwrap();
            let mut parts = pushed(&mut stream, &ids(&text)).concat();
            parts += &stream.finish().unwrap();
            // Sixteen bytes in a row that are no text, five replacements or more, are given up on, and what follows may be cut elsewhere.
            let lossy = String::from_utf8_lossy(&text);
            if !lossy.contains(&"\u{fffd}".repeat(5)) {
                prop_assert_eq!(parts, lossy);
            }
        }

        #[test]
        fn real_text_is_never_cut(text in "\\PC{0,60}") {
            let mut stream = TextStream::after(&[], bytes).unwrap();
            let mut parts = pushed(&mut stream, &ids(text.as_bytes()));
            parts.push(stream.finish().unwrap());
            prop_assert_eq!(parts.concat(), text);
        }
    }
}
