//! `prune eval --against`: the dense model passes the windows first, and its final states wait for the model at their heads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use super::folder::RunFolder;
use super::inputs::RunInputs;
use super::opened::OpenedModel;
use super::pass::early_shape;
use super::planned::Planning;
use super::same_run::RunIdentity;
use super::settled_run::{Comparison, RunTask, SettledRun};
use super::texts::Texts;
use crate::eval::{DenseHead, Meeting, MeetingRole};
use crate::failure::Failure;
use crate::pipeline::AgainstShape;
use crate::run::events::LockLost;
use crate::run::{Event, Events, HiddenStatesStorage, Plan};
use crate::settings::{HiddenStatesChoice, ModelSettings, OutputSettings, Settings};

/// Opens the dense model of `--against`; `None` without the flag.
///
/// # Errors
/// Fails for a model that cannot be read, and where the two vocabularies have different sizes.
pub(super) fn open(
    settings: &Settings,
    model: &OpenedModel,
    events: &dyn Events,
) -> Result<Option<OpenedModel>> {
    let Some(dense) = &settings.evaluation.against else {
        return Ok(None);
    };
    let asked = ModelSettings { model: dense.clone(), revision: None, ..settings.model.clone() };
    let mut dense = OpenedModel::open(&asked, &settings.device, None, events)?;
    let (here, there) = (model.config.vocab_size, dense.config.vocab_size);
    if here != there {
        return Err(Failure::new(format!(
            "`{}` and `{}` have vocabularies of {here} and {there} tokens, and cannot be compared",
            model.folder.display(),
            dense.folder.display()
        ))
        .hint("name the dense model that this model was made from")
        .into());
    }
    let limit = dense.config.longest_sequence();
    if model.seqlen > limit {
        return Err(Failure::usage(format!(
            "the windows have {} tokens, and `{}` of --against has {limit} positions",
            model.seqlen,
            dense.folder.display()
        ))
        .hint(format!("use --seqlen {limit} or less"))
        .into());
    }
    dense.seqlen = model.seqlen;
    dense.check_ends(events)?;
    Ok(Some(dense))
}

impl OpenedModel {
    /// The dense model in numbers, as the plan of the other model needs it.
    pub(super) fn as_against(&self) -> AgainstShape<'_> {
        AgainstShape::Other { config: &self.config, dtypes: self.dtypes() }
    }
}

/// The dense model with the plan of its sweep. Its states stay where the states of the model are going to be, or else in host memory.
///
/// # Errors
/// Fails where it does not fit.
pub(super) fn planned(
    dense: Option<OpenedModel>,
    settings: &Settings,
    given: &RunInputs<'_>,
    (texts, plan): (&Texts, &Plan),
) -> Result<Option<(OpenedModel, Plan)>> {
    let Some(dense) = dense else {
        return Ok(None);
    };
    let mut device = settings.device.clone();
    device.hidden_states = match plan.hidden_states.storage {
        HiddenStatesStorage::Disk => HiddenStatesChoice::Disk,
        HiddenStatesStorage::Ram | HiddenStatesStorage::Device => HiddenStatesChoice::Ram,
    };
    let planning = Planning::new(&device, dense.threads)?.beside(&given.ranks);
    let folder = RunFolder::at(&[&*dense.folder], &OutputSettings::default(), false)?;
    let mut shape = early_shape(settings, &dense, None, given, &folder);
    shape.of_all_ranks = given.of_all_ranks(0, texts.windows());
    shape.seqlen = texts.longest(dense.seqlen);
    let packs = texts.task_rows().div_ceil(shape.seqlen);
    let packs = given.samples_here(packs);
    shape.windows = given.samples_here(texts.windows()) + packs;
    shape.tasks = texts.task_shape(packs);
    let plan = planning.plan(&shape)?;
    Ok(Some((dense, plan)))
}

/// Makes the dense model, if there is one, a run beside `job`, whose windows it passes with its plan.
///
/// # Errors
/// Fails when its folder cannot be resolved.
pub(super) fn join(mut job: SettledRun, dense: Option<(OpenedModel, Plan)>) -> Result<SettledRun> {
    let Some((dense, plan)) = dense else {
        return Ok(job);
    };
    let head = DenseHead::Of(Arc::clone(&dense.source), Arc::clone(&dense.config));
    let meeting = Meeting::new(job.settings.evaluation.kl_positions, head);
    let folder = RunFolder::at(&[&*dense.folder], &OutputSettings::default(), false)?;
    let run = SettledRun {
        settings: job.settings.clone(),
        model: dense,
        folder,
        task: RunTask::Measure(None),
        texts: Arc::clone(&job.texts),
        plan,
        identity: RunIdentity::default(),
        ranks: job.ranks.clone(),
        comparison: Some(Comparison {
            meeting: Arc::clone(&meeting),
            role: MeetingRole::Dense,
            dense: None,
        }),
    };
    let (role, dense) = (MeetingRole::Model, Some(Box::new(run)));
    job.comparison = Some(Comparison { meeting, role, dense });
    Ok(job)
}

/// Events of both sweeps, told as a single sweep: its progress goes from 0 to 100 % once.
pub(super) struct BothSweeps<'a> {
    events: &'a dyn Events,
    /// Decoder layers of the model, which passes after the dense model.
    layers: usize,
    /// The sweep of the dense model has begun.
    has_begun: AtomicBool,
    /// The sweep of the dense model is over.
    is_second: AtomicBool,
}

impl<'a> BothSweeps<'a> {
    /// The sweeps of `job`, told to `events`.
    pub(super) fn of(job: &SettledRun, events: &'a dyn Events) -> Self {
        let layers = job.model.config.num_hidden_layers;
        Self { events, layers, has_begun: AtomicBool::default(), is_second: AtomicBool::default() }
    }

    /// The start of both sweeps, from the start of the first sweep. The windows of the dense model wait at its head.
    fn of_both(&self, dense: usize, finished: usize, passes: u64) -> Event {
        let left = (dense + 1).saturating_sub(finished).max(1);
        let passes = passes / left as u64 * (left + self.layers) as u64;
        Event::SweepStarted { layers: dense + self.layers, finished, passes }
    }
}

impl Events for BothSweeps<'_> {
    fn emit(&self, event: Event) {
        match event {
            Event::SweepStarted { layers, finished, passes } => {
                if !self.has_begun.swap(true, Ordering::Relaxed) {
                    self.events.emit(self.of_both(layers, finished, passes));
                }
            }
            Event::SweepDone if !self.is_second.swap(true, Ordering::Relaxed) => {}
            other => self.events.emit(other),
        }
    }

    fn is_stopping(&self) -> bool {
        self.events.is_stopping()
    }

    fn when_lock_lost(&self) -> LockLost {
        self.events.when_lock_lost()
    }
}
