//! Documents by number, from a file far larger than memory: JSON lines, gzipped JSON lines, or parquet.
//!
//! A file is read once from end to end to learn where each line begins and ends; afterwards a document costs one
//! positioned read. Compressed and parquet files are unpacked to JSON lines on the way. Index and unpacked text live in the
//! [`TextCache`], or in temporary files where there is none.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;
use serde::Deserialize;

use super::cache::{Staged, TextCache};
use super::line_index::{self, Header, LineIndexer};
use super::parquet_text::TextColumn;
use super::unpacked::Unpacked;
use crate::failure::Failure;
use crate::run::{Event, Events};

/// A longer line is refused rather than read: no document is that long, but a file without line ends is.
pub(super) const LONGEST_LINE: u64 = 64 << 20;

/// What to do about a gzipped file that grows too much.
const GUNZIP: &str =
    "if it is meant, unpack it (gzip -dc FILE.gz > text.jsonl) and name the unpacked file";

/// What a file of documents must look like.
const ONE_OBJECT: &str = "every line must be a JSON object with a string `text`, as in {\"text\": \"...\"}; give plain text as a .txt file";

/// How a file of documents is stored; told by its first bytes, as names often lie about compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// One JSON object per line.
    Lines,
    /// The same, gzipped (several members are read as one).
    GzippedLines,
    /// Parquet with a string column `text`.
    Parquet,
}

impl Format {
    /// Looks at the first bytes of a file.
    pub(super) fn of(path: &Path) -> Result<Self> {
        let mut start = Vec::new();
        open(path)?
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

/// One line of a file of documents; other fields are skipped.
#[derive(Deserialize)]
struct Document {
    text: String,
}

/// The documents of one file.
#[derive(Debug)]
pub(super) struct Documents {
    source: PathBuf,
    /// The unpacked copy that is read, for messages; none where the source itself is read.
    copy: Option<PathBuf>,
    text: File,
    index: File,
    header: Header,
    /// Temporary files, kept until we are done.
    _temporary: Vec<Staged>,
}

impl Documents {
    /// Opens a file of documents; the first time, this reads all of it.
    ///
    /// # Errors
    ///
    /// Fails when the file cannot be read or is damaged, has a line of more than 64 MiB or no document at all, and when
    /// neither the cache nor the folder for temporary files can hold what is derived from it.
    pub(super) fn open(
        path: &Path,
        format: Format,
        cache: &TextCache,
        events: &dyn Events,
    ) -> Result<Self> {
        let key = TextCache::key_of_file(path)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        let places = cache
            .place(&format!("documents-{key}.index"))
            .zip(cache.place(&format!("documents-{key}.jsonl")));
        let Some((index_place, text_place)) = places else {
            return Self::build_temporary(path, format, events);
        };
        if let Some(found) = Self::from_cache(path, format, &index_place, &text_place) {
            events.note(format!(
                "documents from the cache: {} in `{}`",
                found.count(),
                index_place.display()
            ));
            return Ok(found);
        }
        match Self::build_in_cache(path, format, &index_place, &text_place, events) {
            // Only a failing write can be helped by writing elsewhere.
            Err(error) if error.is::<line_index::WriteFailed>() => {
                events.warn(format!(
                    "cannot keep documents in the cache: {error}; using a temporary file instead"
                ));
                Self::build_temporary(path, format, events)
            }
            built => built,
        }
    }

    /// How many documents there are; at least one.
    pub(super) fn count(&self) -> u64 {
        self.header.count
    }

    /// SHA-256 of the text as JSON lines: of the file itself where it is that, of its unpacked content otherwise.
    pub(super) fn sha256(&self) -> String {
        crate::bytes::hex(&self.header.sha256)
    }

    /// The text of one document, counted from 0.
    ///
    /// # Errors
    ///
    /// Fails when its line is not a JSON object with a string `text` (file and line number are named), or cannot be read.
    pub(super) fn text(&mut self, number: u64) -> Result<String> {
        let (start, end) = self.header.range(&self.index, number)?;
        let mut line = Vec::new();
        self.text.seek(SeekFrom::Start(start))?;
        (&self.text)
            .take(end - start)
            .read_to_end(&mut line)
            .with_context(|| format!("cannot read `{}`", self.source.display()))?;
        match serde_json::from_slice::<Document>(&line) {
            Ok(document) => Ok(document.text),
            Err(error) => Err(self.bad_line(start, &line, &error)),
        }
    }

    /// The failure for a line that holds no document. Lines are counted now: blank ones have no number of their own.
    fn bad_line(&self, start: u64, line: &[u8], error: &serde_json::Error) -> anyhow::Error {
        let number = line_index::line_number(&self.text, start);
        let number = number.map_or_else(
            |_| format!("byte {start}"),
            |number| format!("line {number}"),
        );
        let failure = not_a_document(&self.source, &number, line, error);
        match &self.copy {
            Some(copy) => {
                failure.detail(format!("read from the unpacked copy `{}`", copy.display()))
            }
            None => failure,
        }
        .into()
    }

    /// What an earlier run left, if it is whole.
    fn from_cache(
        path: &Path,
        format: Format,
        index_place: &Path,
        text_place: &Path,
    ) -> Option<Self> {
        let copy = (format != Format::Lines).then(|| text_place.to_path_buf());
        let text = File::open(copy.as_deref().unwrap_or(path)).ok()?;
        let index = File::open(index_place).ok()?;
        let header = Header::read(&index, text.metadata().ok()?.len())?;
        Some(Self {
            source: path.to_path_buf(),
            copy,
            text,
            index,
            header,
            _temporary: Vec::new(),
        })
    }

    /// Builds index and unpacked text and leaves them in the cache.
    fn build_in_cache(
        path: &Path,
        format: Format,
        index_place: &Path,
        text_place: &Path,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut index = Staged::beside(index_place).map_err(line_index::WriteFailed)?;
        let mut text = if format == Format::Lines {
            None
        } else {
            Some(Staged::beside(text_place).map_err(line_index::WriteFailed)?)
        };
        let header = build(path, format, &index, text.as_ref(), events)?;
        // The index goes last: whoever finds it finds the text, too.
        if let Some(text) = &mut text {
            text.commit(text_place).map_err(line_index::WriteFailed)?;
        }
        index.commit(index_place).map_err(line_index::WriteFailed)?;
        Self::assemble(
            path,
            text.as_ref().map(|_| text_place.to_path_buf()),
            index,
            text,
            header,
        )
    }

    /// Builds index and unpacked text in temporary files.
    fn build_temporary(path: &Path, format: Format, events: &dyn Events) -> Result<Self> {
        let temporary = || {
            Staged::temporary().map_err(|error| {
                Failure::new(format!("cannot write to the folder for temporary files: {error}"))
                    .hint("set TMPDIR to a folder with free space, or PRUNE_CACHE to keep what is unpacked")
            })
        };
        let index = temporary()?;
        let text = if format == Format::Lines {
            None
        } else {
            Some(temporary()?)
        };
        let header = build(path, format, &index, text.as_ref(), events).map_err(|error| match error.downcast::<line_index::WriteFailed>() {
            Ok(failed) => Failure::new(format!("cannot unpack `{}` into a temporary file: {failed}", path.display()))
                .hint("set TMPDIR to a folder with free space, or PRUNE_CACHE to keep what is unpacked")
                .into(),
            Err(other) => other,
        })?;
        Self::assemble(path, None, index, text, header)
    }

    /// Puts the open files together.
    fn assemble(
        path: &Path,
        copy: Option<PathBuf>,
        index: Staged,
        text: Option<Staged>,
        header: Header,
    ) -> Result<Self> {
        let clone = |staged: &Staged| {
            staged
                .file()
                .try_clone()
                .context("cannot reopen a file just written")
        };
        let text_file = match &text {
            Some(text) => clone(text)?,
            None => open(path)?,
        };
        let index_file = clone(&index)?;
        let temporary = text.into_iter().chain([index]).collect();
        Ok(Self {
            source: path.to_path_buf(),
            copy,
            text: text_file,
            index: index_file,
            header,
            _temporary: temporary,
        })
    }
}

/// Reads the whole source once, writing the index and, where there is one, the unpacked text.
fn build(
    path: &Path,
    format: Format,
    index: &Staged,
    text: Option<&Staged>,
    events: &dyn Events,
) -> Result<Header> {
    let started = std::time::Instant::now();
    let phase = format!(
        "index {}",
        path.file_name().unwrap_or_default().to_string_lossy()
    );
    events.emit(Event::PhaseStarted {
        phase: phase.clone(),
        unit: "documents",
        steps: 0,
    });
    let unpacked = if format == Format::GzippedLines {
        let file = open(path)?.metadata().context("cannot stat an open file")?;
        Some(Unpacked::new(path, file.len(), GUNZIP))
    } else {
        // A plain file is as large as it is; rows of parquet are counted as they are read.
        None
    };
    let text_file = text.map(Staged::file);
    let mut indexer = LineIndexer::new(path, index.file(), text_file, unpacked, events)?;
    match format {
        Format::Lines => indexer.feed_all(open(path)?)?,
        Format::GzippedLines => {
            indexer.feed_all(MultiGzDecoder::new(BufReader::new(open(path)?)))?
        }
        Format::Parquet => TextColumn::open(path)?.for_each(&mut |row| {
            indexer.feed(format!("{}\n", serde_json::json!({ "text": row })).as_bytes())
        })?,
    }
    let header = indexer.finish()?;
    events.emit(Event::PhaseDone {
        phase,
        elapsed: started.elapsed(),
    });
    if header.count == 0 {
        return Err(
            Failure::new(format!("no documents in `{}`", path.display()))
                .detail("the file has only blank lines, or none")
                .hint(ONE_OBJECT)
                .into(),
        );
    }
    Ok(header)
}

/// Looks at the beginning of a file only: is this a file of documents?
///
/// # Errors
///
/// Fails when the first line is not a document, the parquet column is missing, or the file is damaged at its beginning.
pub(super) fn check(path: &Path, format: Format) -> Result<()> {
    let reader: Box<dyn Read> = match format {
        Format::Parquet => return TextColumn::open(path).map(drop),
        Format::Lines => Box::new(open(path)?),
        Format::GzippedLines => Box::new(MultiGzDecoder::new(BufReader::new(open(path)?))),
    };
    let mut reader = BufReader::new(reader.take(LONGEST_LINE));
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        number += 1;
        let read = reader
            .read_until(b'\n', &mut line)
            .map_err(|error| line_index::unreadable(path, &error, 0))?;
        if read == 0 {
            return Err(
                Failure::new(format!("no documents in `{}`", path.display()))
                    .hint(ONE_OBJECT)
                    .into(),
            );
        }
        if !line.trim_ascii().is_empty() {
            break;
        }
    }
    let parsed = serde_json::from_slice::<Document>(&line);
    Ok(parsed
        .map(drop)
        .map_err(|error| not_a_document(path, &format!("line {number}"), &line, &error))?)
}

/// The failure for a line without a document: what is wrong, what was found, what is expected.
fn not_a_document(path: &Path, place: &str, line: &[u8], error: &serde_json::Error) -> Failure {
    let found = match serde_json::from_slice::<serde_json::Value>(line) {
        Ok(serde_json::Value::Object(fields)) => {
            let mut names: Vec<&str> = fields.keys().map(String::as_str).take(20).collect();
            if fields.len() > names.len() {
                names.push("…");
            }
            format!("fields found: {}", names.join(", "))
        }
        _ => format!(
            "it begins: {}",
            String::from_utf8_lossy(line)
                .chars()
                .take(60)
                .collect::<String>()
                .trim_end()
        ),
    };
    Failure::new(format!(
        "{place} of `{}` is not a document: {error}",
        path.display()
    ))
    .detail(found)
    .hint(ONE_OBJECT)
}

/// Opens a file for reading.
fn open(path: &Path) -> Result<File> {
    Ok(File::open(path)
        .map_err(|error| Failure::new(format!("cannot open `{}`: {error}", path.display())))?)
}
