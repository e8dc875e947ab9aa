//! What computes: the CPU, and the devices beside it, which share the samples of a layer.
//!
//! A plan names the devices of each layer. On the CPU a pass goes over the samples one by one, with all threads in each. Devices
//! each take the next sample that no other has; what a device has no memory for is done on the CPU at once ([`Seat`]). Results
//! are put together in the order of the samples, so they do not depend on who computed what, beyond the rounding of a device.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};

use super::engine::CopyAhead;
use super::hidden_states::HiddenStates;
use super::seat::Seat;
use super::sweep::Swept;
use crate::linalg::Workspace;
use crate::model::head::HeadChunk;
use crate::model::on_device::Seen;
use crate::model::{DecoderLayer, LayerContext, ModelConfig, Observer};
use crate::run::Events;
use candle_core::Tensor;

/// The devices of a sweep, the CPU among them.
pub struct Compute<'a> {
    context: LayerContext,
    config: &'a ModelConfig,
    seats: Vec<Seat>,
    /// By layer, the names of the devices that compute it.
    devices: Vec<Vec<String>>,
    events: &'a dyn Events,
}

impl<'a> Compute<'a> {
    /// Computes on the CPU alone.
    pub fn on_cpu(context: LayerContext, config: &'a ModelConfig, events: &'a dyn Events) -> Self {
        Self::new(context, config, Vec::new(), Vec::new(), events)
    }

    /// # Arguments
    /// * `devices`: by layer, who computes it; the CPU where there is no entry
    pub fn new(
        context: LayerContext,
        config: &'a ModelConfig,
        seats: Vec<Seat>,
        devices: Vec<Vec<String>>,
        events: &'a dyn Events,
    ) -> Self {
        Self {
            context,
            config,
            seats,
            devices,
            events,
        }
    }

    /// The scratch memory of the CPU, for products outside a layer.
    pub fn workspace(&mut self) -> &mut Workspace {
        self.context.workspace()
    }

    /// What the CPU computes with.
    pub fn context(&mut self) -> &mut LayerContext {
        &mut self.context
    }

    /// Whether a device other than the CPU computes the last layer, and so the head.
    pub fn has_device_for_the_head(&self) -> bool {
        let last = self.devices.last();
        last.is_some_and(|last| {
            self.seats
                .iter()
                .any(|seat| last.iter().any(|name| name == seat.device()))
        })
    }

    /// Moves every sample through a layer and puts it back; `done` is told how many were finished before, each time one is.
    ///
    /// # Errors
    /// Fails when a hidden state cannot be read or written, and when a device fails for another reason than lack of memory.
    pub fn forward(
        &mut self,
        phase: &str,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        done: &(dyn Fn(usize) + Sync),
    ) -> Result<()> {
        let (config, events, context) = (self.config, self.events, &mut self.context);
        let mut seats = ready(&mut self.seats, &self.devices, layer, config, events)?;
        if seats.is_empty() {
            return hidden.advance(|sample, state| {
                events.check()?;
                let next = layer.forward(state, context)?;
                done(sample);
                Ok(next)
            });
        }
        let samples = hidden.samples();
        let mut finished = 0;
        let hidden = Mutex::new(hidden);
        share(
            &mut seats,
            events,
            samples,
            // Each goes back to its place.
            false,
            &|seat, sample| {
                let state = lock(&hidden).at_rest(sample)?;
                seat.forward(phase, sample, layer, &state, config, events)
            },
            &mut |sample| {
                let state = lock(&hidden).get(sample)?;
                layer.forward(&state, context)
            },
            &mut |sample, next: Tensor| {
                lock(&hidden).put(sample, next)?;
                done(finished);
                finished += 1;
                Ok(())
            },
        )
    }

    /// Observes every sample in a layer, each with an observer of its own; `done` takes them in the order of the samples.
    ///
    /// # Errors
    /// As [`Compute::forward`].
    pub fn capture<O: Observer + Send>(
        &mut self,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        new: &(dyn Fn(usize) -> O + Sync),
        done: &mut (dyn FnMut(usize, O) + Send),
    ) -> Result<()> {
        let (config, events, context) = (self.config, self.events, &mut self.context);
        let mut seats = ready(&mut self.seats, &self.devices, layer, config, events)?;
        if seats.is_empty() {
            for sample in 0..hidden.samples() {
                events.check()?;
                let mut observer = new(sample);
                layer.capture(&hidden.get(sample)?, context, &mut observer)?;
                done(sample, observer);
            }
            return Ok(());
        }
        let samples = hidden.samples();
        let hidden = Mutex::new(hidden);
        share(
            &mut seats,
            events,
            samples,
            true,
            &|seat, sample| {
                let state = lock(&hidden).at_rest(sample)?;
                seat.capture(sample, layer, &state, new, config, events)
            },
            &mut |sample| {
                let state = lock(&hidden).get(sample)?;
                let mut observer = new(sample);
                layer.capture(&state, context, &mut observer)?;
                Ok(observer)
            },
            &mut |sample, observer| {
                done(sample, observer);
                Ok(())
            },
        )
    }

    /// Shows every window to some rows of the head on the devices of the last layer; `done` takes what was seen in the order of the windows.
    ///
    /// # Arguments
    /// * `tokens`: `[windows, seqlen]`
    ///
    /// # Errors
    /// As [`Compute::forward`].
    pub fn see(
        &mut self,
        chunk: &HeadChunk<'_>,
        hidden: &mut HiddenStates,
        tokens: &[u32],
        done: &mut (dyn FnMut(usize, Vec<Seen>) + Send),
    ) -> Result<()> {
        let (config, events, context) = (self.config, self.events, &mut self.context);
        let last = self.devices.last().cloned().unwrap_or_default();
        let mut seats = Vec::new();
        for seat in &mut self.seats {
            if last.iter().any(|name| name == seat.device())
                && seat.take_head(chunk, config, events)?
            {
                seats.push(seat);
            }
        }
        let (samples, seqlen) = (hidden.samples(), hidden.seqlen());
        let hidden = Mutex::new(hidden);
        let window = |sample: usize| &tokens[sample * seqlen..(sample + 1) * seqlen];
        share(
            &mut seats,
            events,
            samples,
            true,
            &|seat, sample| {
                let state = lock(&hidden).at_rest(sample)?;
                seat.see(sample, chunk, &state, window(sample), config, events)
            },
            &mut |sample| {
                let state = lock(&hidden).get(sample)?;
                Seen::on_host(chunk, &state, window(sample), context)
            },
            &mut |sample, seen| {
                done(sample, seen);
                Ok(())
            },
        )
    }

    /// A layer's turn has come.
    pub(super) fn layer_begins(&mut self) {
        self.seats.iter_mut().for_each(Seat::layer_begins);
    }

    /// What copies a layer that was read ahead onto the devices that will compute it.
    pub(super) fn copies_ahead(&self) -> CopyAhead {
        let of = |seat: &Seat| Some((seat.device().to_string(), seat.engine().copies_ahead()?));
        let copies: Vec<(String, CopyAhead)> = self.seats.iter().filter_map(of).collect();
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

    /// What devices had no memory for at first, what they held at most, and where the CPU's time went.
    pub fn finish(mut self) -> Swept {
        Swept {
            fallbacks: self.seats.iter_mut().flat_map(Seat::take_falls).collect(),
            devices: self.seats.iter().map(Seat::memory_report).collect(),
            watch: self.context.workspace().panel().watch.clone(),
        }
    }
}

/// The devices of a layer that could take it up.
fn ready<'s>(
    seats: &'s mut [Seat],
    devices: &[Vec<String>],
    layer: &DecoderLayer,
    config: &ModelConfig,
    events: &dyn Events,
) -> Result<Vec<&'s mut Seat>> {
    let named = devices.get(layer.index()).map_or(&[][..], Vec::as_slice);
    let mut ready = Vec::new();
    for seat in seats {
        if named.iter().any(|name| name == seat.device())
            && seat.take_layer(layer, config, events)?
        {
            ready.push(seat);
        }
    }
    Ok(ready)
}

/// Results that wait for those of earlier samples, where their order counts.
struct InOrder<'c, R> {
    order_counts: bool,
    next: usize,
    waiting: BTreeMap<usize, R>,
    done: &'c mut (dyn FnMut(usize, R) -> Result<()> + Send),
}

impl<R> InOrder<'_, R> {
    fn take(&mut self, sample: usize, result: R) -> Result<()> {
        if !self.order_counts {
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

/// Lets each device take the next sample no other has; what it leaves, `on_cpu` does at once, one sample at a time. `done` sees the
/// results in the order of the samples where that counts; small ones only should have to wait for it.
fn share<R: Send>(
    seats: &mut [&mut Seat],
    events: &dyn Events,
    samples: usize,
    order_counts: bool,
    on_device: &(dyn Fn(&mut Seat, usize) -> Result<Option<R>> + Sync),
    on_cpu: &mut (dyn FnMut(usize) -> Result<R> + Send),
    done: &mut (dyn FnMut(usize, R) -> Result<()> + Send),
) -> Result<()> {
    let results = Mutex::new(InOrder {
        order_counts,
        next: 0,
        waiting: BTreeMap::new(),
        done,
    });
    if seats.is_empty() {
        for sample in 0..samples {
            events.check()?;
            let result = on_cpu(sample)?;
            lock(&results).take(sample, result)?;
        }
        return Ok(());
    }
    let next = AtomicUsize::new(0);
    let on_cpu = Mutex::new(on_cpu);
    let work = |seat: &mut Seat| -> Result<()> {
        let _stop = StopOnPanic(&next, samples);
        loop {
            let sample = next.fetch_add(1, Ordering::Relaxed);
            if sample >= samples {
                return Ok(());
            }
            let mut one = || -> Result<()> {
                events.check()?;
                let result = match on_device(seat, sample)? {
                    Some(result) => result,
                    None => (*lock(&on_cpu))(sample)?,
                };
                lock(&results).take(sample, result)
            };
            let one = one();
            if one.is_err() {
                // No one begins another sample.
                next.store(samples, Ordering::Relaxed);
                return one;
            }
        }
    };
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = seats
            .iter_mut()
            .map(|seat| thread::Builder::new().spawn_scoped(scope, move || work(seat)))
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
            if outcome.is_ok() {
                outcome = ended;
            }
        }
        outcome
    })
}

/// Keeps the other threads from beginning another sample once one has panicked.
struct StopOnPanic<'n>(&'n AtomicUsize, usize);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(self.1, Ordering::Relaxed);
        }
    }
}

/// A panic elsewhere ends the run by itself; what the lock guards is not looked at after it.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
