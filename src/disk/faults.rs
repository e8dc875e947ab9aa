//! Injected faults, for tests of interrupted runs and failing disks. Only the cargo feature `faults` compiles this file; the
//! tests enable it.
//!
//! `PRUNE_FAULT=<what>:<n>` in the environment counts the operations of this room and at the n-th (from 1)
//!
//! | what | happens |
//! | --- | --- |
//! | `kill` | the process ends as with `kill -9`; a write does its first half |
//! | `fail` | the operation fails with an input/output error; a write does its first half |
//! | `full` | this write and every later write find the disk full |
//! | `forget` | every unsynced change is undone, then the process ends: a power cut |
//! | `wait` | two seconds pass, so that a test can send a signal at this place |
//! | `room` | counts no operation: every file system reports `n` free bytes |
//!
//! `forget` undoes in reverse order the bytes written since the last sync of their file, and the names created, changed or removed
//! since the last sync of their folder. An unknown value ends the program at its first operation, so that a test with a spelling
//! mistake cannot pass.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::positioned;

const VARIABLE: &str = "PRUNE_FAULT";

/// The time of `wait`.
const WAIT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Kill,
    Fail,
    Full,
    Forget,
    Wait,
    Room,
}

#[derive(Debug)]
struct Fault {
    what: What,
    /// The number of the operation, from 1.
    at: u64,
    progress: Mutex<FaultProgress>,
}

#[derive(Debug, Default)]
struct FaultProgress {
    operations: u64,
    /// In the order of the changes.
    undo: Vec<Undo>,
}

/// The reversal of an unsynced change.
#[derive(Debug)]
enum Undo {
    /// Overwritten bytes of a file, and its earlier length.
    Bytes { file: File, offset: u64, before: Vec<u8>, length: u64 },
    /// The earlier contents under a name, `None` for no file. The file itself may have a new name now.
    Name { path: PathBuf, before: Option<Vec<u8>> },
    /// A renamed file.
    Renamed { from: PathBuf, to: PathBuf },
}

fn fault() -> Option<&'static Fault> {
    static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
    FAULT
        .get_or_init(|| {
            let text = std::env::var(VARIABLE).ok()?;
            let parsed = parse(&text);
            // A test with an unknown fault must not run as if it had asked for no fault.
            Some(parsed.unwrap_or(Fault { what: What::Kill, at: 1, progress: Mutex::default() }))
        })
        .as_ref()
}

fn parse(text: &str) -> Option<Fault> {
    let (what, at) = text.split_once(':')?;
    let what = match what {
        "kill" => What::Kill,
        "fail" => What::Fail,
        "full" => What::Full,
        "forget" => What::Forget,
        "wait" => What::Wait,
        "room" => What::Room,
        _ => return None,
    };
    Some(Fault { what, at: at.parse().ok().filter(|&at| at > 0)?, progress: Mutex::default() })
}

/// The free bytes that `room` reports.
#[cfg(unix)]
pub(super) fn room() -> Option<u64> {
    let fault = fault()?;
    (fault.what == What::Room).then_some(fault.at)
}

/// Counts an operation. `partly` does the half that an interruption leaves; `undo` records the reversal.
fn step(
    is_write: bool,
    partly: impl FnOnce(),
    undo: impl FnOnce(&mut Vec<Undo>) -> io::Result<()>,
) -> io::Result<()> {
    let Some(fault) = fault() else { return Ok(()) };
    let mut progress = fault.progress.lock().unwrap_or_else(PoisonError::into_inner);
    progress.operations += 1;
    let is_reached = progress.operations >= fault.at;
    let is_here = progress.operations == fault.at;
    match fault.what {
        What::Kill if is_here => {
            partly();
            end()
        }
        What::Fail if is_here => {
            partly();
            Err(io::Error::other(format!("fault {} on purpose", progress.operations)))
        }
        What::Full if is_reached && is_write => Err(io::ErrorKind::StorageFull.into()),
        What::Forget if is_here => {
            for undo in std::mem::take(&mut progress.undo).into_iter().rev() {
                // The test finds a change that could not be undone.
                let _ = undo.run();
            }
            end()
        }
        What::Forget => undo(&mut progress.undo),
        What::Wait if is_here => {
            drop(progress);
            std::thread::sleep(WAIT);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Ends the process as `kill -9` does: nothing is flushed or cleaned up.
fn end() -> ! {
    #[cfg(unix)]
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}

impl Undo {
    fn run(self) -> io::Result<()> {
        match self {
            Self::Bytes { file, offset, before, length } => {
                positioned::write_all_at(&file, &before, offset)?;
                file.set_len(length)
            }
            Self::Name { path, before: Some(before) } => fs::write(path, before),
            Self::Name { path, before: None } => fs::remove_file(path),
            Self::Renamed { from, to } => fs::rename(to, from),
        }
    }
}

fn contents(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

pub(super) fn before_create(path: &Path) -> io::Result<()> {
    step(
        true,
        || {},
        |undo| {
            undo.push(Undo::Name { path: path.to_path_buf(), before: contents(path)? });
            Ok(())
        },
    )
}

pub(super) fn before_write(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let half = || {
        // The operation is reported as failed, or the process ends.
        let _ = positioned::write_all_at(file, &bytes[..bytes.len() / 2], offset);
    };
    step(true, half, |undo| {
        let length = file.metadata()?.len();
        let there = length.saturating_sub(offset).min(bytes.len() as u64);
        let mut before = vec![0; there as usize];
        positioned::read_exact_at(file, &mut before, offset)?;
        undo.push(Undo::Bytes { file: file.try_clone()?, offset, before, length });
        Ok(())
    })
}

pub(super) fn before_sync(file: &File) -> io::Result<()> {
    step(
        false,
        || {},
        |undo| {
            let synced = identity(file)?;
            undo.retain(|undo| match undo {
                Undo::Bytes { file, .. } => identity(file).is_ok_and(|other| other != synced),
                _ => true,
            });
            Ok(())
        },
    )
}

pub(super) fn before_rename(from: &Path, to: &Path) -> io::Result<()> {
    step(
        false,
        || {},
        |undo| {
            if let Some(before) = contents(to)? {
                undo.push(Undo::Name { path: to.to_path_buf(), before: Some(before) });
            }
            undo.push(Undo::Renamed { from: from.to_path_buf(), to: to.to_path_buf() });
            Ok(())
        },
    )
}

pub(super) fn before_remove(path: &Path) -> io::Result<()> {
    step(
        false,
        || {},
        |undo| {
            if let Some(before) = contents(path)? {
                undo.push(Undo::Name { path: path.to_path_buf(), before: Some(before) });
            }
            Ok(())
        },
    )
}

pub(super) fn before_sync_folder(folder: &Path) -> io::Result<()> {
    step(
        false,
        || {},
        |undo| {
            undo.retain(|undo| match undo {
                Undo::Bytes { .. } => true,
                Undo::Name { path, .. } | Undo::Renamed { to: path, .. } => {
                    path.parent() != Some(folder)
                }
            });
            Ok(())
        },
    )
}

/// An identity that two handles of a file share.
#[cfg(unix)]
fn identity(file: &File) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// The same identity for all files: a sync of any file counts for all files.
#[cfg(not(unix))]
fn identity(_: &File) -> io::Result<(u64, u64)> {
    Ok((0, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_from_their_names() {
        let read = |text| parse(text).map(|fault| (fault.what, fault.at));
        assert_eq!(read("kill:3"), Some((What::Kill, 3)));
        assert_eq!(read("forget:1"), Some((What::Forget, 1)));
        for wrong in ["kill", "kill:0", "kill:x", "burn:1", ""] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn undoing_in_reverse_order_restores_the_files() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, "old")?;
        fs::write(&new, "new")?;
        let file = super::super::open(&new)?;
        let undo = [
            Undo::Bytes { file, offset: 1, before: b"ew".to_vec(), length: 3 },
            Undo::Name { path: old.clone(), before: Some(b"old".to_vec()) },
            Undo::Renamed { from: new.clone(), to: old.clone() },
        ];
        fs::write(&new, "nothing")?;
        fs::rename(&new, &old)?;
        for undo in undo.into_iter().rev() {
            undo.run()?;
        }
        assert_eq!(fs::read(&old)?, b"old");
        assert_eq!(fs::read(&new)?, b"new");
        Ok(())
    }
}
