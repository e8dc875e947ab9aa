//! Sealed files: states that a later process continues from. The first line has the length and the hash of the rest, so a bit that
//! flipped, and bytes that are missing or were appended, are found before any of the content is used.
//!
//! ```text
//! {"sealed": {"bytes":                       1234, "sha256": "…"}}     the rest is anything
//! {"sealed": {"bytes":                       1234, "sha256": "…"},     the rest completes a JSON object
//! ```

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, Write};
use std::path::Path;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::atomic::{GrowingFile, write_atomic, write_growing};
use crate::bytes::hex;

/// Bytes of the first line, its end included.
const HEAD: usize = 128;

/// Bytes that are read at once.
const PIECE: usize = 1 << 20;

/// The first line of a file.
#[derive(Deserialize)]
struct SealedLine {
    sealed: Seal,
}

/// The length and the hash of the rest of a file.
#[derive(Debug, PartialEq, Deserialize)]
struct Seal {
    bytes: u64,
    sha256: String,
}

impl Seal {
    fn new(bytes: u64, hasher: Sha256) -> Self {
        Self { bytes, sha256: hex(&hasher.finalize()) }
    }

    /// The line of this seal, of [`HEAD`] bytes; `end` closes its object.
    fn line(&self, end: char) -> String {
        let Self { bytes, sha256 } = self;
        format!("{{\"sealed\": {{\"bytes\": {bytes:26}, \"sha256\": \"{sha256}\"}}{end}\n")
    }

    /// Reads a first line.
    fn parse(line: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
        let text = text.strip_suffix([',', '}'])?;
        let line: SealedLine = serde_json::from_str(&format!("{text}}}")).ok()?;
        Some(line.sealed)
    }

    /// Compares the seal of a first line with the rest of the file.
    fn check(&self, found: &Self) -> io::Result<()> {
        let (now, then) = (found.bytes, self.bytes);
        let what = match now.cmp(&then) {
            std::cmp::Ordering::Equal if *self == *found => return Ok(()),
            std::cmp::Ordering::Equal => {
                "its content is not the one that was written: the hash differs".to_string()
            }
            std::cmp::Ordering::Less => format!("{} of its {then} bytes are missing", then - now),
            std::cmp::Ordering::Greater => {
                format!("{} bytes follow the {then} that were written", now - then)
            }
        };
        Err(io::Error::new(ErrorKind::InvalidData, what))
    }
}

fn no_seal() -> io::Error {
    let why = "its first line has no length and no hash of the rest: it is damaged, or an older version wrote it";
    io::Error::new(ErrorKind::InvalidData, why)
}

/// Writes the text of a JSON object, which is not checked. A crash leaves the old file or the whole new file. The file is JSON, too,
/// with the seal as its first field.
///
/// # Errors
/// Fails as [`write_atomic`].
pub fn write_sealed_json(path: &Path, object: &str) -> anyhow::Result<()> {
    let rest = object.strip_prefix('{').unwrap_or(object);
    let seal = Seal::new(rest.len() as u64, Sha256::new_with_prefix(rest));
    write_atomic(path, (seal.line(',') + rest).as_bytes())
}

/// Checks the content of a file of [`write_sealed_json`].
///
/// # Errors
/// Fails if the content differs from what was written; the error names the difference.
pub fn check_sealed_json(content: &[u8]) -> io::Result<()> {
    let (line, rest) = content.split_at_checked(HEAD).ok_or_else(no_seal)?;
    let seal = Seal::parse(line).ok_or_else(no_seal)?;
    seal.check(&Seal::new(rest.len() as u64, Sha256::new_with_prefix(rest)))
}

/// Writes a file in pieces. A crash leaves the old file or the whole new file.
///
/// # Errors
/// Fails as [`write_atomic_with`](super::write_atomic_with).
pub fn write_sealed_with(
    path: &Path,
    write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    write_growing(path, &mut |file| {
        let unknown = Seal::new(0, Sha256::new());
        file.write_all(unknown.line('}').as_bytes())?;
        let mut content = HashedContent { file, hasher: Sha256::new(), bytes: 0 };
        write(&mut content)?;
        let HashedContent { hasher, bytes, .. } = content;
        file.replace_head(Seal::new(bytes, hasher).line('}').as_bytes())
    })
}

/// The content of a file on its way there.
struct HashedContent<'f> {
    file: &'f mut GrowingFile,
    hasher: Sha256,
    bytes: u64,
}

impl Write for HashedContent<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Opens a file of [`write_sealed_with`] and reads it once to compare it with its seal. Returns a reader of the content.
///
/// # Errors
/// Fails when the file cannot be read, and when its content differs from what was written; the error names the difference.
pub fn open_sealed(path: &Path) -> io::Result<BufReader<File>> {
    let mut file = BufReader::with_capacity(PIECE, File::open(path)?);
    let mut line = [0; HEAD];
    file.read_exact(&mut line).map_err(|_| no_seal())?;
    let seal = Seal::parse(&line).ok_or_else(no_seal)?;
    let (mut hasher, mut bytes) = (Sha256::new(), 0);
    let mut piece = vec![0; PIECE];
    loop {
        let count = file.read(&mut piece)?;
        if count == 0 {
            break;
        }
        hasher.update(&piece[..count]);
        bytes += count as u64;
    }
    seal.check(&Seal::new(bytes, hasher))?;
    file.seek(io::SeekFrom::Start(HEAD as u64))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of a file, changed in one bit; then bytes removed from its end and appended.
    fn assert_notices_damage(path: &Path, is_whole: &dyn Fn() -> bool) {
        let good = std::fs::read(path).expect("a file");
        assert!(is_whole());
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(path, &bad).expect("written");
            assert!(!is_whole(), "byte {at}");
        }
        for bad in [
            &good[..good.len() - 1],
            &good[..HEAD],
            &good[..HEAD - 1],
            &[&good[..], b"x"].concat(),
            &good[HEAD..],
            b"",
        ] {
            std::fs::write(path, bad).expect("written");
            assert!(!is_whole(), "{} bytes", bad.len());
        }
    }

    #[test]
    fn any_damage_of_a_sealed_file_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state");
        write_sealed_with(&path, &mut |out| {
            out.write_all(b"first piece, ")?;
            out.write_all(&[0; 300])
        })
        .expect("written");
        let mut content = Vec::new();
        let mut file = open_sealed(&path).expect("whole");
        file.read_to_end(&mut content).expect("read");
        assert_eq!(content, [&b"first piece, "[..], &[0; 300]].concat());
        assert_notices_damage(&path, &|| open_sealed(&path).is_ok());
    }

    #[test]
    fn a_sealed_object_is_json_and_any_damage_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("state.json");
        write_sealed_json(&path, "{\n  \"a\": [1, 2]\n}\n").expect("written");
        let read = || std::fs::read(&path).expect("a file");
        let json: serde_json::Value = serde_json::from_slice(&read()).expect("JSON");
        assert_eq!(json["a"][1], 2);
        assert_notices_damage(&path, &|| check_sealed_json(&read()).is_ok());
    }

    #[test]
    fn the_difference_is_named() {
        let seal = |bytes, content: &str| Seal::new(bytes, Sha256::new_with_prefix(content));
        let why = |found: Seal| {
            let error = seal(10, "a").check(&found).expect_err("they differ");
            error.to_string()
        };
        assert!(why(seal(10, "b")).contains("the hash differs"));
        assert_eq!(why(seal(7, "a")), "3 of its 10 bytes are missing");
        assert_eq!(why(seal(12, "a")), "2 bytes follow the 10 that were written");
        assert_eq!(seal(u64::MAX, "").line(',').len(), HEAD);
    }
}
