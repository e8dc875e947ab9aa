//! Faults on purpose, for tests: what would happen if the program ended, or the disk refused, exactly here.
//!
//! `PRUNE_FAULT=<what>:<n>` in the environment counts the operations of this room and at the n-th (from 1)
//!
//! | what | happens |
//! | --- | --- |
//! | `kill` | the process ends as by `kill -9`; of a write, the first half is done |
//! | `fail` | the operation fails with an input/output error; of a write, the first half is done |
//! | `full` | the first write from there on, and every later one, finds the disk full |
//! | `forget` | everything that was not synced is undone, then the process ends: a power cut |
//! | `wait` | two seconds pass: whoever sends signals finds the run at this place |
//! | `room` | no operation: every file system says that it has `n` bytes free |
//!
//! Forgetting undoes backwards: bytes written since their file was synced, and names made, changed or removed since their folder was.
//! Any other value ends the program at its first operation, so that a test with a spelling mistake cannot pass.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::positioned;

/// The variable of the environment.
const VARIABLE: &str = "PRUNE_FAULT";

/// How long an operation waits that was told to.
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
    /// The operation it happens at, from 1.
    at: u64,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    operations: u64,
    /// In the order of what they undo.
    undo: Vec<Undo>,
}

/// How to take back what was done since the last sync.
#[derive(Debug)]
enum Undo {
    /// Bytes of a file, and its length.
    Bytes {
        file: File,
        offset: u64,
        before: Vec<u8>,
        length: u64,
    },
    /// A name in a folder: what it stood for before, `None` for nothing. The file itself may have gone to another name.
    Name {
        path: PathBuf,
        before: Option<Vec<u8>>,
    },
    /// A file that got another name.
    Renamed { from: PathBuf, to: PathBuf },
}

fn fault() -> Option<&'static Fault> {
    static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
    FAULT
        .get_or_init(|| {
            let text = std::env::var(VARIABLE).ok()?;
            let parsed = parse(&text);
            // A test that asks for a fault nobody knows must not go on without one.
            Some(parsed.unwrap_or(Fault {
                what: What::Kill,
                at: 1,
                progress: Mutex::default(),
            }))
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
    Some(Fault {
        what,
        at: at.parse().ok().filter(|&at| at > 0)?,
        progress: Mutex::default(),
    })
}

/// The bytes that are said to be free.
#[cfg(unix)]
pub(super) fn room() -> Option<u64> {
    let fault = fault()?;
    (fault.what == What::Room).then_some(fault.at)
}

/// Counts an operation. `partly` is what still happens of it where it is interrupted, `undo` how to take it back.
fn step(
    is_write: bool,
    partly: impl FnOnce(),
    undo: impl FnOnce(&mut Vec<Undo>) -> io::Result<()>,
) -> io::Result<()> {
    let Some(fault) = fault() else { return Ok(()) };
    let mut progress = fault
        .progress
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
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
            Err(io::Error::other(format!(
                "fault {} on purpose",
                progress.operations
            )))
        }
        What::Full if is_reached && is_write => Err(io::ErrorKind::StorageFull.into()),
        What::Forget if is_here => {
            for undo in std::mem::take(&mut progress.undo).into_iter().rev() {
                // What cannot be undone makes the test fail by what it finds.
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

/// As `kill -9` would: nothing is flushed, nothing cleaned up.
fn end() -> ! {
    #[cfg(unix)]
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    std::process::abort()
}

impl Undo {
    fn run(self) -> io::Result<()> {
        match self {
            Self::Bytes {
                file,
                offset,
                before,
                length,
            } => {
                positioned::write_all_at(&file, &before, offset)?;
                file.set_len(length)
            }
            Self::Name {
                path,
                before: Some(before),
            } => fs::write(path, before),
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
            undo.push(Undo::Name {
                path: path.to_path_buf(),
                before: contents(path)?,
            });
            Ok(())
        },
    )
}

pub(super) fn before_write(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let half = || {
        // The operation is reported as failed, or not at all.
        let _ = positioned::write_all_at(file, &bytes[..bytes.len() / 2], offset);
    };
    step(true, half, |undo| {
        let length = file.metadata()?.len();
        let there = length.saturating_sub(offset).min(bytes.len() as u64);
        let mut before = vec![0; there as usize];
        positioned::read_exact_at(file, &mut before, offset)?;
        undo.push(Undo::Bytes {
            file: file.try_clone()?,
            offset,
            before,
            length,
        });
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
                undo.push(Undo::Name {
                    path: to.to_path_buf(),
                    before: Some(before),
                });
            }
            undo.push(Undo::Renamed {
                from: from.to_path_buf(),
                to: to.to_path_buf(),
            });
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
                undo.push(Undo::Name {
                    path: path.to_path_buf(),
                    before: Some(before),
                });
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

/// Tells open files apart.
#[cfg(unix)]
fn identity(file: &File) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Open files are not told apart here: every sync counts for all.
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
    fn what_is_undone_backwards_is_what_was_there() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (old, new) = (folder.path().join("old"), folder.path().join("new"));
        fs::write(&old, "old")?;
        fs::write(&new, "new")?;
        let file = super::super::open(&new)?;
        let undo = [
            Undo::Bytes {
                file,
                offset: 1,
                before: b"ew".to_vec(),
                length: 3,
            },
            Undo::Name {
                path: old.clone(),
                before: Some(b"old".to_vec()),
            },
            Undo::Renamed {
                from: new.clone(),
                to: old.clone(),
            },
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
