//! Time and peak memory per phase of a run, added up over the layers, and memory at its checkpoints.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::engine::DeviceMemory;
use super::memory;
use crate::bytes::ByteSize;
use crate::run::manifest::{GpuMemory, MemorySample, PhaseReport};
use crate::run::state::merge_phases;
use crate::run::{Event, Events, Moment, Phase};

/// Collects time and memory of each phase. The sweep, its editor and its passengers share the clock by reference.
pub struct Clock {
    began: Instant,
    records: Mutex<Records>,
    /// Reads the memory of the GPUs; absent without GPUs.
    devices: OnceLock<DeviceGauge>,
}

/// The clock of a run and the receiver of its events: most steps of a run need both.
#[derive(Clone, Copy)]
pub struct Reporter<'a> {
    /// Measures time and memory.
    pub clock: &'a Clock,
    /// Receives progress, notes and warnings.
    pub events: &'a dyn Events,
}

/// Reads the counters of all GPUs, added up.
pub type DeviceGauge = Arc<dyn Fn() -> DeviceMemory + Send + Sync>;

#[derive(Debug, Default)]
struct Records {
    phases: Vec<PhaseReport>,
    samples: Vec<MemorySample>,
    /// The highest peak since the last sample.
    peak: ByteSize,
}

impl Records {
    fn peak_since_the_last_sample(&mut self, now: ByteSize) -> ByteSize {
        std::mem::take(&mut self.peak).max(now)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// Starts a clock.
    pub fn new() -> Self {
        Self { began: Instant::now(), records: Mutex::default(), devices: OnceLock::new() }
    }

    /// From now on samples include the memory of GPUs.
    pub fn read_devices(&self, gauge: DeviceGauge) {
        // The first gauge stays: a run opens its devices once.
        let _ = self.devices.set(gauge);
    }

    /// Seconds since the clock started.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Takes a memory sample and emits it. Does nothing on a system that does not report memory.
    pub fn mark(&self, moment: Moment, events: &dyn Events) {
        let Some(resident) = memory::resident() else {
            return;
        };
        let mut records = self.records();
        let sample = MemorySample {
            seconds: self.seconds(),
            checkpoint: moment.to_string(),
            anonymous: resident.anonymous,
            peak_anonymous: records.peak_since_the_last_sample(resident.peak_anonymous),
            gpu: self.devices.get().map(|gauge| {
                let memory = gauge();
                GpuMemory {
                    allocated: memory.allocated,
                    reserved: memory.reserved,
                    peak: memory.peak_allocated,
                    free: memory.free,
                    total: memory.total,
                }
            }),
        };
        records.samples.push(sample.clone());
        drop(records);
        memory::reset_peak();
        events.emit(Event::Memory(sample));
    }

    /// Runs `body` as part of `phase`. Phases must not be nested, since their time would count twice.
    pub fn measure<R>(&self, phase: Phase, body: impl FnOnce() -> R) -> R {
        let before = memory::resident().map(|resident| resident.peak_anonymous);
        memory::reset_peak();
        let start = Instant::now();
        let result = body();
        let seconds = start.elapsed().as_secs_f64();
        let peak = memory::resident().map(|resident| resident.peak_anonymous);
        let mut records = self.records();
        records.peak = records.peak.max(before.max(peak).unwrap_or_default());
        let phases = &mut records.phases;
        match phases.iter_mut().find(|report| report.phase == phase) {
            Some(report) => {
                report.seconds += seconds;
                report.peak_anonymous = report.peak_anonymous.max(peak);
            }
            None => phases.push(PhaseReport { phase, seconds, peak_anonymous: peak }),
        }
        result
    }

    /// Adds `phases`, which a different clock reported.
    pub fn add(&self, phases: &[PhaseReport]) {
        let mut records = self.records();
        records.phases = merge_phases(&records.phases, phases);
    }

    /// Returns the phases so far, in the order of their first run.
    pub fn report(&self) -> Vec<PhaseReport> {
        self.records().phases.clone()
    }

    /// Returns the memory samples so far, in the order of time.
    pub fn samples(&self) -> Vec<MemorySample> {
        self.records().samples.clone()
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        // A thread that panics cannot leave a half-written report: each update is a push or two stores.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_add_up_and_keep_their_order() {
        let clock = Clock::new();
        assert_eq!(clock.measure(Phase::Read, || 7), 7);
        clock.measure(Phase::Score, || ());
        clock.measure(Phase::Read, || std::thread::sleep(std::time::Duration::from_millis(5)));
        let report = clock.report();
        assert_eq!(
            report.iter().map(|phase| phase.phase).collect::<Vec<_>>(),
            [Phase::Read, Phase::Score]
        );
        assert!(report[0].seconds >= 0.005);
    }

    // tests/it/messages.rs tests the real peak in a separate process. Here, tests that run at the same time reset the process's
    // high-water mark.
    #[test]
    fn a_sample_has_the_highest_peak_since_the_one_before() {
        let mut records = Records { peak: ByteSize(5), ..Records::default() };
        assert_eq!(records.peak_since_the_last_sample(ByteSize(4)), ByteSize(5));
        assert_eq!(records.peak_since_the_last_sample(ByteSize(2)), ByteSize(2));
    }
}
