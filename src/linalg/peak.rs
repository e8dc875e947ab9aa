//! The CPU's peak, measured in the same run as everything it is compared with: multiply-adds on registers and nothing else.

use std::thread;
use std::time::Instant;

use super::product::Kernel;

/// GFLOP/s of a kernel, of so many threads together. Takes some tenths of a second.
pub fn of(kernel: Kernel, threads: usize) -> f64 {
    best(threads, &|| kernel.spin())
}

/// The best of three runs after one that wakes the cores up; `work` returns the operations it did.
fn best(threads: usize, work: &(dyn Fn() -> usize + Sync)) -> f64 {
    let run = || {
        let start = Instant::now();
        let operations: usize = thread::scope(|scope| {
            let spawn = || thread::Builder::new().spawn_scoped(scope, work);
            // Threads that cannot be had do nothing.
            let workers: Vec<_> = (0..threads).flat_map(|_| spawn()).collect();
            let operations = workers.into_iter().map(|worker| worker.join().unwrap_or(0));
            operations.sum()
        });
        operations as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    run();
    (0..3).map(|_| run()).fold(0.0, f64::max)
}
