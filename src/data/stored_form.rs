//! The stored form of files of documents. Their first bytes decide, because names are often wrong about compression.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;

use super::digest;
use super::text_file::open;
use crate::input::{ContentKind, Expected};

/// The mark of UTF-8, with which some editors begin a file.
pub(super) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Files of one form, in order.
#[derive(Debug, Clone, Copy)]
pub(super) struct DocumentFiles<'a> {
    pub(super) paths: &'a [PathBuf],
    pub(super) format: Format,
}

impl DocumentFiles<'_> {
    /// The file, or the folder of several files.
    pub(super) fn name(&self) -> PathBuf {
        match self.paths {
            [path] => path.clone(),
            paths => {
                let folder = paths.first().and_then(|path| path.parent());
                folder.unwrap_or(Path::new(".")).to_path_buf()
            }
        }
    }

    /// SHA-256 of the file; of several files, the hash of their hashes.
    pub(super) fn sha256(&self) -> Result<String> {
        let of_file = |path: &PathBuf| {
            digest::of_file(path).with_context(|| format!("cannot read `{}`", path.display()))
        };
        let mut hashes = self.paths.iter().map(of_file).collect::<Result<Vec<_>>>()?;
        Ok(match hashes.len() {
            1 => hashes.remove(0),
            _ => digest::of_bytes(hashes.join("\n").as_bytes()),
        })
    }
}

/// The stored form of a file of documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// A JSON object per line.
    Lines,
    /// Gzipped JSON lines (several gzip members are read in sequence).
    GzippedLines,
    /// One JSON list of objects.
    Array,
    /// A gzipped list.
    GzippedArray,
    /// Parquet.
    Parquet,
    /// An Arrow stream, as the `datasets` library keeps its cache and saves data sets.
    ArrowStream,
    /// An Arrow file.
    ArrowFile,
}

impl Format {
    /// Reads the first bytes of a file. Fails for content that does not agree with its role or its name.
    pub(super) fn of(path: &Path, expected: Expected) -> Result<Self> {
        let reading = || format!("cannot read `{}`", path.display());
        let mut file = BufReader::new(open(path, expected)?);
        let start = file.fill_buf().with_context(reading)?;
        Ok(match ContentKind::of(start) {
            ContentKind::Parquet => Self::Parquet,
            ContentKind::ArrowStream => Self::ArrowStream,
            ContentKind::ArrowFile => Self::ArrowFile,
            // A damaged file is refused when it is read.
            ContentKind::Gzip => match begins_list(MultiGzDecoder::new(file)) {
                true => Self::GzippedArray,
                false => Self::GzippedLines,
            },
            _ if begins_list(file) => Self::Array,
            _ => Self::Lines,
        })
    }

    /// The text of a file of JSON, unpacked.
    pub(super) fn reader(self, file: File) -> Box<dyn Read> {
        match self {
            Self::GzippedLines | Self::GzippedArray => {
                Box::new(MultiGzDecoder::new(BufReader::new(file)))
            }
            _ => Box::new(file),
        }
    }

    /// The place of a document, for a message.
    pub(super) fn place(self, number: u64) -> String {
        match self {
            Self::Lines | Self::GzippedLines => format!("line {number}"),
            Self::Array | Self::GzippedArray => format!("entry {number}"),
            _ => format!("row {number}"),
        }
    }

    pub(super) fn is_gzipped(self) -> bool {
        matches!(self, Self::GzippedLines | Self::GzippedArray)
    }

    pub(super) fn is_array(self) -> bool {
        matches!(self, Self::Array | Self::GzippedArray)
    }

    /// Returns whether documents are rows of columns.
    pub(super) fn is_columnar(self) -> bool {
        matches!(self, Self::Parquet | Self::ArrowStream | Self::ArrowFile)
    }
}

/// Returns whether the first character of a text, white space and the mark of UTF-8 left out, begins a list.
fn begins_list(text: impl Read) -> bool {
    let mut start = Vec::new();
    let _ = text.take(4096).read_to_end(&mut start);
    let start = start.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&start);
    start.trim_ascii_start().starts_with(b"[")
}
