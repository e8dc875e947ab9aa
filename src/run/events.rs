//! How library code speaks: it emits [`Event`]s and never prints. The console draws them, tests record them.

use std::time::Duration;

/// Something worth telling the person who waits.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A phase of the run begins ("tokenise", "layer 3/32", "verify"); `steps` is how many units it will count, 0 if unknown.
    PhaseStarted {
        /// The phase, as it is shown.
        phase: String,
        /// What is counted ("samples", "windows", "tensors").
        unit: &'static str,
        /// How many units the phase has, 0 where that is unknown.
        steps: u64,
    },
    /// `done` units of the current phase are finished.
    Progress {
        /// Units finished since the phase began.
        done: u64,
    },
    /// The current phase ended.
    PhaseDone {
        /// The phase, as it was announced.
        phase: String,
        /// How long it took.
        elapsed: Duration,
    },
    /// A decoder layer is pruned.
    LayerPruned {
        /// Its index, from 0.
        layer: usize,
        /// Zeros over all weights of its pruned matrices, in [0, 1].
        sparsity: f64,
        /// How long the layer took, all streams together.
        elapsed: Duration,
    },
    /// A fact worth a line ("tokens from the cache", "hidden states spill to ...").
    Note(String),
    /// Something the user should act on or know before trusting the result.
    Warning(String),
}

/// Receives events. Implementations must not block for long: the sweep calls them from its loop.
pub trait Events: Sync {
    /// Takes one event.
    fn emit(&self, event: Event);

    /// Shorthand for [`Event::Note`].
    fn note(&self, text: String) {
        self.emit(Event::Note(text));
    }

    /// Shorthand for [`Event::Warning`].
    fn warn(&self, text: String) {
        self.emit(Event::Warning(text));
    }
}

/// Drops every event; for tests and for callers that want only the result.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Events for Silent {
    fn emit(&self, _: Event) {}
}
