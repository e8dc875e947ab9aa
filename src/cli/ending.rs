//! What the end of the process has to do with: what is left unfinished, which folders to let go, which to remove.

use std::io;
use std::path::PathBuf;
use std::sync::Weak;

use super::folder_lock::FolderLock;

/// What a run that ends before its time leaves behind.
#[derive(Debug, Clone)]
pub(super) struct Unfinished {
    /// In words.
    pub(super) text: String,
    /// Whether another process can go on with it.
    pub(super) is_resumable: bool,
    /// Whether anything was written yet.
    pub(super) has_begun: bool,
}

/// What the end of the process has to do with.
#[derive(Default)]
pub(super) struct Ending {
    /// What an interruption leaves behind.
    pub(super) unfinished: Option<Unfinished>,
    /// What asked the run to stop.
    pub(super) signal: Option<&'static str>,
    /// Folders this process keeps others out of.
    pub(super) locks: Vec<Weak<FolderLock>>,
    /// A folder that an interruption removes.
    pub(super) temporary: Option<PathBuf>,
    /// Why a result did not reach standard output, though somebody was there to read it.
    pub(super) lost: Option<io::Error>,
}

impl Ending {
    /// Lets all folders go, the inner one first, as it was taken last, and removes what is of no use any more.
    pub(super) fn let_go(self) {
        let locks = self.locks.into_iter().rev();
        for lock in locks.filter_map(|lock| lock.upgrade()) {
            lock.release();
        }
        if let Some(folder) = self.temporary {
            // What cannot be removed stays in the system's folder for such things.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}
