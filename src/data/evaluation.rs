//! Evaluation windows: the text that perplexity is measured on.
//!
//! The rule is the reference's: T tokens give floor(T / seqlen) windows that do not overlap, and the rest is dropped. Only the first
//! window may begin with a beginning-of-text token. This is not the word-level perplexity of lm-eval-harness.

use anyhow::Result;

use serde::{Deserialize, Serialize};

use super::cache::TextCache;
use super::calibration::shorter;
use super::joined::{DOCUMENT_WINDOWS, tokenize_joined};
use super::source::Source;
use super::{Tokenizer, digest};
use crate::failure::Failure;
use crate::run::{Events, TextProtocol};

/// SHA-256 of the test split of WikiText-2 as the hub publishes it: 4358 rows joined with two newlines, 1,296,370 bytes.
const PUBLISHED_WIKITEXT_2: &str =
    "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83";

/// The windows, and the record of their origin.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Evaluation {
    /// Token ids, [windows, seqlen] row-major.
    pub tokens: Vec<u32>,
    /// Number of windows.
    pub windows: usize,
    /// Tokens per window.
    pub seqlen: usize,
    /// The record of text and ids.
    pub protocol: TextProtocol,
}

impl Source {
    /// Cuts the evaluation text into windows of `seqlen` tokens, at most `max_windows`.
    ///
    /// # Errors
    /// Fails when the text cannot be read (see [`Source::check`]), has too few tokens for a window, or cannot be tokenized.
    pub fn evaluation(
        &self,
        tokenizer: &Tokenizer,
        seqlen: usize,
        max_windows: Option<usize>,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Evaluation> {
        if seqlen == 0 || max_windows == Some(0) {
            return Err(Failure::usage("no windows to evaluate: seqlen or --eval-windows is 0")
                .hint("use numbers above zero")
                .into());
        }
        let text = tokenize_joined(self, tokenizer, cache, events)?;
        let mut tokens = text.ids;
        let available = tokens.len() / seqlen;
        if available == 0 {
            return Err(Failure::new(format!(
                "the evaluation text is too short for one window of {seqlen} tokens"
            ))
            .detail(format!("`{}` has {} tokens", self.path(), tokens.len()))
            .hint(shorter(tokens.len(), "name a longer text with --eval-dataset"))
            .into());
        }
        let most = if text.is_of_documents { DOCUMENT_WINDOWS } else { usize::MAX };
        let windows = available.min(most).min(max_windows.unwrap_or(usize::MAX));
        tokens.truncate(windows * seqlen);
        tokens.shrink_to_fit();
        if self.dataset == "wikitext2" && text.protocol.text_sha256 != PUBLISHED_WIKITEXT_2 {
            events.warn(format!(
            "`{}` is not the raw test split of WikiText-2 that the hub publishes (wikitext-2-raw-v1): its perplexity does not compare with \
             published numbers. The tokenised edition (`<unk>`), a part, another split and WikiText-103 give other numbers; name such a text \
             by its path alone",
            self.path()
        ));
        }
        let protocol = TextProtocol {
            tokens_used: tokens.len() as u64,
            windows: windows as u64,
            seqlen: seqlen as u64,
            tokens_sha256: digest::of_ids(&tokens),
            ..text.protocol
        };
        Ok(Evaluation { tokens, windows, seqlen, protocol })
    }
}
