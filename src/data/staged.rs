//! Files that are written under a temporary name and renamed when they are complete.
//!
//! The writer holds a lock on its unfinished file. A file whose lock is free was left by a process that ended, on this machine or on
//! any machine that shares the folder; [`remove_abandoned`] removes it.

use std::env;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The end of the name of an unfinished file.
const SUFFIX: &str = ".partial";
/// The age from which an unfinished file counts as abandoned on file systems without locks.
const ABANDONED: Duration = Duration::from_secs(24 * 60 * 60);

/// An unfinished file. Dropping it removes it, unless [`Staged::commit`] gave it its name.
#[derive(Debug)]
pub(super) struct Staged {
    file: File,
    path: PathBuf,
    is_committed: bool,
}

impl Staged {
    /// A new file in `folder`, which is created if needed. `name` begins its temporary name.
    pub(super) fn in_folder(folder: &Path, name: &str) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let (file, path) = create(folder, name)?;
        Ok(Self { file, path, is_committed: false })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to `target`, replacing an older file, and returns it. Its data is on disk before its name is.
    pub(super) fn commit(&mut self, target: &Path) -> io::Result<File> {
        self.file.sync_data()?;
        fs::rename(&self.path, target)?;
        self.is_committed = true;
        self.file.try_clone()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A file without a name in the system's folder for temporary files. It ends with the process.
pub(super) fn temporary() -> io::Result<File> {
    let (file, path) = create(&env::temp_dir(), "prune-text")?;
    fs::remove_file(path)?;
    Ok(file)
}

/// Creates a file with an unused name, open for reading and writing, and locks it.
fn create(folder: &Path, name: &str) -> io::Result<(File, PathBuf)> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    loop {
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".{name}.{}-{count}{SUFFIX}", std::process::id()));
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).open(&path) {
            // Before the lock, a second process may have taken the file for abandoned and removed it: then the next name.
            Ok(file)
                if !matches!(file.try_lock(), Err(TryLockError::WouldBlock)) && path.exists() =>
            {
                return Ok((file, path));
            }
            Ok(_) => {}
            // A process with the same id made the file, earlier or on a machine that shares the folder: the next name.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Removes the unfinished files of processes that have ended. Files that cannot be removed stay.
pub(super) fn remove_abandoned(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') && name.ends_with(SUFFIX) && is_abandoned(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Tells if no process writes an unfinished file any more.
fn is_abandoned(path: &Path) -> bool {
    let Ok(file) = File::open(path) else {
        return false;
    };
    match file.try_lock() {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        // The file system has no locks.
        Err(TryLockError::Error(_)) => {
            let age = file.metadata().and_then(|metadata| metadata.modified());
            age.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > ABANDONED))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_ended_processes_are_removed_and_files_being_written_stay() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let staged = Staged::in_folder(folder.path(), "documents-x-").expect("create");
        // Left by a process that was killed: nothing holds its lock.
        let left = folder.path().join(".documents-y-.12345-0.partial");
        fs::write(&left, "half").expect("write");
        let other = folder.path().join("tokens-x.bin");
        fs::write(&other, "ids").expect("write");
        remove_abandoned(folder.path());
        assert!(!left.exists() && staged.path.exists() && other.exists());
        let target = folder.path().join("documents-x-y.jsonl");
        let mut staged = staged;
        staged.commit(&target).expect("commit");
        drop(staged);
        remove_abandoned(folder.path());
        assert!(target.exists());
        drop(Staged::in_folder(folder.path(), "z").expect("create"));
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 2);
    }
}
