//! Draws events for a person: a bar on a terminal, one plain line now and then elsewhere. All of it on standard error.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::run::{Event, Events};

/// How often a plain line is printed.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// The console; keeps the warnings it showed, for the manifest.
pub struct Console {
    is_terminal: bool,
    is_quiet: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    warnings: Vec<String>,
    bar: Option<ProgressBar>,
    phase: String,
    unit: &'static str,
    steps: u64,
    began: Option<Instant>,
    last_line: Option<Instant>,
}

impl Default for Console {
    fn default() -> Self {
        Self::new()
    }
}

impl Console {
    /// A console for this process's standard error.
    pub fn new() -> Self {
        Self {
            is_terminal: std::io::stderr().is_terminal(),
            is_quiet: false,
            state: Mutex::default(),
        }
    }

    /// A console that keeps warnings and prints nothing; for callers inside the process.
    pub fn quiet() -> Self {
        Self {
            is_quiet: true,
            ..Self::new()
        }
    }

    /// Every warning so far.
    pub fn warnings(&self) -> Vec<String> {
        self.state().warnings.clone()
    }

    /// Takes the bar away; called before results are printed.
    pub fn clear(&self) {
        if let Some(bar) = self.state().bar.take() {
            bar.finish_and_clear();
        }
    }

    /// A line of the plan or of what was found.
    pub fn line(&self, text: &str) {
        if !self.is_quiet {
            self.state().print(text);
        }
    }

    /// A result, on standard output.
    pub fn result(&self, text: &str) {
        self.clear();
        // A reader who has left (`prune eval | true`) does not turn a finished run into a failed one.
        let _ = std::io::stdout().write_all(text.as_bytes());
    }

    /// An error, after everything else.
    pub fn print_error(text: &str) {
        print_line(text);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // A panic elsewhere cannot leave more than a stale bar behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One line on standard error. Whoever read it may be gone (`2> >(head -1)`): that must not end a run of hours.
fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

impl State {
    fn print(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| print_line(text)),
            None => print_line(text),
        }
    }

    fn start(&mut self, is_terminal: bool, phase: String, unit: &'static str, steps: u64) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if is_terminal {
            let style = ProgressStyle::with_template(
                "{prefix} {bar:30} {pos}/{len} {msg} | {per_sec} | ETA {eta}",
            );
            let bar = ProgressBar::new(steps)
                .with_prefix(phase.clone())
                .with_message(unit);
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.tick();
            self.bar = Some(bar);
        }
        (self.phase, self.unit, self.steps) = (phase, unit, steps);
        (self.began, self.last_line) = (Some(Instant::now()), Some(Instant::now()));
    }

    fn progress(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            return;
        }
        let (Some(began), Some(last)) = (self.began, self.last_line) else {
            return;
        };
        if last.elapsed() < PLAIN_INTERVAL {
            return;
        }
        self.last_line = Some(Instant::now());
        let rate = done as f64 / began.elapsed().as_secs_f64().max(1e-9);
        let left = self.steps.saturating_sub(done) as f64 / rate.max(1e-9);
        print_line(&format!(
            "{}: {done}/{} {} | {rate:.2} {}/s | ETA {left:.0}s",
            self.phase, self.steps, self.unit, self.unit
        ));
    }
}

impl Events for Console {
    fn emit(&self, event: Event) {
        let mut state = self.state();
        if self.is_quiet {
            if let Event::Warning(text) = event {
                state.warnings.push(text);
            }
            return;
        }
        match event {
            Event::PhaseStarted { phase, unit, steps } => {
                state.start(self.is_terminal, phase, unit, steps)
            }
            Event::Progress { done } => state.progress(done),
            Event::PhaseDone { .. } => {
                if let Some(bar) = state.bar.take() {
                    bar.finish_and_clear();
                }
            }
            Event::LayerPruned {
                layer,
                sparsity,
                elapsed,
            } => {
                state.print(&format!(
                    "layer {layer} sparsity {sparsity:.6} ({:.1} s)",
                    elapsed.as_secs_f64()
                ));
            }
            Event::Note(text) => state.print(&text),
            Event::Warning(text) => {
                state.print(&format!("warning: {text}"));
                state.warnings.push(text);
            }
        }
    }
}
