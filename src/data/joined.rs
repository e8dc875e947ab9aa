//! Texts that are tokenized as a whole: the joined rows of WikiText-2, the first documents of C4's validation split, or a plain file.
//!
//! The conventions are the same as for published perplexities (SparseGPT's and Wanda's loaders over the hub's `wikitext-2-raw-v1` and
//! `allenai/c4`). Training rows are joined with a space, test rows with two newlines, the first 1100 validation documents with
//! a space, and the Penn Treebank's sentences with a space in both roles. Each joined text has the ids of one tokenizer call
//! ([`Encoder`]), so it has at most one beginning-of-text token, at its start.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::cache::TextCache;
use super::document_text::DocumentText;
use super::documents::Documents;
use super::encoder::Encoder;
use super::line_memory::LineMemory;
use super::parquet_text::TextColumn;
use super::role::Role;
use super::source::{Files, Source};
use super::stored_form::Format;
use super::text_file::{for_each_line, for_each_portion};
use super::{Tokenizer, arrow_rows, demo_text};
use crate::bytes::hex;
use crate::failure::Failure;
use crate::input::Expected;
use crate::run::{Event, Events, TextProtocol};

/// Documents joined for evaluation: the reference's slice of C4's validation shard.
const EVALUATION_DOCUMENTS: u64 = 1100;
/// Windows of joined documents at most: the reference truncates them to 256 · seqlen tokens.
pub(super) const DOCUMENT_WINDOWS: usize = 256;
const KIB: u64 = 1024;

/// A tokenized text and its record.
pub(super) struct TokenizedText {
    pub(super) ids: Vec<u32>,
    /// The record, with zero windows and used tokens.
    pub(super) protocol: TextProtocol,
    /// True if the text is made of documents, of which only the first windows are used.
    pub(super) is_of_documents: bool,
}

/// Turns a text into ids, or finds its ids in the cache. Reads the text twice, first for its hash. If the tokenizer's texts can be cut, the
/// text is never in memory as a whole. Fails when a file cannot be read, is not UTF-8 or holds nothing, and when tokenizing fails.
pub(super) fn tokenize_joined(
    source: &Source,
    tokenizer: &Tokenizer,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<TokenizedText> {
    tokenize_beginning(source, usize::MAX, tokenizer, cache, events)
}

/// Does the same for a text of which `at_most` ids are enough: all ids of a text with fewer, and otherwise its first ids, that many or
/// more. Stops tokenizing then. The cache keeps complete texts only.
pub(super) fn tokenize_beginning(
    source: &Source,
    at_most: usize,
    tokenizer: &Tokenizer,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<TokenizedText> {
    let text = JoinedText::open(source, cache, events)?;
    let digest = text.digest()?;
    if digest.bytes == 0 {
        let flag = source.role.flag();
        return Err(Failure::new(format!("the text of {flag} is empty: `{}`", source.path()))
            .hint(format!("name another text with {flag}"))
            .into());
    }
    let label = &source.label;
    let tokenize = || {
        let started = Instant::now();
        let phase = format!("tokenize {label}");
        events.emit(Event::PhaseStarted {
            phase: phase.clone(),
            unit: "KiB",
            steps: digest.bytes.div_ceil(KIB),
        });
        let encoded = text.encode(&digest, at_most, tokenizer, events)?;
        events.emit(Event::PhaseDone { phase, elapsed: started.elapsed() });
        anyhow::Ok(encoded)
    };
    // A rendered text has the ids of a call that adds no special tokens.
    let hash = &match text.is_rendered {
        true => format!("{} plain", tokenizer.sha256()),
        false => tokenizer.sha256().to_owned(),
    };
    let is_kept = cache.has_token_ids(hash, &digest.sha256);
    let ids = if at_most == usize::MAX || is_kept {
        cache.token_ids(hash, &digest.sha256, events, || Ok(tokenize()?.0))?
    } else {
        match tokenize()? {
            (ids, true) => cache.token_ids(hash, &digest.sha256, events, || Ok(ids))?,
            (ids, false) => ids,
        }
    };
    let protocol = TextProtocol {
        dataset: source.dataset.to_owned(),
        path: source.path(),
        convention: format!("{label}: {}, one tokenizer call", digest.convention),
        text_sha256: digest.sha256,
        tokenizer_sha256: tokenizer.sha256().to_owned(),
        total_tokens: ids.len() as u64,
        ..TextProtocol::default()
    };
    Ok(TokenizedText {
        ids,
        protocol,
        is_of_documents: matches!(source.files, Files::Documents(..)),
    })
}

/// The end of a reading pass before the end of the text.
#[derive(Debug)]
struct Enough;

impl fmt::Display for Enough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ids read so far are enough")
    }
}

impl std::error::Error for Enough {}

/// Size, hash and origin of a text, from a pass over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextDigest {
    pub(super) bytes: u64,
    pub(super) sha256: String,
    /// The way the text was joined, in words.
    pub(super) convention: String,
}

/// The text of a source. Each pass reads it from its files, portion by portion.
pub(super) struct JoinedText<'a> {
    source: &'a Source,
    /// The documents that the text is made of, if it is.
    documents: Option<Documents>,
    /// The documents are conversations, which the model's template renders.
    is_rendered: bool,
    /// The bound of a line.
    lines: LineMemory,
}

impl<'a> JoinedText<'a> {
    /// Opens the files of a text. The first time, this reads all of a file of documents.
    pub(super) fn open(source: &'a Source, cache: &TextCache, events: &dyn Events) -> Result<Self> {
        let documents = match &source.files {
            Files::Documents(_, format) => Some(Documents::open(source, *format, cache, events)?),
            _ => None,
        };
        let mut text = Self { source, documents, is_rendered: false, lines: cache.lines() };
        // The first document decides.
        let mut is_rendered = false;
        text.documents(&mut |document| {
            is_rendered = document.is_rendered;
            Ok(false)
        })?;
        text.is_rendered = is_rendered;
        Ok(text)
    }

    /// Reads the text once for its size and hash. Fails when a file cannot be read or is not UTF-8.
    pub(super) fn digest(&self) -> Result<TextDigest> {
        let (mut hasher, mut bytes) = (Sha256::new(), 0);
        let convention = self.for_each(&mut |portion| {
            hasher.update(portion);
            bytes += portion.len() as u64;
            Ok(())
        })?;
        Ok(TextDigest { bytes, sha256: hex(&hasher.finalize()), convention })
    }

    /// Reads the text once more, for its ids. Returns the ids, and true if they cover the whole text; `at_most` ids are enough.
    fn encode(
        &self,
        digest: &TextDigest,
        at_most: usize,
        tokenizer: &Tokenizer,
        events: &dyn Events,
    ) -> Result<(Vec<u32>, bool)> {
        let mut progress = |done: u64| {
            events.emit(Event::Progress { done: done.div_ceil(KIB) });
        };
        let mut encoder = Encoder::new(tokenizer, &mut progress).plain(self.is_rendered);
        let mut hasher = Sha256::new();
        let read = self.for_each(&mut |portion| {
            hasher.update(portion);
            encoder.push(portion)?;
            if encoder.ids().len() >= at_most {
                return Err(Enough.into());
            }
            Ok(())
        });
        match read {
            Err(error) if error.is::<Enough>() => return Ok((encoder.into_ids(), false)),
            read => read?,
        };
        if hex(&hasher.finalize()) != digest.sha256 {
            return Err(Failure::new(format!(
                "`{}` changed while it was being read",
                self.source.path()
            ))
            .hint("run again when nothing writes to it any more")
            .into());
        }
        Ok((encoder.finish()?, true))
    }

    /// Gives the text to `take` in portions, in order. Returns the way it was joined, in words.
    fn for_each(&self, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<String> {
        match &self.source.files {
            Files::Plain(path) => {
                for_each_portion(path, take)?;
                Ok("the file as it stands".to_owned())
            }
            Files::Demo => {
                let text = demo_text::text(self.source.role)?;
                take(&text)?;
                Ok(format!("{} generated stories, each ended by a newline", text.lines().count()))
            }
            Files::Rows(parts) => {
                let (separator, name) = match self.source.role {
                    Role::Calibration => (" ", "one space"),
                    Role::Evaluation => ("\n\n", "two newlines"),
                };
                let mut joiner = Joiner::new(separator, take);
                for part in parts {
                    read_rows(part, self.lines, &mut joiner)?;
                }
                Ok(format!("{} rows joined with {name}", joiner.pieces))
            }
            Files::Sentences(path) => {
                let mut joiner = Joiner::new(" ", take);
                // The rule of the hub's loader `ptb_text_only`: every line is a sentence, without the white space around it.
                for_each_line(path, self.lines, &mut |line| {
                    joiner.push(line.trim_matches(is_white))
                })?;
                Ok(format!("{} sentences joined with one space", joiner.pieces))
            }
            Files::Documents(..) => {
                let separator = if self.is_rendered { "" } else { " " };
                let mut joiner = Joiner::new(separator, take);
                self.documents(&mut |document| joiner.push(&document.text).map(|()| true))?;
                let (count, how) = match self.is_rendered {
                    true => (
                        joiner.pieces,
                        "conversations in sequence, as the chat template renders them",
                    ),
                    false => (joiner.pieces, "documents joined with one space"),
                };
                Ok(format!("the first {count} {how}, at most {DOCUMENT_WINDOWS} windows"))
            }
        }
    }

    /// Gives the first documents to `take`, until that returns false.
    fn documents(&self, take: &mut dyn FnMut(DocumentText) -> Result<bool>) -> Result<()> {
        let Some(documents) = &self.documents else {
            return Ok(());
        };
        for number in 0..documents.count().min(EVALUATION_DOCUMENTS) {
            let Some(document) = documents.document(number)? else {
                continue;
            };
            let taken = self.source.text_of(&document).and_then(&mut *take);
            if !taken.map_err(|error| documents.at_document(error, number))? {
                break;
            }
        }
        Ok(())
    }
}

/// Joins pieces like Python's `separator.join(pieces)`: empty pieces count.
struct Joiner<'a> {
    take: &'a mut dyn FnMut(&str) -> Result<()>,
    separator: &'static str,
    pieces: usize,
}

impl<'a> Joiner<'a> {
    fn new(separator: &'static str, take: &'a mut dyn FnMut(&str) -> Result<()>) -> Self {
        Self { take, separator, pieces: 0 }
    }

    fn push(&mut self, piece: &str) -> Result<()> {
        if self.pieces > 0 {
            (self.take)(self.separator)?;
        }
        self.pieces += 1;
        (self.take)(piece)
    }
}

/// Adds the rows of a WikiText-2 file: unchanged parquet rows, or the lines of a raw file by the hub's rule.
fn read_rows(path: &Path, lines: LineMemory, joiner: &mut Joiner<'_>) -> Result<()> {
    match Format::of(path, Expected::Rows)? {
        Format::Parquet => {
            return TextColumn::open(path)?.for_each(&mut |row| joiner.push(row));
        }
        format if format.is_columnar() => {
            return arrow_rows::for_each_text(path, format, &mut |row| joiner.push(row));
        }
        _ => {}
    }
    // The rule of the hub's loader: a line of white space becomes the empty row, and a line with text keeps its newline.
    let mut push = |line: &str| joiner.push(if is_blank(line) { "" } else { line });
    for_each_line(path, lines, &mut |line| {
        if !line.contains('\r') {
            return push(line);
        }
        // Python's text mode turns every line end into "\n".
        let line = line.replace("\r\n", "\n").replace('\r', "\n");
        line.split_inclusive('\n').try_for_each(&mut push)
    })
}

/// True if Python's `str.strip()` leaves nothing.
fn is_blank(line: &str) -> bool {
    line.chars().all(is_white)
}

/// The characters that Python's `str.strip()` removes: Unicode's white space and the four information separators.
fn is_white(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::data::testing::write_parquet;
    use crate::data::text_file::PORTION;
    use crate::run::Silent;

    fn read(files: Files, role: Role) -> Result<String> {
        let source =
            Source { role, files, dataset: "text", label: "text".to_owned(), chat: Ok(None) };
        let text = JoinedText::open(&source, &TextCache::disabled(), &Silent)?;
        let mut read = String::new();
        text.for_each(&mut |portion| {
            read += portion;
            Ok(())
        })?;
        Ok(read)
    }

    fn text_of(files: Files, role: Role) -> String {
        read(files, role).expect("read")
    }

    #[test]
    fn sentences_lose_the_white_space_around_them_and_are_joined_with_one_space() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("ptb.test.txt");
        // " ".join(line.strip() for line in file): the empty line counts.
        fs::write(&path, " no it was n't \n\n but <unk> was \n").expect("write");
        for role in [Role::Calibration, Role::Evaluation] {
            assert_eq!(
                text_of(Files::Sentences(path.clone()), role),
                "no it was n't  but <unk> was"
            );
        }
    }

    #[test]
    fn raw_lines_and_hub_rows_give_the_same_text() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (raw, windows, parquet) = (
            folder.path().join("a.raw"),
            folder.path().join("b.raw"),
            folder.path().join("c.parquet"),
        );
        let lines = " \n = Title = \n \n First . \n Second . ";
        fs::write(&raw, lines).expect("write");
        fs::write(&windows, lines.replace('\n', "\r\n")).expect("write");
        // The hub's rows of that file, by the rule of datasets' wikitext loader.
        let rows = ["", " = Title = \n", "", " First . \n", " Second . "].map(str::to_owned);
        write_parquet(&parquet, "text", &[&rows]);
        for path in [raw, windows, parquet] {
            let rows = || Files::Rows(vec![path.clone()]);
            assert_eq!(
                text_of(rows(), Role::Calibration),
                "  = Title = \n   First . \n  Second . "
            );
            assert_eq!(
                text_of(rows(), Role::Evaluation),
                "\n\n = Title = \n\n\n\n\n First . \n\n\n Second . "
            );
        }
    }

    #[test]
    fn a_plain_file_is_taken_as_it_stands() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.txt");
        fs::write(&path, " \nx\r\n").expect("write");
        assert_eq!(text_of(Files::Plain(path.clone()), Role::Calibration), " \nx\r\n");
        fs::write(&path, b"abc\xff").expect("write");
        let error = read(Files::Plain(path.clone()), Role::Calibration).expect_err("must fail");
        assert!(error.to_string().contains("offset 3"), "{error}");
        fs::write(&path, "é\né\n".as_bytes().split_last().expect("bytes").1).expect("write");
        assert_eq!(text_of(Files::Plain(path.clone()), Role::Evaluation), "é\né");
        fs::write(&path, b"\xc3\xa9\n\xc3").expect("write");
        let error = read(Files::Plain(path.clone()), Role::Calibration).expect_err("must fail");
        assert!(error.to_string().contains("offset 3"), "{error}");
        // A character on the border of two portions, and a bad byte in the third.
        let text = format!("{}é{}", "a".repeat(PORTION - 1), "b".repeat(PORTION));
        fs::write(&path, &text).expect("write");
        assert_eq!(text_of(Files::Plain(path.clone()), Role::Evaluation), text);
        fs::write(&path, [text.as_bytes(), b"\xff"].concat()).expect("write");
        let error = read(Files::Plain(path), Role::Calibration).expect_err("must fail");
        assert!(error.to_string().contains(&format!("offset {}", text.len())), "{error}");
    }
}
