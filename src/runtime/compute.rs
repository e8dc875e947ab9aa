//! The devices that compute: the CPU, and GPUs, which share the samples of a layer.
//!
//! A plan names the devices of each layer. Without a GPU, the CPU computes the samples in their order, each with all threads. With GPUs,
//! each GPU takes the next free sample. GPUs get blocks of samples in turn where they sum them up or have their hidden states (`pass.rs`).
//! If a GPU has too little memory for a sample, or for a sample of a block that is summed up, the CPU computes this sample or block
//! ([`DeviceWorker`]). Results are combined in the order of the samples, so they depend on the
//! device of a sample only by its rounding.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use super::blocks::SampleBlocks;
use super::device_worker::DeviceWorker;
use super::engine::CopyAhead;
use super::hidden_states::HiddenStates;
use super::pass::{Pass, ResultOrder, lock};
use crate::linalg::profile::Watch;
use crate::linalg::select::Quota;
use crate::linalg::{CodedActivations, Workspace};
use crate::model::head::HeadChunk;
use crate::model::on_device::{GramSums, LogSumExpPart, SampleSums, TakeGram};
use crate::model::{DecoderLayer, LayerContext, LinearId, ModelConfig, Observer};
use crate::ranks::Ranks;
use crate::run::fallback::{DeviceMemoryReport, FallbackReport};
use crate::run::{Events, MemorySettings, Phase};
use candle_core::{DType, Device, Tensor};

/// A function that gets a sample, its hidden state, and the output of a layer for it.
pub type CompareStates<'c> = dyn FnMut(usize, &Tensor, &Tensor) -> Result<()> + Send + 'c;

/// The devices of a sweep.
pub struct Compute<'a> {
    pub(super) context: LayerContext,
    pub(super) workers: Vec<DeviceWorker<'a>>,
    /// By layer, the names of the devices that compute it.
    pub(super) devices: Vec<Vec<String>>,
    /// Each device has its own samples, whose hidden states stay on it.
    deals_samples: bool,
    ranks: Ranks,
    pub(super) events: &'a dyn Events,
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
        Self { context, workers, devices, deals_samples: false, ranks: Ranks::alone(), events }
    }

    /// Shares the samples with other ranks.
    #[must_use]
    pub fn with_ranks(self, ranks: Ranks) -> Self {
        Self { ranks, ..self }
    }

    /// The ranks that share the samples.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Gives the devices the blocks of samples in turn, so that each finds the hidden states that stayed on it.
    #[must_use]
    pub(super) fn dealing_samples(self, deals_samples: bool) -> Self {
        Self { deals_samples, ..self }
    }

    /// The same with these activations of products of 8-bit codes on the CPU.
    #[must_use]
    pub(super) fn with_coded_activations(self, activations: CodedActivations) -> Self {
        Self { context: self.context.with_coded_activations(activations), ..self }
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

    /// The CPU for a model of another shape, with the settings and the arithmetic of this one.
    pub fn on_cpu_for(&mut self, config: &ModelConfig, seqlen: usize) -> Compute<'a> {
        let settings = self.context.settings().clone();
        let products = self.context.workspace().product_context().products;
        let context = LayerContext::with_settings(config, seqlen, settings);
        Compute::on_cpu(context.with_products(products), self.events)
    }

    /// Returns whether a device besides the CPU computes the last layer, and so the head.
    pub fn has_device_for_the_head(&self) -> bool {
        let last = self.devices.last();
        last.is_some_and(|last| self.workers.iter().any(|worker| last.contains(worker.name())))
    }

    /// Replaces every hidden state by the output of a layer. Calls `done` after each sample with the number of samples finished before.
    ///
    /// # Errors
    /// Fails when a hidden state cannot be read or written, and on a device error that is not lack of memory.
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
        let (mut finished, displaced) = (0, hidden.displaced());
        let hidden = Mutex::new(hidden);
        Pass {
            on_device: &|worker, sample| {
                let (state, segments) = {
                    let mut hidden = lock(&hidden);
                    (hidden.stored(sample)?, hidden.segments(sample))
                };
                let Some(segments) = segments else {
                    return worker.forward(phase, sample, layer, &state);
                };
                // A device has no attention to the rows of an earlier sequence: its sequences pass in turn.
                if segments.iter().any(|segment| segment.position() > 0) {
                    return Ok(None);
                }
                let mut outputs = Vec::new();
                for segment in segments.iter() {
                    let rows = state.narrow(0, segment.rows.start, segment.rows.len())?;
                    match worker.forward(phase, sample, layer, &rows.contiguous()?)? {
                        Some(output) => outputs.push(output),
                        None => return Ok(None),
                    }
                }
                Ok(Some(Tensor::cat(&outputs, 0)?))
            },
            on_cpu: &mut |sample| {
                let mut hidden = lock(&hidden);
                let (state, segments) = (hidden.get(sample)?, hidden.segments(sample));
                drop(hidden);
                match segments {
                    Some(segments) => layer.forward_segments(&state, &segments, context),
                    None => layer.forward(&state, context),
                }
            },
            done: &mut |sample, next: Tensor| {
                if let Some(compare) = &mut compare {
                    let before = lock(&hidden).get(sample)?;
                    let next = next.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                    compare(sample, &before, &next)?;
                }
                lock(&hidden).put(sample, next)?;
                done(finished);
                finished += 1;
                Ok(())
            },
            order: ResultOrder::Any,
            is_dealt: self.deals_samples,
        }
        .run(workers, samples, self.events)?;
        lock(&hidden).warn_of_displaced(displaced, self.events);
        // The time of a pass ends with it, and an error belongs to it.
        self.workers.iter_mut().try_for_each(DeviceWorker::wait)
    }

    /// Observes every sample in a layer, each with a new observer. Calls `done` with the observers in the order of the samples.
    /// `order` is [`ResultOrder::OfSamples`], or [`ResultOrder::Blocking`] for large observations and for Gram matrices.
    ///
    /// Gram matrices on devices are sums of blocks, and `grams.take` gets them in the order of the blocks. A device that has had all blocks
    /// so far keeps their sum.
    pub fn capture<O: Observer + Send>(
        &mut self,
        layer: &DecoderLayer,
        hidden: &mut HiddenStates,
        order: ResultOrder,
        grams: GramsOnDevices<'_>,
        new: &(dyn Fn(usize, Accumulation) -> O + Sync),
        done: &mut (dyn FnMut(usize, O) + Send),
    ) -> Result<()> {
        let workers = ready(&mut self.workers, &self.devices, layer)?;
        let (samples, context, events) = (hidden.samples(), &mut self.context, self.events);
        let blocks = SampleBlocks::new(samples);
        let has_grams = !grams.widths.is_empty() && !workers.is_empty();
        let samples_of = |unit: usize| match has_grams {
            true => blocks.samples_of(unit),
            false => unit..unit + 1,
        };
        let (hidden, done, take) = (Mutex::new(hidden), Mutex::new(done), Mutex::new(grams.take));
        let state = |sample: usize| lock(&hidden).stored(sample);
        // A single device keeps sums until the CPU has to compute a block. The sums so far come before this block.
        let (keeps, kept) = (AtomicBool::new(workers.len() == 1), Mutex::new(GramSums::default()));
        Pass {
            on_device: &|worker, unit| {
                let own = samples_of(unit);
                let new = |sample: usize| new(sample, Accumulation::Later);
                let observed = worker.capture(own.clone(), layer, (&state, grams.widths), &new)?;
                if !has_grams {
                    return Ok(observed.map(|observed| (observed, Vec::new())));
                }
                if keeps.load(Ordering::Relaxed)
                    && observed.is_some()
                    && worker.keep_block(&own, layer, grams.widths)?
                {
                    return Ok(observed.map(|observed| (observed, Vec::new())));
                }
                let before = match keeps.swap(false, Ordering::Relaxed) {
                    true => worker.take_kept(),
                    false => GramSums::default(),
                };
                let Some(observed) = observed else {
                    *lock(&kept) = before;
                    return Ok(None);
                };
                Ok(Some((observed, vec![before, worker.take_block()])))
            },
            on_cpu: &mut |unit| {
                let kept = std::mem::take(&mut *lock(&kept));
                kept.hand_on(&mut **lock(&take))?;
                let mut observed = Vec::new();
                for sample in samples_of(unit) {
                    events.check()?;
                    let state = lock(&hidden).get(sample)?;
                    let mut observer = new(sample, Accumulation::Now);
                    layer.capture(&state, context, &mut observer)?;
                    match has_grams {
                        // The rows of the next sample follow at once.
                        true => (*lock(&done))(sample, observer),
                        false => observed.push((observer, SampleSums::default())),
                    }
                }
                Ok((observed, Vec::new()))
            },
            done: &mut |unit, (observed, sums)| {
                for (sample, (mut observer, columns)) in samples_of(unit).zip(observed) {
                    columns.show(&mut observer)?;
                    (*lock(&done))(sample, observer);
                }
                sums.into_iter().try_for_each(|sums| sums.hand_on(&mut **lock(&take)))
            },
            order,
            // Devices with blocks of samples would wait for each other's rows.
            is_dealt: has_grams || (self.deals_samples && order != ResultOrder::Blocking),
        }
        .run(workers, if has_grams { blocks.count() } else { samples }, self.events)?;
        let kept = self.workers.iter_mut().filter(|_| has_grams).map(DeviceWorker::take_kept);
        kept.collect::<Vec<_>>().into_iter().try_for_each(|sums| sums.hand_on(&mut **lock(&take)))
    }

    /// X·Wᵀ of a matrix without its bias, in f32 on a device that has the layer; `None` where no device has it.
    ///
    /// # Errors
    /// Fails on a device error that is not lack of memory.
    pub fn product(
        &mut self,
        layer: &DecoderLayer,
        id: LinearId,
        rows: &[f32],
    ) -> Result<Option<Tensor>> {
        let worker = self.first_worker(layer);
        worker.map_or(Ok(None), |worker| worker.product(layer, id, rows))
    }

    /// Chooses the lowest scores |w_ij| · norm_j of a matrix on a device that has the layer: the bits of a mask, equal to the CPU's; `None`
    /// where no device can.
    ///
    /// # Errors
    /// Fails on a device error that is not lack of memory.
    pub fn choose_lowest(
        &mut self,
        layer: &DecoderLayer,
        id: LinearId,
        norms: &[f32],
        quota: Quota,
    ) -> Result<Option<Vec<u8>>> {
        let worker = self.first_worker(layer);
        worker.map_or(Ok(None), |worker| worker.choose_lowest(layer, id, norms, quota))
    }

    /// Removes the weights chosen last on the device, too, where they are zero in `layer` now.
    ///
    /// # Errors
    /// Fails when a device fails.
    pub fn zero_chosen(&mut self, layer: &DecoderLayer, id: LinearId) -> Result<()> {
        self.first_worker(layer).map_or(Ok(()), |worker| worker.zero_chosen(layer, id))
    }

    /// The first device that computes a layer.
    fn first_worker(&mut self, layer: &DecoderLayer) -> Option<&mut DeviceWorker<'a>> {
        let named = self.devices.get(layer.index()).map_or(&[][..], Vec::as_slice);
        self.workers.iter_mut().find(|worker| named.contains(worker.name()))
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
            is_dealt: self.deals_samples,
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
        // What this thread took from devices between passes.
        self.workers.iter_mut().take(1).for_each(DeviceWorker::count_work);
        let workers = self.workers.iter_mut();
        SweepReport {
            fallbacks: workers.flat_map(DeviceWorker::take_fallbacks).collect(),
            devices: self.workers.iter().map(DeviceWorker::memory_report).collect(),
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
    /// Adds the fallbacks and the devices of a later sweep, and takes its profile.
    #[must_use]
    pub fn and(mut self, later: Self) -> Self {
        self.fallbacks.extend(later.fallbacks);
        self.devices.extend(later.devices);
        Self { watch: later.watch, ..self }
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

/// The moment at which the observations of a sample may be added to the observations of earlier samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulation {
    /// While the sample passes: all earlier samples are done.
    Now,
    /// After the sample has passed: several samples pass at the same time, and an attempt on a device may fail half-way.
    Later,
}

/// The Gram matrices that devices sum up in a pass, instead of sending rows.
pub struct GramsOnDevices<'c> {
    /// The number of columns of each; empty where devices send rows.
    pub widths: &'c [usize],
    /// The receiver of the sums.
    pub take: &'c mut TakeGram<'c>,
}
