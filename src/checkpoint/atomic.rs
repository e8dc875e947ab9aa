//! Small files that appear whole or not at all: written under a temporary name, synced, then renamed.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::disk;
use crate::failure::Failure;

/// Writes `bytes` to `path`. A crash leaves the old file or the whole new file, never a part.
///
/// # Errors
/// Fails when the folder of `path` does not exist or cannot be written; an old file at `path` then stays.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    write_atomic_with(path, &mut |out| out.write_all(bytes))
}

/// Writes a file in pieces. A crash leaves the old file or the whole new file.
///
/// # Errors
/// Fails as [`write_atomic`], and with the error of `write`.
pub fn write_atomic_with(
    path: &Path,
    write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    write_growing(path, &mut |file| write(file))
}

/// Writes a file in pieces, and its beginning once the rest is known. A crash leaves the old file or the whole new file.
///
/// # Errors
/// Fails as [`write_atomic_with`].
pub(super) fn write_growing(
    path: &Path,
    write: &mut dyn FnMut(&mut GrowingFile) -> io::Result<()>,
) -> anyhow::Result<()> {
    let temporary = temporary_name(path);
    let written = write_and_rename(&temporary, path, write);
    if written.is_err() {
        // The first error is reported; a temporary file that stays does no harm.
        let _ = disk::remove(&temporary);
    }
    written.map_err(|error| cannot_write(path, &error).into())
}

/// A file that is written from its beginning to its end.
pub(super) struct GrowingFile {
    file: File,
    bytes: u64,
}

impl GrowingFile {
    /// Replaces the first bytes, which were written already.
    pub(super) fn replace_head(&self, bytes: &[u8]) -> io::Result<()> {
        disk::write_all_at(&self.file, bytes, 0)
    }
}

impl Write for GrowingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        disk::write_all_at(&self.file, bytes, self.bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes renames and new names in `folder` survive a power cut.
///
/// # Errors
/// Fails when the folder cannot be opened or the device reports an error.
pub fn sync_folder(folder: &Path) -> anyhow::Result<()> {
    disk::sync_folder(folder).map_err(|error| cannot_write(folder, &error).into())
}

/// The failure of a write to `path`, with a hint if the disk is full.
pub fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    let failure =
        Failure::new(format!("cannot write `{}`", path.display())).detail(error.to_string());
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            failure.hint("free some space, or choose a folder on another disk with --save")
        }
        _ => failure,
    }
}

fn write_and_rename(
    temporary: &Path,
    path: &Path,
    write: &mut dyn FnMut(&mut GrowingFile) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = GrowingFile { file: disk::create(temporary)?, bytes: 0 };
    write(&mut file)?;
    disk::sync(&file.file)?;
    drop(file);
    disk::rename(temporary, path)?;
    disk::sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// `run.json` → `.run.json.1234.tmp`: hidden, and private to this process.
fn temporary_name(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn atomic_write_replaces_the_file_and_leaves_nothing_else() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("run.json");
        write_atomic(&path, b"old")?;
        write_atomic(&path, b"new")?;
        assert_eq!(fs::read(&path)?, b"new");
        assert_eq!(fs::read_dir(folder.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn atomic_write_into_a_missing_folder_names_the_path() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("missing/run.json");
        let error = write_atomic(&path, b"x").err().map(|e| e.to_string());
        assert!(error.is_some_and(|text| text.contains("missing/run.json")));
        Ok(())
    }
}
