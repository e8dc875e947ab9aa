//! The output files of a run: created, or reopened where an earlier process left the run unfinished; and finished at the end.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Result;

use super::folder::state_file::{self, StateFile};
use super::recorder::Recorder;
use super::settled_run::{RunTask, SettledRun};
use super::tensor_files::GONE;
use crate::checkpoint::{CheckpointWriter, ExpectedMatrix, PartialModel, Published};
use crate::job::folder::memory_log;
use crate::model::ModelConfig;
use crate::pipeline::{LayerJournal, MaskObserver, Output, SaveMasks, expected, permute};
use crate::run::manifest::{LayerReport, OutputReport, SweepMeasurements};
use crate::run::{Events, Moment, Phase, RunState};
use crate::runtime::{Finished, LayerSource};

/// The files of a run; all `None` where nothing is saved.
#[derive(Default)]
pub(super) struct Outputs<'a> {
    pub(super) writer: Option<CheckpointWriter>,
    pub(super) masks: Option<SaveMasks>,
    pub(super) state: Option<StateFile<'a>>,
    /// The layers that an earlier process finished.
    pub(super) layers_before: Vec<LayerReport>,
    /// The files that the first rank writes; `None` on the first rank.
    pub(super) of_first: Option<FirstRank>,
}

/// The outputs of the first rank, as the other ranks see them.
pub(super) struct FirstRank {
    /// The measurements, where an earlier process made all of them.
    pub(super) measured: Option<SweepMeasurements>,
    /// The files of the finished layers.
    pub(super) written: Option<Arc<PartialModel>>,
}

/// The files of a run, and its state, whose file is not begun.
type OpenedFiles = (Option<CheckpointWriter>, Option<SaveMasks>, RunState);

impl<'a> Outputs<'a> {
    /// Reopens the files of the unfinished run, or creates the files of a new run.
    pub(super) fn open(job: &'a SettledRun, recorder: &'a Recorder<'a>) -> Result<Self> {
        let (mut writer, masks, saved) = match reopen(job, recorder)? {
            Some(files) => files,
            None => create(job, recorder)?,
        };
        if let Some(writer) = &mut writer {
            writer.will_write(written_tensors(job).iter().map(String::as_str));
            writer.will_check_early(job.settings.output.verify);
        }
        if let Some(run) = &job.folder.run {
            recorder.write_memory_log(&run.join(memory_log::FILE))?;
        }
        let layers_before = saved.layers.clone();
        let (clock, started) = (&job.model.clock, job.model.started_unix_seconds);
        let state = job.folder.state();
        let state = state.map(|folder| StateFile::begin(folder, saved, clock, recorder, started));
        Ok(Self { writer, masks, state: state.transpose()?, layers_before, of_first: None })
    }

    /// Number of layers that an earlier process finished.
    pub(super) fn finished_layers(&self) -> usize {
        self.layers_before.len()
    }

    /// The measurements, where an earlier process made all of them.
    pub(super) fn measured(&self) -> Option<SweepMeasurements> {
        match &self.of_first {
            Some(first) => first.measured.clone(),
            None => {
                let run = self.state.as_ref()?.run();
                let (perplexity, tasks) = (run.perplexity.clone()?, run.tasks.clone());
                Some(SweepMeasurements { perplexity, tasks })
            }
        }
    }

    /// The model with the layers that an earlier process finished; `None` without finished layers.
    pub(super) fn finished_model(&self) -> Result<Option<Arc<PartialModel>>> {
        Ok(match (&self.of_first, &self.writer) {
            (Some(first), _) => first.written.clone(),
            (None, Some(writer)) if self.finished_layers() > 0 => Some(Arc::new(writer.written()?)),
            _ => None,
        })
    }

    /// The weights of the finished layers as they were written.
    pub(super) fn finished(&self, config: &Arc<ModelConfig>) -> Result<Option<Finished>> {
        let Some(written) = self.finished_model()? else {
            return Ok(None);
        };
        let written = LayerSource::as_stored(written, Arc::clone(config));
        Ok(Some(Finished { layers: self.finished_layers(), written }))
    }

    /// The receivers of pruned layers.
    pub(super) fn receivers(&mut self) -> Output<'_> {
        let mut observers: Vec<&mut dyn MaskObserver> = Vec::new();
        if let Some(masks) = &mut self.masks {
            observers.push(masks);
        }
        let state = self.state.as_mut();
        Output {
            sink: self.writer.as_mut(),
            journal: state.map(|state| state as &mut dyn LayerJournal),
            observers,
        }
    }

    /// Reads everything back and gives the files their names.
    pub(super) fn finish(
        &mut self,
        job: &SettledRun,
        own: Published,
        expected: &[ExpectedMatrix],
        events: &dyn Events,
    ) -> Result<Option<OutputReport>> {
        let clock = &job.model.clock;
        let level = job.settings.output.verify;
        let verification = self.writer.take().map(|mut writer| {
            clock.mark(Moment::BeforeSaving, events);
            writer.will_publish(own);
            clock.measure(Phase::SaveAndVerify, || writer.finish(expected, level, events))
        });
        let verification = verification.transpose()?;
        if let Some(masks) = self.masks.take() {
            clock.measure(Phase::SaveAndVerify, || masks.finish())?;
        }
        let Some((model, verification)) = job.folder.model.as_ref().zip(verification) else {
            return Ok(None);
        };
        clock.mark(Moment::AfterSaving, events);
        Ok(Some(OutputReport { model: model.display().to_string(), verification }))
    }
}

/// Names of the tensors that the run writes.
fn written_tensors(job: &SettledRun) -> Vec<String> {
    let config = &job.model.config;
    match &job.task {
        RunTask::Prune(pruning) => {
            let mut names = pruning.targets.tensors();
            names.extend(permute::biases(&pruning.technique, &pruning.targets, config));
            names
        }
        RunTask::Recover(recovery) => recovery.tensors(config),
        RunTask::Measure(_) => Vec::new(),
    }
}

/// Creates the files of a new run, or of an unfinished run that begins again with its first layer.
fn create(job: &SettledRun, events: &dyn Events) -> Result<OpenedFiles> {
    let model = &job.model;
    let begun = match &job.identity.unfinished {
        Some(state) => {
            job.folder.prepare_again()?;
            state.clone().begun_again()
        }
        None => {
            job.folder.prepare()?;
            job.identity.begin(&job.settings.arguments, model.started_unix_seconds)
        }
    };
    let state = RunState {
        settings: job.identity.deciding.clone(),
        allocation: job.allocation().cloned(),
        layer_drop: model.part_of.as_ref().and_then(|whole| whole.layer_drop.clone()),
        width_drop: model.part_of.as_ref().and_then(|whole| whole.width_drop.clone()),
        ..begun
    };
    if let Some(folder) = job.folder.state() {
        // The state comes first: files without a state are refused as foreign.
        StateFile::create(folder, &state)?;
    }
    let writer = job.folder.model.as_ref().map(|folder| {
        model.clock.measure(Phase::Allocate, || {
            CheckpointWriter::create(&model.checkpoint, folder, events)
        })
    });
    let writer = writer.transpose()?;
    let masks = job.masks().zip(job.pruning()).map(|(path, pruning)| {
        let settings = job.settings.deciding()?;
        model.clock.measure(Phase::Allocate, || {
            SaveMasks::create(path, settings, &pruning.targets, &model.config, events)
        })
    });
    Ok((writer, masks.transpose()?, state))
}

/// Reopens the files of the unfinished run; `None` where there is no such run, or a file of it is missing.
fn reopen(job: &SettledRun, events: &dyn Events) -> Result<Option<OpenedFiles>> {
    let (Some(state), Some(model)) = (&job.identity.unfinished, &job.folder.model) else {
        return Ok(None);
    };
    if state.layers.is_empty() {
        // Its files may not have been made yet; making them again loses nothing.
        job.folder.refuse_files(false)?;
        return Ok(None);
    }
    job.folder.tidy()?;
    let (source, mut state) = (&job.model, state.clone());
    let gone = |what: &str| events.warn(format!("{what} {GONE}"));
    let (tensors, masks) = (&state.tensors, expected::masks_of(&state.layers));
    let reopened = source.clock.measure(Phase::Check, || {
        CheckpointWriter::reopen(&source.checkpoint, model, tensors, events)
    })?;
    let Some((mut writer, damaged)) = reopened else {
        job.folder.refuse_files(false)?;
        gone("the model files");
        return Ok(None);
    };
    let mut damaged: BTreeSet<String> =
        damaged.iter().map(|tensor| expected::matrix_of(tensor).to_string()).collect();
    let mut saved = None;
    if let Some((path, pruning)) = job.masks().zip(job.pruning()) {
        let settings = job.settings.deciding()?;
        let reopened = SaveMasks::reopen(path, settings, &pruning.targets, &source.config, &masks)?;
        let Some((masks, not_written)) = reopened else {
            gone("the masks");
            return Ok(None);
        };
        damaged.extend(not_written);
        saved = Some(masks);
    }
    let again = state.keep_whole_layers(&damaged);
    if let Some(first) = again.first() {
        let layers = state.layers.len();
        let bad = damaged.first().unwrap_or(first);
        events.warn(format!(
            "`{bad}` is not on the disk as it was written: layer {layers} and all after it are done again"
        ));
        let tensors = |name: &String| [expected::tensor_of(name), expected::bias_of(name)];
        let mut names: Vec<String> = again.iter().flat_map(tensors).collect();
        if let RunTask::Recover(recovery) = &job.task {
            let config = &source.config;
            let layers = layers..config.num_hidden_layers;
            names.extend(layers.flat_map(|layer| recovery.norms_of(layer, config)));
        }
        writer.forget(names.iter().map(String::as_str));
        if let Some(masks) = &mut saved {
            masks.forget(again.iter().map(String::as_str));
        }
    }
    state_file::announce(&state, source.config.num_hidden_layers, events);
    Ok(Some((Some(writer), saved, state)))
}
