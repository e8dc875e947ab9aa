//! Files of documents turned into JSON lines: gzip is unpacked, lists are cut into their entries, rows of columns become objects, and
//! several files follow each other.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::json_array::ArrayLines;
use super::line_index::{LineIndex, LineIndexer, unreadable};
use super::stored_form::{BYTE_ORDER_MARK, DocumentFiles, Format};
use super::text_file::open;
use super::unpacked::Unpacked;
use super::{arrow_rows, parquet_rows};
use crate::failure::Failure;
use crate::input::{self, ContentKind, Expected};
use crate::run::{Event, Events};

/// The remedy for a gzipped file that unpacks to too much.
const GUNZIP: &str =
    "if it is meant, unpack it (gzip -dc FILE.gz > text.jsonl) and name the unpacked file";
/// Bytes of text that are read at once.
const PORTION: usize = 1 << 20;

/// Writes the documents of files as JSON lines into an empty file.
pub(super) fn unpack(
    parts: DocumentFiles<'_>,
    copy: &File,
    events: &dyn Events,
) -> Result<LineIndex> {
    let name = parts.name();
    let indexer = LineIndexer::new(&name, events).copying_to(copy);
    index(&name, indexer, events, |indexer| {
        for path in parts.paths {
            for_each_portion(path, parts.format, &mut |lines| {
                indexer.feed(lines)?;
                Ok(true)
            })?;
            if parts.paths.len() > 1 {
                // The last line of a file may have no end.
                indexer.feed(b"\n")?;
            }
        }
        Ok(())
    })
}

/// Gives the lines of a file to `take` in portions. `take` returns false for enough. Lines of columns come whole.
pub(super) fn for_each_portion(
    path: &Path,
    format: Format,
    take: &mut dyn FnMut(&[u8]) -> Result<bool>,
) -> Result<()> {
    match format {
        Format::Parquet => return parquet_rows::for_each(path, take),
        Format::ArrowStream | Format::ArrowFile => return arrow_rows::for_each(path, format, take),
        _ => {}
    }
    let file = open(path, Expected::Documents)?;
    let bytes = file.metadata().context("cannot stat an open file")?.len();
    let mut unpacked = format.is_gzipped().then(|| Unpacked::new(path, bytes, GUNZIP));
    let mut reader = BufReader::with_capacity(PORTION, format.reader(file));
    let mut array = format.is_array().then(ArrayLines::default);
    let (mut is_first, mut lines) = (true, Vec::new());
    loop {
        let portion = match reader.fill_buf() {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            portion => portion.map_err(|error| unreadable(path, &error, 0))?,
        };
        if portion.is_empty() {
            break;
        }
        if is_first && format.is_gzipped() {
            check_unpacked(path, portion)?;
        }
        is_first = false;
        let read = portion.len();
        if let Some(unpacked) = &mut unpacked {
            unpacked.add(read as u64)?;
        }
        let goes_on = match &mut array {
            None => take(portion)?,
            Some(array) => {
                lines.clear();
                array.push(portion, &mut lines).map_err(|failure| of_file(failure, path))?;
                take(&lines)?
            }
        };
        reader.consume(read);
        if !goes_on {
            return Ok(());
        }
    }
    match array {
        Some(array) => Ok(array.finish().map_err(|failure| of_file(failure, path))?),
        None => Ok(()),
    }
}

/// Adds the name of the file to a failure.
fn of_file(mut failure: Failure, path: &Path) -> Failure {
    failure.message = format!("`{}`: {}", path.display(), failure.message);
    failure
}

/// The longest first line that is checked before any work. A longer line is checked when its turn comes.
const LONGEST_FIRST: usize = 1 << 20;

/// The first line of a file that is not blank.
pub(super) struct FirstLine {
    /// Its number, from 1.
    pub(super) number: u64,
    /// Its bytes, without the mark of UTF-8 at the beginning of a file.
    pub(super) bytes: Vec<u8>,
    /// False for a line of more than a MiB, of which only the beginning is there.
    pub(super) is_whole: bool,
}

/// Reads the first line of a file that is not blank; `None` if there is none. Fails when the file cannot be read.
pub(super) fn first_line(path: &Path, format: Format) -> Result<Option<FirstLine>> {
    let mut first = FirstLine { number: 1, bytes: Vec::new(), is_whole: true };
    for_each_portion(path, format, &mut |portion| {
        for piece in portion.split_inclusive(|byte| *byte == b'\n') {
            first.bytes.extend_from_slice(&piece[..piece.len().min(LONGEST_FIRST)]);
            if first.number == 1 && first.bytes.starts_with(BYTE_ORDER_MARK) {
                first.bytes.drain(..BYTE_ORDER_MARK.len());
            }
            let is_blank = first.bytes.trim_ascii().is_empty();
            first.is_whole = first.bytes.len() < LONGEST_FIRST;
            match piece.ends_with(b"\n") {
                true if is_blank => {
                    first.number += 1;
                    first.bytes.clear();
                }
                is_ended if is_ended || !first.is_whole => return Ok(false),
                _ => {}
            }
        }
        Ok(true)
    })?;
    Ok(Some(first).filter(|first| !first.bytes.trim_ascii().is_empty()))
}

/// Makes the index of a file of documents: a phase of the run.
pub(super) fn index<'a>(
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
            .detail("it is empty, or has blank lines or an empty list alone")
            .hint("name a file that has documents")
            .into());
    }
    Ok(index)
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
