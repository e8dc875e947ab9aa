//! One run per folder: the file `prune.lock` names the process that works here, on network file systems too.
//!
//! It is created by an operation that every file system grants to one process only: create, or fail if the file exists. It holds
//! host, boot, process, and a count that the owner raises every [`BEAT`]. A process that finds a lock decides by its owner:
//!
//! | owner | decision |
//! | --- | --- |
//! | a living process of this host and boot | refused |
//! | a dead process of this host, or the same batch job before it was requeued | stale: taken over, with a note |
//! | another host, boot or container | watched: refused at the first sign, stale after [`PATIENCE`] without a sign |
//!
//! No decision compares clocks, because they differ between hosts. If an owner that raises its count finds a foreign lock, or
//! no lock, it ends at once: another process may be working in the folder, or may have finished there.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::owner::Owner;
use crate::bytes::{ByteSize, read_whole};
use crate::disk::{self, positioned};
use crate::failure::Failure;
use crate::run::Events;

/// The file's name.
pub(in crate::job) const FILE: &str = "prune.lock";

/// Time between two signs of an owner.
const BEAT: Duration = Duration::from_secs(5);

/// Longest wait for a sign: several beats, and the time that network file systems keep old contents.
const PATIENCE: Duration = Duration::from_secs(40);

/// Attempts to take a lock that appears and disappears.
const ATTEMPTS: usize = 100;

/// Between two attempts.
const BRIEFLY: Duration = Duration::from_millis(10);

/// The length of a lock's text is a multiple of this many bytes, which holds all but very long names.
const LENGTH: usize = 1024;

/// The largest lock that is read.
const LARGEST: ByteSize = ByteSize(1 << 20);

/// Time between two looks at the lock of an unknown owner.
const LOOK: Duration = Duration::from_millis(500);

/// The locks of this process, in the order they were taken.
static HELD: Mutex<Vec<Weak<FolderLock>>> = Mutex::new(Vec::new());

/// Longest wait for changes under way at the end of the process.
const LAST_CHANGES: Duration = Duration::from_secs(2);

/// Releases all folders of this process, inner folders first. The end of the process calls it. Threads may still run, so no
/// change of a file may follow. If a change under way does not end, the locks stay and are stale once the process is gone.
pub(crate) fn release_all() {
    let held = std::mem::take(&mut *HELD.lock().unwrap_or_else(PoisonError::into_inner));
    let held: Vec<Arc<FolderLock>> = held.into_iter().filter_map(|lock| lock.upgrade()).collect();
    if held.is_empty() || !disk::close(LAST_CHANGES) {
        return;
    }
    for lock in held.iter().rev() {
        lock.release();
    }
}

/// A folder that no other process may write to, until this is dropped.
#[derive(Debug)]
pub(in crate::job) struct FolderLock {
    path: PathBuf,
    owner: Owner,
    /// Folders that were made for the lock, the deepest first.
    made: Vec<PathBuf>,
    is_released: AtomicBool,
    /// Ends the thread that gives signs.
    end: Arc<(Mutex<bool>, Condvar)>,
}

impl FolderLock {
    /// Takes the folder, and creates it if it is missing. A background thread calls `lost` with the reason if this process loses the lock.
    ///
    /// # Errors
    /// Fails when another process works there, and when the folder cannot be written.
    pub(in crate::job) fn take(
        folder: &Path,
        events: &dyn Events,
        lost: impl Fn(String) + Send + 'static,
    ) -> Result<Arc<Self>> {
        let lock = Arc::new(Self::take_within(folder, PATIENCE, events)?);
        let beating = Arc::downgrade(&lock);
        let end = Arc::clone(&lock.end);
        std::thread::Builder::new()
            .name("lock".to_string())
            .spawn(move || {
                let mut beat = 0;
                loop {
                    let (is_ended, wake) = &*end;
                    let guard = is_ended.lock().unwrap_or_else(PoisonError::into_inner);
                    let waited = wake.wait_timeout_while(guard, BEAT, |is_ended| !*is_ended);
                    let (guard, _) = waited.unwrap_or_else(PoisonError::into_inner);
                    let is_ended = *guard;
                    // The guard is released first: dropping the lock below locks the same mutex.
                    drop(guard);
                    let Some(lock) = beating.upgrade().filter(|_| !is_ended) else {
                        return;
                    };
                    beat += 1;
                    if let Some(why) = lock.beat(beat) {
                        // A lock that was released meanwhile is missing as intended.
                        if !lock.is_released.load(Ordering::SeqCst) {
                            lost(why);
                        }
                        return;
                    }
                }
            })
            .context("starting the thread that keeps the lock")?;
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|lock| lock.strong_count() > 0);
        held.push(Arc::downgrade(&lock));
        drop(held);
        Ok(lock)
    }

    fn take_within(folder: &Path, patience: Duration, events: &dyn Events) -> Result<Self> {
        let made: Vec<PathBuf> = folder
            .ancestors()
            .take_while(|path| !path.as_os_str().is_empty() && !path.exists())
            .map(Path::to_path_buf)
            .collect();
        let owner = Owner::me();
        let path = folder.join(FILE);
        let cannot = |error: io::Error| {
            Failure::new(format!("cannot write `{}`", path.display()))
                .detail(error.to_string())
                .hint("choose a --save folder that can be made and written to")
        };
        fs::create_dir_all(folder).map_err(cannot)?;
        for new in &made {
            // The parent holds the directory entry.
            disk::sync_folder(new.parent().unwrap_or(Path::new("."))).map_err(cannot)?;
        }
        for _ in 0..ATTEMPTS {
            let made_file = File::options().write(true).create_new(true).open(&path);
            match made_file {
                Ok(file) => {
                    if let Err(error) = positioned::write_all_at(&file, &text(&owner), 0) {
                        // The error of the write is reported, not an error of the removal.
                        let _ = fs::remove_file(&path);
                        return Err(cannot(error).into());
                    }
                    return Ok(Self {
                        path,
                        owner,
                        made,
                        is_released: AtomicBool::new(false),
                        end: Arc::default(),
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    let Some((seen, why)) = judge(&path, &owner, patience, events)? else {
                        // The lock is gone, or is just being written: a concurrent process may take it, too.
                        std::thread::sleep(BRIEFLY);
                        continue;
                    };
                    events.note(format!("a stale lock in `{}`: {why}", folder.display()));
                    take_over(&path, &seen, &owner).map_err(cannot)?;
                }
                Err(error) => return Err(cannot(error).into()),
            }
        }
        Err(cannot(io::Error::other("it comes and goes"))
            .hint(format!("remove `{}` if no other prune works there", path.display()))
            .into())
    }

    /// Gives a sign. Returns the reason where this process has the lock no more.
    fn beat(&self, beat: u64) -> Option<String> {
        let mut owner = self.owner.clone();
        let found = read(&self.path);
        if let Ok(None) = found {
            return Some(format!(
                "`{}` is gone: another process has worked there while this one slept, or somebody removed it",
                self.path.display()
            ));
        }
        if let Some(found) = found.ok().flatten().as_deref().and_then(parse) {
            owner.beat = found.beat;
            if found != owner {
                return Some(format!(
                    "{} has it, because this process gave no sign for long",
                    found.name()
                ));
            }
        }
        owner.beat = beat;
        // The lock is written in place, with the same length: a full disk does not matter, and nobody ever finds half of it. If a
        // server does not answer, the work itself will notice.
        let open = File::options().write(true).open(&self.path);
        let _ = open.and_then(|file| positioned::write_all_at(&file, &text(&owner), 0));
        None
    }

    /// Lets the folder go; what was made for the lock alone is removed.
    pub(in crate::job) fn release(&self) {
        if self.is_released.swap(true, Ordering::SeqCst) {
            return;
        }
        let (is_ended, wake) = &*self.end;
        *is_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        wake.notify_all();
        let found = read(&self.path).ok().flatten();
        let is_mine = found
            .and_then(|text| parse(&text))
            .is_none_or(|owner| owner.is_here(&self.owner) && owner.pid == self.owner.pid);
        if is_mine {
            let _ = fs::remove_file(&self.path);
        }
        for folder in &self.made {
            // A folder that something was written to stays.
            if fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        self.release();
    }
}

fn text(owner: &Owner) -> Vec<u8> {
    let mut text = serde_json::to_vec(owner).expect("strings and numbers always have a JSON form");
    // The length is the same for every count.
    text.resize(text.len().next_multiple_of(LENGTH), b' ');
    text
}

/// The text of a lock; `None` where there is none.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match read_whole(path, LARGEST) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

fn parse(text: &[u8]) -> Option<Owner> {
    serde_json::from_slice(text).ok()
}

/// The refusal of a folder in which a process works.
#[derive(Debug)]
pub(in crate::job) struct FolderInUse(Failure);

impl fmt::Display for FolderInUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for FolderInUse {}

/// The refusal as an error with its text, which callers can tell from other errors.
fn in_use(failure: Failure) -> anyhow::Error {
    anyhow::Error::new(FolderInUse(failure.clone())).context(failure)
}

/// Judges an existing lock: `None` if it has disappeared, else its contents and the reason it is stale.
fn judge(
    path: &Path,
    me: &Owner,
    patience: Duration,
    events: &dyn Events,
) -> Result<Option<(Vec<u8>, String)>> {
    let look = || {
        read(path).map_err(|error| {
            Failure::new(format!("cannot read `{}`", path.display()))
                .detail(error.to_string())
                .hint("it says who works in that folder: choose another --save folder, or remove it if nobody does")
        })
    };
    let Some(first) = look()? else {
        return Ok(None);
    };
    let folder = path.parent().unwrap_or(Path::new("."));
    let refused = |owner: &Owner| {
        Failure::new(format!("another prune works in `{}`", folder.display()))
            .detail(owner.name())
            .hint("wait for it, or choose another --save folder")
    };
    let owner = parse(&first);
    match owner.as_ref().map(|owner| (owner, owner.lives(me))) {
        Some((owner, Some(true))) => return Err(in_use(refused(owner))),
        Some((owner, Some(false))) => {
            let why = format!("{} does not work any more", owner.name());
            return Ok(Some((first, why)));
        }
        _ => {}
    }
    let name = owner.as_ref().map_or("a process that cannot be told".to_string(), Owner::name);
    events.note(format!(
        "`{}` is locked by {name}; looking for a sign of it for {} s",
        folder.display(),
        patience.as_secs_f64()
    ));
    let began = Instant::now();
    while began.elapsed() < patience {
        std::thread::sleep(LOOK.min(patience));
        let Some(now) = look()? else {
            return Ok(None);
        };
        if now != first {
            match parse(&now).or(owner.clone()) {
                Some(owner) => return Err(in_use(refused(&owner))),
                // Its owner was just about to write it.
                None => return Ok(None),
            }
        }
    }
    let why = format!("{name} gave no sign for {} s", patience.as_secs_f64());
    Ok(Some((first, why)))
}

/// Removes the stale lock `seen`, and no newer lock: if several processes try, only the first moves it away.
fn take_over(path: &Path, seen: &[u8], me: &Owner) -> io::Result<()> {
    let aside = path.with_file_name(format!("{FILE}.stale.{}.{}", me.host, me.pid));
    match fs::rename(path, &aside) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    if fs::read(&aside)? != seen {
        // Somebody was faster, and this is the new lock: it goes back, unless there is a third by now.
        let _ = fs::hard_link(&aside, path);
    }
    fs::remove_file(&aside)
}

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
