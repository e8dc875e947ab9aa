//! Progress of copies, downloads and scans: bytes go in, events with whole MiB come out.

use std::time::Instant;

use super::events::{Event, Events};

/// Most progress events of a phase.
const UPDATES: u64 = 200;

const MIB: u64 = 1 << 20;

/// A phase that moves bytes. It ends with [`Meter::finish`]; a failed phase never ends.
pub struct Meter<'a> {
    events: &'a dyn Events,
    phase: String,
    started: Instant,
    /// Bytes between two events.
    interval: u64,
    done: u64,
    /// Bytes at the last event.
    told: u64,
}

impl<'a> Meter<'a> {
    /// Announces `phase`, which will move `total` bytes; 0 where the number is unknown.
    pub fn start(events: &'a dyn Events, phase: impl Into<String>, total: u64) -> Self {
        let phase = phase.into();
        events.emit(Event::PhaseStarted {
            phase: phase.clone(),
            unit: "MiB",
            steps: total.div_ceil(MIB),
        });
        Self {
            events,
            phase,
            started: Instant::now(),
            interval: (total / UPDATES).max(MIB),
            done: 0,
            told: 0,
        }
    }

    /// Adds finished bytes.
    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        self.at(0);
    }

    /// Shows `bytes` of an unfinished file in addition to the finished bytes. The number may fall: a download can start over.
    pub fn at(&mut self, bytes: u64) {
        let done = self.done + bytes;
        if done.abs_diff(self.told) >= self.interval {
            self.told = done;
            self.events.emit(Event::Progress { done: done / MIB });
        }
    }

    /// Announces the end.
    pub fn finish(self) {
        self.events.emit(Event::Progress { done: self.done.div_ceil(MIB) });
        self.events.emit(Event::PhaseDone { phase: self.phase, elapsed: self.started.elapsed() });
    }
}
