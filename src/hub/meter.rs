//! Bytes of several files as one progress in MiB.

use std::time::Instant;

use crate::bytes::ByteSize;
use crate::run::{Event, Events};

const MIB: u64 = 1 << 20;

/// Counts the bytes of a download of several files.
pub(super) struct Meter<'a> {
    events: &'a dyn Events,
    phase: String,
    began: Instant,
    /// Bytes of the files before this one.
    finished: u64,
    shown: u64,
}

impl<'a> Meter<'a> {
    /// Announces a download of `total` bytes, 0 where that is unknown.
    pub(super) fn start(events: &'a dyn Events, phase: String, total: ByteSize) -> Self {
        events.emit(Event::PhaseStarted {
            phase: phase.clone(),
            unit: "MiB",
            steps: total.0.div_ceil(MIB),
        });
        Self {
            events,
            phase,
            began: Instant::now(),
            finished: 0,
            shown: 0,
        }
    }

    /// `bytes` of the current file are there. May go back: a transfer can start over.
    pub(super) fn at(&mut self, bytes: u64) {
        let done = (self.finished + bytes) / MIB;
        if done != self.shown {
            self.shown = done;
            self.events.emit(Event::Progress { done });
        }
    }

    /// The current file of `bytes` is there.
    pub(super) fn file_done(&mut self, bytes: u64) {
        self.finished += bytes;
        self.at(0);
    }

    /// Everything is there.
    pub(super) fn finish(self) {
        self.events.emit(Event::PhaseDone {
            phase: self.phase,
            elapsed: self.began.elapsed(),
        });
    }
}
