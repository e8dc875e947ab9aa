//! The places of the lines of a large text, found in one pass over it. Blank lines do not count, as for the hub's JSON reader.
//!
//! An index has at most [`MOST_MARKS`] marks. Up to a million lines have a mark each; in a longer text every second, fourth, …
//! line has a mark, and the reader walks from there.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::Result;
use sha2::{Digest, Sha256};

use super::line_memory::LONGEST_LINE;
use super::text_file::line_too_long;
use crate::failure::Failure;
use crate::run::{Event, Events};

/// Marks of an index at most: 8 MiB.
const MOST_MARKS: usize = 1 << 20;
/// Bytes of text handled at once.
const CHUNK: usize = 1 << 20;

/// A failure to write the copy: the caller may write it elsewhere. Shows the system's message.
#[derive(Debug)]
pub(super) struct WriteFailed(pub(super) io::Error);

impl fmt::Display for WriteFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for WriteFailed {}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LineIndex {
    /// First byte of every `stride`-th line.
    marks: Vec<u64>,
    stride: u64,
    most_marks: usize,
    count: u64,
    /// Bytes of the longest line.
    pub(super) longest: u64,
    pub(super) sha256: [u8; 32],
}

impl LineIndex {
    fn new(most_marks: usize) -> Self {
        Self { marks: Vec::new(), stride: 1, most_marks, count: 0, longest: 0, sha256: [0; 32] }
    }

    /// Lines that are not blank.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Adds the line that begins at byte `start`.
    fn add(&mut self, start: u64) {
        if self.marks.len() == self.most_marks {
            let mut is_kept = [false, true].into_iter().cycle();
            self.marks.retain(|_| is_kept.next() == Some(false));
            self.stride *= 2;
        }
        if self.count.is_multiple_of(self.stride) {
            self.marks.push(start);
        }
        self.count += 1;
    }

    /// Reads a line of `text`, counted from 0. Returns its first byte and its bytes.
    /// Fails when the text cannot be read, or has become shorter.
    pub(super) fn read(&self, mut text: &File, number: u64) -> io::Result<(u64, Vec<u8>)> {
        let mark = usize::try_from(number / self.stride).unwrap_or(usize::MAX);
        let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut start = *self.marks.get(mark).ok_or_else(gone)?;
        let mut left = number % self.stride;
        text.seek(SeekFrom::Start(start))?;
        let mut reader = BufReader::new(text);
        let mut line = Vec::new();
        loop {
            let read = (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line)?;
            if read == 0 {
                return Err(gone());
            }
            if !line.trim_ascii().is_empty() {
                if left == 0 {
                    return Ok((start, line));
                }
                left -= 1;
            }
            start += read as u64;
            line.clear();
        }
    }
}

/// Makes the index of a text that passes through it, and writes a copy of the text if asked to.
pub(super) struct LineIndexer<'a> {
    source: &'a Path,
    copy: Option<BufWriter<&'a File>>,
    events: &'a dyn Events,
    index: LineIndex,
    hasher: Sha256,
    position: u64,
    line_start: u64,
    is_blank: bool,
}

impl<'a> LineIndexer<'a> {
    /// An indexer before the first byte. `source` names the text in messages.
    pub(super) fn new(source: &'a Path, events: &'a dyn Events) -> Self {
        Self {
            source,
            copy: None,
            events,
            index: LineIndex::new(MOST_MARKS),
            hasher: Sha256::new(),
            position: 0,
            line_start: 0,
            is_blank: true,
        }
    }

    pub(super) fn copying_to(mut self, file: &'a File) -> Self {
        self.copy = Some(BufWriter::with_capacity(CHUNK, file));
        self
    }

    pub(super) fn feed_all(&mut self, mut reader: impl Read) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        loop {
            match reader.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(read) => self.feed(&chunk[..read])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(unreadable(self.source, &error, self.index.count).into());
                }
            }
        }
    }

    /// Takes the next bytes of the text. Fails with [`WriteFailed`] when the copy cannot be written, and with a [`Failure`] when a line is
    /// too long.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        if let Some(copy) = &mut self.copy {
            copy.write_all(bytes).map_err(WriteFailed)?;
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.is_blank = self.is_blank && piece.trim_ascii().is_empty();
            self.position += piece.len() as u64;
            if self.position - self.line_start > LONGEST_LINE {
                let place = format!(
                    "it begins at byte {} and follows {} documents",
                    self.line_start, self.index.count
                );
                return Err(line_too_long(self.source)
                    .detail(place)
                    .hint("write one JSON object per line, or give plain text as a .txt file")
                    .into());
            }
            if piece.ends_with(b"\n") {
                self.end_line();
            }
        }
        Ok(())
    }

    /// Adds the line that ends here, unless it is blank.
    fn end_line(&mut self) {
        if !self.is_blank {
            let length = self.position - self.line_start;
            self.index.longest = self.index.longest.max(length);
            self.index.add(self.line_start);
            if self.index.count.is_multiple_of(4096) {
                let done = self.index.count;
                self.events.emit(Event::Progress { done });
            }
        }
        self.line_start = self.position;
        self.is_blank = true;
    }

    /// Ends the text. Fails with [`WriteFailed`] when the copy cannot be written.
    pub(super) fn finish(mut self) -> Result<LineIndex> {
        // The last line may have no newline.
        self.end_line();
        if let Some(mut copy) = self.copy {
            copy.flush().map_err(WriteFailed)?;
        }
        self.index.sha256 = self.hasher.finalize().into();
        Ok(self.index)
    }
}

/// The failure for a source that cannot be read to its end.
pub(super) fn unreadable(path: &Path, error: &io::Error, documents: u64) -> Failure {
    let failure = Failure::new(format!("cannot read `{}`: {error}", path.display()))
        .hint("the file is damaged or incomplete: copy it again");
    match documents {
        0 => failure,
        documents => failure.detail(format!("{documents} documents were read before")),
    }
}

/// The number, from 1, of the line that begins at a byte: counts the newlines before it.
pub(super) fn line_number(mut text: &File, start: u64) -> io::Result<u64> {
    text.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::new(text.take(start));
    let mut chunk = vec![0; CHUNK];
    let mut number = 1;
    loop {
        match reader.read(&mut chunk)? {
            0 => return Ok(number),
            read => number += chunk[..read].iter().filter(|byte| **byte == b'\n').count() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Silent;

    #[test]
    fn every_line_is_found_whether_it_has_a_mark_or_not() {
        let lines: Vec<String> = (0..100).map(|n| format!("line {n}\n")).collect();
        // Blank lines between them, which do not count.
        let text = lines.join(" \n\n");
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(text.as_bytes()).expect("write");
        for most_marks in [2, 4, 64, 128] {
            let mut indexer = LineIndexer::new(Path::new("x"), &Silent);
            indexer.index = LineIndex::new(most_marks);
            for piece in text.as_bytes().chunks(7) {
                indexer.feed(piece).expect("feed");
            }
            let index = indexer.finish().expect("finish");
            assert_eq!(index.count(), 100);
            assert!(index.marks.len() <= most_marks);
            for (number, line) in lines.iter().enumerate() {
                let (start, read) = index.read(&file, number as u64).expect("read");
                assert_eq!(read, line.as_bytes());
                assert_eq!(text.find(line.as_str()), Some(start as usize));
            }
            assert!(index.read(&file, 100).is_err());
        }
    }
}
