//! Progress of long copies, as events: bytes in, whole MiB out, a fixed number of events per phase.

use std::time::Instant;

use crate::run::{Event, Events};

/// More updates than this per phase tell nobody anything.
const UPDATES: u64 = 200;

/// One phase that moves a known number of bytes. It ends when [`Meter::finish`] is called; a failed phase never ends.
pub(crate) struct Meter<'a> {
    events: &'a dyn Events,
    phase: &'static str,
    started: Instant,
    total: u64,
    done: u64,
    told: u64,
}

impl<'a> Meter<'a> {
    /// Announces `phase`, which will move `total` bytes.
    pub(crate) fn start(events: &'a dyn Events, phase: &'static str, total: u64) -> Self {
        events.emit(Event::PhaseStarted {
            phase: phase.into(),
            unit: "MiB",
            steps: total >> 20,
        });
        Self {
            events,
            phase,
            started: Instant::now(),
            total,
            done: 0,
            told: 0,
        }
    }

    /// `bytes` more are done.
    pub(crate) fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if self.done - self.told >= (self.total / UPDATES).max(1 << 20) {
            self.told = self.done;
            self.events.emit(Event::Progress {
                done: self.done >> 20,
            });
        }
    }

    /// Announces the end.
    pub(crate) fn finish(self) {
        self.events.emit(Event::Progress {
            done: self.done >> 20,
        });
        self.events.emit(Event::PhaseDone {
            phase: self.phase.into(),
            elapsed: self.started.elapsed(),
        });
    }
}
