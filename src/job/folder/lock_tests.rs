//! The rules of the lock, each by itself.

use super::super::owner::{self, Owner};
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
    result.err().map_or("taken".into(), |error| error.to_string())
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
        assert!(notes.len() == 1 && notes[0].contains("does not work any more"), "{notes:?}");
        drop(lock);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_process_that_nobody_has_buried_does_not_work_any_more() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let began = Instant::now();
    while !owner::is_dead(child.id()) && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(BRIEFLY);
    }
    let me = Owner::me();
    let gone = Owner { pid: child.id(), process_began: owner::began(child.id()), ..me.clone() };
    assert_eq!(owner::exists(child.id()), Some(true));
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
    let me = Owner { job: "7".to_string(), restart: "1".to_string(), ..Owner::me() };
    let before = Owner { host: "elsewhere".to_string(), restart: String::new(), ..me.clone() };
    assert_eq!(before.lives(&me), Some(false));
    let other = Owner { job: "8".to_string(), ..before };
    assert_eq!(other.lives(&me), None);
}

#[test]
fn who_lost_the_lock_is_told_and_does_not_remove_it() {
    let folder = tempfile::tempdir().unwrap();
    let lock = FolderLock::take_within(folder.path(), SHORT, &Silent).unwrap();
    assert_eq!(lock.beat(1), None);
    assert_eq!(lock.beat(2), None);
    written(folder.path(), |owner| owner.host = "elsewhere".to_string());
    assert!(lock.beat(3).is_some_and(|other| other.contains("elsewhere")));
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
