//! Small files that appear whole or not at all: written beside their name, synced, then renamed onto it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Writes `bytes` to `path` so that a crash leaves either the old file or the new one, never a part.
///
/// # Errors
///
/// Fails when the folder of `path` does not exist or cannot be written; an old file at `path` is then still there.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = temporary_name(path);
    let written = write_and_rename(&temporary, path, bytes);
    if written.is_err() {
        // The first error is the one to tell; a leftover temporary file harms nobody.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(|error| cannot_write(path, &error).into())
}

/// Makes renames and new names in `folder` survive a power cut.
///
/// # Errors
///
/// Fails when the folder cannot be opened or the device reports an error.
pub fn sync_folder(folder: &Path) -> anyhow::Result<()> {
    sync_names(folder).map_err(|error| cannot_write(folder, &error).into())
}

/// The failure of any write below `path`, with a hint where the disk is full.
pub(super) fn cannot_write(path: &Path, error: &io::Error) -> Failure {
    let failure =
        Failure::new(format!("cannot write `{}`", path.display())).detail(error.to_string());
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            failure.hint("free some space, or choose a folder on another disk with --save")
        }
        _ => failure,
    }
}

fn write_and_rename(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(temporary, path)?;
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => sync_names(folder),
        _ => sync_names(Path::new(".")),
    }
}

/// `run.json` → `.run.json.1234.tmp`: hidden, and private to this process.
fn temporary_name(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

#[cfg(unix)]
fn sync_names(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_names(_: &Path) -> io::Result<()> {
    // Folders cannot be opened as files here; NTFS journals its names.
    Ok(())
}

#[cfg(test)]
mod tests {
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
