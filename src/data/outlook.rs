//! What can be known about a text before any work is done on it: how large it is, and whether its ids are in the cache.

use std::path::Path;

use anyhow::Result;

use super::cache::TextCache;
use super::dataset::{DatasetSpec, Source, locate};
use super::joined::JoinedText;
use super::{Role, Tokenizer};
use crate::bytes::ByteSize;
use crate::run::Silent;

/// What tokenising a text will cost depends on this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextOutlook {
    /// The size of the text as it is tokenised. None for a file of documents, which would have to be unpacked first: to
    /// calibrate they are tokenised one by one, to evaluate 1100 of them are joined.
    pub text: Option<ByteSize>,
    /// The ids are in the cache, so that the text is only read for its hash. False for documents.
    pub is_cached: bool,
}

/// Reads a text once, for its size and its hash, without tokenising it: no more than a few portions of it are in memory.
///
/// Where `tokenizer_config.json` was changed since the ids were kept, they may be said to be there and are not.
///
/// # Arguments
///
/// * `model_folder` - the folder with `tokenizer.json`, which is hashed but not loaded
///
/// # Errors
///
/// Fails when the text is missing or cannot be read (see [`super::check`]), and when `tokenizer.json` cannot be.
pub fn outlook(
    spec: &DatasetSpec,
    role: Role,
    model_folder: &Path,
    cache: &TextCache,
) -> Result<TextOutlook> {
    let source = locate(spec, role)?;
    if matches!(source, Source::Documents(..)) {
        return Ok(TextOutlook {
            text: None,
            is_cached: false,
        });
    }
    let seen = JoinedText::open(&source, role, cache, &Silent)?.look()?;
    let is_cached = cache.folder().is_some()
        && Tokenizer::possible_hashes(model_folder)?
            .iter()
            .any(|tokenizer| cache.has_token_ids(tokenizer, &seen.sha256));
    Ok(TextOutlook {
        text: Some(ByteSize(seen.bytes)),
        is_cached,
    })
}
