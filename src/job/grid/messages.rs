//! Events of a cell on their way out: phases get the cell's number, and what an earlier cell has told is not told again.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::failure::Failure;
use crate::ranks::Ranks;
use crate::run::events::LockLost;
use crate::run::{Event, Events, Manifest, Unfinished};

/// Forwards the events of all cells.
pub(super) struct CellEvents<'a> {
    events: &'a dyn Events,
    /// The ranks that share the cells. If a rank leaves, all stop.
    ranks: &'a Ranks,
    /// The cells that are kept if the sweep is interrupted.
    interrupted: Unfinished,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// `3/18: `, before the names of phases.
    place: String,
    /// Notes and warnings of earlier cells.
    texts: BTreeSet<String>,
}

impl<'a> CellEvents<'a> {
    /// Forwards to `events`; `arguments` are the command that continues the sweep in `out`.
    pub(super) fn new(
        ranks: &'a Ranks,
        events: &'a dyn Events,
        out: &Path,
        arguments: &[String],
    ) -> Self {
        let events = Self {
            events,
            ranks,
            interrupted: Unfinished {
                has_begun: false,
                ..Unfinished::resumable("cells", out, "sweep", arguments)
            },
            told: Mutex::default(),
        };
        events.emit(Event::IfInterrupted(None));
        events
    }

    /// Announces the next cell, or the next cells that share their statistics.
    pub(super) fn begin(&self, numbers: RangeInclusive<usize>, of: usize, names: &str) {
        let (first, last) = numbers.into_inner();
        let (place, note) = match first == last {
            true => (format!("{first}/{of}: "), format!("cell {first} of {of}: {names}")),
            false => (
                format!("{first}-{last}/{of}: "),
                format!("cells {first} to {last} of {of} share their statistics: {names}"),
            ),
        };
        self.told().place = place;
        self.events.note(note);
        self.emit(Event::IfInterrupted(None));
    }

    /// The cell was finished before.
    pub(super) fn already_finished(&self) {
        self.events.note("  it is finished".to_string());
    }

    /// The cell is done.
    pub(super) fn finished(&self, name: &str, manifest: &Manifest) {
        let perplexity = manifest.perplexity.pruned;
        let measured = perplexity
            .map_or_else(String::new, |of| format!(", pruned perplexity {:.4}", of.perplexity));
        let seconds = manifest.seconds;
        let text = match manifest.cells_at_once {
            None => format!("  done in {seconds:.1} s{measured}"),
            Some(cells) => {
                format!("  {name}: done, with {cells} cells in {seconds:.1} s{measured}")
            }
        };
        self.events.note(text);
    }

    /// The cell has failed.
    pub(super) fn failed(&self, name: &str, error: &anyhow::Error) {
        self.emit(Event::IfInterrupted(None));
        self.events
            .emit(Event::Warning { text: format!("the cell {name} failed: {}", in_words(error)) });
    }

    /// All cells are done.
    pub(super) fn end(&self) {
        self.told().place.clear();
        self.events.emit(Event::IfInterrupted(None));
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same text once only.
    fn is_new(&self, text: &str) -> bool {
        self.told().texts.insert(text.to_string())
    }
}

impl Events for CellEvents<'_> {
    fn emit(&self, event: Event) {
        let event = match event {
            Event::PhaseStarted { phase, unit, steps } => {
                Event::PhaseStarted { phase: self.told().place.clone() + &phase, unit, steps }
            }
            Event::PhaseDone { phase, elapsed } => {
                Event::PhaseDone { phase: self.told().place.clone() + &phase, elapsed }
            }
            Event::Note { text } | Event::Warning { text } if !self.is_new(&text) => return,
            Event::IfInterrupted(unfinished) => {
                // A cell whose layers are kept may finish its layer first; without kept layers, a cell ends at once.
                let resumable = unfinished.filter(|of| of.is_resumable && of.has_begun);
                Event::IfInterrupted(resumable.or_else(|| Some(self.interrupted.clone())))
            }
            other => other,
        };
        self.events.emit(event);
    }

    fn is_stopping(&self) -> bool {
        self.events.is_stopping() || self.ranks.departure().is_some()
    }

    fn when_lock_lost(&self) -> LockLost {
        self.events.when_lock_lost()
    }
}

/// An error with its details and its hint.
pub(super) fn in_words(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Failure>() {
        Some(failure) => failure.to_string(),
        None => format!("{error:#}"),
    }
}
