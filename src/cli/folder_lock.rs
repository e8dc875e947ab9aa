//! One run, one folder: a file `prune.lock` that says who works here, on network file systems too.
//!
//! It is made with the one operation every file system does for one process only (create, unless it is there), and holds host, boot,
//! process and a count that its owner raises every few seconds. Who finds it decides
//!
//! | the lock is of | then |
//! | --- | --- |
//! | a process of this boot of this host that lives | refused |
//! | one that does not live any more, or the same batch job before it was started again | stale: said, and taken over |
//! | another host, boot or container | watched: refused as soon as it is seen to live, stale after [`PATIENCE`] without a sign |
//!
//! Nothing is judged by clocks, which differ between hosts. Whoever finds, when it raises its count, that the lock has another owner or
//! none ends at once: two processes must never write to one model, and where the lock is gone another may have come, finished and left.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bytes::{ByteSize, read_whole};
use crate::disk::{self, positioned};
use crate::failure::Failure;
use crate::run::Events;

/// The file's name.
pub(super) const FILE: &str = "prune.lock";

/// How often an owner gives a sign.
const BEAT: Duration = Duration::from_secs(5);

/// How long one without a sign is waited for: several beats, and what network file systems keep of old contents.
const PATIENCE: Duration = Duration::from_secs(40);

/// How often a lock that is there and then gone is tried for.
const ATTEMPTS: usize = 100;

/// Between two attempts.
const BRIEFLY: Duration = Duration::from_millis(10);

/// What the text of a lock is a multiple of, in bytes: longer than any, but for very long names.
const LENGTH: usize = 1024;

/// The largest lock that is read.
const LARGEST: ByteSize = ByteSize(1 << 20);

/// How often the lock of an unknown owner is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Who works in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    host: String,
    /// This start of the machine's system; empty where it has no name.
    boot: String,
    /// Where process numbers are counted: containers have spaces of their own. Empty where there are none.
    process_space: String,
    pid: u32,
    /// When the process began, as the system counts it, so that a number that was given again is told apart; empty where unknown.
    process_began: String,
    /// The batch job and how often it was started again; empty outside one.
    job: String,
    restart: String,
    /// Signs given.
    beat: u64,
}

impl Owner {
    /// This process.
    fn me() -> Self {
        let text = |path: &str| {
            fs::read_to_string(path).map_or(String::new(), |text| text.trim().to_string())
        };
        let variable = |name: &str| std::env::var(name).unwrap_or_default();
        let pid = std::process::id();
        let array = variable("SLURM_ARRAY_TASK_ID");
        let job = match (variable("SLURM_ARRAY_JOB_ID"), variable("SLURM_JOB_ID")) {
            (of, _) if !of.is_empty() && !array.is_empty() => format!("{of}_{array}"),
            (_, job) => job,
        };
        Self {
            host: host(),
            boot: text("/proc/sys/kernel/random/boot_id"),
            process_space: fs::read_link("/proc/self/ns/pid")
                .map_or(String::new(), |link| link.to_string_lossy().into_owned()),
            pid,
            process_began: began(pid),
            job,
            restart: variable("SLURM_RESTART_COUNT"),
            beat: 0,
        }
    }

    fn is_here(&self, me: &Self) -> bool {
        (&self.host, &self.boot, &self.process_space) == (&me.host, &me.boot, &me.process_space)
    }

    /// Whether it still works, where that can be known at once.
    fn lives(&self, me: &Self) -> Option<bool> {
        if self.is_here(me) {
            if !exists(self.pid)? {
                return Some(false);
            }
            if is_dead(self.pid) {
                return Some(false);
            }
            let began = began(self.pid);
            // Systems may hide other users' processes: then only its signs tell.
            let is_hidden = began.is_empty() && !self.process_began.is_empty();
            return (!is_hidden).then_some(began == self.process_began);
        }
        let is_my_job = !self.job.is_empty() && self.job == me.job;
        (is_my_job && self.restart != me.restart).then_some(false)
    }

    fn name(&self) -> String {
        let job = match self.job.as_str() {
            "" => String::new(),
            job => format!(", job {job}"),
        };
        format!("process {} on {}{job}", self.pid, self.host)
    }
}

#[cfg(unix)]
fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// Whether there is a process of this number; one of another user counts. `None` where the system is not asked.
#[cfg(unix)]
fn exists(pid: u32) -> Option<bool> {
    let pid = i32::try_from(pid).ok();
    let pid = pid.and_then(rustix::process::Pid::from_raw);
    Some(pid.is_some_and(|pid| {
        !matches!(
            rustix::process::test_kill_process(pid),
            Err(rustix::io::Errno::SRCH)
        )
    }))
}

/// Of others it is found out by waiting.
#[cfg(not(unix))]
fn exists(pid: u32) -> Option<bool> {
    (pid == std::process::id()).then_some(true)
}

/// When a process began, in the system's ticks since it was started.
fn began(pid: u32) -> String {
    stat(pid, 19)
}

/// Whether a process has ended, and its number is kept only because nobody has asked how it did: containers may never ask.
fn is_dead(pid: u32) -> bool {
    ["Z", "X"].contains(&stat(pid, 0).as_str())
}

/// What the system tells of a process, by its place after the name; empty where it does not tell.
fn stat(pid: u32, field: usize) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the last parenthesis may hold anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let field = fields.split_whitespace().nth(field);
    field.unwrap_or_default().to_string()
}

/// A folder that no other process may write to, until this is dropped.
#[derive(Debug)]
pub(super) struct FolderLock {
    path: PathBuf,
    owner: Owner,
    /// Folders that were made for the lock, the deepest first.
    made: Vec<PathBuf>,
    is_released: AtomicBool,
    /// Ends the thread that gives signs.
    end: Arc<(Mutex<bool>, Condvar)>,
}

impl FolderLock {
    /// Takes the folder, which is made where there is none. `lost` is called, from another thread, where this process has it no more, with
    /// the reason.
    ///
    /// # Errors
    /// Fails when another process works there, and when the folder cannot be written.
    pub(super) fn take(
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
                    // Released before the lock, which may be dropped here, and then takes it itself.
                    drop(guard);
                    let Some(lock) = beating.upgrade().filter(|_| !is_ended) else {
                        return;
                    };
                    beat += 1;
                    if let Some(why) = lock.beat(beat) {
                        // One that was let go just now is gone as it should be.
                        if !lock.is_released.load(Ordering::SeqCst) {
                            lost(why);
                        }
                        return;
                    }
                }
            })
            .context("starting the thread that keeps the lock")?;
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
            // The name of a folder is the business of the one it is in.
            disk::sync_folder(new.parent().unwrap_or(Path::new("."))).map_err(cannot)?;
        }
        for _ in 0..ATTEMPTS {
            let made_file = File::options().write(true).create_new(true).open(&path);
            match made_file {
                Ok(file) => {
                    if let Err(error) = positioned::write_all_at(&file, &text(&owner), 0) {
                        // The error is the one to tell.
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
                        // It is gone, or just coming: others may be at it, too.
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
            .hint(format!(
                "remove `{}` if no other prune works there",
                path.display()
            ))
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
        // In its place and of its length: a full disk does not matter, and nobody ever finds half of it. A server that does not answer will be
        // noticed by the work itself.
        let open = File::options().write(true).open(&self.path);
        let _ = open.and_then(|file| positioned::write_all_at(&file, &text(&owner), 0));
        None
    }

    /// Lets the folder go; what was made for the lock alone is removed.
    pub(super) fn release(&self) {
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
            // One that something was written to stays.
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
    // Always of one length, whatever the count.
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

/// What is to be done with a lock that is there: `None` where it is gone, its text and why it is stale where it is.
///
/// # Errors
/// Fails where its owner works.
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
        Some((owner, Some(true))) => return Err(refused(owner).into()),
        Some((owner, Some(false))) => {
            let why = format!("{} does not work any more", owner.name());
            return Ok(Some((first, why)));
        }
        _ => {}
    }
    let name = owner
        .as_ref()
        .map_or("a process that cannot be told".to_string(), Owner::name);
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
                Some(owner) => return Err(refused(&owner).into()),
                // Its owner was just about to write it.
                None => return Ok(None),
            }
        }
    }
    let why = format!("{name} gave no sign for {} s", patience.as_secs_f64());
    Ok(Some((first, why)))
}

/// Removes the stale lock `seen`, and no other: of several that try, one moves it away.
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
mod tests {
    use super::*;
    use crate::run::{Event, Silent};

    /// Keeps notes.
    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>);

    impl Events for Notes {
        fn emit(&self, event: Event) {
            if let (Event::Note { text }, Ok(mut notes)) = (event, self.0.lock()) {
                notes.push(text);
            }
        }
    }

    const SHORT: Duration = Duration::from_millis(60);

    fn written(folder: &Path, change: impl FnOnce(&mut Owner)) -> Owner {
        let mut owner = Owner::me();
        change(&mut owner);
        fs::write(folder.join(FILE), text(&owner)).unwrap();
        owner
    }

    fn says<T>(result: Result<T>) -> String {
        result
            .err()
            .map_or("taken".into(), |error| error.to_string())
    }

    #[test]
    fn a_folder_is_one_process_s_and_is_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("a/b");
        let lock = FolderLock::take_within(&run, SHORT, &Silent).unwrap();
        assert!(run.join(FILE).is_file());
        let refused = says(FolderLock::take_within(&run, SHORT, &Silent));
        assert!(refused.contains("another prune works in"), "{refused}");
        assert!(refused.contains(&std::process::id().to_string()));
        drop(lock);
        assert!(!folder.path().join("a").exists());

        let lock = FolderLock::take_within(&run, SHORT, &Silent).unwrap();
        fs::write(run.join("result"), "x").unwrap();
        drop(lock);
        assert_eq!(fs::read_dir(&run).unwrap().count(), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_lock_of_a_process_that_is_gone_is_taken_over_aloud() {
        let folder = tempfile::tempdir().unwrap();
        for change in [
            (|owner| owner.pid = 0x3fff_fff0) as fn(&mut Owner),
            // The number was given again.
            |owner| owner.process_began = "1".to_string(),
        ] {
            written(folder.path(), change);
            let notes = Notes::default();
            let lock = FolderLock::take_within(folder.path(), SHORT, &notes).unwrap();
            let notes = notes.0.lock().unwrap();
            assert!(
                notes.len() == 1 && notes[0].contains("does not work any more"),
                "{notes:?}"
            );
            drop(lock);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_that_nobody_has_buried_does_not_work_any_more() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let began = Instant::now();
        while !is_dead(child.id()) && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(BRIEFLY);
        }
        let me = Owner::me();
        let gone = Owner {
            pid: child.id(),
            process_began: super::began(child.id()),
            ..me.clone()
        };
        assert_eq!(exists(child.id()), Some(true));
        assert_eq!((gone.lives(&me), me.lives(&me)), (Some(false), Some(true)));
        child.wait().unwrap();
    }

    #[test]
    fn another_host_is_watched() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = |owner: &mut Owner| owner.host = "elsewhere".to_string();
        written(folder.path(), elsewhere);
        let notes = Notes::default();
        drop(FolderLock::take_within(folder.path(), SHORT, &notes).unwrap());
        let told = notes.0.lock().unwrap().join("\n");
        assert!(told.contains("gave no sign"), "{told}");

        let mut owner = written(folder.path(), elsewhere);
        let path = folder.path().join(FILE);
        let beating = std::thread::spawn(move || {
            std::thread::sleep(SHORT);
            owner.beat += 1;
            fs::write(path, text(&owner)).unwrap();
        });
        let patience = Duration::from_secs(20);
        let refused = says(FolderLock::take_within(folder.path(), patience, &Silent));
        assert!(refused.contains("on elsewhere"), "{refused}");
        beating.join().unwrap();
    }

    #[test]
    fn a_batch_job_that_was_started_again_has_no_rival() {
        let me = Owner {
            job: "7".to_string(),
            restart: "1".to_string(),
            ..Owner::me()
        };
        let before = Owner {
            host: "elsewhere".to_string(),
            restart: String::new(),
            ..me.clone()
        };
        assert_eq!(before.lives(&me), Some(false));
        let other = Owner {
            job: "8".to_string(),
            ..before
        };
        assert_eq!(other.lives(&me), None);
    }

    #[test]
    fn who_lost_the_lock_is_told_and_does_not_remove_it() {
        let folder = tempfile::tempdir().unwrap();
        let lock = FolderLock::take_within(folder.path(), SHORT, &Silent).unwrap();
        assert_eq!(lock.beat(1), None);
        assert_eq!(lock.beat(2), None);
        written(folder.path(), |owner| owner.host = "elsewhere".to_string());
        assert!(
            lock.beat(3)
                .is_some_and(|other| other.contains("elsewhere"))
        );
        drop(lock);
        assert!(folder.path().join(FILE).is_file());
    }

    #[test]
    fn a_lock_that_is_gone_is_lost_and_not_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let lock = FolderLock::take_within(folder.path(), SHORT, &Silent).unwrap();
        assert_eq!(lock.beat(1), None);
        fs::remove_file(folder.path().join(FILE)).unwrap();
        assert!(lock.beat(2).is_some_and(|why| why.contains("is gone")));
        assert!(!folder.path().join(FILE).exists());
    }

    #[test]
    fn only_the_lock_that_was_seen_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let me = Owner::me();
        let path = folder.path().join(FILE);
        let other = written(folder.path(), |owner| owner.pid += 1);
        take_over(&path, b"another", &me).unwrap();
        assert_eq!(fs::read(&path).unwrap(), text(&other));
        take_over(&path, &text(&other), &me).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
