//! What tokenising takes in memory, from a tokenizer's file and the size of a text: the numbers a plan is made of.
//!
//! J = bytes of `tokenizer.json`, E = its entries (tokens and merges), T = bytes of the text, w = workers (threads, at most 8):
//!
//! ```text
//! load     = J + 250 · E                               215 · E where a merge is written as one string
//! kept     = 210 · E
//! ids      = 1.2 · T
//! working  = w · (16 KiB · 95 + 4 MiB) + w · 64 KiB    0 where the ids come from the cache
//! tokenise = max(load, kept + ids + working)
//! whole    = max(load, kept + ids + 120 · T)           for a tokenizer whose texts cannot be cut
//! ```
//!
//! The constants are resident anonymous memory, measured on Linux with glibc and the tokenizers of Llama 2 (93,249 entries) and
//! Llama 3 (408,147), each written with indentation, without it, and with merges as strings. At its peak, loading took J and 237
//! to 246 bytes per entry (191 to 213), and left 180 to 205, of which 70 to 76 are in use; the rest waits in the allocator and
//! serves what follows, so what is planned here is above what is taken. In one call, a byte of text takes 94 and 77 bytes
//! (normalized text with its alignments, pre-tokens, symbols, a string per token); of 9.8 MiB, 76 and 113 were resident. A worker
//! keeps the symbols of up to 10,000 words, 3.6 MiB with the tokenizer of Llama 3. An id is four bytes; English text has 3.8 to 4.5 bytes
//! per id, and ids grow by doubling, whose unused half is not resident. Text that the vocabulary does not know may have four
//! times as many ids as planned. Models that are not byte pairs take more to load, which is not planned.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::encoder::{MOST_WORKERS, PIECE_BYTES, PIECES_PER_WORKER};
use super::tokenizer::{LARGEST, no_tokenizer, unreadable};
use crate::bytes::{ByteSize, read_whole};

/// Bytes per entry at the peak of loading, merges being pairs.
const LOAD_OF_PAIRS: usize = 250;
/// The same with merges as strings, which the library reads without the way round.
const LOAD_OF_STRINGS: usize = 215;
/// Bytes per entry that stay.
const KEPT: usize = 210;
/// Tenths of T that the ids take.
const IDS: u64 = 12;
/// Tenths of a byte per byte of text that one worker encodes.
const PIECE: u64 = 950;
/// Tenths of a byte per byte of text encoded in one call.
const WHOLE: u64 = 1200;
/// The words a worker remembers.
const WORDS: ByteSize = ByteSize(4 << 20);

/// How large a tokenizer is, as its file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizerSize {
    /// The size of `tokenizer.json`.
    pub json: ByteSize,
    /// Tokens of the model's vocabulary, and merges.
    pub entries: usize,
    /// A merge is written as a pair of strings, not as one string with a space.
    pub has_pairs: bool,
}

impl TokenizerSize {
    /// Counts what is in the `tokenizer.json` of a model folder, without loading the tokenizer. While it counts, the file is in
    /// memory, and nothing else.
    ///
    /// # Errors
    ///
    /// Fails when the file cannot be read or is no JSON with a `model`.
    pub fn of(model_folder: &Path) -> Result<Self> {
        let path = model_folder.join("tokenizer.json");
        let bytes = read_whole(&path, LARGEST).map_err(|error| match error.kind() {
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
        })
    }
}

/// Of `tokenizer.json`, what is counted.
#[derive(Deserialize)]
struct CountedFile {
    model: CountedModel,
}

/// The model in it.
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

/// Counts without keeping anything. A string is an entry that is no pair.
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
    let each = if tokenizer.has_pairs {
        LOAD_OF_PAIRS
    } else {
        LOAD_OF_STRINGS
    };
    tokenizer.json + ByteSize::of(tokenizer.entries, each)
}

/// The peak of loading a tokenizer and tokenising one text in pieces. Of several texts one after the other, the largest counts.
///
/// # Arguments
///
/// * `tokenizer` - from [`TokenizerSize::of`]
/// * `text` - size of the text
/// * `threads` - worker threads of the run
/// * `is_cached` - the ids are in the cache, so the text is only read for its hash
pub fn tokenise(
    tokenizer: TokenizerSize,
    text: ByteSize,
    threads: usize,
    is_cached: bool,
) -> ByteSize {
    let workers = threads.clamp(1, MOST_WORKERS);
    // A text that fits one piece is encoded by nobody else.
    let piece = text.min(ByteSize(PIECE_BYTES as u64));
    let worker = tenths(PIECE, piece) + WORDS.min(tenths(PIECE, text));
    let waiting = text.min(ByteSize::of(workers * PIECES_PER_WORKER, PIECE_BYTES));
    let working = if is_cached {
        ByteSize::ZERO
    } else {
        std::iter::repeat_n(worker, workers).sum::<ByteSize>() + waiting
    };
    load_tokenizer(tokenizer).max(kept(tokenizer) + tenths(IDS, text) + working)
}

/// The same for a tokenizer whose texts cannot be cut: see [`Tokenizer::is_bounded`](super::Tokenizer::is_bounded).
pub fn tokenise_whole(tokenizer: TokenizerSize, text: ByteSize) -> ByteSize {
    load_tokenizer(tokenizer).max(kept(tokenizer) + tenths(IDS, text) + tenths(WHOLE, text))
}

/// What is resident once a tokenizer is loaded.
fn kept(tokenizer: TokenizerSize) -> ByteSize {
    ByteSize::of(tokenizer.entries, KEPT)
}

/// Tenths of a size; the largest size there is where that is too much to count.
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
        assert_eq!(
            count(&format!(r#"{vocab}, "merges": [["a", "b"]]}}"#)),
            (4, true)
        );
        assert_eq!(
            count(&format!(r#"{vocab}, "merges": ["a b"]}}"#)),
            (4, false)
        );
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
        let of = |text: u64| tokenise(LARGE, ByteSize(text), 2, false).0;
        // 1.2 bytes of ids per byte of text.
        assert_eq!(of(1000 * MIB) - of(500 * MIB), 600 * MIB);
        let whole = |text: u64| tokenise_whole(LARGE, ByteSize(text)).0;
        assert!(whole(500 * MIB) > 10 * of(500 * MIB));
    }

    #[test]
    fn the_plan_is_near_what_was_measured() {
        // High-water mark of the resident set less 3.6 MiB of program, and 9.8 MiB of text where there was one; two threads.
        let text = ByteSize(10_318_839);
        let llama_2 = TokenizerSize {
            json: ByteSize(3_619_016),
            entries: 32_000 + 61_249,
            has_pairs: true,
        };
        let legacy = TokenizerSize {
            json: ByteSize(9_085_698),
            has_pairs: false,
            ..LARGE
        };
        for (planned, measured) in [
            (load_tokenizer(llama_2), 25.3),
            (load_tokenizer(LARGE), 108.6),
            (load_tokenizer(legacy), 83.1),
            (tokenise(llama_2, text, 2, false), 32.8),
            (tokenise(LARGE, text, 2, false), 108.6),
        ] {
            let error = planned.mib() - measured;
            assert!((0.0..20.0).contains(&error), "{planned}, {measured} MiB");
        }
    }

    #[test]
    fn more_threads_than_workers_take_no_more() {
        let of = |threads| tokenise(LARGE, ByteSize(100 * MIB), threads, false);
        assert!(of(1) < of(2) && of(2) < of(8));
        assert_eq!(of(8), of(64));
        assert_eq!(of(0), of(1));
    }

    #[test]
    fn cached_ids_are_the_cheapest_and_loading_is_the_least() {
        let text = ByteSize(100 * MIB);
        assert!(tokenise(LARGE, text, 2, true) < tokenise(LARGE, text, 2, false));
        assert_eq!(
            tokenise(LARGE, ByteSize::ZERO, 1, true),
            load_tokenizer(LARGE)
        );
    }

    #[test]
    fn sizes_beyond_counting_do_not_overflow() {
        let most = ByteSize(u64::MAX);
        let tokenizer = TokenizerSize {
            json: most,
            entries: usize::MAX,
            has_pairs: true,
        };
        assert_eq!(tokenise(tokenizer, most, usize::MAX, false), most);
        assert_eq!(tokenise_whole(tokenizer, most), most);
    }
}
