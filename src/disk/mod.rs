//! Changes to the output of a run: files are created, written, synced, renamed and removed through these functions. They fail with
//! the error of the system.
//!
//! The layer is thin. With the cargo feature `faults`, tests can end or fail the program at any of these operations, or undo
//! all unsynced changes as a power cut would. Files that an unfinished run does not need do not go through here: inputs, the
//! caches of texts and of the hub, and hidden states on disk.
//!
//! | file | content |
//! | --- | --- |
//! | `gate` | the end of all changes, before the process releases its folders |
//! | `positioned` | reads and writes at an offset |

#[cfg(feature = "faults")]
mod faults;
mod gate;
pub mod positioned;

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::bytes::ByteSize;

/// Every change passes here.
static GATE: gate::Gate = gate::Gate::new();

/// Ends all changes of this process: waits for operations under way, and holds later operations for ever. Returns `false`, and holds
/// nothing, if an operation is not done within `patience`. The end of the process calls it before it releases folders.
pub fn close(patience: Duration) -> bool {
    GATE.close(patience)
}

/// Creates an empty file for reading and writing, or empties an existing file.
pub fn create(path: &Path) -> io::Result<File> {
    #[cfg(feature = "faults")]
    faults::before_create(path)?;
    let _under_way = GATE.pass();
    File::options().read(true).write(true).create(true).truncate(true).open(path)
}

/// Opens an existing file for reading and writing.
pub fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Writes all of `bytes` at byte `offset` of `file`.
///
/// # Errors
/// Fails with the error of the system; a part may have been written.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    #[cfg(feature = "faults")]
    faults::before_write(file, bytes, offset)?;
    let _under_way = GATE.pass();
    positioned::write_all_at(file, bytes, offset)
}

/// Extends an empty file to `length` zero bytes and reserves the room for them. Returns `false`, and changes nothing, where the file
/// system cannot reserve room. (Compressing file systems agree and reserve none.)
///
/// # Errors
/// Fails with the error of the system, for example when the disk is full.
pub fn reserve(file: &File, length: u64) -> io::Result<bool> {
    // A write of no bytes that extends the file.
    #[cfg(feature = "faults")]
    faults::before_write(file, &[], 0)?;
    let _under_way = GATE.pass();
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::FallocateFlags;
        use rustix::io::Errno;
        if length == 0 {
            return Ok(true);
        }
        // A signal that asks the run to stop must not look like an error of the disk.
        let reserved = rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length)
        });
        match reserved {
            Ok(()) => Ok(true),
            // The file system or the kernel cannot reserve.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (file, length);
        Ok(false)
    }
}

/// Waits until the bytes of `file` are on the disk.
pub fn sync(file: &File) -> io::Result<()> {
    #[cfg(feature = "faults")]
    faults::before_sync(file)?;
    file.sync_all()
}

/// Renames the file `from` to `to`, and replaces an existing file there.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    #[cfg(feature = "faults")]
    faults::before_rename(from, to)?;
    let _under_way = GATE.pass();
    fs::rename(from, to)
}

/// Removes a file, if it exists.
pub fn remove(path: &Path) -> io::Result<()> {
    #[cfg(feature = "faults")]
    faults::before_remove(path)?;
    let _under_way = GATE.pass();
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns whether `path` still names this open file; another process may have removed or replaced it.
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
    // Outside Unix, open files keep their names.
    #[cfg(not(unix))]
    {
        let _ = (file, named);
        Ok(true)
    }
}

/// Makes new names, renames and removals in `folder` survive a power cut, on file systems that can sync a folder.
///
/// # Errors
/// Fails when the folder cannot be opened or the device reports an error.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    #[cfg(feature = "faults")]
    faults::before_sync_folder(folder)?;
    sync_names(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
}

#[cfg(unix)]
fn sync_names(folder: &Path) -> io::Result<()> {
    use rustix::io::Errno;
    match File::open(folder)?.sync_all() {
        // Some network and FUSE file systems cannot sync a folder, so there is no more to do.
        Err(error)
            if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::NOTSUP)) =>
        {
            Ok(())
        }
        synced => synced,
    }
}

#[cfg(not(unix))]
fn sync_names(_: &Path) -> io::Result<()> {
    // Windows cannot open folders as files; NTFS journals its names.
    Ok(())
}

/// A file system and its free space for this user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// The number of the file system.
    pub device: u64,
    /// Free bytes without the superuser's reserve; quotas are not considered.
    pub free: ByteSize,
}

/// The file system of `path`, which may not exist yet; `None` where the system does not report it.
#[cfg(unix)]
pub fn room(path: &Path) -> Option<Room> {
    use std::os::unix::fs::MetadataExt;
    let absolute = std::path::absolute(path).ok()?;
    let (there, metadata) =
        absolute.ancestors().find_map(|folder| Some((folder, fs::metadata(folder).ok()?)))?;
    let system = rustix::fs::statvfs(there).ok()?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    #[cfg(feature = "faults")]
    let free = faults::room().unwrap_or(free);
    Some(Room { device: metadata.dev(), free: ByteSize(free) })
}

/// Returns `None`: unknown on this system.
#[cfg(not(unix))]
pub fn room(_: &Path) -> Option<Room> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_created_written_renamed_and_removed() -> io::Result<()> {
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

    // procfs refuses to sync its folders with EINVAL.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_folder_that_its_file_system_cannot_sync_is_no_failure() -> io::Result<()> {
        let folder = Path::new("/proc/self");
        let refused = File::open(folder)?.sync_all();
        assert_eq!(refused.expect_err("not on procfs").kind(), io::ErrorKind::InvalidInput);
        sync_folder(folder)
    }

    #[test]
    fn room_is_reserved_or_the_file_stays_empty() -> io::Result<()> {
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
    fn the_room_of_a_future_folder_is_that_of_its_file_system() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let here = room(folder.path()).expect("a file system");
        let later = room(&folder.path().join("a/b")).expect("a file system");
        assert_eq!(here.device, later.device);
        assert!(later.free > ByteSize::ZERO);
        Ok(())
    }
}
