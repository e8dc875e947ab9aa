//! The resident set of this process on systems without `/proc`: macOS and Windows, through a library. Tests read it on Linux, too.
//!
//! These systems report no peak that can be reset. So a thread reads the resident set over and over, and the highest reading is the
//! peak: a peak shorter than the pause between two readings may be missed. Pages of the program's file are counted; pages that the
//! system has compressed or swapped out are not.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

use super::memory::Resident;
use crate::bytes::ByteSize;

/// The pause between two readings. Windows lists all processes for each, which takes some milliseconds.
const PAUSE: Duration = Duration::from_millis(50);

/// The readings of this process.
#[cfg_attr(target_os = "linux", expect(dead_code, reason = "Linux has /proc"))]
pub(super) static GAUGE: Gauge = Gauge::new();

/// Readings of the resident set.
pub(super) struct Gauge {
    /// Locked during a reading: a reading that began before a reset must not end after it.
    peak: Mutex<u64>,
    thread: Once,
}

impl Gauge {
    const fn new() -> Self {
        Self { peak: Mutex::new(0), thread: Once::new() }
    }

    /// Reads the resident set. The peak is the highest reading since the last reset.
    pub(super) fn resident(&self) -> Option<Resident> {
        let mut peak = self.peak();
        let now = resident_set()?;
        *peak = now.max(*peak);
        Some(Resident { anonymous: ByteSize(now), peak_anonymous: ByteSize(*peak) })
    }

    /// Forgets the readings so far. The first call starts the thread that reads.
    pub(super) fn reset_peak(&'static self) {
        self.thread.call_once(|| {
            let read = move || {
                while self.resident().is_some() {
                    thread::sleep(PAUSE);
                }
            };
            let name = "resident-set".to_string();
            // A system without room for a thread has the readings of phases' ends.
            let _ = thread::Builder::new().name(name).spawn(read);
        });
        let mut peak = self.peak();
        *peak = resident_set().unwrap_or(0);
    }

    fn peak(&self) -> MutexGuard<'_, u64> {
        self.peak.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn resident_set() -> Option<u64> {
    let process = get_current_pid().ok()?;
    let mut system = System::new();
    system.refresh_processes_specifics(
        ProcessesToUpdate::Some(&[process]),
        false,
        ProcessRefreshKind::nothing().with_memory(),
    );
    Some(system.process(process)?.memory()).filter(|bytes| *bytes > 0)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Tests that run at the same time allocate between two readings.
    const TOLERANCE: u64 = 256 << 20;

    #[test]
    fn the_library_agrees_with_proc() {
        let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1));
        let expected = 1024 * kib.expect("a number").parse::<u64>().expect("a number");
        let found = resident_set().expect("this process");
        assert!(found.abs_diff(expected) < TOLERANCE, "{found} and {expected}");
    }

    #[test]
    fn a_peak_between_two_calls_is_found_and_a_reset_forgets_it() {
        static HERE: Gauge = Gauge::new();
        HERE.reset_peak();
        let before = HERE.resident().expect("this process").peak_anonymous;
        {
            let _large = std::hint::black_box(vec![1u8; 2 * TOLERANCE as usize]);
            let began = Instant::now();
            while *HERE.peak() < before.0 + TOLERANCE && began.elapsed().as_secs() < 10 {
                thread::sleep(PAUSE);
            }
        }
        let after = HERE.resident().expect("this process");
        assert!(after.peak_anonymous.0 >= before.0 + TOLERANCE, "{after:?}");
        HERE.reset_peak();
        let again = HERE.resident().expect("this process");
        assert!(again.peak_anonymous < after.peak_anonymous, "{again:?} and {after:?}");
    }
}
