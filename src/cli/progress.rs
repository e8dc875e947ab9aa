//! Progress: the counts of the current phase and of the whole run, and their texts for bars and plain lines.
//!
//! Only arithmetic and text here; [`Console`](super::console::Console) decides when to show it.

use std::time::{Duration, Instant};

use crate::report::three_digits;

/// Time between two plain lines.
pub(super) const PLAIN_INTERVAL: Duration = Duration::from_secs(10);
/// Time between two JSON lines of progress.
pub(super) const JSON_INTERVAL: Duration = Duration::from_secs(1);

/// The sweep as a whole.
#[derive(Debug)]
struct SweepProgress {
    began: Instant,
    layers: usize,
    layers_done: usize,
    passes: u64,
    /// Passes of the phases that are over.
    passes_done: u64,
}

/// The current phase and, inside the sweep, the run.
#[derive(Debug, Default)]
pub(super) struct Progress {
    phase: String,
    unit: &'static str,
    steps: u64,
    done: u64,
    began: Option<Instant>,
    last_told: Option<Instant>,
    sweep: Option<SweepProgress>,
    /// The loss of the last step of a training, and the tokens of a step.
    training: Option<(f64, u64)>,
}

impl Progress {
    /// The sweep begins with the unfinished layers.
    pub(super) fn start_sweep(&mut self, layers: usize, finished: usize, passes: u64) {
        self.sweep = Some(SweepProgress {
            began: Instant::now(),
            layers: layers - finished.min(layers),
            layers_done: 0,
            passes,
            passes_done: 0,
        });
    }

    /// The sweep is over.
    pub(super) fn end_sweep(&mut self) {
        self.end_phase();
        self.sweep = None;
    }

    /// A layer is through.
    pub(super) fn layer_done(&mut self) {
        if let Some(sweep) = &mut self.sweep {
            sweep.layers_done += 1;
        }
    }

    /// A phase begins; what came before it counts as done.
    pub(super) fn start_phase(&mut self, phase: String, unit: &'static str, steps: u64) {
        self.end_phase();
        let now = Instant::now();
        (self.phase, self.unit, self.steps) = (phase, unit, steps);
        self.training = None;
        self.began = Some(now);
        self.last_told.get_or_insert(now);
    }

    /// The phase is over.
    pub(super) fn end_phase(&mut self) {
        if let Some(sweep) = &mut self.sweep {
            sweep.passes_done += self.done;
        }
        self.done = 0;
        self.began = None;
    }

    /// Units of the phase that are done.
    pub(super) fn set_done(&mut self, done: u64) {
        self.done = done;
    }

    /// A step of a training is over.
    pub(super) fn set_loss(&mut self, loss: f64, tokens: u64) {
        self.training = Some((loss, tokens));
    }

    /// A line was printed.
    pub(super) fn told(&mut self) {
        self.last_told = Some(Instant::now());
    }

    /// Returns true where no line was printed for `interval`.
    pub(super) fn is_due(&mut self, interval: Duration) -> bool {
        let is_due = self.last_told.is_some_and(|last| last.elapsed() >= interval);
        if is_due {
            self.told();
        }
        is_due
    }

    /// The phase as it was announced.
    pub(super) fn phase(&self) -> &str {
        &self.phase
    }

    /// The finished share of the phase, in [0, 1]; `None` where its steps are unknown.
    pub(super) fn share(&self) -> Option<f64> {
        (self.steps > 0).then(|| (self.done as f64 / self.steps as f64).min(1.0))
    }

    /// "10/64", or "10" where the steps are unknown.
    fn count(&self) -> String {
        match self.steps {
            0 => self.done.to_string(),
            steps => format!("{}/{steps}", self.done),
        }
    }

    /// "10/64 | 7.1 samples/s | ETA 8s", and "0/64 samples" before the first sample.
    pub(super) fn numbers(&self) -> String {
        match (self.count(), self.pace()) {
            (count, pace) if pace.is_empty() => format!("{count} {}", self.unit),
            (count, pace) => count + &pace,
        }
    }

    /// " | 7.1 samples/s | ETA 8s"; empty before the first sample.
    fn pace(&self) -> String {
        let elapsed = self.began.map_or(0.0, |began| began.elapsed().as_secs_f64());
        if self.done == 0 || elapsed <= 0.0 {
            return String::new();
        }
        let rate = self.done as f64 / elapsed;
        let mut text = match self.training {
            // A step may take minutes. Tokens per second can be compared between programs.
            Some((loss, tokens)) => {
                let speed = three_digits(rate * tokens as f64);
                format!(" | loss {loss:.4} | {speed} tokens/s")
            }
            None => format!(" | {} {}/s", three_digits(rate), self.unit),
        };
        if let Some(left) = self.steps.checked_sub(self.done).filter(|&left| left > 0) {
            text += &format!(" | ETA {}", duration(left as f64 / rate));
        }
        text
    }

    /// Fraction of the run in [0, 1] and the seconds it still takes; `None` outside the sweep.
    pub(super) fn run(&self) -> Option<(f64, Option<f64>)> {
        let sweep = self.sweep.as_ref()?;
        let (done, all) = if sweep.passes > 0 {
            ((sweep.passes_done + self.done) as f64, sweep.passes as f64)
        } else {
            (sweep.layers_done as f64, sweep.layers.max(1) as f64)
        };
        let fraction = (done / all).min(1.0);
        let elapsed = sweep.began.elapsed().as_secs_f64();
        let left = (fraction > 0.0).then(|| elapsed / fraction - elapsed);
        Some((fraction, left))
    }

    /// "12 %, 22m05s left", for the run.
    pub(super) fn run_text(&self) -> Option<String> {
        let (fraction, left) = self.run()?;
        let percent = format!("{:.0} %", (100.0 * fraction).floor());
        Some(match left {
            Some(left) => format!("{percent}, {} left", duration(left)),
            None => percent,
        })
    }

    /// "layer 2 of 0-31: calibrate: 10/64 samples | 7.1 samples/s | ETA 8s | run 12 %, 22m05s left".
    /// Between two phases a short sentence.
    pub(super) fn line(&self) -> String {
        if self.began.is_none() {
            return "still working".to_string();
        }
        let mut text = format!("{}: {} {}{}", self.phase, self.count(), self.unit, self.pace());
        if let Some(run) = self.run_text() {
            text += &format!(" | run {run}");
        }
        text
    }
}

/// "8s", "3m10s", "2h05m", "4d03h".
fn duration(seconds: f64) -> String {
    let seconds = seconds.round().clamp(0.0, 1e9) as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_like_a_clock() {
        let texts: Vec<String> =
            [0.4, 59.6, 190.0, 7500.0, 100_000.0].into_iter().map(duration).collect();
        assert_eq!(texts, ["0s", "1m00s", "3m10s", "2h05m", "1d03h"]);
    }

    #[test]
    fn the_run_counts_the_passes_of_all_phases() {
        let mut progress = Progress::default();
        progress.start_sweep(2, 0, 40);
        progress.start_phase("layer 1/2: calibrate".to_string(), "samples", 10);
        progress.set_done(10);
        progress.start_phase("layer 1/2: propagate".to_string(), "samples", 10);
        assert_eq!(progress.numbers(), "0/10 samples", "no rate yet");
        progress.set_done(4);
        assert!(progress.numbers().starts_with("4/10 | "), "{}", progress.numbers());
        let (fraction, _) = progress.run().expect("inside the sweep");
        assert_eq!(fraction, 14.0 / 40.0);
        assert!(
            progress.line().starts_with("layer 1/2: propagate: 4/10 samples | "),
            "{}",
            progress.line()
        );
        assert!(progress.line().contains(" | run 35 %, "), "{}", progress.line());
        progress.end_sweep();
        assert!(progress.run().is_none());
    }

    #[test]
    fn a_line_is_due_after_a_time_without_any_whatever_phases_begin() {
        let mut progress = Progress::default();
        assert!(!progress.is_due(Duration::ZERO), "nothing has begun");
        progress.start_phase("read".to_string(), "layers", 2);
        std::thread::sleep(Duration::from_millis(20));
        progress.end_phase();
        progress.start_phase("score".to_string(), "layers", 2);
        assert!(progress.is_due(Duration::from_millis(20)), "a new phase is no line");
        assert!(!progress.is_due(Duration::from_secs(1)));
        progress.end_phase();
        assert_eq!(progress.line(), "still working");
        progress.told();
        assert!(!progress.is_due(Duration::from_secs(1)));
    }

    #[test]
    fn without_passes_the_run_counts_layers() {
        let mut progress = Progress::default();
        progress.start_sweep(4, 0, 0);
        progress.layer_done();
        assert_eq!(progress.run().map(|(fraction, _)| fraction), Some(0.25));
    }
}
