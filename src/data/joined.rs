//! Texts that are tokenized as one: WikiText-2's rows joined, the first documents of C4's validation, or a plain file.
//!
//! The conventions are those that published perplexities rest on (SparseGPT's and Wanda's loaders over the hub's
//! `wikitext-2-raw-v1` and `allenai/c4`): training rows are joined with one space, test rows with two newlines, and the
//! first 1100 validation documents with one space, the Penn Treebank's sentences with one space in either role. Each joined text
//! is one tokenizer call, or in pieces gives the ids of one ([`Encoder`]), so at most one beginning-of-text token stands in it, at
//! its start.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::cache::TextCache;
use super::dataset::{DatasetSpec, Source};
use super::documents::{Documents, Format, LONGEST_LINE};
use super::encoder::Encoder;
use super::parquet_text::TextColumn;
use super::{Role, TextProtocol, Tokenizer};
use crate::bytes::{ByteSize, hex};
use crate::failure::Failure;
use crate::run::{Event, Events};

/// Documents joined for evaluation, as the reference slices C4's validation shard.
const EVALUATION_DOCUMENTS: u64 = 1100;
/// Windows kept of joined documents: the reference truncates to 256 · seqlen tokens.
pub(super) const DOCUMENT_WINDOWS: usize = 256;
/// Bytes read at once from a text that is taken as it stands.
const PORTION: usize = 64 << 10;
/// Progress counts these.
const KIB: u64 = 1024;

/// A tokenized text and what is known about it.
pub(super) struct TokenizedText {
    /// All ids of the text.
    pub(super) ids: Vec<u32>,
    /// The record so far: windows and tokens used are still zero.
    pub(super) protocol: TextProtocol,
    /// True where the text is made of documents, so that only the first windows count.
    pub(super) is_of_documents: bool,
}

/// Reads a text and turns it into ids, or finds its ids in the cache. The text is read twice, first for its hash, and is
/// never in memory as a whole if the tokenizer lets it be cut.
///
/// # Errors
///
/// Fails when a file cannot be read, is not UTF-8 or holds nothing, and when tokenizing fails.
pub(super) fn tokenized(
    spec: &DatasetSpec,
    source: &Source,
    role: Role,
    tokenizer: &Tokenizer,
    cache: &TextCache,
    events: &dyn Events,
) -> Result<TokenizedText> {
    let mut text = JoinedText::open(source, role, cache, events)?;
    let seen = text.look()?;
    if seen.bytes == 0 {
        return Err(Failure::new(format!(
            "the text of {} is empty: `{}`",
            role.flag(),
            source.path()
        ))
        .hint(format!("name another text with {}", role.flag()))
        .into());
    }
    let label = source.label(spec, role);
    let ids = cache.token_ids(tokenizer.sha256(), &seen.sha256, events, || {
        let started = Instant::now();
        let phase = format!("tokenize {label}");
        events.emit(Event::PhaseStarted {
            phase: phase.clone(),
            unit: "KiB",
            steps: seen.bytes.div_ceil(KIB),
        });
        let ids = text.encode(&seen, tokenizer, events)?;
        events.emit(Event::PhaseDone {
            phase,
            elapsed: started.elapsed(),
        });
        Ok(ids)
    })?;
    let protocol = TextProtocol {
        dataset: source.dataset(spec).to_owned(),
        path: source.path(),
        convention: format!("{label}: {}, one tokenizer call", seen.convention),
        text_sha256: seen.sha256,
        tokenizer_sha256: tokenizer.sha256().to_owned(),
        total_tokens: ids.len() as u64,
        ..TextProtocol::default()
    };
    Ok(TokenizedText {
        ids,
        protocol,
        is_of_documents: matches!(source, Source::Documents(..)),
    })
}

/// What one pass over a text tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    /// Its size.
    pub(super) bytes: u64,
    /// Its SHA-256 in hex.
    pub(super) sha256: String,
    /// How it was put together.
    pub(super) convention: String,
}

/// A text of a source in its role, read from its files portion by portion as often as need be.
pub(super) struct JoinedText<'a> {
    source: &'a Source,
    role: Role,
    /// Open where the text is made of documents.
    documents: Option<Documents>,
}

impl<'a> JoinedText<'a> {
    /// Finds out how to read a text; of documents, the first time, this reads all.
    ///
    /// # Errors
    ///
    /// As [`Documents::open`].
    pub(super) fn open(
        source: &'a Source,
        role: Role,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Self> {
        let documents = match source {
            Source::Documents(path, format) => Some(Documents::open(path, *format, cache, events)?),
            _ => None,
        };
        Ok(Self {
            source,
            role,
            documents,
        })
    }

    /// Reads the text once for its size and hash.
    ///
    /// # Errors
    ///
    /// Fails when a file cannot be read or is not UTF-8.
    pub(super) fn look(&mut self) -> Result<Seen> {
        let (mut hasher, mut bytes) = (Sha256::new(), 0);
        let convention = self.for_each(&mut |portion| {
            hasher.update(portion);
            bytes += portion.len() as u64;
            Ok(())
        })?;
        Ok(Seen {
            bytes,
            sha256: hex(&hasher.finalize()),
            convention,
        })
    }

    /// Reads the text once more, for its ids.
    fn encode(
        &mut self,
        seen: &Seen,
        tokenizer: &Tokenizer,
        events: &dyn Events,
    ) -> Result<Vec<u32>> {
        let mut progress = |done: u64| {
            events.emit(Event::Progress {
                done: done.div_ceil(KIB),
            });
        };
        let mut encoder = Encoder::new(tokenizer, &mut progress);
        let mut hasher = Sha256::new();
        self.for_each(&mut |portion| {
            hasher.update(portion);
            encoder.push(portion)
        })?;
        if hex(&hasher.finalize()) != seen.sha256 {
            return Err(Failure::new(format!(
                "`{}` changed while it was being read",
                self.source.path()
            ))
            .hint("run again when nothing writes to it any more")
            .into());
        }
        encoder.finish()
    }

    /// Gives the text to `take` in portions, in order, and returns how it was put together.
    fn for_each(&mut self, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<String> {
        match (self.source, &mut self.documents) {
            (Source::Plain(path), _) => {
                for_each_portion(path, take)?;
                Ok("the file as it stands".to_owned())
            }
            (Source::Stories(part), _) => {
                take(&part.text())?;
                Ok(format!(
                    "{} generated stories, each ended by a newline",
                    part.stories()
                ))
            }
            (Source::Rows(parts), _) => {
                let (separator, name) = match self.role {
                    Role::Calibration => (" ", "one space"),
                    Role::Evaluation => ("\n\n", "two newlines"),
                };
                let mut joiner = Joiner::new(separator, take);
                for part in parts {
                    read_rows(part, &mut joiner)?;
                }
                Ok(format!("{} rows joined with {name}", joiner.pieces))
            }
            (Source::Sentences(path), _) => {
                let mut joiner = Joiner::new(" ", take);
                // As the hub's loader `ptb_text_only` has it: every line is a sentence, without the white space around it.
                for_each_line(path, &mut |line| joiner.push(line.trim_matches(is_white)))?;
                Ok(format!("{} sentences joined with one space", joiner.pieces))
            }
            (Source::Documents(..), documents) => {
                let mut joiner = Joiner::new(" ", take);
                if let Some(documents) = documents {
                    for number in 0..documents.count().min(EVALUATION_DOCUMENTS) {
                        joiner.push(&documents.text(number)?)?;
                    }
                }
                Ok(format!(
                    "the first {} documents joined with one space, at most {DOCUMENT_WINDOWS} windows",
                    joiner.pieces
                ))
            }
        }
    }
}

/// Joins pieces as Python's `separator.join(pieces)` does: empty pieces count.
struct Joiner<'a> {
    take: &'a mut dyn FnMut(&str) -> Result<()>,
    separator: &'static str,
    pieces: usize,
}

impl<'a> Joiner<'a> {
    fn new(separator: &'static str, take: &'a mut dyn FnMut(&str) -> Result<()>) -> Self {
        Self {
            take,
            separator,
            pieces: 0,
        }
    }

    fn push(&mut self, piece: &str) -> Result<()> {
        if self.pieces > 0 {
            (self.take)(self.separator)?;
        }
        self.pieces += 1;
        (self.take)(piece)
    }
}

/// Adds the rows of one WikiText-2 file: parquet rows as they are, lines of a raw file by the hub's rule.
fn read_rows(path: &Path, joiner: &mut Joiner<'_>) -> Result<()> {
    if Format::of(path)? == Format::Parquet {
        return TextColumn::open(path)?.for_each(&mut |row| joiner.push(row));
    }
    // The hub's loader: a line of nothing but white space becomes the empty row, any other keeps its newline.
    let mut push = |line: &str| joiner.push(if is_blank(line) { "" } else { line });
    for_each_line(path, &mut |line| {
        if !line.contains('\r') {
            return push(line);
        }
        // Python opens the file in text mode, which turns every line end into "\n".
        let line = line.replace("\r\n", "\n").replace('\r', "\n");
        line.split_inclusive('\n').try_for_each(&mut push)
    })
}

/// Gives a file to `take` in portions of [`PORTION`] bytes or a few less: it may have no line ends.
fn for_each_portion(path: &Path, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let cannot_read = || format!("cannot read `{}`", path.display());
    let mut file = File::open(path).with_context(cannot_read)?;
    let (mut portion, mut offset) = (Vec::with_capacity(PORTION), 0);
    loop {
        let read = (&mut file)
            .take((PORTION - portion.len()) as u64)
            .read_to_end(&mut portion)
            .with_context(cannot_read)?;
        let valid = match std::str::from_utf8(&portion) {
            Ok(text) => text.len(),
            // A character goes on in the next portion.
            Err(error) if read > 0 && error.error_len().is_none() => error.valid_up_to(),
            Err(error) => return Err(not_utf8(path, offset + error.valid_up_to() as u64).into()),
        };
        if read == 0 {
            return Ok(());
        }
        take(std::str::from_utf8(&portion[..valid]).context("text is checked twice")?)?;
        portion.drain(..valid);
        offset += valid as u64;
    }
}

/// Gives every line of a file to `take`, its newline included, the last one with none if there is none.
fn for_each_line(path: &Path, take: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let cannot_read = || format!("cannot read `{}`", path.display());
    let mut reader = BufReader::new(File::open(path).with_context(cannot_read)?);
    let (mut line, mut offset) = (Vec::new(), 0);
    while (&mut reader)
        .take(LONGEST_LINE + 1)
        .read_until(b'\n', &mut line)
        .with_context(cannot_read)?
        > 0
    {
        if line.len() as u64 > LONGEST_LINE {
            return Err(Failure::new(format!(
                "a line of `{}` is longer than {}",
                path.display(),
                ByteSize(LONGEST_LINE)
            ))
            .detail(format!("it begins at byte {offset}"))
            .hint("check that it is a text of lines; one without them is read by its path alone, as a .txt file")
            .into());
        }
        // No character but the newline itself has its byte, so no character is cut.
        let text = std::str::from_utf8(&line)
            .map_err(|error| not_utf8(path, offset + error.valid_up_to() as u64))?;
        take(text)?;
        offset += line.len() as u64;
        line.clear();
    }
    Ok(())
}

/// Whether `str.strip()` of Python leaves nothing: Unicode's white space and the four information separators.
fn is_blank(line: &str) -> bool {
    line.chars().all(is_white)
}

/// What `str.strip()` of Python takes away.
fn is_white(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// The failure for a file in another encoding.
pub(super) fn not_utf8(path: &Path, offset: u64) -> Failure {
    Failure::new(format!("`{}` is not UTF-8 text", path.display()))
        .detail(format!("the first invalid byte is at offset {offset}"))
        .hint(format!("convert it (iconv -f latin1 -t utf-8 '{}' > text.txt), or check that it is text at all", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::data::testing::write_parquet;
    use crate::run::Silent;

    fn read(source: &Source, role: Role) -> Result<String> {
        let mut text = JoinedText::open(source, role, &TextCache::disabled(), &Silent)?;
        let mut read = String::new();
        text.for_each(&mut |portion| {
            read += portion;
            Ok(())
        })?;
        Ok(read)
    }

    fn text_of(source: &Source, role: Role) -> String {
        read(source, role).expect("read")
    }

    #[test]
    fn sentences_lose_the_white_space_around_them_and_are_joined_with_one_space() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("ptb.test.txt");
        // " ".join(line.strip() for line in file): the empty line counts.
        fs::write(&path, " no it was n't \n\n but <unk> was \n").expect("write");
        for role in [Role::Calibration, Role::Evaluation] {
            assert_eq!(
                text_of(&Source::Sentences(path.clone()), role),
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
            let source = Source::Rows(vec![path]);
            assert_eq!(
                text_of(&source, Role::Calibration),
                "  = Title = \n   First . \n  Second . "
            );
            assert_eq!(
                text_of(&source, Role::Evaluation),
                "\n\n = Title = \n\n\n\n\n First . \n\n\n Second . "
            );
        }
    }

    #[test]
    fn a_plain_file_is_taken_as_it_stands() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a.txt");
        fs::write(&path, " \nx\r\n").expect("write");
        assert_eq!(
            text_of(&Source::Plain(path.clone()), Role::Calibration),
            " \nx\r\n"
        );
        fs::write(&path, b"abc\xff").expect("write");
        let error = read(&Source::Plain(path.clone()), Role::Calibration).expect_err("must fail");
        assert!(error.to_string().contains("offset 3"), "{error}");
        fs::write(&path, "é\né\n".as_bytes().split_last().expect("bytes").1).expect("write");
        assert_eq!(
            text_of(&Source::Plain(path.clone()), Role::Evaluation),
            "é\né"
        );
        fs::write(&path, b"\xc3\xa9\n\xc3").expect("write");
        let error = read(&Source::Plain(path.clone()), Role::Calibration).expect_err("must fail");
        assert!(error.to_string().contains("offset 3"), "{error}");
        // A character on the border of two portions, and a bad byte in the third.
        let text = format!("{}é{}", "a".repeat(PORTION - 1), "b".repeat(PORTION));
        fs::write(&path, &text).expect("write");
        assert_eq!(
            text_of(&Source::Plain(path.clone()), Role::Evaluation),
            text
        );
        fs::write(&path, [text.as_bytes(), b"\xff"].concat()).expect("write");
        let error = read(&Source::Plain(path), Role::Calibration).expect_err("must fail");
        assert!(
            error
                .to_string()
                .contains(&format!("offset {}", text.len())),
            "{error}"
        );
    }
}
