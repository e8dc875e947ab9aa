//! Small files that appear whole or not at all: written under a temporary name, synced, then renamed.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use crate::disk;
use crate::failure::Failure;

/// Writes `bytes` to `path` so that a crash leaves either the old file or the new one, never a part.
///
/// # Errors
/// Fails when the folder of `path` does not exist or cannot be written; an old file at `path` then stays.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let temporary = temporary_name(path);
    let written = write_and_rename(&temporary, path, bytes);
    if written.is_err() {
        // The first error is reported; a temporary file that stays does no harm.
        let _ = disk::remove(&temporary);
    }
    written.map_err(|error| cannot_write(path, &error).into())
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

fn write_and_rename(temporary: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = disk::create(temporary)?;
    disk::write_all_at(&file, bytes, 0)?;
    disk::sync(&file)?;
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
