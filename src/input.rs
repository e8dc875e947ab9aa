//! Input files, all opened here: the first bytes of a file must agree with its role and its name.
//!
//! A download that failed half-way leaves wrong content under the right name: a git-lfs pointer, an HTML page, an archive. Read as
//! text, such content gives a wrong result without an error. So every file that a user or a publisher supplies is opened through
//! [`open`], [`read`], [`read_settings`] or [`read_given`], with the content that the caller expects. Unexpected content is an
//! [`io::Error`] that holds a [`Mismatch`]; [`cannot_read`] turns it into a [`Failure`] with the remedy. Files of the program's own
//! runs (locks, caches, records) are read through [`crate::bytes`].

mod content;
mod in_order;

use std::fmt;
use std::fs::File;
use std::io::{self, Seek};
use std::path::Path;

use crate::bytes::{ByteSize, LARGEST_SETTINGS, read_up_to, regular_file};
use crate::failure::Failure;
pub use content::{ContentKind, Expected};
use content::{LOOKED_AT, beginning};
pub use in_order::InOrder;

/// ContentKind that does not agree with the role and the name of its file. It travels inside an [`io::Error`].
#[derive(Debug)]
pub struct Mismatch {
    found: ContentKind,
    expected: Expected,
    remedy: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, expected, .. } = self;
        write!(f, "it is {}, not {expected}", found.noun())
    }
}

impl std::error::Error for Mismatch {}

/// Checks the first bytes of a file that is read without being opened here, such as the text inside an archive.
///
/// # Errors
/// Fails with a [`Mismatch`] for content that does not agree with the role or the name.
pub fn check(start: &[u8], expected: Expected, path: &Path) -> io::Result<()> {
    let found = ContentKind::of(&start[..start.len().min(LOOKED_AT)]);
    if found.fits(expected, path) {
        return Ok(());
    }
    Err(io::Error::other(Mismatch { found, expected, remedy: found.remedy(expected, path) }))
}

/// Opens a file, at its beginning.
///
/// # Errors
/// Fails when it cannot be opened or read, and for content that does not agree with its role or its name.
pub fn open(path: &Path, expected: Expected) -> io::Result<File> {
    let mut file = File::open(path)?;
    check(&beginning(&mut file)?, expected, path)?;
    file.rewind()?;
    Ok(file)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// Fails as [`open`], when the file is larger, and for a folder, a pipe or a device: these may never end.
pub fn read(path: &Path, most: ByteSize, expected: Expected) -> io::Result<Vec<u8>> {
    regular_file(path)?;
    let bytes = read_up_to(File::open(path)?, most)?;
    check(&bytes, expected, path)?;
    Ok(bytes)
}

/// Reads a file of settings as text; it must be a regular file of at most [`LARGEST_SETTINGS`].
///
/// # Errors
/// Fails as [`read`], and for bytes that are not UTF-8.
pub fn read_settings(path: &Path) -> io::Result<String> {
    let expected = match path.extension().is_some_and(|ending| ending == "json") {
        true => Expected::Json,
        false => Expected::Settings,
    };
    text(read(path, LARGEST_SETTINGS, expected)?)
}

/// Reads a text that the command line names. It may be a pipe, like `<(command)` in a shell.
///
/// # Errors
/// Fails when it cannot be read or is larger than [`LARGEST_SETTINGS`], for content that does not agree with its role or its name,
/// and for bytes that are not UTF-8.
pub fn read_given(path: &Path, expected: Expected) -> io::Result<String> {
    let bytes = read_up_to(File::open(path)?, LARGEST_SETTINGS)?;
    check(&bytes, expected, path)?;
    text(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::other(format!("it is not UTF-8 text from byte {at} on"))
    })
}

/// The failure for an input file that cannot be opened or read, with the remedy for content that does not agree with it.
pub fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    let failure = Failure::new(format!("cannot read `{}`: {error}", path.display()));
    with_remedy(failure, error)
}

/// Adds to a failure the remedy for content that does not agree with its file, if this is the error.
pub fn with_remedy(failure: Failure, error: &io::Error) -> Failure {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(Mismatch { remedy, .. }) => failure.hint(remedy),
        None => failure,
    }
}

#[cfg(test)]
mod tests;
