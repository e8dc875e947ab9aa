//! The memory of tokenizing, for the memory plan: from the size of a tokenizer and the size of a text.
//!
//! J = bytes of `tokenizer.json`, E = its entries (tokens and merges), T = bytes of the text, w = workers (threads, at most 8):
//!
//! ```text
//! load     = J + 250 · E                               215 · E if a merge is written as one string
//! kept     = 210 · E
//! ids      = 1.2 · T
//! retained = 1.5 MiB + w · 0.5 MiB                     0 for a tokenizer without a pattern
//! working  = w · (16 KiB · 95 + 4 MiB) + w · 64 KiB    120 · T for a tokenizer whose texts cannot be cut; 0 if the ids come from the cache
//! tokenize = max(load, kept + ids + working + retained)
//! ```
//!
//! `retained` stays until the run ends: the library keeps the tables of a pattern. Resident memory after tokenizing a text of 9.8 MiB and
//! dropping the tokenizer, less the memory that a tokenizer without a pattern (Llama 2's) leaves, with 1, 2 and 8 threads: 1.8, 2.1 and
//! 5.2 MiB with GPT-2's pattern, 1.1, 2.5 and 1.4 MiB with Llama 3's.
//!
//! The constants are resident anonymous memory, measured on Linux with glibc and the tokenizers of Llama 2 (93,249 entries) and
//! Llama 3 (408,147), each written with indentation, without it, and with merges as strings:
//!
//! | bytes | pairs | strings |
//! | --- | --- | --- |
//! | per entry at the peak of loading, in addition to J | 237 to 246 | 191 to 213 |
//! | per entry after loading | 180 to 205 | 180 to 205 |
//!
//! Of the memory after loading, 70 to 76 bytes per entry are in use; the allocator keeps the rest for later, so the plan is above the
//! use. In one call, a byte of text takes 94 (Llama 2) and 77 bytes (Llama 3): normalized text with its alignments, pre-tokens,
//! symbols, a string per token. For a text of 9.8 MiB, 76 and 113 bytes per byte were resident. A worker keeps the symbols of up to
//! 10,000 words, 3.6 MiB with the tokenizer of Llama 3. An id has four bytes. English text has 3.8 to 4.5 bytes per id, and the unused
//! half of the list of ids is not resident. Text outside the vocabulary may have four times as many ids as planned. Models that
//! are not byte pairs take more memory to load; the plan does not count it.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::tokenizer_file::{LARGEST, no_tokenizer, unreadable};
use crate::bytes::ByteSize;
use crate::input::{self, Expected};

/// A piece ends at the first safe place after this many bytes. A worker takes 1.5 MiB for it.
pub(super) const PIECE_BYTES: usize = 16 << 10;
/// Pieces per worker in a batch. The worker encodes a piece while the text of its next pieces waits in memory.
pub(super) const PIECES_PER_WORKER: usize = 4;
/// Workers at most. Each worker has its own tables, and eight encode any usual text in seconds.
pub(super) const MOST_WORKERS: usize = 8;
/// Bytes per entry at the peak of loading, with merges as pairs.
const LOAD_OF_PAIRS: usize = 250;
/// Bytes per entry at the peak of loading, with merges as strings, which the library reads directly.
const LOAD_OF_STRINGS: usize = 215;
/// Bytes per entry after loading.
const KEPT: usize = 210;
/// Bytes of ids per byte of text, in tenths.
const IDS: u64 = 12;
/// Bytes of a worker per byte of its piece, in tenths.
const PIECE: u64 = 950;
/// Bytes per byte of a text that is encoded in one call, in tenths.
const WHOLE: u64 = 1200;
/// The text size that stands for a file of documents. It covers the index of its lines (8 MiB) and a document at a time.
const DOCUMENTS: ByteSize = ByteSize(16 << 20);
/// The size of a document, where a document is encoded in one call.
const DOCUMENT: ByteSize = ByteSize(1 << 20);
/// Memory of a pattern after its last use, and the part of each worker.
const PATTERN: ByteSize = ByteSize(3 << 19);
const PATTERN_OF_WORKER: ByteSize = ByteSize(1 << 19);
/// The words that a worker keeps.
const WORDS: ByteSize = ByteSize(4 << 20);

/// The size of a tokenizer, read from its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizerSize {
    /// The size of `tokenizer.json`.
    pub json: ByteSize,
    /// Number of tokens and merges.
    pub entries: usize,
    /// True if a merge is written as a pair of strings, false if as one string with a space.
    pub has_pairs: bool,
    /// The pre-tokenizer splits texts by a pattern, a regular expression.
    pub has_pattern: bool,
}

/// The way in which a text becomes token ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// The ids come from the cache, and the text is read for its hash only.
    Cached,
    /// In pieces, by several workers.
    InPieces,
    /// In one call: texts of the tokenizer cannot be cut, see [`Tokenizer::is_bounded`](super::Tokenizer::is_bounded).
    InOneCall,
}

impl TokenizerSize {
    /// Counts the entries in the `tokenizer.json` of a model folder, without loading the tokenizer. Takes the memory of the file.
    ///
    /// # Errors
    /// Fails when the file cannot be read or is not JSON with a `model`.
    pub fn of(model_folder: &Path) -> Result<Self> {
        let path = model_folder.join("tokenizer.json");
        let bytes =
            input::read(&path, LARGEST, Expected::Json).map_err(|error| match error.kind() {
                ErrorKind::NotFound => no_tokenizer(model_folder),
                _ => unreadable(&path, &error),
            })?;
        let file: CountedFile = serde_json::from_slice(&bytes)
            .with_context(|| format!("`{}` is not a tokenizer we can read", path.display()))?;
        let CountedModel { vocab, merges } = file.model;
        Ok(Self {
            json: ByteSize(bytes.len() as u64),
            entries: vocab.entries + merges.entries,
            has_pairs: merges.has_pairs,
            has_pattern: has_pattern(&file.pre_tokenizer),
        })
    }
}

fn has_pattern(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer {
        Value::Object(fields) => {
            fields.get("use_regex") == Some(&Value::Bool(true))
                || fields.contains_key("Regex")
                || fields.values().any(has_pattern)
        }
        Value::Array(inner) => inner.iter().any(has_pattern),
        _ => false,
    }
}

/// The part of `tokenizer.json` that is counted.
#[derive(Deserialize)]
struct CountedFile {
    model: CountedModel,
    #[serde(default)]
    pre_tokenizer: Value,
}

#[derive(Deserialize)]
struct CountedModel {
    #[serde(default)]
    vocab: Counted,
    #[serde(default)]
    merges: Counted,
}

/// The entries of a map or list.
#[derive(Default)]
struct Counted {
    entries: usize,
    has_pairs: bool,
}

impl<'de> Deserialize<'de> for Counted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Counting)
    }
}

/// A visitor that counts entries and keeps none. A list inside a list is a pair.
struct Counting;

impl<'de> Visitor<'de> for Counting {
    type Value = Counted;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map, a list, or an entry of one")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Counted, A::Error> {
        let mut counted = Counted::default();
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            counted.entries += 1;
        }
        Ok(counted)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Counted, A::Error> {
        let mut counted = Counted::default();
        while let Some(entry) = list.next_element::<Counted>()? {
            counted.entries += 1;
            counted.has_pairs |= entry.entries > 0;
        }
        Ok(counted)
    }

    fn visit_str<E>(self, _: &str) -> Result<Counted, E> {
        Ok(Counted::default())
    }

    fn visit_f64<E>(self, _: f64) -> Result<Counted, E> {
        Ok(Counted::default())
    }

    fn visit_i64<E>(self, _: i64) -> Result<Counted, E> {
        Ok(Counted::default())
    }

    fn visit_u64<E>(self, _: u64) -> Result<Counted, E> {
        Ok(Counted::default())
    }

    fn visit_unit<E>(self) -> Result<Counted, E> {
        Ok(Counted::default())
    }
}

/// The peak of loading a tokenizer.
pub fn load_tokenizer(tokenizer: TokenizerSize) -> ByteSize {
    let each = if tokenizer.has_pairs { LOAD_OF_PAIRS } else { LOAD_OF_STRINGS };
    tokenizer.json + ByteSize::of(tokenizer.entries, each)
}

/// The peak of loading a tokenizer and tokenizing a text. For several texts, the largest peak counts.
///
/// # Arguments
/// * `tokenizer` - from [`TokenizerSize::of`]
/// * `text` - size of the text; `None` for a file of documents
/// * `threads` - worker threads of the run
pub fn tokenize(
    tokenizer: TokenizerSize,
    text: Option<ByteSize>,
    threads: usize,
    encoding: Encoding,
) -> ByteSize {
    let size = text.unwrap_or(DOCUMENTS);
    let working = match encoding {
        Encoding::Cached => ByteSize::ZERO,
        Encoding::InPieces => pieces(size, threads) + retained(tokenizer, threads),
        Encoding::InOneCall => {
            tenths(WHOLE, text.unwrap_or(DOCUMENT)) + retained(tokenizer, threads)
        }
    };
    load_tokenizer(tokenizer).max(kept(tokenizer) + tenths(IDS, size) + working)
}

/// The peak of loading a tokenizer and tokenizing questions, of which texts of `texts` bytes are in memory together.
pub fn tokenize_questions(tokenizer: TokenizerSize, texts: ByteSize, threads: usize) -> ByteSize {
    let workers = threads.clamp(1, MOST_WORKERS) as u64;
    // An id has 4 bytes, and two letters at least, in text that questions are made of.
    let working = ByteSize(3 * texts.0) + ByteSize(WORDS.0 * workers);
    load_tokenizer(tokenizer).max(kept(tokenizer) + working + retained(tokenizer, threads))
}

/// The memory that stays after the tokenizer is dropped, until the run ends: the tables of its pattern.
pub fn retained(tokenizer: TokenizerSize, threads: usize) -> ByteSize {
    let workers = threads.clamp(1, MOST_WORKERS) as u64;
    match tokenizer.has_pattern {
        true => PATTERN + ByteSize(PATTERN_OF_WORKER.0 * workers),
        false => ByteSize::ZERO,
    }
}

/// The memory of all workers and their pieces.
fn pieces(text: ByteSize, threads: usize) -> ByteSize {
    let workers = threads.clamp(1, MOST_WORKERS);
    // A short text is one piece.
    let piece = text.min(ByteSize(PIECE_BYTES as u64));
    let worker = tenths(PIECE, piece) + WORDS.min(tenths(PIECE, text));
    let waiting = text.min(ByteSize::of(workers * PIECES_PER_WORKER, PIECE_BYTES));
    std::iter::repeat_n(worker, workers).sum::<ByteSize>() + waiting
}

/// The memory of a loaded tokenizer.
pub(super) fn kept(tokenizer: TokenizerSize) -> ByteSize {
    ByteSize::of(tokenizer.entries, KEPT)
}

/// `count` tenths of a size; saturates.
fn tenths(count: u64, size: ByteSize) -> ByteSize {
    let tenths = u128::from(count) * u128::from(size.0) / 10;
    ByteSize(u64::try_from(tenths).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Llama 3's.
    const LARGE: TokenizerSize = TokenizerSize {
        json: ByteSize(17_209_961),
        entries: 128_000 + 280_147,
        has_pairs: true,
        has_pattern: true,
    };

    #[test]
    fn entries_are_counted_in_both_ways_of_writing_merges() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let count = |model: &str| {
            let json = format!(r#"{{"added_tokens": [], "decoder": null, "model": {model}}}"#);
            fs::write(folder.path().join("tokenizer.json"), &json).expect("write");
            let size = TokenizerSize::of(folder.path()).expect("a size");
            assert_eq!(size.json, ByteSize(json.len() as u64));
            (size.entries, size.has_pairs)
        };
        let vocab = r#"{"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}"#;
        assert_eq!(count(&format!(r#"{vocab}, "merges": [["a", "b"]]}}"#)), (4, true));
        assert_eq!(count(&format!(r#"{vocab}, "merges": ["a b"]}}"#)), (4, false));
        assert_eq!(count(&format!("{vocab}}}")), (3, false));
        assert_eq!(
            count(r#"{"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.5], ["b", 0]]}"#).0,
            2
        );
        fs::write(folder.path().join("tokenizer.json"), "{}").expect("write");
        assert!(TokenizerSize::of(folder.path()).is_err());
    }

    #[test]
    fn a_long_text_adds_its_ids_and_nothing_else() {
        let of = |text: u64| tokenize(LARGE, Some(ByteSize(text)), 2, Encoding::InPieces).0;
        // 1.2 bytes of ids per byte of text.
        assert_eq!(of(1000 * MIB) - of(500 * MIB), 600 * MIB);
        let whole = |text: u64| tokenize(LARGE, Some(ByteSize(text)), 2, Encoding::InOneCall).0;
        assert!(whole(500 * MIB) > 10 * of(500 * MIB));
    }

    #[test]
    fn the_plan_is_near_what_was_measured() {
        // High-water mark of the resident set, less 3.6 MiB of program and, where a text was tokenized, 9.8 MiB of text; two threads.
        let text = ByteSize(10_318_839);
        let llama_2 = TokenizerSize {
            json: ByteSize(3_619_016),
            entries: 32_000 + 61_249,
            has_pairs: true,
            has_pattern: false,
        };
        let legacy = TokenizerSize { json: ByteSize(9_085_698), has_pairs: false, ..LARGE };
        for (planned, measured) in [
            (load_tokenizer(llama_2), 25.3),
            (load_tokenizer(LARGE), 108.6),
            (load_tokenizer(legacy), 83.1),
            (tokenize(llama_2, Some(text), 2, Encoding::InPieces), 32.8),
            (tokenize(LARGE, Some(text), 2, Encoding::InPieces), 108.6),
        ] {
            let error = planned.mib() - measured;
            assert!((0.0..20.0).contains(&error), "{planned}, {measured} MiB");
        }
    }

    #[test]
    fn a_pattern_is_found_and_its_tables_are_planned_for_the_whole_run() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let has_pattern = |pre_tokenizer: &str| {
            let json = format!(r#"{{"model": {{}}, "pre_tokenizer": {pre_tokenizer}}}"#);
            fs::write(folder.path().join("tokenizer.json"), json).expect("write");
            TokenizerSize::of(folder.path()).expect("a size").has_pattern
        };
        let bytes = |uses| format!(r#"{{"type": "ByteLevel", "use_regex": {uses}}}"#);
        let split = r#"{"type": "Split", "pattern": {"Regex": "x"}}"#;
        let both =
            format!(r#"{{"type": "Sequence", "pretokenizers": [{split}, {}]}}"#, bytes(false));
        assert!(has_pattern(&bytes(true)) && has_pattern(&both));
        assert!(!has_pattern(&bytes(false)) && !has_pattern("null"));
        // The tokenizer of the shared model `wikitext-llama-8m`, see the file's first lines.
        for (threads, measured) in [(1, 1.8), (2, 2.1), (8, 5.2)] {
            let error = retained(LARGE, threads).mib() - measured;
            assert!((0.0..1.0).contains(&error), "{threads}: {error}");
        }
    }

    #[test]
    fn more_threads_than_workers_take_no_more() {
        let of = |threads| tokenize(LARGE, Some(ByteSize(100 * MIB)), threads, Encoding::InPieces);
        assert!(of(1) < of(2) && of(2) < of(8));
        assert_eq!(of(8), of(64));
        assert_eq!(of(0), of(1));
    }

    #[test]
    fn cached_ids_are_the_cheapest_and_loading_is_the_least() {
        let text = ByteSize(100 * MIB);
        assert!(
            tokenize(LARGE, Some(text), 2, Encoding::Cached)
                < tokenize(LARGE, Some(text), 2, Encoding::InPieces)
        );
        assert_eq!(
            tokenize(LARGE, Some(ByteSize::ZERO), 1, Encoding::Cached),
            load_tokenizer(LARGE)
        );
    }

    #[test]
    fn sizes_beyond_counting_do_not_overflow() {
        let most = ByteSize(u64::MAX);
        let tokenizer =
            TokenizerSize { json: most, entries: usize::MAX, has_pairs: true, has_pattern: true };
        assert_eq!(tokenize(tokenizer, Some(most), usize::MAX, Encoding::InPieces), most);
        assert_eq!(tokenize(tokenizer, Some(most), 1, Encoding::InOneCall), most);
    }
}
