//! Time and peak memory per phase of a run, added up over the layers, and memory at its checkpoints.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::engine::DeviceMemory;
use super::memory;
use crate::bytes::ByteSize;
use crate::run::manifest::{GpuMemory, MemorySample, PhaseReport};
use crate::run::{Event, Events};

/// Collects what each phase cost. Shared by reference between the sweep, its editor and its passengers.
pub struct Clock {
    began: Instant,
    seen: Mutex<Seen>,
    /// Reads the memory of the GPUs, where there are any.
    devices: OnceLock<DeviceGauge>,
}

/// Reads the counters of all GPUs, added up.
pub type DeviceGauge = Arc<dyn Fn() -> DeviceMemory + Send + Sync>;

#[derive(Debug, Default)]
struct Seen {
    phases: Vec<PhaseReport>,
    samples: Vec<MemorySample>,
    /// The highest peak since the last sample.
    peak: ByteSize,
}

impl Seen {
    /// The highest of the peaks noted since this was last asked, and of `now`.
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
    /// A clock that starts now and has seen nothing.
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            seen: Mutex::default(),
            devices: OnceLock::new(),
        }
    }

    /// From now on samples tell the memory of GPUs, too.
    pub fn read_devices(&self, gauge: DeviceGauge) {
        // The first one stays; a run opens its devices once.
        let _ = self.devices.set(gauge);
    }

    /// Seconds since the clock started.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Takes a memory sample and tells it; does nothing where the system does not say how much there is.
    pub fn mark(&self, checkpoint: impl Into<String>, events: &dyn Events) {
        let Some(resident) = memory::resident() else {
            return;
        };
        let mut seen = self.seen();
        let sample = MemorySample {
            seconds: self.seconds(),
            checkpoint: checkpoint.into(),
            anonymous: resident.anonymous,
            peak_anonymous: seen.peak_since_the_last_sample(resident.peak_anonymous),
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
        seen.samples.push(sample.clone());
        drop(seen);
        memory::reset_peak();
        events.emit(Event::Memory(sample));
    }

    /// Runs `body` as part of `phase`. Phases must not be nested: time would count twice.
    pub fn measure<R>(&self, phase: &'static str, body: impl FnOnce() -> R) -> R {
        let before = memory::resident().map(|resident| resident.peak_anonymous);
        memory::reset_peak();
        let start = Instant::now();
        let result = body();
        let seconds = start.elapsed().as_secs_f64();
        let peak = memory::resident().map(|resident| resident.peak_anonymous);
        let mut seen = self.seen();
        seen.peak = seen.peak.max(before.max(peak).unwrap_or_default());
        let phases = &mut seen.phases;
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
        self.seen().phases.clone()
    }

    /// The memory samples so far, in order of time.
    pub fn samples(&self) -> Vec<MemorySample> {
        self.seen().samples.clone()
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // A panic in another thread cannot leave a half-written report behind: each update is one push or two stores.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
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

    // On the real peak, in a process of its own: tests/it/messages.rs. Here other tests reset the process's high-water mark.
    #[test]
    fn a_sample_has_the_highest_peak_since_the_one_before() {
        let mut seen = Seen {
            peak: ByteSize(5),
            ..Seen::default()
        };
        assert_eq!(seen.peak_since_the_last_sample(ByteSize(4)), ByteSize(5));
        assert_eq!(seen.peak_since_the_last_sample(ByteSize(2)), ByteSize(2));
    }
}
