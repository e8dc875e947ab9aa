//! The output files of a merge: created, or reopened where an earlier process left the run unfinished; and finished at the end.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};

use super::job::MergeJob;
use crate::checkpoint::MergedWriter;
use crate::job::folder::memory_log;
use crate::job::folder::state_file::StateFile;
use crate::job::recorder::Recorder;
use crate::merging::pass::MergeJournal;
use crate::run::manifest::OutputReport;
use crate::run::merging::{MergeReport, MergedTensor};
use crate::run::state::SCHEMA;
use crate::run::{Events, Moment, Phase, RunState};
use crate::runtime::memory;

/// The files of a merge and the state of its run.
pub(super) struct MergeOutputs<'a> {
    pub(super) writer: MergedWriter,
    pub(super) state: StateFile<'a>,
}

impl<'a> MergeOutputs<'a> {
    /// Reopens the files of the unfinished run, or creates the files of a new run.
    ///
    /// # Errors
    /// Fails when files cannot be created, read or renamed.
    pub(super) fn open(job: &'a MergeJob, recorder: &'a Recorder<'a>) -> Result<Self> {
        let folder = job.folder.state().context("a merge has a folder")?;
        let (writer, state) = match reopen(job, recorder)? {
            Some(files) => files,
            None => create(job, recorder)?,
        };
        if let Some(run) = &job.folder.run {
            recorder.write_memory_log(&run.join(memory_log::FILE))?;
        }
        let started = job.started_unix_seconds;
        Ok(Self { writer, state: StateFile::begin(folder, state, &job.clock, recorder, started)? })
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
        let model = job.folder.model.as_ref().context("a merge has a folder")?;
        let output = OutputReport { model: model.display().to_string(), verification };
        Ok((self.state, output))
    }
}

/// Creates the files of a new run.
fn create(job: &MergeJob, events: &dyn Events) -> Result<(MergedWriter, RunState)> {
    job.folder.prepare()?;
    let state = RunState {
        schema: SCHEMA,
        arguments: job.settings.arguments.clone(),
        started_unix_seconds: job.started_unix_seconds,
        settings: job.deciding.clone(),
        ..RunState::default()
    };
    if let Some(folder) = job.folder.state() {
        // The state comes first: files without a state are refused as foreign.
        StateFile::create(folder, &state)?;
    }
    let model = job.folder.model.as_ref().context("a merge has a folder")?;
    let writer = job.clock.measure(Phase::Allocate, || {
        MergedWriter::create(job.layout.clone(), model, &job.inputs.folders(), events)
    })?;
    Ok((writer, state))
}

/// Reopens the files of the unfinished run; `None` where there is no such run, or a file of it is missing.
fn reopen(job: &MergeJob, events: &dyn Events) -> Result<Option<(MergedWriter, RunState)>> {
    let (Some(state), Some(model)) = (&job.unfinished, &job.folder.model) else {
        return Ok(None);
    };
    if state.merged.is_empty() {
        // Its files may not have been made yet; making them again loses nothing.
        job.folder.refuse_files(false)?;
        return Ok(None);
    }
    job.folder.tidy()?;
    let mut state = state.clone();
    let counted: BTreeSet<&str> = state.merged.iter().map(|of| of.name.as_str()).collect();
    // Versions before recorded tensors whose counts were lost when they were killed.
    state.tensors.retain(|name, _| counted.contains(name.as_str()));
    let folders = job.inputs.folders();
    let reopened = job.clock.measure(Phase::Check, || {
        MergedWriter::reopen(job.layout.clone(), model, &folders, &state.tensors, events)
    })?;
    let Some((writer, damaged)) = reopened else {
        job.folder.refuse_files(false)?;
        events.warn(
            "the model files of the unfinished run are not there any more, or are others: starting over"
                .to_string(),
        );
        return Ok(None);
    };
    for name in &damaged {
        events.warn(format!("`{name}` is not on the disk as it was written: it is merged again"));
        state.tensors.remove(name);
    }
    let tensors = &state.tensors;
    state.merged.retain(|tensor| tensors.contains_key(&tensor.name));
    events.note(format!(
        "continuing an unfinished merge: {} of {} tensors are finished",
        state.merged.len(),
        job.tensors.len()
    ));
    Ok(Some((writer, state)))
}

impl MergeJournal for StateFile<'_> {
    fn tensors_done(
        &mut self,
        tensors: Vec<MergedTensor>,
        digests: BTreeMap<String, String>,
    ) -> Result<()> {
        self.merged(tensors, digests)
    }
}
