//! The peak speed of the CPU: multiply-adds on registers only, measured in the same run as the speeds compared with it.

use std::thread;
use std::time::Instant;

use super::product::Kernel;

/// GFLOP/s of a kernel on a number of threads together. Takes some tenths of a second.
pub fn of(kernel: Kernel, threads: usize) -> f64 {
    best(threads, &|| kernel.spin())
}

/// The best of three runs after a warm-up; `work` returns its number of operations.
fn best(threads: usize, work: &(dyn Fn() -> usize + Sync)) -> f64 {
    let run = || {
        let start = Instant::now();
        let operations: usize = thread::scope(|scope| {
            let spawn = || thread::Builder::new().spawn_scoped(scope, work);
            // A missing thread does no work.
            let workers: Vec<_> = (0..threads).flat_map(|_| spawn()).collect();
            let operations = workers.into_iter().map(|worker| worker.join().unwrap_or(0));
            operations.sum()
        });
        operations as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    run();
    (0..3).map(|_| run()).fold(0.0, f64::max)
}
