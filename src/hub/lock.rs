//! A lock per file: of several processes one downloads a file, and the others wait for it.
//!
//! The lock is one of the operating system, on `<cache>/.locks/<repository>/<etag>.lock`. The Python client locks the same file, so the
//! two wait for each other. The system releases the lock when its process ends; the empty file stays.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use crate::run::Events;

/// The time between two attempts.
const POLL: Duration = Duration::from_millis(100);

/// Takes the lock after every other process has released it; `None` on a file system without locks.
///
/// # Errors
/// Fails when the lock file cannot be made.
pub(super) fn acquire(path: &Path, file: &str, events: &dyn Events) -> io::Result<Option<File>> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let lock = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let mut has_waited = false;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(Some(lock)),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(error)) => {
                events.warn(format!(
                    "no lock on `{}` ({error}): another process may download `{file}` a second time",
                    path.display()
                ));
                return Ok(None);
            }
        }
        if !has_waited {
            events.note(format!(
                "another process downloads `{file}`; waiting for it (lock `{}`)",
                path.display()
            ));
            has_waited = true;
        }
        sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Silent;

    #[test]
    fn a_second_taker_waits_until_the_first_lets_go() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("a/b.lock");
        let first = acquire(&path, "x", &Silent)?;
        assert!(first.is_some());
        let other = path.clone();
        let second =
            std::thread::spawn(move || acquire(&other, "x", &Silent).map(|lock| lock.is_some()));
        sleep(3 * POLL);
        assert!(!second.is_finished());
        drop(first);
        assert!(second.join().expect("no panic")?);
        Ok(())
    }
}
