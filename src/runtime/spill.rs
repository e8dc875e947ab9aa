//! Spill files: files without a name that go with the process.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::path::Path;

use anyhow::Result;

use crate::failure::Failure;

/// Checks that a spill file can be created in `folder`.
///
/// # Errors
/// Fails when the folder or a file in it cannot be created.
pub fn check_spill_folder(folder: &Path) -> Result<()> {
    spill_file(folder, "check").map(drop)
}

/// Attempts to find an unused file name.
const NAMES: usize = 16;

/// Creates a spill file that only its owner can read. It never opens an existing file and never follows a link.
pub fn spill_file(folder: &Path, stream: &str) -> Result<File> {
    let refused = |error: std::io::Error| {
        Failure::new(format!(
            "cannot create a spill file in `{}`: {error}",
            folder.display()
        ))
        .hint("name a folder that can be written to with --offload-folder, or use --hidden-states ram")
    };
    std::fs::create_dir_all(folder).map_err(refused)?;
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut taken = None;
    for _ in 0..NAMES {
        let path = folder.join(format!("hidden-states-{stream}-{:016x}.spill", random()));
        let file = match options.open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                taken = Some(error);
                continue;
            }
            opened => opened.map_err(refused)?,
        };
        // An open file without a name disappears with the process, however the process ends.
        #[cfg(unix)]
        std::fs::remove_file(&path).map_err(refused)?;
        return Ok(file);
    }
    Err(refused(taken.unwrap_or_else(|| ErrorKind::AlreadyExists.into())).into())
}

/// Returns a random number: the keys of the standard library's hash maps come from the system.
pub fn random() -> u64 {
    RandomState::new().hash_one(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_spill_file_is_private_and_never_one_that_exists() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = spill_file(folder.path(), "test").unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_ne!(random(), random(), "names cannot be guessed");
        // A folder that is a file: nothing can be created there.
        let path = folder.path().join("file");
        std::fs::write(&path, "kept").unwrap();
        let error = check_spill_folder(&path).unwrap_err().to_string();
        assert!(error.starts_with("cannot create a spill file in `"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept");
        check_spill_folder(folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
