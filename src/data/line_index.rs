//! Where each line of a large file begins and ends, in a file beside it.
//!
//! Layout of an index, all numbers u64 little endian: magic (8 bytes), number of lines, size of the text in bytes, SHA-256
//! of the text (32 bytes), then the first and the past-the-end byte of every line. Blank lines are left out, as the hub's
//! JSON reader does. An index made for another text is told by the size it states.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::documents::LONGEST_LINE;
use super::unpacked::Unpacked;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::run::{Event, Events};

/// First bytes of an index; the digit is the layout's version.
const MAGIC: &[u8; 8] = b"PRNDOC1\n";
const HEADER: usize = 8 + 8 + 8 + 32;
/// Bytes per line in an index.
const ENTRY: u64 = 16;
/// Bytes of text handled at once.
const CHUNK: usize = 1 << 20;

/// Writing failed, not reading: another place may do. Shows the system's message.
#[derive(Debug)]
pub(super) struct WriteFailed(pub(super) io::Error);

impl fmt::Display for WriteFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for WriteFailed {}

/// What an index says about its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// Lines that are not blank.
    pub(super) count: u64,
    /// Bytes of the text.
    pub(super) text_bytes: u64,
    /// SHA-256 of the text.
    pub(super) sha256: [u8; 32],
}

impl Header {
    /// Reads the header of an index for a text of `text_bytes`; none where it is cut short or made for another text.
    pub(super) fn read(mut index: &File, text_bytes: u64) -> Option<Self> {
        let mut bytes = [0u8; HEADER];
        index.seek(SeekFrom::Start(0)).ok()?;
        index.read_exact(&mut bytes).ok()?;
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (count, rest) = rest.split_first_chunk::<8>()?;
        let (size, rest) = rest.split_first_chunk::<8>()?;
        let header = Self {
            count: u64::from_le_bytes(*count),
            text_bytes: u64::from_le_bytes(*size),
            sha256: *rest.first_chunk::<32>()?,
        };
        let expected = header
            .count
            .checked_mul(ENTRY)?
            .checked_add(HEADER as u64)?;
        let is_whole =
            magic == MAGIC && header.count > 0 && index.metadata().ok()?.len() == expected;
        (is_whole && header.text_bytes == text_bytes).then_some(header)
    }

    /// First and past-the-end byte of a line, counted from 0 among those that are not blank.
    pub(super) fn range(&self, mut index: &File, number: u64) -> Result<(u64, u64)> {
        let mut entry = [0u8; ENTRY as usize];
        index
            .seek(SeekFrom::Start(HEADER as u64 + number * ENTRY))
            .and_then(|_| index.read_exact(&mut entry))
            .context("cannot read a line index")?;
        let (start, end) = entry.split_at(8);
        let read = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX);
        let (start, end) = (read(start), read(end));
        if start > end || end > self.text_bytes || end - start > LONGEST_LINE {
            return Err(Failure::new("a line index in the cache is damaged")
                .detail(format!("line {number} is said to span bytes {start} to {end} of {}", self.text_bytes))
                .hint("delete the documents-* files in the cache folder ($PRUNE_CACHE, or ~/.cache/prune)")
                .into());
        }
        Ok((start, end))
    }

    fn to_bytes(&self) -> Vec<u8> {
        [
            &MAGIC[..],
            &self.count.to_le_bytes(),
            &self.text_bytes.to_le_bytes(),
            &self.sha256,
        ]
        .concat()
    }
}

/// Writes the index of a text that passes through it, and a copy of the text where one is wanted.
pub(super) struct LineIndexer<'a> {
    source: &'a Path,
    index: BufWriter<&'a File>,
    copy: Option<BufWriter<&'a File>>,
    /// What may come out of a packed source.
    unpacked: Option<Unpacked<'a>>,
    events: &'a dyn Events,
    hasher: Sha256,
    position: u64,
    line_start: u64,
    is_blank: bool,
    count: u64,
}

impl<'a> LineIndexer<'a> {
    /// Begins an index in an empty file; `source` names the text in messages, `unpacked` counts it where the source is packed and
    /// nobody else counts.
    pub(super) fn new(
        source: &'a Path,
        index: &'a File,
        copy: Option<&'a File>,
        unpacked: Option<Unpacked<'a>>,
        events: &'a dyn Events,
    ) -> Result<Self> {
        let mut index = BufWriter::new(index);
        // Room for the header, whose numbers are known at the end.
        index.write_all(&[0; HEADER]).map_err(WriteFailed)?;
        let copy = copy.map(|file| BufWriter::with_capacity(CHUNK, file));
        let hasher = Sha256::new();
        Ok(Self {
            source,
            index,
            copy,
            unpacked,
            events,
            hasher,
            position: 0,
            line_start: 0,
            is_blank: true,
            count: 0,
        })
    }

    /// Takes everything a reader gives.
    ///
    /// # Errors
    ///
    /// Fails as [`LineIndexer::feed`] does, and when reading fails, as it does on a damaged archive.
    pub(super) fn feed_all(&mut self, mut reader: impl Read) -> Result<()> {
        let mut chunk = vec![0; CHUNK];
        loop {
            match reader.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(read) => self.feed(&chunk[..read])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(unreadable(self.source, &error, self.count).into()),
            }
        }
    }

    /// Takes the next bytes of the text.
    ///
    /// # Errors
    ///
    /// Fails with [`WriteFailed`] when a file cannot be written, and with a [`Failure`] when a line is too long, or the whole is too
    /// much for a packed source.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some(unpacked) = &mut self.unpacked {
            unpacked.add(bytes.len() as u64)?;
        }
        self.hasher.update(bytes);
        if let Some(copy) = &mut self.copy {
            copy.write_all(bytes).map_err(WriteFailed)?;
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.is_blank = self.is_blank && piece.trim_ascii().is_empty();
            self.position += piece.len() as u64;
            if self.position - self.line_start > LONGEST_LINE {
                return Err(self.line_too_long().into());
            }
            if piece.ends_with(b"\n") {
                self.end_line()?;
            }
        }
        Ok(())
    }

    /// Notes the line that ends here, unless it is blank.
    fn end_line(&mut self) -> Result<()> {
        if !self.is_blank {
            self.index
                .write_all(&self.line_start.to_le_bytes())
                .map_err(WriteFailed)?;
            self.index
                .write_all(&self.position.to_le_bytes())
                .map_err(WriteFailed)?;
            self.count += 1;
            if self.count.is_multiple_of(4096) {
                self.events.emit(Event::Progress { done: self.count });
            }
        }
        self.line_start = self.position;
        self.is_blank = true;
        Ok(())
    }

    /// Writes what is left and the header.
    ///
    /// # Errors
    ///
    /// Fails with [`WriteFailed`] when a file cannot be written.
    pub(super) fn finish(mut self) -> Result<Header> {
        // The last line may lack its newline.
        self.end_line()?;
        let header = Header {
            count: self.count,
            text_bytes: self.position,
            sha256: self.hasher.finalize().into(),
        };
        self.index
            .seek(SeekFrom::Start(0))
            .and_then(|_| self.index.write_all(&header.to_bytes()))
            .map_err(WriteFailed)?;
        self.index.flush().map_err(WriteFailed)?;
        if let Some(mut copy) = self.copy {
            copy.flush().map_err(WriteFailed)?;
        }
        Ok(header)
    }

    fn line_too_long(&self) -> Failure {
        Failure::new(format!(
            "a line of `{}` is longer than {}",
            self.source.display(),
            ByteSize(LONGEST_LINE)
        ))
        .detail(format!(
            "it begins at byte {} and follows {} documents",
            self.line_start, self.count
        ))
        .hint("write one JSON object per line, or give plain text as a .txt file")
    }
}

/// The failure for a source that breaks off while it is read.
pub(super) fn unreadable(path: &Path, error: &io::Error, documents: u64) -> Failure {
    Failure::new(format!("cannot read `{}`: {error}", path.display()))
        .detail(format!("{documents} documents were read before"))
        .hint("the file is damaged or incomplete: copy it again")
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
