//! Documents by number, from a file larger than memory: JSON lines, gzipped JSON lines, or parquet.
//!
//! One pass over the file finds its lines and its hash; then a document costs one positioned read. Gzipped files and parquet are
//! unpacked to JSON lines on the way. The unpacked text is kept in the [`TextCache`], or in a temporary file if there is no cache.
//! A copy in the cache is used only if its name holds the hashes of the source and of the copy.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;

use super::cache::{TextCache, short};
use super::digest;
use super::line_index::{self, LineIndex, LineIndexer, WriteFailed};
use super::parquet_text::TextColumn;
use super::staged::{self, Staged};
use super::text_file::open;
use super::unpacked::Unpacked;
use crate::bytes::hex;
use crate::failure::Failure;
use crate::input::{self, ContentKind, Expected};
use crate::run::{Event, Events};

/// The remedy for a gzipped file that unpacks to too much.
const GUNZIP: &str =
    "if it is meant, unpack it (gzip -dc FILE.gz > text.jsonl) and name the unpacked file";

const ONE_OBJECT: &str = "every line must be a JSON object with a string `text`, as in {\"text\": \"...\"}; give plain text as a .txt file";

/// The mark of UTF-8, with which some editors begin a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The stored form of a file of documents. Its first bytes decide, because names are often wrong about compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// A JSON object per line.
    Lines,
    /// Gzipped JSON lines (several gzip members are read in sequence).
    GzippedLines,
    /// Parquet with a string column `text`.
    Parquet,
}

impl Format {
    /// Reads the first bytes of a file. Fails for content that does not agree with its role or its name.
    pub(super) fn of(path: &Path, expected: Expected) -> Result<Self> {
        let mut start = Vec::new();
        open(path, expected)?
            .take(4)
            .read_to_end(&mut start)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        Ok(match start[..] {
            [0x1f, 0x8b, ..] => Self::GzippedLines,
            [b'P', b'A', b'R', b'1'] => Self::Parquet,
            _ => Self::Lines,
        })
    }
}

/// A line of a file of documents. All fields except `text` are skipped.
#[derive(Deserialize)]
struct Document {
    text: String,
}

#[derive(Debug)]
pub(super) struct Documents {
    source: PathBuf,
    /// The unpacked copy, for messages; `None` if the source itself is read or the copy has no name.
    copy: Option<PathBuf>,
    text: File,
    index: LineIndex,
}

impl Documents {
    /// Opens a file of documents. Reads all of it once, and unpacks it if it is packed and the cache has no copy.
    /// Fails when the file cannot be read or is damaged, when it has no document, when a line has more than 64 MiB or more than the memory
    /// budget allows, and when neither the cache nor the folder for temporary files can hold the unpacked text.
    pub(super) fn open(
        path: &Path,
        format: Format,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Self> {
        let documents = Self::indexed(path, format, cache, events)?;
        cache.lines().check(path, documents.index.longest)?;
        Ok(documents)
    }

    fn indexed(
        path: &Path,
        format: Format,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Self> {
        if format == Format::Lines {
            let text = open(path, Expected::Documents)?;
            let indexer = LineIndexer::new(path, events);
            let index = index(path, indexer, events, |indexer| indexer.feed_all(&text))?;
            return Ok(Self::new(path, None, text, index));
        }
        let Some(folder) = cache.folder() else {
            return Self::unpack_temporary(path, format, events);
        };
        let source =
            digest::of_file(path).with_context(|| format!("cannot read `{}`", path.display()))?;
        // The name of a copy holds the hashes of its source and of its text.
        let prefix = format!("documents-{}-", short(&source));
        if let Some(found) = Self::from_cache(path, cache, &prefix, events) {
            return Ok(found);
        }
        match Self::unpack_into(folder, &prefix, path, format, events) {
            // A temporary file may help against a failing write, but not against a damaged source.
            Err(error) if error.is::<WriteFailed>() => {
                events.warn(format!(
                    "cannot keep documents in the cache: {error}; using a temporary file instead"
                ));
                Self::unpack_temporary(path, format, events)
            }
            unpacked => unpacked,
        }
    }

    fn new(source: &Path, copy: Option<PathBuf>, text: File, index: LineIndex) -> Self {
        Self { source: source.to_path_buf(), copy, text, index }
    }

    /// Number of documents, at least 1.
    pub(super) fn count(&self) -> u64 {
        self.index.count()
    }

    /// SHA-256 of the JSON-lines text: of the file itself, or of its unpacked text.
    pub(super) fn sha256(&self) -> String {
        hex(&self.index.sha256)
    }

    /// The text of document `number`, counted from 0.
    /// Fails when its line is not a JSON object with a string `text` (the message names file and line), or cannot be read.
    pub(super) fn text(&mut self, number: u64) -> Result<String> {
        let (start, line) = self.line(number)?;
        match serde_json::from_slice::<Document>(&line) {
            Ok(document) => Ok(document.text),
            Err(error) => Err(self.bad_line(start, &line, &error)),
        }
    }

    /// The first byte of line `number`, counted from 0, and the bytes of the line, without the mark of UTF-8 at the beginning of a file.
    /// Fails when it cannot be read.
    pub(super) fn line(&self, number: u64) -> Result<(u64, Vec<u8>)> {
        let (start, mut line) = self
            .index
            .read(&self.text, number)
            .with_context(|| format!("cannot read `{}`", self.source.display()))?;
        if start == 0 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok((start, line))
    }

    /// The place of the line at a byte, for a message. Its number is counted only now, because blank lines are not indexed.
    pub(super) fn place(&self, start: u64) -> String {
        let number = line_index::line_number(&self.text, start);
        number.map_or_else(|_| format!("byte {start}"), |number| format!("line {number}"))
    }

    /// Adds the name of the unpacked copy to the failure of a line, if the copy has a name.
    pub(super) fn of_copy(&self, failure: Failure) -> Failure {
        match &self.copy {
            Some(copy) => {
                failure.detail(format!("read from the unpacked copy `{}`", copy.display()))
            }
            None => failure,
        }
    }

    /// The failure for a line without a document.
    fn bad_line(&self, start: u64, line: &[u8], error: &serde_json::Error) -> anyhow::Error {
        let failure = not_a_document(&self.source, &self.place(start), line, error);
        self.of_copy(failure).into()
    }

    /// The copy of an earlier run, if its text still has the hash in its name. A damaged copy is removed.
    fn from_cache(
        path: &Path,
        cache: &TextCache,
        prefix: &str,
        events: &dyn Events,
    ) -> Option<Self> {
        let copy = cache.find(prefix)?;
        let text = File::open(&copy).ok()?;
        let indexer = LineIndexer::new(&copy, events);
        let index = index(path, indexer, events, |indexer| indexer.feed_all(&text));
        let is_intact = |index: &LineIndex| copy.ends_with(copy_name(prefix, index));
        let Some(index) = index.ok().filter(is_intact) else {
            events.warn(format!(
                "the unpacked text `{}` is damaged; it is unpacked again",
                copy.display()
            ));
            let _ = fs::remove_file(&copy);
            return None;
        };
        events.note(format!("documents from the cache: {} in `{}`", index.count(), copy.display()));
        Some(Self::new(path, Some(copy), text, index))
    }

    fn unpack_into(
        folder: &Path,
        prefix: &str,
        path: &Path,
        format: Format,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut staged = Staged::in_folder(folder, prefix).map_err(WriteFailed)?;
        let index = unpack(path, format, staged.file(), events)?;
        let copy = folder.join(copy_name(prefix, &index));
        let text = staged.commit(&copy).map_err(WriteFailed)?;
        Ok(Self::new(path, Some(copy), text, index))
    }

    fn unpack_temporary(path: &Path, format: Format, events: &dyn Events) -> Result<Self> {
        const PLACE: &str =
            "set TMPDIR to a folder with free space, or PRUNE_CACHE to keep what is unpacked";
        let text = staged::temporary().map_err(|error| {
            Failure::new(format!("cannot write to the folder for temporary files: {error}"))
                .hint(PLACE)
        })?;
        let index = unpack(path, format, &text, events).map_err(|error| {
            match error.downcast::<WriteFailed>() {
                Ok(failed) => Failure::new(format!(
                    "cannot unpack `{}` into a temporary file: {failed}",
                    path.display()
                ))
                .hint(PLACE)
                .into(),
                Err(other) => other,
            }
        })?;
        Ok(Self::new(path, None, text, index))
    }
}

fn copy_name(prefix: &str, index: &LineIndex) -> String {
    format!("{prefix}{}.jsonl", short(&hex(&index.sha256)))
}

/// Unpacks a packed file as JSON lines into an empty file.
fn unpack(path: &Path, format: Format, copy: &File, events: &dyn Events) -> Result<LineIndex> {
    let mut indexer = LineIndexer::new(path, events).copying_to(copy);
    let file = open(path, Expected::Documents)?;
    if format == Format::Parquet {
        // The reader of parquet limits the rows itself.
        let column = TextColumn::open(path)?;
        return index(path, indexer, events, |indexer| {
            column.for_each(&mut |row| {
                indexer.feed(format!("{}\n", serde_json::json!({ "text": row })).as_bytes())
            })
        });
    }
    let bytes = file.metadata().context("cannot stat an open file")?.len();
    indexer = indexer.limited_by(Unpacked::new(path, bytes, GUNZIP));
    index(path, indexer, events, |indexer| {
        indexer.feed_all(MultiGzDecoder::new(BufReader::new(file)))
    })
}

/// Makes the index of a file of documents: a phase of the run.
fn index<'a>(
    path: &Path,
    mut indexer: LineIndexer<'a>,
    events: &dyn Events,
    feed: impl FnOnce(&mut LineIndexer<'a>) -> Result<()>,
) -> Result<LineIndex> {
    let started = Instant::now();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let phase = format!("index {name}");
    events.emit(Event::PhaseStarted { phase: phase.clone(), unit: "documents", steps: 0 });
    feed(&mut indexer)?;
    let index = indexer.finish()?;
    events.emit(Event::PhaseDone { phase, elapsed: started.elapsed() });
    if index.count() == 0 {
        return Err(Failure::new(format!("no documents in `{}`", path.display()))
            .detail("the file has only blank lines, or none")
            .hint(ONE_OBJECT)
            .into());
    }
    Ok(index)
}

/// Checks the beginning of a file of documents.
/// Fails when the first line is not a document, the parquet column is missing, or the file is damaged at its beginning.
pub(super) fn check(path: &Path, format: Format) -> Result<()> {
    if format == Format::Parquet {
        return TextColumn::open(path).map(drop);
    }
    let Some(first) = first_line(path, format)? else {
        return Err(Failure::new(format!("no documents in `{}`", path.display()))
            .hint(ONE_OBJECT)
            .into());
    };
    match serde_json::from_slice::<Document>(&first.bytes) {
        Err(error) if first.is_whole || is_array(&first.bytes) => {
            let place = format!("line {}", first.number);
            Err(not_a_document(path, &place, &first.bytes, &error).into())
        }
        _ => Ok(()),
    }
}

/// The longest first line that is checked before any work. A longer line is checked when its turn comes.
const LONGEST_FIRST: u64 = 1 << 20;

/// The first line of a file that is not blank.
pub(super) struct FirstLine {
    /// Its number, from 1.
    pub(super) number: u64,
    /// Its bytes, without the mark of UTF-8 at the beginning of a file.
    pub(super) bytes: Vec<u8>,
    /// False for a line of more than [`LONGEST_FIRST`], of which only the beginning is there.
    pub(super) is_whole: bool,
}

/// Reads the first line that is not blank, of a file of lines; `None` if there is none. Fails when the file cannot be read.
pub(super) fn first_line(path: &Path, format: Format) -> Result<Option<FirstLine>> {
    let file = open(path, Expected::Documents)?;
    let reader: Box<dyn Read> = match format {
        Format::Lines | Format::Parquet => Box::new(file),
        Format::GzippedLines => Box::new(MultiGzDecoder::new(BufReader::new(file))),
    };
    let mut reader = BufReader::new(reader.take(LONGEST_FIRST));
    if format == Format::GzippedLines {
        let start = reader.fill_buf().map_err(|error| line_index::unreadable(path, &error, 0))?;
        check_unpacked(path, start)?;
    }
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        number += 1;
        let read = reader
            .read_until(b'\n', &mut line)
            .map_err(|error| line_index::unreadable(path, &error, 0))?;
        if read == 0 {
            return Ok(None);
        }
        if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        if !line.trim_ascii().is_empty() {
            let is_whole = line.ends_with(b"\n") || (line.len() as u64) < LONGEST_FIRST;
            return Ok(Some(FirstLine { number, bytes: line, is_whole }));
        }
    }
}

fn not_a_document(path: &Path, place: &str, line: &[u8], error: &serde_json::Error) -> Failure {
    let failure =
        Failure::new(format!("{place} of `{}` is not a document: {error}", path.display()))
            .detail(found_in(line));
    of_array(failure, path, line).or_hint(ONE_OBJECT)
}

/// Adds to the failure of a line, if it begins a list, the command that writes the entries of the list as lines.
pub(super) fn of_array(failure: Failure, path: &Path, line: &[u8]) -> Failure {
    if !is_array(line) {
        return failure;
    }
    let lines = path.with_extension("jsonl");
    failure
        .detail("the file is a JSON array, not a file of JSON lines")
        .hint(format!(
            "write its entries as lines: python -c \"import json; [print(json.dumps(x)) for x in json.load(open('{}'))]\" > '{}'",
            path.display(),
            lines.display()
        ))
}

fn is_array(line: &[u8]) -> bool {
    line.trim_ascii_start().starts_with(b"[")
}

/// Checks the first bytes of the text inside a gzip file. Fails for an archive, or a file that is no text.
fn check_unpacked(path: &Path, start: &[u8]) -> Result<()> {
    let Err(error) = input::check(start, Expected::Json, path) else {
        return Ok(());
    };
    let shown = path.display();
    let (found, inside) = (ContentKind::of(start), path.with_extension(""));
    let remedy = match found {
        ContentKind::Packed(_, command) => format!("unpack it: {command} '{shown}' > text.jsonl"),
        _ => format!(
            "unpack it, and convert the file inside: gzip -dc '{shown}' > '{}'",
            inside.display()
        ),
    };
    Err(Failure::new(format!("cannot read the text inside `{shown}`: {error}")).hint(remedy).into())
}

/// The content of a line, for a message: the names of its fields, else its beginning.
pub(super) fn found_in(line: &[u8]) -> String {
    match serde_json::from_slice::<serde_json::Value>(line) {
        Ok(serde_json::Value::Object(fields)) => {
            let mut names: Vec<&str> = fields.keys().map(String::as_str).take(20).collect();
            if fields.len() > names.len() {
                names.push("…");
            }
            format!("fields found: {}", names.join(", "))
        }
        _ => format!(
            "it begins: {}",
            String::from_utf8_lossy(line).chars().take(60).collect::<String>().trim_end()
        ),
    }
}
