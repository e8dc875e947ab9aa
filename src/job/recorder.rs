//! Events on their way out of a run: the warnings are kept for the record, memory samples go to the memory log.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;

use super::folder::memory_log::MemoryLog;
use crate::bytes::ByteSize;
use crate::ranks::Ranks;
use crate::run::events::LockLost;
use crate::run::measured::PhaseReport;
use crate::run::plan::exceeded;
use crate::run::{Event, Events, Plan};
use crate::runtime::Clock;

/// Forwards every event and keeps what the record needs.
pub(super) struct Recorder<'a> {
    events: &'a dyn Events,
    kept: Mutex<Kept>,
    ranks: Ranks,
    /// The cell whose events these are, where several cells share a pass.
    cell: Option<String>,
}

#[derive(Default)]
struct Kept {
    warnings: Vec<String>,
    memory_log: Option<MemoryLog>,
}

impl<'a> Recorder<'a> {
    /// Forwards to `events`.
    pub(super) fn new(events: &'a dyn Events) -> Self {
        Self { events, kept: Mutex::default(), ranks: Ranks::alone(), cell: None }
    }

    /// Names the cell of a sweep in the event of a layer.
    pub(super) fn of_cell(self, name: String) -> Self {
        Self { cell: Some(name), ..self }
    }

    /// Stops the run, too, when another of these ranks has left it.
    pub(super) fn among(self, ranks: &Ranks) -> Self {
        Self { ranks: ranks.clone(), ..self }
    }

    /// Every warning so far.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.kept().warnings.clone()
    }

    /// The phases of a run on the CPU, and the highest peak. Warns where the peak is above the plan.
    pub(super) fn measured(
        &self,
        clock: &Clock,
        plan: &Plan,
    ) -> (Vec<PhaseReport>, Option<ByteSize>) {
        let phases = clock.report();
        let peak = phases.iter().filter_map(|phase| phase.peak_anonymous).max();
        let planned = plan.cpu().map(|of| (of.budget, of.peak));
        if let Some((measured, planned)) = peak.zip(planned)
            && let Some(warning) = exceeded("memory", measured, planned)
        {
            self.warn(warning);
        }
        (phases, peak)
    }

    /// Keeps memory samples from now on (`--log-memory`).
    pub(super) fn log_memory(&self) {
        self.kept().memory_log = Some(MemoryLog::default());
    }

    /// Writes memory samples to this file, beginning with the samples so far.
    pub(super) fn write_memory_log(&self, file: &Path) -> Result<()> {
        match &mut self.kept().memory_log {
            Some(log) => log.write_to(file),
            None => Ok(()),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Events for Recorder<'_> {
    fn emit(&self, event: Event) {
        let mut failed = None;
        match &event {
            Event::Warning { text } => self.kept().warnings.push(text.clone()),
            Event::Fallback(fallback) => self.kept().warnings.push(fallback.to_string()),
            Event::Memory(sample) => {
                let log = &mut self.kept().memory_log;
                failed = log.as_mut().and_then(|log| log.add(sample).err());
            }
            _ => {}
        }
        self.events.emit(match event {
            Event::LayerPruned { layer, sparsity, elapsed, .. } => {
                Event::LayerPruned { layer, sparsity, elapsed, cell: self.cell.clone() }
            }
            other => other,
        });
        if let Some(error) = failed {
            self.warn(format!("{error:#}"));
        }
    }

    fn is_stopping(&self) -> bool {
        self.events.is_stopping() || self.ranks.departure().is_some()
    }

    fn when_lock_lost(&self) -> LockLost {
        self.events.when_lock_lost()
    }
}
