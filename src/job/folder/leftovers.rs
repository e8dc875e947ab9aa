//! Files that a killed process left in the folders of a finished run.

use anyhow::Result;

use super::{RunFolder, files_in, is_temporary, lock};
use crate::run::Events;

impl RunFolder {
    /// Removes what a killed process left in the folders of a finished run: its locks and temporary files. Where another process works,
    /// nothing is removed.
    ///
    /// # Errors
    /// Fails when a folder cannot be listed or a file cannot be removed.
    pub(in crate::job) fn tidy_finished(mut self, events: &dyn Events) -> Result<()> {
        let is_left = |name: &String| name == lock::FILE || is_temporary(name);
        let mut names = Vec::new();
        for folder in [&self.run, &self.model].into_iter().flatten() {
            names.extend(files_in(folder)?);
        }
        if !names.iter().any(is_left) || self.lock(events).is_err() {
            return Ok(());
        }
        self.tidy()
    }
}
