//! The output files of a merge: created, or reopened where an earlier process left the run unfinished; and finished at the end.

use anyhow::{Context, Result};

use super::job::MergeJob;
use crate::checkpoint::LayoutWriter;
use crate::job::folder::memory_log;
use crate::job::folder::state_file::StateFile;
use crate::job::recorder::Recorder;
use crate::job::tensor_files::TensorFiles;
use crate::run::manifest::OutputReport;
use crate::run::merging::MergeReport;
use crate::run::{Events, Moment, Phase, RunState};
use crate::runtime::{Reporter, memory};

/// The files of a merge and the state of its run.
pub(super) struct MergeOutputs<'a> {
    pub(super) writer: LayoutWriter,
    pub(super) state: StateFile<'a>,
}

impl<'a> MergeOutputs<'a> {
    /// Reopens the files of the unfinished run, or creates the files of a new run.
    ///
    /// # Errors
    /// Fails when files cannot be created, read or renamed.
    pub(super) fn open(job: &'a MergeJob, recorder: &'a Recorder<'a>) -> Result<Self> {
        let MergeJob { folder, clock, .. } = job;
        let files = TensorFiles {
            folder,
            layout: &job.layout,
            sources: job.merge.inputs.folders(),
            reporter: Reporter { clock, events: recorder },
            work: ["merge", "merged"],
        };
        let started = job.started_unix_seconds;
        let place = folder.state().context("a merge has a folder")?;
        let (writer, state) = match reopen(job, &files)? {
            Some(files) => files,
            None => {
                folder.prepare()?;
                let state = job.identity.begin(&job.settings.arguments, started);
                // The state comes first: files without a state are refused as foreign.
                StateFile::create(place, &state)?;
                (files.create()?, state)
            }
        };
        if let Some(run) = &folder.run {
            recorder.write_memory_log(&run.join(memory_log::FILE))?;
        }
        Ok(Self { writer, state: StateFile::begin(place, state, clock, recorder, started)? })
    }

    /// Reads everything back and gives the files their names.
    pub(super) fn finish(
        self,
        job: &MergeJob,
        report: &MergeReport,
        events: &dyn Events,
    ) -> Result<(StateFile<'a>, OutputReport)> {
        job.clock.mark(Moment::BeforeSaving, events);
        // The pieces of the workers, and what a measurement of activations left.
        memory::release_freed();
        let published = job.published(report)?;
        let verification = job
            .clock
            .measure(Phase::SaveAndVerify, || self.writer.finish(published, &[], events))?;
        job.clock.mark(Moment::AfterSaving, events);
        let model = job.folder.model_folder()?.display().to_string();
        Ok((self.state, OutputReport { model, verification }))
    }
}

/// Reopens the files of the unfinished run; `None` where there is no such run, or a file of it is missing.
fn reopen(job: &MergeJob, files: &TensorFiles<'_>) -> Result<Option<(LayoutWriter, RunState)>> {
    let Some(state) = &job.identity.unfinished else {
        return Ok(None);
    };
    if state.merged.is_empty() {
        // Its files may not have been made yet; making them again loses nothing.
        job.folder.refuse_files(false)?;
        return Ok(None);
    }
    let mut state = state.clone();
    // Versions before recorded tensors whose counts were lost when they were killed.
    state.keep_counted_tensors();
    let writer = files.reopen(&mut state.tensors)?;
    let tensors = &state.tensors;
    state.merged.retain(|tensor| tensors.contains_key(&tensor.name));
    Ok(writer.map(|writer| (writer, state)))
}
