//! The files of an output whose tensors are finished in any order: of a merge, a quantisation, a packing, and an unpacking.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use super::folder::RunFolder;
use crate::checkpoint::{Layout, LayoutWriter};
use crate::run::Phase;
use crate::runtime::Reporter;

/// The end of the warning for files that are gone.
pub(super) const GONE: &str =
    "of the unfinished run are not there any more, or are others: starting over";

/// An output whose files are not open yet.
pub(super) struct TensorFiles<'a> {
    pub(super) folder: &'a RunFolder,
    pub(super) layout: &'a Layout,
    /// Folders that are read, and must not be written to.
    pub(super) sources: Vec<&'a Path>,
    pub(super) reporter: Reporter<'a>,
    /// The name of the work, and of what it does to a tensor.
    pub(super) work: [&'static str; 2],
}

impl TensorFiles<'_> {
    /// The files of the unfinished run; where there is none, or a file is missing, new files.
    ///
    /// # Arguments
    /// * `finished`: as of [`TensorFiles::reopen`]
    /// * `forget`: removes the finished tensors from the record; what an earlier process knows of the source stays
    ///
    /// # Errors
    /// Fails as [`TensorFiles::reopen`] and [`TensorFiles::create`], for files in the way, and without room on the disk.
    pub(super) fn open(
        &self,
        finished: &mut BTreeMap<String, String>,
        forget: impl FnOnce() -> Result<()>,
    ) -> Result<LayoutWriter> {
        if !finished.is_empty()
            && let Some(writer) = self.reopen(finished)?
        {
            return Ok(writer);
        }
        self.folder.check_disk(self.layout.bytes())?;
        self.folder.refuse_files(false)?;
        self.folder.prepare_again()?;
        forget()?;
        self.create()
    }

    /// Creates the files of a run that begins.
    ///
    /// # Errors
    /// Fails as [`LayoutWriter::create`].
    pub(super) fn create(&self) -> Result<LayoutWriter> {
        let (layout, model) = (self.layout.clone(), self.folder.model_folder()?);
        let Reporter { clock, events } = self.reporter;
        clock
            .measure(Phase::Allocate, || LayoutWriter::create(layout, model, &self.sources, events))
    }

    /// Reopens the files of the unfinished run, and removes damaged tensors from `finished`, the hashes of tensors by name. `None`
    /// where a file is missing.
    ///
    /// # Errors
    /// Fails for files that no run explains, and as [`LayoutWriter::reopen`].
    pub(super) fn reopen(
        &self,
        finished: &mut BTreeMap<String, String>,
    ) -> Result<Option<LayoutWriter>> {
        self.folder.tidy()?;
        let (layout, model) = (self.layout.clone(), self.folder.model_folder()?);
        let Reporter { clock, events } = self.reporter;
        let reopened = clock.measure(Phase::Check, || {
            LayoutWriter::reopen(layout, model, &self.sources, finished, events)
        })?;
        let Some((writer, damaged)) = reopened else {
            self.folder.refuse_files(false)?;
            events.warn(format!("the model files {GONE}"));
            return Ok(None);
        };
        let [work, done] = self.work;
        for name in &damaged {
            events
                .warn(format!("`{name}` is not on the disk as it was written: it is {done} again"));
            finished.remove(name);
        }
        events.note(format!(
            "continuing an unfinished {work}: {} of {} tensors are finished",
            finished.len(),
            self.layout.tensors().len()
        ));
        Ok(Some(writer))
    }
}
