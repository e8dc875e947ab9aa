//! State for the end of the process: the message about unfinished files, and the folders to release or remove.

use std::io;
use std::path::PathBuf;

use crate::job::folder::lock;
use crate::run::Unfinished;

/// State for the end of the process.
#[derive(Default)]
pub(super) struct Ending {
    /// The files that an interruption leaves.
    pub(super) unfinished: Option<Unfinished>,
    /// The signal that asked the run to stop.
    pub(super) signal: Option<&'static str>,
    /// A folder that an interruption removes.
    pub(super) temporary: Option<PathBuf>,
    /// The error that kept a result from standard output while a reader was there.
    pub(super) lost: Option<io::Error>,
}

impl Ending {
    /// Releases all folders, and removes the temporary folder.
    pub(super) fn release_folders(self) {
        lock::release_all();
        if let Some(folder) = self.temporary {
            // A folder that cannot be removed stays with the system's temporary files.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}
