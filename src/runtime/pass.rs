//! A pass of all samples through a layer: its samples are shared by the devices, and its results are handed on in order.
//!
//! A unit of a pass is a sample, or a block of samples where devices sum up a block.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};

use super::blocks::SampleBlocks;
use super::device_worker::DeviceWorker;
use crate::run::Events;

/// The order in which results are handed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultOrder {
    /// Sample order. A result waits until all earlier samples are done, so results should be small.
    OfSamples,
    /// Sample order, for large results: a device waits with its result, so there is at most a single result per device. The CPU begins
    /// when all earlier samples are done.
    Blocking,
    /// The order of computing: each result is handed on as soon as it is there.
    Any,
}

/// The receiver of a pass's results, and the results that wait for earlier samples.
struct Results<'c, R> {
    order: ResultOrder,
    next: usize,
    waiting: BTreeMap<usize, R>,
    /// An error or a panic ended the pass: no further result is taken.
    is_over: bool,
    done: &'c mut (dyn FnMut(usize, R) -> Result<()> + Send),
}

impl<R> Results<'_, R> {
    fn take(&mut self, sample: usize, result: R) -> Result<()> {
        if self.order == ResultOrder::Any {
            return (self.done)(sample, result);
        }
        self.waiting.insert(sample, result);
        while let Some(result) = self.waiting.remove(&self.next) {
            (self.done)(self.next, result)?;
            self.next += 1;
        }
        Ok(())
    }
}

/// The units of a pass that have not begun, and the results.
struct Queue<'c, R> {
    next: AtomicUsize,
    units: usize,
    results: Mutex<Results<'c, R>>,
    /// Signals that a result was taken, or that the pass is over.
    changed: Condvar,
}

impl<'c, R> Queue<'c, R> {
    /// The next unit that no device has taken.
    fn begin(&self) -> Option<usize> {
        let unit = self.next.fetch_add(1, Ordering::Relaxed);
        (unit < self.units).then_some(unit)
    }

    fn is_stopped(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.units
    }

    /// Waits for the results of all earlier units, where they are [`ResultOrder::Blocking`]. `None` once the pass is over.
    fn turn(&self, unit: usize) -> Option<MutexGuard<'_, Results<'c, R>>> {
        let mut results = lock(&self.results);
        while results.order == ResultOrder::Blocking && results.next != unit && !results.is_over {
            let woken = self.changed.wait(results);
            results = woken.unwrap_or_else(PoisonError::into_inner);
        }
        (!results.is_over).then_some(results)
    }

    /// Takes the result of a unit; with [`ResultOrder::Blocking`] after the results of all earlier units.
    fn take(&self, unit: usize, result: R) -> Result<()> {
        let Some(mut results) = self.turn(unit) else {
            return Ok(());
        };
        let taken = results.take(unit, result);
        self.changed.notify_all();
        taken
    }

    /// Ends the pass early: no device begins a new unit, and none waits.
    fn stop(&self) {
        self.next.store(self.units, Ordering::Relaxed);
        lock(&self.results).is_over = true;
        self.changed.notify_all();
    }
}

/// A pass over all samples, which the devices share. The CPU computes what a device leaves.
pub(super) struct Pass<'p, 'a, R> {
    pub(super) on_device: &'p (dyn Fn(&mut DeviceWorker<'a>, usize) -> Result<Option<R>> + Sync),
    pub(super) on_cpu: &'p mut (dyn FnMut(usize) -> Result<R> + Send),
    pub(super) done: &'p mut (dyn FnMut(usize, R) -> Result<()> + Send),
    pub(super) order: ResultOrder,
    /// Devices get the blocks of samples in turn. Otherwise each device takes the next free unit.
    pub(super) is_dealt: bool,
}

impl<'a, R: Send> Pass<'_, 'a, R> {
    /// Computes all units: samples, or blocks of samples.
    pub(super) fn run(
        self,
        workers: Vec<&mut DeviceWorker<'a>>,
        units: usize,
        events: &dyn Events,
    ) -> Result<()> {
        let (on_device, on_cpu) = (self.on_device, Mutex::new(self.on_cpu));
        let queue = Queue {
            next: AtomicUsize::new(0),
            units,
            results: Mutex::new(Results {
                order: self.order,
                next: 0,
                waiting: BTreeMap::new(),
                is_over: false,
                done: self.done,
            }),
            changed: Condvar::new(),
        };
        // `None` ends the work of a device: the pass is over.
        let one = |worker: Option<&mut DeviceWorker<'a>>, unit: usize| -> Result<Option<R>> {
            events.check()?;
            let computed = match worker {
                Some(worker) => on_device(worker, unit)?,
                None => None,
            };
            match computed {
                Some(result) => Ok(Some(result)),
                None if queue.turn(unit).is_some() => (*lock(&on_cpu))(unit).map(Some),
                None => Ok(None),
            }
        };
        if workers.is_empty() {
            return (0..units).try_for_each(|unit| match one(None, unit)? {
                Some(result) => queue.take(unit, result),
                None => Ok(()),
            });
        }
        // A device begins its next unit before the host takes the result, unless results are large.
        let holds_one = self.order != ResultOrder::Blocking;
        // At most 32 units are a block each, so units that are blocks of samples are dealt as their samples would be.
        let (dealt, blocks) = (self.is_dealt.then_some(workers.len()), SampleBlocks::new(units));
        let work = |number: usize, worker: &mut DeviceWorker<'a>| -> Result<()> {
            let _stop = StopOnPanic(&queue);
            let own = (number..blocks.count()).step_by(dealt.unwrap_or(1));
            let mut own = own.flat_map(|block| blocks.samples_of(block));
            let mut next = || match dealt {
                Some(_) => own.next().filter(|_| !queue.is_stopped()),
                None => queue.begin(),
            };
            let mut computed = || -> Result<()> {
                let mut held = None;
                while let Some(unit) = next() {
                    let Some(result) = one(Some(&mut *worker), unit)? else {
                        return Ok(());
                    };
                    let before = held.replace((unit, result));
                    if let Some((unit, result)) = before {
                        queue.take(unit, result)?;
                    }
                    if !holds_one && let Some((unit, result)) = held.take() {
                        queue.take(unit, result)?;
                    }
                }
                held.map_or(Ok(()), |(unit, result)| queue.take(unit, result))
            };
            let outcome = computed().inspect_err(|_| queue.stop());
            worker.count_work();
            outcome
        };
        on_threads(workers, &work, &|| queue.stop())
    }
}

/// Runs `work` for every worker and its number, each on a thread of its own, and returns the first error. Calls `stop` where a thread cannot
/// start: the others would wait for its units.
fn on_threads<'a>(
    workers: Vec<&mut DeviceWorker<'a>>,
    work: &(dyn Fn(usize, &mut DeviceWorker<'a>) -> Result<()> + Sync),
    stop: &dyn Fn(),
) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .enumerate()
            .map(|(number, worker)| {
                let thread = thread::Builder::new();
                let thread = thread.spawn_scoped(scope, move || work(number, worker));
                thread.inspect_err(|_| stop())
            })
            .collect();
        let mut outcome = Ok(());
        for thread in threads {
            let ended = thread.context("starting the thread of a device").and_then(|thread| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("the thread of a device panicked")))
            });
            outcome = outcome.and(ended);
        }
        outcome
    })
}

/// Ends the pass for all threads once a thread has panicked.
struct StopOnPanic<'q, 'c, R>(&'q Queue<'c, R>);

impl<R> Drop for StopOnPanic<'_, '_, R> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Locks a mutex. A thread that panics ends the run, so the state that the lock protects does not matter then.
pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
