//! The partial file of a download: it grows by what arrives, and knows the SHA-256 of its bytes.
//!
//! A download appends to `blobs/<etag>.incomplete`, the Python client's name for it, and renames it when it is whole.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::cache::cannot_write;
use crate::bytes::{ByteSize, hex};
use crate::failure::Failure;

/// Bytes read at once.
pub(super) const BUFFER: usize = 256 << 10;

/// A file under way to the cache.
pub(super) struct Partial {
    file: File,
    path: PathBuf,
    /// Of the first `length` bytes.
    hash: Sha256,
    length: u64,
}

impl Partial {
    /// Opens a partial file, or creates it and its folder.
    pub(super) fn open(path: PathBuf) -> Result<Self, Failure> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let file = path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| options.open(&path))
            .map_err(cannot_write(&path))?;
        Ok(Self { file, path, hash: Sha256::new(), length: 0 })
    }

    /// Returns the bytes in the file.
    pub(super) fn stored(&self) -> Result<u64, Failure> {
        let metadata = self.file.metadata();
        Ok(metadata.map_err(cannot_write(&self.path))?.len())
    }

    /// Keeps the first `length` bytes, hashes them, and continues after them.
    pub(super) fn keep(&mut self, length: u64) -> Result<(), Failure> {
        self.hash = Sha256::new();
        self.length = length;
        let kept = self.hash_and_cut(length);
        kept.map_err(cannot_write(&self.path))
    }

    fn hash_and_cut(&mut self, length: u64) -> io::Result<()> {
        // A device has no length to cut.
        if self.file.metadata()?.len() != length {
            self.file.set_len(length)?;
        }
        self.file.seek(SeekFrom::Start(0))?;
        let kept = Read::by_ref(&mut self.file).take(length);
        let hashed = io::copy(&mut BufReader::with_capacity(BUFFER, kept), &mut self.hash)?;
        if hashed < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Appends bytes; `missing` is the number that the file lacks, for the message of a full disk.
    pub(super) fn append(&mut self, bytes: &[u8], missing: Option<u64>) -> Result<(), Failure> {
        self.file.write_all(bytes).map_err(|error| {
            let failure = cannot_write(&self.path)(error);
            match missing {
                Some(missing) => {
                    failure.detail(format!("{} are still to be written", ByteSize(missing)))
                }
                None => failure,
            }
        })?;
        self.hash.update(bytes);
        self.length += bytes.len() as u64;
        Ok(())
    }

    /// Returns the bytes that are kept and hashed.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// Returns the SHA-256 of these bytes, as hexadecimal digits.
    pub(super) fn sha256(&self) -> String {
        hex(&self.hash.clone().finalize())
    }

    /// Gives the whole file its name in the cache.
    pub(super) fn publish(self, blob: &Path) -> Result<(), Failure> {
        self.file.sync_all().map_err(cannot_write(&self.path))?;
        fs::rename(&self.path, blob).map_err(cannot_write(blob))
    }
}
