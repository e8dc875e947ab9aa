//! Events: library code emits [`Event`]s and never prints. The console draws them, tests record them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::command_line::quoted;
use super::fallback::FallbackReport;
use super::manifest::{MatrixReport, MemorySample};
use crate::failure::printable;

/// Something that happened in a run. In JSON it is an object whose `event` names the variant.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The sweep over the layers begins. A pass is a sample through a layer or the head.
    SweepStarted {
        /// Decoder layers.
        layers: usize,
        /// Layers that an earlier session finished.
        finished: usize,
        /// Passes of all phases until [`Event::SweepDone`]; 0 if no sample passes the model.
        passes: u64,
    },
    /// The sweep has ended.
    SweepDone,
    /// A phase of the run begins ("tokenize", "layer 2 of 0-31: calibrate", "verify").
    PhaseStarted {
        /// The name that is shown.
        phase: String,
        /// The unit that is counted ("samples", "windows", "tensors").
        unit: &'static str,
        /// The number of units, 0 if it is unknown.
        steps: u64,
    },
    /// `done` units of the current phase are finished.
    Progress {
        /// Units finished since the phase began.
        done: u64,
    },
    /// The current phase ended.
    PhaseDone {
        /// The name from [`Event::PhaseStarted`].
        phase: String,
        /// The duration of the phase.
        #[serde(rename = "seconds", serialize_with = "seconds")]
        elapsed: Duration,
    },
    /// A linear of a decoder layer is merged.
    MatrixMerged {
        /// The module's full name.
        name: String,
        /// Linears that are merged.
        done: usize,
        /// All linears.
        of: usize,
        /// An estimate of the seconds that are left.
        seconds_left: f64,
    },
    /// A matrix is pruned.
    MatrixPruned(MatrixReport),
    /// A decoder layer is pruned.
    LayerPruned {
        /// Its index, from 0.
        layer: usize,
        /// Zeros over all weights of its pruned matrices, in [0, 1].
        sparsity: f64,
        /// The cell of a sweep, where several cells share a pass. Not part of the JSON lines.
        #[serde(skip)]
        cell: Option<String>,
        /// The time spent in the layer, all streams together.
        #[serde(rename = "seconds", serialize_with = "seconds")]
        elapsed: Duration,
    },
    /// A step of a training is over.
    TrainingStep {
        /// Its number, from 1; inside a layer where layers are trained one by one.
        step: u64,
        /// All steps.
        steps: u64,
        /// The layer that is trained; `None` for the whole model.
        layer: Option<usize>,
        /// The loss before the step's update.
        loss: f64,
        /// The learning rate.
        rate: f64,
        /// Tokens of the step.
        tokens: u64,
    },
    /// A fact for the user ("output       out/model").
    Note {
        /// The fact.
        text: String,
    },
    /// A fact for a user who asks for details ("tokens from the cache").
    Detail {
        /// The fact.
        text: String,
    },
    /// A fact that the user must know to trust the result, or act on.
    Warning {
        /// The fact, and the advice.
        text: String,
    },
    /// A device was out of memory on a unit of work.
    Fallback(FallbackReport),
    /// The process's memory at a checkpoint of the run.
    Memory(MemorySample),
    /// From now on an interruption leaves these files; `None` once the run is over. Not part of the JSON lines.
    #[serde(skip)]
    IfInterrupted(Option<Unfinished>),
    /// A temporary folder that an interruption removes; `None` once the run has removed it. Not part of the JSON lines.
    #[serde(skip)]
    Temporary(Option<PathBuf>),
}

/// Files that a run leaves when it ends early.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// Their folder and the command that continues the run, for the person who reads.
    pub text: String,
    /// True if a later process can continue the run.
    pub is_resumable: bool,
    /// True if anything was written yet.
    pub has_begun: bool,
}

impl Unfinished {
    /// Finished parts of a work, kept in a folder, with the command that continues it.
    pub fn resumable(parts: &str, folder: &Path, work: &str, arguments: &[String]) -> Self {
        let (folder, command) = (folder.display(), quoted(arguments));
        Self {
            text: format!(
                "finished {parts} are kept in `{folder}`; this command continues the {work}:\n  {command}"
            ),
            is_resumable: true,
            has_begun: true,
        }
    }
}

/// Ends the process when another process has taken its folder. The arguments are the folder and the reason.
pub type LockLost = fn(&str, &str);

fn seconds<S: Serializer>(elapsed: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(elapsed.as_secs_f64())
}

/// The run was asked to stop, and stopped between two units of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped;

impl std::fmt::Display for Stopped {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("the run was asked to stop")
    }
}

impl std::error::Error for Stopped {}

/// A receiver of events. Implementations must return quickly, since the sweep calls them from its loop.
///
/// The receiver also decides when a run ends: long loops call [`Events::check`] between two units of work.
pub trait Events: Sync {
    /// Takes an event.
    fn emit(&self, event: Event);

    /// Returns whether the run should stop after the current unit of work.
    fn is_stopping(&self) -> bool {
        false
    }

    /// Ends the run between two units of work, if it should stop.
    fn check(&self) -> Result<(), Stopped> {
        if self.is_stopping() { Err(Stopped) } else { Ok(()) }
    }

    /// Returns the function that ends the process when another process has taken a folder of this run. The lock's own thread calls it.
    fn when_lock_lost(&self) -> LockLost {
        |_, _| std::process::abort()
    }

    /// Emits an [`Event::Note`]. The text may quote a file, so control characters are escaped.
    fn note(&self, text: String) {
        self.emit(Event::Note { text: printable(&text).into_owned() });
    }

    /// Emits an [`Event::Detail`]. The text may quote a file, so control characters are escaped.
    fn detail(&self, text: String) {
        self.emit(Event::Detail { text: printable(&text).into_owned() });
    }

    /// Emits an [`Event::Warning`]. The text may quote a file, so control characters are escaped.
    fn warn(&self, text: String) {
        self.emit(Event::Warning { text: printable(&text).into_owned() });
    }
}

/// A receiver that drops every event, for tests and for callers that need only the result.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Events for Silent {
    fn emit(&self, _: Event) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct Recorder(Mutex<Vec<Event>>);

    impl Events for Recorder {
        fn emit(&self, event: Event) {
            self.0.lock().expect("one thread").push(event);
        }
    }

    #[test]
    fn names_from_files_cannot_move_the_cursor_through_a_warning_or_a_note() {
        let recorder = Recorder(Mutex::default());
        recorder.warn("tensor `\u{1b}[2J\n`".into());
        recorder.note("tensor `\u{202e}x`".into());
        let events = recorder.0.into_inner().expect("one thread");
        let expected = [
            Event::Warning { text: "tensor `\\u{1b}[2J\\n`".into() },
            Event::Note { text: "tensor `\\u{202e}x`".into() },
        ];
        assert_eq!(events, expected);
    }
}
