//! Spill files: files without a name, which go with the process.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use anyhow::Result;

use crate::failure::Failure;

/// Checks that a spill file can be created in `folder`.
///
/// # Errors
/// Fails when the folder or a file in it cannot be created.
pub fn check_spill_folder(folder: &Path) -> Result<()> {
    spill_file(folder).map(drop)
}

/// Creates a spill file that only its owner can read. It never opens an existing file and never follows a link.
///
/// The file never has a name where the file system can open such files, so a kill at any moment leaves nothing there. On other file
/// systems, a kill between two calls may leave an empty file.
///
/// # Errors
/// Fails when the folder or a file in it cannot be created.
pub fn spill_file(folder: &Path) -> Result<File> {
    let refused = |error: std::io::Error| {
        Failure::new(format!(
            "cannot create a spill file in `{}`: {error}",
            folder.display()
        ))
        .hint("name a folder that can be written to with --offload-folder, or use --hidden-states ram")
    };
    std::fs::create_dir_all(folder).map_err(refused)?;
    let file = tempfile::tempfile_in(folder).map_err(refused)?;
    #[cfg(unix)]
    {
        let of_owner = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        file.set_permissions(of_owner).map_err(refused)?;
    }
    Ok(file)
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
        let file = spill_file(folder.path()).unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no name");
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
