//! Time and peak memory per phase of a run, added up over the layers.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::memory;
use crate::run::manifest::PhaseReport;

/// Collects what each phase cost. Shared by reference between the sweep, its editor and its passengers.
#[derive(Debug, Default)]
pub struct Clock {
    phases: Mutex<Vec<PhaseReport>>,
}

impl Clock {
    /// A clock that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs `body` as part of `phase`. Phases must not be nested: time would count twice.
    pub fn measure<R>(&self, phase: &'static str, body: impl FnOnce() -> R) -> R {
        memory::reset_peak();
        let start = Instant::now();
        let result = body();
        let seconds = start.elapsed().as_secs_f64();
        let peak = memory::resident().map(|resident| resident.peak_anonymous);
        // A panic in another thread cannot leave a half-written report behind: each update is one push or two stores.
        let mut phases = self.phases.lock().unwrap_or_else(PoisonError::into_inner);
        match phases.iter_mut().find(|report| report.phase == phase) {
            Some(report) => {
                report.seconds += seconds;
                report.peak_anonymous = report.peak_anonymous.max(peak);
            }
            None => phases.push(PhaseReport {
                phase: phase.to_string(),
                seconds,
                peak_anonymous: peak,
            }),
        }
        result
    }

    /// The phases so far, in the order they first ran.
    pub fn report(&self) -> Vec<PhaseReport> {
        self.phases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_and_keep_their_order() {
        let clock = Clock::new();
        assert_eq!(clock.measure("load", || 7), 7);
        clock.measure("score", || ());
        clock.measure("load", || {
            std::thread::sleep(std::time::Duration::from_millis(5))
        });
        let report = clock.report();
        assert_eq!(
            report
                .iter()
                .map(|phase| phase.phase.as_str())
                .collect::<Vec<_>>(),
            ["load", "score"]
        );
        assert!(report[0].seconds >= 0.005);
    }
}
