//! A lock per file: the first process downloads the file, and processes that come later wait for it.
//!
//! The operating system keeps the lock, on `<cache>/.locks/<repository>/<etag>.lock`. The Python client locks the same file, so the two
//! programs wait for each other. The system releases the lock when its process ends; the empty file stays.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use crate::run::Events;

/// Takes the lock once no process holds it; `None` on a file system without locks.
///
/// # Errors
/// Fails when the lock file cannot be made.
pub(super) fn acquire(path: &Path, file: &str, events: &dyn Events) -> io::Result<Option<File>> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mut options = File::options();
    let lock = options.write(true).create(true).truncate(false).open(path)?;
    let shown = path.display();
    let locked = match lock.try_lock() {
        Err(TryLockError::WouldBlock) => {
            events.note(format!(
                "another process downloads `{file}`; waiting for it (lock `{shown}`)"
            ));
            lock.lock()
        }
        Err(TryLockError::Error(error)) => Err(error),
        Ok(()) => Ok(()),
    };
    if let Err(error) = &locked {
        events.warn(format!(
            "no lock on `{shown}` ({error}): another process may download `{file}` a second time"
        ));
    }
    Ok(locked.is_ok().then_some(lock))
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

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
        sleep(Duration::from_millis(300));
        assert!(!second.is_finished());
        drop(first);
        assert!(second.join().expect("no panic")?);
        Ok(())
    }
}
