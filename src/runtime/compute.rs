//! The devices that compute: the CPU, and GPUs, which share the samples of a layer.
//!
//! A plan names the devices of each layer. Without a GPU, samples are computed one by one, each with all threads. With GPUs, each GPU
//! takes the next free sample. If a GPU has too little memory for a sample, the CPU computes this sample immediately ([`DeviceWorker`]).
//! Results are combined in the order of the samples, so they depend on the device of a sample only by its rounding.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};

use super::device_worker::DeviceWorker;
use super::engine::CopyAhead;
use super::hidden_states::HiddenStates;
use crate::linalg::Workspace;
use crate::linalg::profile::Watch;
use crate::model::head::HeadChunk;
use crate::model::on_device::LogSumExpPart;
use crate::model::{DecoderLayer, LayerContext, Observer};
use crate::run::fallback::{DeviceMemoryReport, FallbackReport};
use crate::run::{Events, MemorySettings, Phase};
use candle_core::{DType, Tensor};

/// A function that gets a sample, its hidden state, and the output of a layer for it.
pub type CompareStates<'c> = dyn FnMut(usize, &Tensor, &Tensor) -> Result<()> + Send + 'c;

/// The devices of a sweep.
pub struct Compute<'a> {
    pub(super) context: LayerContext,
    pub(super) workers: Vec<DeviceWorker<'a>>,
    /// By layer, the names of the devices that compute it.
    pub(super) devices: Vec<Vec<String>>,
    events: &'a dyn Events,
}

impl<'a> Compute<'a> {
    /// Computes on the CPU alone.
    pub fn on_cpu(context: LayerContext, events: &'a dyn Events) -> Self {
        Self::new(context, Vec::new(), Vec::new(), events)
    }

    /// Computes on `devices`: by layer, the names of its devices; the CPU for a layer without an entry.
    pub fn new(
        context: LayerContext,
        workers: Vec<DeviceWorker<'a>>,
        devices: Vec<Vec<String>>,
        events: &'a dyn Events,
    ) -> Self {
        Self {
            context,
            workers,
            devices,
            events,
        }
    }

    /// The scratch memory of the CPU, for products outside a layer.
    pub fn workspace(&mut self) -> &mut Workspace {
        self.context.workspace()
    }

    /// The settings that trade memory for time.
    pub fn settings(&self) -> &MemorySettings {
        self.context.settings()
    }

    /// The context of layers on the CPU.
    pub fn context(&mut self) -> &mut LayerContext {
        &mut self.context
    }

    /// Returns whether a device other than the CPU computes the last layer, and so the head.
    pub fn has_device_for_the_head(&self) -> bool {
        let last = self.devices.last();
        last.is_some_and(|last| {
            self.workers
                .iter()
                .any(|worker| last.contains(worker.name()))
        })
    }

    /// Replaces every hidden state by the output of a layer. Calls `done` after each sample with the number of samples finished before.
    ///
    /// # Errors
    /// Fails when a hidden state cannot be read or written, and when a device fails for another reason than lack of memory.
    pub fn forward(
        &mut self,
        phase: Phase,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        done: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        self.replace(phase, layer, hidden, None, done)
    }

    /// Does the same in the phase "propagate". Before an output replaces a hidden state, `compare` gets the sample and both, in f32.
    ///
    /// # Errors
    /// Fails as [`Compute::forward`], and with the first error of `compare`.
    pub fn forward_and_compare(
        &mut self,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        compare: &mut CompareStates<'_>,
        done: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        self.replace(Phase::Propagate, layer, hidden, Some(compare), done)
    }

    fn replace(
        &mut self,
        phase: Phase,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        mut compare: Option<&mut CompareStates<'_>>,
        done: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        let workers = ready(&mut self.workers, &self.devices, layer)?;
        let (samples, context) = (hidden.samples(), &mut self.context);
        let mut finished = 0;
        let hidden = Mutex::new(hidden);
        Pass {
            on_device: &|worker, sample| {
                let state = lock(&hidden).stored(sample)?;
                worker.forward(phase, sample, layer, &state)
            },
            on_cpu: &mut |sample| {
                let state = lock(&hidden).get(sample)?;
                layer.forward(&state, context)
            },
            done: &mut |sample, next: Tensor| {
                if let Some(compare) = &mut compare {
                    let before = lock(&hidden).get(sample)?;
                    compare(sample, &before, &next.to_dtype(DType::F32)?)?;
                }
                lock(&hidden).put(sample, next)?;
                done(finished);
                finished += 1;
                Ok(())
            },
            order: ResultOrder::Any,
        }
        .run(workers, samples, self.events)
    }

    /// Observes every sample in a layer, each with a new observer. Calls `done` with the observers in the order of the samples.
    /// `order` is [`ResultOrder::OfSamples`], or [`ResultOrder::Blocking`] for large observations.
    pub fn capture<O: Observer + Send>(
        &mut self,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        order: ResultOrder,
        new: &(dyn Fn(usize, Turn) -> O + Sync),
        done: &mut (dyn FnMut(usize, O) + Send),
    ) -> Result<()> {
        let workers = ready(&mut self.workers, &self.devices, layer)?;
        let (samples, context) = (hidden.samples(), &mut self.context);
        let hidden = Mutex::new(hidden);
        let turn = match workers.is_empty() {
            true => Turn::Now,
            false => Turn::Later,
        };
        Pass {
            on_device: &|worker, sample| {
                let state = lock(&hidden).stored(sample)?;
                worker.capture(sample, layer, &state, &|sample| new(sample, turn))
            },
            on_cpu: &mut |sample| {
                let state = lock(&hidden).get(sample)?;
                let mut observer = new(sample, turn);
                layer.capture(&state, context, &mut observer)?;
                Ok(observer)
            },
            done: &mut |sample, observer| {
                done(sample, observer);
                Ok(())
            },
            order,
        }
        .run(workers, samples, self.events)
    }

    /// Computes every window's log-sum-exp over some rows of the head, on the devices of the last layer. Calls `done` with the parts
    /// in the order of the windows. `tokens` is `[windows, seqlen]`.
    pub fn head_windows(
        &mut self,
        chunk: &HeadChunk<'_>,
        hidden: &mut HiddenStates,
        tokens: &[u32],
        done: &mut (dyn FnMut(usize, Vec<LogSumExpPart>) + Send),
    ) -> Result<()> {
        let last = self.devices.last().map_or(&[][..], Vec::as_slice);
        let mut workers = Vec::new();
        for worker in &mut self.workers {
            if last.contains(worker.name()) && worker.load_head(chunk)? {
                workers.push(worker);
            }
        }
        let (samples, seqlen, context) = (hidden.samples(), hidden.seqlen(), &mut self.context);
        let hidden = Mutex::new(hidden);
        let window = |sample: usize| &tokens[sample * seqlen..(sample + 1) * seqlen];
        Pass {
            on_device: &|worker, sample| {
                let state = lock(&hidden).stored(sample)?;
                worker.head_window(sample, chunk, &state, window(sample))
            },
            on_cpu: &mut |sample| {
                let state = lock(&hidden).get(sample)?;
                LogSumExpPart::on_host(chunk, &state, window(sample), context)
            },
            done: &mut |sample, parts| {
                done(sample, parts);
                Ok(())
            },
            order: ResultOrder::OfSamples,
        }
        .run(workers, samples, self.events)
    }

    /// Prepares all devices for the next layer.
    pub(super) fn begin_layer(&mut self) {
        self.workers.iter_mut().for_each(DeviceWorker::begin_layer);
    }

    /// Returns a function that copies a layer onto the devices that will compute it.
    pub(super) fn copies_ahead(&self) -> CopyAhead {
        let of = |worker: &DeviceWorker<'_>| {
            Some((worker.name().clone(), worker.engine().copies_ahead()?))
        };
        let copies: Vec<(String, CopyAhead)> = self.workers.iter().filter_map(of).collect();
        let devices = self.devices.clone();
        Box::new(move |layer| {
            let named = devices.get(layer.index()).map_or(&[][..], Vec::as_slice);
            for (device, copy) in &copies {
                if named.contains(device) {
                    copy(layer);
                }
            }
        })
    }

    /// Ends the sweep: returns fallbacks, peak memory of devices, and the profile of the CPU.
    pub fn finish(mut self) -> SweepReport {
        let workers = self.workers.iter_mut();
        SweepReport {
            fallbacks: workers.flat_map(DeviceWorker::take_fallbacks).collect(),
            devices: self
                .workers
                .iter()
                .map(DeviceWorker::memory_report)
                .collect(),
            watch: self.context.workspace().product_context().watch.clone(),
        }
    }
}

/// The report of the devices after a sweep.
#[derive(Debug, Clone, Default)]
pub struct SweepReport {
    /// Units of work that a device had no memory for at first.
    pub fallbacks: Vec<FallbackReport>,
    /// Peak memory of devices.
    pub devices: Vec<DeviceMemoryReport>,
    /// The profile of the CPU.
    pub watch: Watch,
}

impl SweepReport {
    /// The devices of this sweep, and those of a later one with its profile.
    #[must_use]
    pub fn and(mut self, later: Self) -> Self {
        self.fallbacks.extend(later.fallbacks);
        self.devices.extend(later.devices);
        Self {
            watch: later.watch,
            ..self
        }
    }
}

/// Returns the devices of a layer that could load it.
fn ready<'s, 'a>(
    workers: &'s mut [DeviceWorker<'a>],
    devices: &[Vec<String>],
    layer: &DecoderLayer,
) -> Result<Vec<&'s mut DeviceWorker<'a>>> {
    let named = devices.get(layer.index()).map_or(&[][..], Vec::as_slice);
    let mut ready = Vec::new();
    for worker in workers {
        if named.contains(worker.name()) && worker.load_layer(layer)? {
            ready.push(worker);
        }
    }
    Ok(ready)
}

/// The moment at which the observations of a sample may be added to those of earlier samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// While the sample passes: all earlier samples are done.
    Now,
    /// After the sample has passed: other samples pass at the same time, and an attempt on a device may fail half-way.
    Later,
}

/// The order in which results are handed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultOrder {
    /// That of the samples. A result waits for those of earlier samples, so results should be small.
    OfSamples,
    /// That of the samples, for large results: a device waits with its result, so there is at most one result per device.
    Blocking,
    /// That of computing.
    Any,
}

/// Results that wait for those of earlier samples.
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

/// The samples of a pass that have not begun, and the results.
struct Queue<'c, R> {
    next: AtomicUsize,
    samples: usize,
    results: Mutex<Results<'c, R>>,
    /// Signals that a result was taken, or that the pass is over.
    changed: Condvar,
}

impl<R> Queue<'_, R> {
    /// The next sample that no device has taken.
    fn begin(&self) -> Option<usize> {
        let sample = self.next.fetch_add(1, Ordering::Relaxed);
        (sample < self.samples).then_some(sample)
    }

    /// Takes the result of a sample; with [`ResultOrder::Blocking`] after those of all earlier samples.
    fn take(&self, sample: usize, result: R) -> Result<()> {
        let mut results = lock(&self.results);
        while results.order == ResultOrder::Blocking && results.next != sample && !results.is_over {
            let woken = self.changed.wait(results);
            results = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if results.is_over {
            return Ok(());
        }
        let taken = results.take(sample, result);
        self.changed.notify_all();
        taken
    }

    /// Ends the pass early: no device begins another sample, and none waits.
    fn stop(&self) {
        self.next.store(self.samples, Ordering::Relaxed);
        lock(&self.results).is_over = true;
        self.changed.notify_all();
    }
}

/// A pass over all samples: each device takes the next sample that no other has taken, and the CPU computes what a device leaves.
struct Pass<'p, 'a, R> {
    on_device: &'p (dyn Fn(&mut DeviceWorker<'a>, usize) -> Result<Option<R>> + Sync),
    on_cpu: &'p mut (dyn FnMut(usize) -> Result<R> + Send),
    done: &'p mut (dyn FnMut(usize, R) -> Result<()> + Send),
    order: ResultOrder,
}

impl<'a, R: Send> Pass<'_, 'a, R> {
    fn run(
        self,
        workers: Vec<&mut DeviceWorker<'a>>,
        samples: usize,
        events: &dyn Events,
    ) -> Result<()> {
        let (on_device, on_cpu) = (self.on_device, Mutex::new(self.on_cpu));
        let queue = Queue {
            next: AtomicUsize::new(0),
            samples,
            results: Mutex::new(Results {
                order: self.order,
                next: 0,
                waiting: BTreeMap::new(),
                is_over: false,
                done: self.done,
            }),
            changed: Condvar::new(),
        };
        let one = |worker: Option<&mut DeviceWorker<'a>>, sample: usize| -> Result<()> {
            events.check()?;
            let computed = match worker {
                Some(worker) => on_device(worker, sample)?,
                None => None,
            };
            let result = match computed {
                Some(result) => result,
                None => (*lock(&on_cpu))(sample)?,
            };
            queue.take(sample, result)
        };
        if workers.is_empty() {
            return (0..samples).try_for_each(|sample| one(None, sample));
        }
        let work = |worker: &mut DeviceWorker<'a>| -> Result<()> {
            let _stop = StopOnPanic(&queue);
            while let Some(sample) = queue.begin() {
                one(Some(&mut *worker), sample).inspect_err(|_| queue.stop())?;
            }
            Ok(())
        };
        on_threads(workers, &work)
    }
}

/// Runs `work` for every worker, each on a thread of its own, and returns the first error.
fn on_threads<'a>(
    workers: Vec<&mut DeviceWorker<'a>>,
    work: &(dyn Fn(&mut DeviceWorker<'a>) -> Result<()> + Sync),
) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .into_iter()
            .map(|worker| thread::Builder::new().spawn_scoped(scope, move || work(worker)))
            .collect();
        let mut outcome = Ok(());
        for thread in threads {
            let ended = thread
                .context("starting the thread of a device")
                .and_then(|thread| {
                    thread
                        .join()
                        .unwrap_or_else(|_| Err(anyhow!("the thread of a device panicked")))
                });
            outcome = outcome.and(ended);
        }
        outcome
    })
}

/// Ends the pass for the other threads once one has panicked.
struct StopOnPanic<'q, 'c, R>(&'q Queue<'c, R>);

impl<R> Drop for StopOnPanic<'_, '_, R> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Locks a mutex. A panic of another thread ends the run, so the state behind the lock does not matter then.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
