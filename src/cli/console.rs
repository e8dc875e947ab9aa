//! The console: results go to standard output, everything else to standard error, for a person or a script.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::args::{MessageArgs, ProgressArg};
use super::bars::Bars;
use super::ending::Ending;
use super::lines::{self, print_line, print_words};
use super::plain_text::visible;
use super::progress::{JSON_INTERVAL, PLAIN_INTERVAL, Progress};
use super::terminal;
use super::wrap::wrapped;
use crate::bytes::ByteSize;
use crate::failure::Failure;
use crate::placement::inventory::total_memory;
use crate::report;
use crate::run::events::LockLost;
use crate::run::manifest::MemorySample;
use crate::run::{Event, Events, Manifest, Unfinished};

/// Time between two looks at the time of the last line.
const LOOK: Duration = Duration::from_secs(1);

/// Levels of detail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// Nothing: the first rank of a run speaks for all.
    Silent,
    /// Warnings and errors.
    Quiet,
    /// Results and progress.
    Normal,
    /// Every matrix, memory after every layer.
    Verbose,
}

/// Forms of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Bars,
    Plain,
    Json,
}

/// The console.
pub struct Console {
    level: Level,
    form: Form,
    prints_json: bool,
    /// The end of a process that has lost the lock of a folder.
    lock_lost: LockLost,
    /// The run was asked to stop where nothing is half-done.
    is_stopping: AtomicBool,
    state: Mutex<State>,
    /// Never locked while anything is printed: printing may block on a reader, and a signal must still be handled.
    ending: Mutex<Ending>,
}

#[derive(Default)]
struct State {
    progress: Progress,
    bars: Option<Bars>,
    memory_log: Option<MemoryTable>,
    /// Standard output stands within a line of streamed text.
    is_within_line: bool,
}

/// The memory samples of `--log-memory`.
struct MemoryTable {
    total: Option<ByteSize>,
    samples: Vec<MemorySample>,
}

impl Default for Console {
    fn default() -> Self {
        Self::new(MessageArgs::default(), |_, _| std::process::abort())
    }
}

impl Console {
    /// A console for this process's streams.
    pub fn new(args: MessageArgs, lock_lost: LockLost) -> Self {
        let form = match args.progress {
            ProgressArg::Auto if std::io::stderr().is_terminal() => Form::Bars,
            ProgressArg::Bar => Form::Bars,
            ProgressArg::Auto | ProgressArg::Plain => Form::Plain,
            ProgressArg::Json => Form::Json,
        };
        let level = match (args.quiet, args.verbose) {
            (true, _) => Level::Quiet,
            (false, true) => Level::Verbose,
            (false, false) => Level::Normal,
        };
        Self {
            level,
            form,
            prints_json: args.json,
            lock_lost,
            is_stopping: AtomicBool::new(false),
            state: Mutex::default(),
            ending: Mutex::default(),
        }
    }

    /// The same console, which prints nothing.
    #[must_use]
    pub(super) fn silent(mut self) -> Self {
        self.level = Level::Silent;
        self
    }

    /// Prints a line whenever [`PLAIN_INTERVAL`] passed without any, also while a long step has no progress to tell. Not on a terminal.
    pub(super) fn keep_telling(self: &Arc<Self>) {
        if self.form != Form::Plain || self.level < Level::Normal {
            return;
        }
        let console = Arc::downgrade(self);
        let tell = move || {
            while let Some(console) = console.upgrade() {
                let mut state = console.state();
                if state.progress.is_due(PLAIN_INTERVAL) {
                    print_line(&state.progress.line());
                }
                drop(state);
                drop(console);
                std::thread::sleep(LOOK);
            }
        };
        // A system without room for a thread has other troubles.
        let _ = std::thread::Builder::new().name("progress".to_string()).spawn(tell);
    }

    /// Takes the bars away; called before results are printed.
    pub fn clear(&self) {
        if let Some(mut bars) = self.state().bars.take() {
            bars.clear();
        }
    }

    /// Prints lines on standard error, as they are.
    pub(super) fn lines(&self, text: String) {
        self.emit(Event::Note { text });
    }

    /// A result, on standard output.
    pub fn result(&self, text: &str) {
        self.clear();
        self.write(&visible(text));
    }

    /// A result in words, on standard output. A terminal gets its lines broken between words.
    fn words(&self, text: &str) {
        match self.columns() {
            Some(columns) => self.result(&wrapped(text, columns)),
            None => self.result(text),
        }
    }

    /// Columns of the terminal that gets the results; `None` for a file or a pipe.
    pub(super) fn columns(&self) -> Option<usize> {
        std::io::stdout().is_terminal().then(terminal::columns_of_results)
    }

    /// Writes to standard output and says whether somebody reads it. A run does not fail because its reader has left
    /// (`prune eval | true`), but it fails on a full disk.
    fn write(&self, text: &str) -> bool {
        if self.level == Level::Silent {
            return true;
        }
        let mut stdout = std::io::stdout();
        let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        match written {
            Ok(()) => true,
            Err(error) => {
                if error.kind() != std::io::ErrorKind::BrokenPipe {
                    self.ending().lost.get_or_insert(error);
                }
                false
            }
        }
    }

    /// Fails where a result was lost on its way to standard output.
    pub(super) fn check_results(&self) -> Result<()> {
        match self.ending().lost.take() {
            None => Ok(()),
            Some(error) => Err(Failure::new("cannot write the result to standard output")
                .detail(error.to_string())
                .hint("what --save names is complete; give the command again where there is room")
                .into()),
        }
    }

    /// A part of a generated text that is written as it comes, on standard output. Says whether anybody reads it still.
    pub(super) fn stream(&self, part: &str) -> bool {
        // A file or a pipe gets the characters of the model.
        let is_read = match std::io::stdout().is_terminal() {
            true => self.write(&visible(part)),
            false => self.write(part),
        };
        if let Some(last) = part.chars().last() {
            let mut state = self.state();
            state.is_within_line = last != '\n';
            state.progress.told();
        }
        is_read
    }

    /// Prints a record: as a JSON object with `--json`, else as `text`.
    pub fn record<T: serde::Serialize>(&self, record: &T, text: &str) -> Result<()> {
        if self.prints_json {
            let mut json = serde_json::to_string_pretty(record)?;
            json.push('\n');
            self.result(&json);
        } else {
            self.words(text);
        }
        Ok(())
    }

    /// An error, after everything else.
    pub fn error(&self, text: &str) {
        if self.level == Level::Silent {
            return;
        }
        self.clear();
        self.state().end_line();
        let unfinished = self.ending().unfinished.take();
        let is_told = |unfinished: &Unfinished| unfinished.has_begun && self.level >= Level::Normal;
        if let Some(unfinished) = unfinished.filter(is_told) {
            self.state().print(self.form, "note", &unfinished.text);
        }
        match self.form {
            Form::Json => print_line(&json!({"event": "error", "text": text}).to_string()),
            Form::Bars | Form::Plain => print_words(text),
        }
    }

    /// Prints memory samples from now on, and keeps them for the table at the end.
    pub(super) fn log_memory(&self) {
        self.state().memory_log = Some(MemoryTable { total: total_memory(), samples: Vec::new() });
    }

    /// The table of memory samples, where they are kept.
    pub(super) fn memory_summary(&self) -> Option<String> {
        let state = self.state();
        let log = state.memory_log.as_ref()?;
        Some(report::memory_log::summary(&log.samples, log.total))
    }

    /// The files that a run leaves when it ends now.
    #[cfg(unix)]
    pub(super) fn unfinished(&self) -> Option<Unfinished> {
        self.ending().unfinished.clone()
    }

    /// Lets all folders go: the process ends.
    pub(super) fn release_folders(&self) {
        let ending = std::mem::take(&mut *self.ending());
        ending.release_folders();
    }

    /// Asks the run to stop where nothing is half-done, because of this signal.
    #[cfg(unix)]
    pub(super) fn stop(&self, signal: &'static str) {
        self.ending().signal = Some(signal);
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// The last words of a run that has stopped because it was asked to.
    pub(super) fn stopped(&self) {
        let signal = self.ending().signal.unwrap_or("stopped");
        self.interrupted(signal);
        self.release_folders();
    }

    /// Prints the profile of `--profile` on standard error, after the table: with `--json`, standard output holds the record alone.
    pub(super) fn profile(&self, manifest: &Manifest) {
        let profile = manifest.profile.as_ref();
        let profile = profile.filter(|_| self.level > Level::Silent);
        let text = profile.map_or(String::new(), report::profile::text);
        for line in text.lines() {
            print_line(line);
        }
    }

    /// The last message of a run that a signal ends.
    pub fn interrupted(&self, signal: &str) {
        self.last_words("interrupted", |place| format!("interrupted ({signal}){place}"));
    }

    /// The last message of a run that ends by a bug of the program; `what` is the text of the panic.
    pub fn broken(&self, what: &str) {
        self.last_words("error", |place| {
            format!(
                "error: this is a bug in prune{place}\n  {what}\nhint: report it with these lines and the command that led here; \
                 a build with `--profile full` shows the calls, too, if RUST_BACKTRACE=1 is set"
            )
        });
    }

    fn last_words(&self, event: &str, text: impl FnOnce(&str) -> String) {
        // A bug of any rank is told.
        if self.level == Level::Silent && event != "error" {
            return;
        }
        let mut state = self.state();
        if let Some(mut bars) = state.bars.take() {
            bars.clear();
        }
        state.end_line();
        let phase = state.progress.phase();
        let place = if phase.is_empty() { String::new() } else { format!(" in {phase}") };
        state.print(self.form, event, &text(&place));
        let unfinished = self.ending().unfinished.take();
        if let Some(unfinished) = unfinished {
            state.print(self.form, "note", &unfinished.text);
        }
    }

    fn ending(&self) -> MutexGuard<'_, Ending> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves at most a stale bar.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Ends the line of streamed text, so that the next message begins at the left of the terminal.
    fn end_line(&mut self) {
        if std::mem::take(&mut self.is_within_line) && std::io::stdout().is_terminal() {
            let _ = std::io::stdout().write_all(b"\n");
        }
    }

    fn print(&mut self, form: Form, event: &str, text: &str) {
        self.progress.told();
        match (&self.bars, form) {
            (_, Form::Json) => print_line(&json!({"event": event, "text": text}).to_string()),
            (Some(bars), _) => bars.suspend(|| print_words(text)),
            (None, _) => print_words(text),
        }
    }

    /// Keeps count, and draws bars or writes a line if it is due.
    fn follow(&mut self, form: Form, is_shown: bool, event: &Event) {
        match event {
            Event::SweepStarted { layers, finished, passes } => {
                self.progress.start_sweep(*layers, *finished, *passes)
            }
            Event::SweepDone => {
                self.progress.end_sweep();
                if let Some(mut bars) = self.bars.take() {
                    bars.clear();
                }
            }
            Event::PhaseStarted { phase, unit, steps } => {
                self.progress.start_phase(phase.clone(), unit, *steps);
                if form == Form::Bars && is_shown {
                    self.bars.get_or_insert_with(Bars::new).start(&self.progress);
                }
            }
            Event::Progress { done } => {
                self.progress.set_done(*done);
                if let Some(bars) = &self.bars {
                    bars.update(&self.progress);
                } else if form == Form::Plain && is_shown && self.progress.is_due(PLAIN_INTERVAL) {
                    print_line(&self.progress.line());
                }
            }
            Event::TrainingStep { loss, tokens, .. } => self.progress.set_loss(*loss, *tokens),
            Event::PhaseDone { .. } => {
                self.progress.end_phase();
                if let Some(bars) = &mut self.bars {
                    bars.end_phase(&self.progress);
                }
            }
            Event::LayerPruned { .. } => self.progress.layer_done(),
            _ => {}
        }
    }

    fn show(&mut self, form: Form, level: Level, event: &Event) {
        self.follow(form, level >= Level::Normal, event);
        match form {
            Form::Json => self.tell_json(level, event),
            Form::Bars | Form::Plain => self.tell(level, form, event),
        }
    }

    fn tell(&mut self, level: Level, form: Form, event: &Event) {
        match event {
            Event::LayerPruned { layer, sparsity, elapsed, cell } if level >= Level::Normal => {
                if let Some(line) = lines::layer(*layer, *sparsity, *elapsed, cell.as_deref()) {
                    self.print(form, "", &line);
                }
            }
            Event::MatrixMerged { name, done, of, seconds_left } if level >= Level::Normal => {
                if let Some(line) = lines::merged(name, [*done, *of], *seconds_left) {
                    self.print(form, "", &line);
                }
            }
            Event::MatrixPruned(matrix) if level >= Level::Verbose => {
                self.print(form, "", &lines::pruned(matrix));
            }
            Event::Memory(sample) if level >= Level::Verbose && self.memory_log.is_none() => {
                self.print(
                    form,
                    "",
                    &format!(
                        "memory at {}: {} anonymous, peak {}",
                        sample.checkpoint, sample.anonymous, sample.peak_anonymous
                    ),
                );
            }
            Event::Note { text } if level >= Level::Normal => self.print(form, "", text),
            Event::Detail { text } if level >= Level::Verbose => self.print(form, "", text),
            Event::Warning { text } => {
                self.print(form, "", &format!("warning: {text}"));
            }
            Event::Fallback(fall) => {
                self.print(form, "", &format!("warning: {fall}"));
            }
            _ => {}
        }
    }

    fn tell_json(&mut self, level: Level, event: &Event) {
        let is_told = match event {
            Event::Warning { .. } | Event::Fallback(_) => true,
            Event::MatrixPruned(_) | Event::MatrixMerged { .. } | Event::Detail { .. } => {
                level >= Level::Verbose
            }
            Event::Progress { .. } => level >= Level::Normal && self.progress.is_due(JSON_INTERVAL),
            _ => level >= Level::Normal,
        };
        if let (true, Ok(line)) = (is_told, serde_json::to_string(event)) {
            print_line(&line);
        }
    }
}

impl Events for Console {
    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    fn emit(&self, event: Event) {
        let mut state = self.state();
        if self.level > Level::Silent {
            state.show(self.form, self.level, &event);
        }
        match event {
            Event::Memory(sample) => {
                let Some(log) = &mut state.memory_log else {
                    return;
                };
                let line = report::memory_log::line(&sample, log.total);
                log.samples.push(sample);
                if self.level >= Level::Normal && self.form != Form::Json {
                    state.print(self.form, "", &line);
                }
            }
            Event::IfInterrupted(unfinished) => self.ending().unfinished = unfinished,
            Event::Temporary(folder) => self.ending().temporary = folder,
            _ => {}
        }
    }

    fn when_lock_lost(&self) -> LockLost {
        self.lock_lost
    }
}
