//! The size of a text, and the presence of its ids in the cache: the facts that its memory is planned with.

use std::path::Path;

use anyhow::Result;

use super::Tokenizer;
use super::cache::TextCache;
use super::joined::JoinedText;
use super::source::{Files, Source};
use crate::bytes::ByteSize;
use crate::run::Silent;

/// The facts that decide the memory of tokenizing a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOutlook {
    /// The size of the text as it is tokenized. `None` for a file of documents, which would have to be unpacked first: calibration
    /// tokenizes each document alone, and evaluation joins 1100 of them.
    pub text: Option<ByteSize>,
    /// The ids are in the cache, and the text is read for its hash only. False for documents.
    pub is_cached: bool,
}

impl Source {
    /// Reads a text once, portion by portion, for its size and its hash. Does not tokenize it.
    ///
    /// After a change of `tokenizer_config.json`, `is_cached` may be true although the cached ids belong to the old settings.
    /// `tokenizer.json` in `model_folder` is hashed but not loaded.
    ///
    /// # Errors
    /// Fails when the text or `tokenizer.json` is missing or cannot be read.
    pub fn outlook(&self, model_folder: &Path, cache: &TextCache) -> Result<TextOutlook> {
        if matches!(self.files, Files::Documents(..)) {
            return Ok(TextOutlook { text: None, is_cached: false });
        }
        let joined = JoinedText::open(self, cache, &Silent)?.digest()?;
        let is_cached = cache.folder().is_some()
            && Tokenizer::possible_hashes(model_folder)?
                .iter()
                .any(|tokenizer| cache.has_token_ids(tokenizer, &joined.sha256));
        Ok(TextOutlook { text: Some(ByteSize(joined.bytes)), is_cached })
    }
}
