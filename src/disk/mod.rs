//! Every change a run makes to its output goes through here: files made, written, synced, renamed, removed.
//!
//! A thin layer, so that tests can end or fail the program at any of these operations, or let it forget what was not synced as a
//! power cut would (`faults`); without that it adds nothing to what the system does. What is only read, caches of texts and of
//! the hub, and hidden states on disk do not matter to an unfinished run and go their own ways.

mod faults;
pub mod positioned;

use std::fs::{self, File};
use std::io;
use std::path::Path;

use crate::bytes::ByteSize;

/// Makes an empty file, in place of an old one, for reading and writing.
///
/// # Errors
/// As the system.
pub fn create(path: &Path) -> io::Result<File> {
    faults::before_create(path)?;
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
}

/// Opens a file that is there, for reading and writing.
///
/// # Errors
/// As the system.
pub fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Writes all of `bytes` at byte `offset` of `file`.
///
/// # Errors
/// As the system; a part may have been written.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    faults::before_write(file, bytes, offset)?;
    positioned::write_all_at(file, bytes, offset)
}

/// Makes `file`, which is empty, `length` bytes long and has the file system set that much aside; its bytes are zero. `false` where the
/// file system says that it cannot promise room without being written to: then nothing has changed. (Some say yes and keep none, as
/// those that compress do with zeros.)
///
/// # Errors
/// When there is no room, and as the system.
pub fn reserve(file: &File, length: u64) -> io::Result<bool> {
    // A write of nothing that makes the file longer.
    faults::before_write(file, &[], 0)?;
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::FallocateFlags;
        use rustix::io::Errno;
        if length == 0 {
            return Ok(true);
        }
        // A signal that only asks the run to stop must not look like a disk that refuses.
        let reserved = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)
        });
        match reserved {
            Ok(()) => Ok(true),
            // Not this file system, or not this kernel.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = length;
        Ok(false)
    }
}

/// Waits until the bytes of `file` are on the disk.
///
/// # Errors
/// When the device reports an error.
pub fn sync(file: &File) -> io::Result<()> {
    faults::before_sync(file)?;
    file.sync_all()
}

/// Gives a file another name, in place of an old one there.
///
/// # Errors
/// As the system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    faults::before_rename(from, to)?;
    fs::rename(from, to)
}

/// Removes a file; one that is not there is removed already.
///
/// # Errors
/// As the system.
pub fn remove(path: &Path) -> io::Result<()> {
    faults::before_remove(path)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Whether `path` is still the name of an open file: somebody else may have removed or replaced it.
///
/// # Errors
/// As the system.
pub fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let named = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        named => named?,
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let open = file.metadata()?;
        Ok((open.dev(), open.ino()) == (named.dev(), named.ino()))
    }
    // Elsewhere open files keep their names.
    #[cfg(not(unix))]
    {
        let _ = (file, named);
        Ok(true)
    }
}

/// Makes new names, renames and removals in `folder` survive a power cut.
///
/// # Errors
/// When the folder cannot be opened or the device reports an error.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    faults::before_sync_folder(folder)?;
    sync_names(if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    })
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

/// A file system, and what this user may still write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Tells file systems apart.
    pub device: u64,
    /// Free, less what is kept for the superuser. Quotas are not counted.
    pub free: ByteSize,
}

/// The file system `path` is on, or would be; `None` where the system does not say.
#[cfg(unix)]
pub fn room(path: &Path) -> Option<Room> {
    use std::os::unix::fs::MetadataExt;
    let absolute = std::path::absolute(path).ok()?;
    let (there, metadata) = absolute
        .ancestors()
        .find_map(|folder| Some((folder, fs::metadata(folder).ok()?)))?;
    let free = match faults::room() {
        Some(bytes) => bytes,
        None => {
            let system = rustix::fs::statvfs(there).ok()?;
            system.f_bavail.saturating_mul(system.f_frsize)
        }
    };
    Some(Room {
        device: metadata.dev(),
        free: ByteSize(free),
    })
}

/// Not known here.
#[cfg(not(unix))]
pub fn room(_: &Path) -> Option<Room> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_written_renamed_and_removed() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let file = create(&one)?;
        write_all_at(&file, b"abc", 2)?;
        sync(&file)?;
        rename(&one, &other)?;
        sync_folder(folder.path())?;
        assert_eq!(fs::read(&other)?, b"\0\0abc");
        remove(&other)?;
        remove(&other)?;
        assert_eq!(fs::read_dir(folder.path())?.count(), 0);
        Ok(())
    }

    #[test]
    fn room_is_set_aside_or_the_file_stays_empty() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("one");
        let file = create(&path)?;
        let length = if reserve(&file, 70_000)? { 70_000 } else { 0 };
        assert_eq!(fs::read(&path)?, vec![0; length]);
        assert!(reserve(&create(&folder.path().join("none"))?, 0).is_ok());
        Ok(())
    }

    #[test]
    #[cfg(unix)]
    fn there_is_room_where_a_folder_will_be() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let here = room(folder.path()).expect("a file system");
        let later = room(&folder.path().join("a/b")).expect("a file system");
        assert_eq!(here.device, later.device);
        assert!(later.free > ByteSize::ZERO);
        Ok(())
    }
}
