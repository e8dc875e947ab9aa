//! A device at work: the fallback ladder of a unit of work on a device with less memory than planned.
//!
//! A unit is a matrix that is copied, multiplied or scored, a sample that passes a layer, a block of samples whose Gram matrices the device
//! sums up, or a window at the head. Its results count only once it is whole.
//!
//! ```text
//! reserve the unit's memory, do it
//!   out of memory → give unused memory back, wait for the device, try once more
//!   out of memory → in smaller pieces, halved until no piece can be halved
//!   out of memory → this unit on the CPU; the next unit tries the device again
//!   three units in a row → smaller pieces that fit the free memory; if none fit, the device pauses until the next layer
//! ```
//!
//! A reservation that the [`Ledger`] refuses and an allocation that the device refuses count as the same event. An error
//! that is not lack of memory ends the run. Hidden states that stay on the device are planned there, and none are evicted.
//!
//! | file | contents |
//! | --- | --- |
//! | `weights` | a layer or the head on the device: copies, products of single matrices, and choices of their lowest scores |

mod weights;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::engine::{Engine, OutOfMemory};
use super::ledger::{Ledger, Refused};
use crate::bytes::ByteSize;
use crate::model::head::HeadChunk;
use crate::model::on_device::{
    CONTEXT, DeviceGrams, GramSums, LogSumExpPart, SampleSums, Tiling, take_work,
};
use crate::model::{DecoderLayer, LayerGradients, LinearId, ModelConfig, Observer};
use crate::run::fallback::{DeviceMemoryReport, DeviceWork, FallbackOutcome, FallbackReport};
use crate::run::{Event, Events, Phase};
use candle_core::Tensor;

/// Units in a row that the CPU computes before the device gets smaller pieces.
const FALLBACKS_BEFORE_REPLAN: u32 = 3;

/// The share of the free memory that new pieces may use.
const REPLANNED_SHARE: f64 = 0.9;

/// Weights on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loaded {
    Nothing,
    /// A layer, and its revision.
    Layer(usize, u64),
    /// Rows of the head, from this row on.
    Head(usize),
}

/// An opened device that computes layers.
pub struct WorkingDevice {
    /// Its name: `cuda:0`.
    pub name: String,
    /// Its arithmetic.
    pub engine: Box<dyn Engine>,
    /// The account of its memory.
    pub ledger: Ledger,
}

/// A device at work: its engine, the account of its memory, and the size of its pieces of work.
pub struct DeviceWorker<'a> {
    /// `cuda:0`.
    device: String,
    engine: Box<dyn Engine>,
    ledger: Ledger,
    cut: Tiling,
    config: Arc<ModelConfig>,
    seqlen: usize,
    events: &'a dyn Events,
    loaded: Loaded,
    /// The layer whose norms are loaded, and its base revision.
    begun: Option<(usize, u64)>,
    /// The revisions of its matrices that are loaded.
    matrices: BTreeMap<LinearId, u64>,
    loaded_bytes: ByteSize,
    /// Weights that did not fit. They are not tried again.
    failed: Loaded,
    /// Bytes reserved for a layer that is copied ahead.
    ahead: ByteSize,
    fallbacks_in_a_row: u32,
    /// Nothing fits until new weights are loaded, or until the Gram matrices are handed on.
    is_paused: bool,
    fallbacks: Vec<FallbackReport>,
    work: DeviceWork,
}

impl<'a> DeviceWorker<'a> {
    /// Creates a worker without weights.
    pub fn new(
        device: WorkingDevice,
        cut: Tiling,
        config: Arc<ModelConfig>,
        seqlen: usize,
        events: &'a dyn Events,
    ) -> Self {
        let WorkingDevice { name, engine, ledger } = device;
        Self {
            device: name,
            engine,
            ledger,
            cut,
            config,
            seqlen,
            events,
            loaded: Loaded::Nothing,
            begun: None,
            matrices: BTreeMap::new(),
            loaded_bytes: ByteSize::ZERO,
            failed: Loaded::Nothing,
            ahead: ByteSize::ZERO,
            fallbacks_in_a_row: 0,
            is_paused: false,
            fallbacks: Vec::new(),
            work: DeviceWork::default(),
        }
    }

    /// Reserves `bytes` for the next layer, which is copied while the current layer is in use.
    #[must_use]
    pub fn with_prefetch(mut self, bytes: ByteSize) -> Self {
        self.ledger.keep(bytes);
        self.ahead = bytes;
        self
    }

    /// Passes a sample through the loaded layer; `None` leaves the sample to the CPU.
    /// Fails on a device error that is not lack of memory.
    pub(super) fn forward(
        &mut self,
        phase: Phase,
        sample: usize,
        layer: &DecoderLayer,
        state: &Tensor,
    ) -> Result<Option<Tensor>> {
        let unit = unit_name(layer, phase, sample);
        let bytes = self.pass_bytes();
        self.attempt(&unit, true, &bytes, &mut |engine, cut| engine.forward(layer, state, cut))
    }

    /// Waits for the samples whose states stay on the device.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.engine.wait().with_context(|| format!("on {}", self.device))
    }

    /// Passes a gradient back through the loaded layer; `None` leaves the sample to the CPU, with `gradients` unchanged.
    /// Fails on a device error that is not lack of memory.
    pub(super) fn backward(
        &mut self,
        sample: usize,
        layer: &DecoderLayer,
        states: [&Tensor; 2],
        gradients: &mut LayerGradients,
    ) -> Result<Option<Tensor>> {
        let unit = unit_name(layer, Phase::Backward, sample);
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let (config, trained) = (Arc::clone(&self.config), gradients.sizes());
        let bytes = move |cut: &Tiling| cut.backward_bytes(&config, seqlen, element, trained);
        self.attempt(&unit, true, &bytes, &mut |engine, cut| {
            engine.backward(layer, states, gradients, cut)
        })
    }

    /// Adds the gradients of all samples that the device has computed for a layer.
    pub(super) fn collect_gradients(&mut self, gradients: &mut LayerGradients) -> Result<()> {
        let collected = self.engine.collect_gradients(gradients);
        collected.with_context(|| format!("on {}", self.device))
    }

    /// Observes samples in the loaded layer, each with a new observer; `None` leaves them to the CPU. The device sums up Gram matrices of
    /// inputs as wide as `grams` says: then the samples are a block, and [`DeviceWorker::keep_block`] or [`DeviceWorker::take_block`]
    /// follows.
    /// Fails on a device error that is not lack of memory.
    pub(super) fn capture<O: Observer>(
        &mut self,
        samples: Range<usize>,
        layer: &DecoderLayer,
        (state, grams): (&dyn Fn(usize) -> Result<Tensor>, &[usize]),
        new: &(dyn Fn(usize) -> O + Sync),
    ) -> Result<Option<Vec<(O, SampleSums)>>> {
        let unit = match samples.len() {
            0 | 1 => unit_name(layer, Phase::Calibrate, samples.start),
            _ => format!(
                "model.layers.{} (calibrate, samples {} to {})",
                layer.index(),
                samples.start,
                samples.end - 1
            ),
        };
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let (config, sums) = (Arc::clone(&self.config), DeviceGrams::bytes(grams));
        let bytes = |cut: &Tiling| sums + cut.capture_bytes(&config, seqlen, element, grams);
        self.attempt(&unit, true, &bytes, &mut |engine, cut| {
            // Each attempt has new observers and new sums, since a failed attempt does not count.
            engine.begin_block();
            let captured = samples.clone().map(|sample| {
                let mut observer = new(sample);
                let sums = engine.capture(layer, &state(sample)?, cut, &mut observer)?;
                Ok((observer, sums))
            });
            captured.collect()
        })
    }

    /// Adds the Gram matrices of a block to the sums of the blocks before it, which stay on the device. Returns whether all are added;
    /// [`DeviceWorker::take_kept`] and then [`DeviceWorker::take_block`] have the sums where they are not.
    /// Fails on a device error that is not lack of memory.
    pub(super) fn keep_block(
        &mut self,
        samples: &Range<usize>,
        layer: &DecoderLayer,
        grams: &[usize],
    ) -> Result<bool> {
        let bytes = DeviceGrams::bytes(grams) + DeviceGrams::adding_bytes(grams, 0);
        let last = samples.end.saturating_sub(1);
        let unit = format!(
            "model.layers.{} (calibrate, sums of samples {} to {last})",
            layer.index(),
            samples.start
        );
        let kept = self.attempt(&unit, false, &|_| bytes, &mut |engine, _| engine.keep_block());
        Ok(kept?.is_some())
    }

    /// The Gram matrices of the block that was observed last, as far as they were not kept.
    pub(super) fn take_block(&mut self) -> GramSums {
        self.engine.take_block()
    }

    /// The Gram matrices of the blocks that were kept. Without them, there is room for samples again.
    pub(super) fn take_kept(&mut self) -> GramSums {
        self.is_paused = false;
        self.engine.take_kept()
    }

    /// Computes a window's part of the log-sum-exp over the loaded rows of the head; `None` leaves the window to the CPU.
    /// Fails on a device error that is not lack of memory.
    pub(super) fn head_window(
        &mut self,
        window: usize,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
    ) -> Result<Option<Vec<LogSumExpPart>>> {
        let unit = format!("lm_head (window {window})");
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let config = Arc::clone(&self.config);
        let rows = chunk.rows.len();
        let bytes = move |cut: &Tiling| cut.head_bytes(&config, seqlen, rows, element);
        self.attempt(&unit, true, &bytes, &mut |engine, cut| {
            engine.head_window(chunk, state, tokens, cut)
        })
    }

    /// Computes loss and gradient of a sample in the loaded head, which is whole; `None` leaves the sample to the CPU.
    /// Fails on a device error that is not lack of memory.
    pub(super) fn head_gradient(
        &mut self,
        sample: usize,
        chunk: &HeadChunk<'_>,
        (state, targets, scale): (&Tensor, &[Option<u32>], f32),
    ) -> Result<Option<(f64, Tensor)>> {
        let unit = format!("lm_head (backward, sample {sample})");
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let config = Arc::clone(&self.config);
        let bytes = move |cut: &Tiling| cut.head_backward_bytes(&config, seqlen, element);
        self.attempt(&unit, true, &bytes, &mut |engine, cut| {
            engine.head_gradient(chunk, state, targets, scale, cut)
        })
    }

    fn pass_bytes(&self) -> impl Fn(&Tiling) -> ByteSize + use<> {
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let config = Arc::clone(&self.config);
        move |cut| cut.pass_bytes(&config, seqlen, element)
    }

    /// Does a unit by the ladder of the file's first lines; `None` leaves it to the CPU.
    fn attempt<R>(
        &mut self,
        unit: &str,
        can_be_cut: bool,
        bytes: &dyn Fn(&Tiling) -> ByteSize,
        work: &mut dyn FnMut(&mut dyn Engine, &Tiling) -> Result<R>,
    ) -> Result<Option<R>> {
        if self.is_paused {
            return Ok(None);
        }
        self.ledger.begin_unit();
        let mut cut = self.cut;
        let mut refused: Option<Refused> = None;
        let mut outcome = FallbackOutcome::Retried;
        loop {
            let needed = bytes(&cut);
            let result = match self.ledger.reserve(needed) {
                Err(refused) => Err(refused.into()),
                Ok(()) => {
                    let result = work(&mut *self.engine, &cut);
                    self.count_work();
                    self.ledger.give_back(needed);
                    result
                }
            };
            let error = match result {
                Ok(done) => {
                    if let Some(refused) = refused {
                        self.report(unit, refused, outcome);
                    }
                    self.cut = cut;
                    self.fallbacks_in_a_row = 0;
                    return Ok(Some(done));
                }
                Err(error) => error,
            };
            let Some(cause) = OutOfMemory::of(&error) else {
                return Err(error).with_context(|| format!("on {}: {unit}", self.device));
            };
            let is_first = refused.is_none();
            let by = match cause {
                OutOfMemory::Ledger(refused) => refused,
                OutOfMemory::Device => Refused { needed, free: self.observed_free() },
            };
            refused.get_or_insert(by);
            drop(error);
            let device = self.device.clone();
            self.engine
                .release()
                .with_context(|| format!("on {device}, which was out of memory: {unit}"))?;
            // The memory of a layer that was copied ahead is free for this unit.
            self.ledger.give_back(std::mem::take(&mut self.ahead));
            if is_first {
                continue;
            }
            match cut.smaller() {
                Some(smaller) if can_be_cut => {
                    (cut, outcome) = (smaller, FallbackOutcome::Smaller);
                }
                _ => break,
            }
        }
        if let Some(refused) = refused {
            self.report(unit, refused, FallbackOutcome::Cpu);
        }
        self.fallbacks_in_a_row += 1;
        if can_be_cut && self.fallbacks_in_a_row >= FALLBACKS_BEFORE_REPLAN {
            self.replan(bytes);
        }
        Ok(None)
    }

    /// Returns the free bytes: the smaller of the device's count and the ledger's.
    fn observed_free(&self) -> ByteSize {
        let free = self.ledger.free();
        self.engine.memory().map_or(free, |memory| free.min(memory.free + self.engine.grams_held()))
    }

    /// Chooses the largest pieces that fit the free memory. Where none fit, the device pauses until new weights are loaded.
    fn replan(&mut self, bytes: &dyn Fn(&Tiling) -> ByteSize) {
        let free = self.observed_free();
        let usable = ByteSize((free.0 as f64 * REPLANNED_SHARE) as u64);
        let fitting = std::iter::successors(Some(self.cut), Tiling::smaller)
            .skip(1)
            .find(|cut| bytes(cut) <= usable);
        self.fallbacks_in_a_row = 0;
        let device = &self.device;
        match fitting {
            Some(cut) => {
                self.events.warn(format!(
                    "{device}: {FALLBACKS_BEFORE_REPLAN} units in a row were out of memory, {free} are free: the next units are smaller"
                ));
                self.cut = cut;
            }
            None => {
                self.events.warn(format!(
                    "{device}: {FALLBACKS_BEFORE_REPLAN} units in a row were out of memory and {free} are free: the CPU computes until other weights are loaded"
                ));
                self.is_paused = true;
            }
        }
    }

    fn report(&mut self, unit: &str, by: Refused, outcome: FallbackOutcome) {
        let report = FallbackReport {
            device: self.device.clone(),
            unit: unit.to_string(),
            needed: by.needed,
            free: by.free,
            budget: self.ledger.capacity(),
            outcome,
        };
        self.events.emit(Event::Fallback(report.clone()));
        self.fallbacks.push(report);
    }

    /// Counts the work that this thread has given to the device since the last call.
    pub(super) fn count_work(&mut self) {
        self.work += take_work();
    }

    pub(super) fn name(&self) -> &String {
        &self.device
    }

    /// Takes the reports of all units that were out of memory at first.
    pub(super) fn take_fallbacks(&mut self) -> Vec<FallbackReport> {
        std::mem::take(&mut self.fallbacks)
    }

    pub(super) fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// Reports the peaks of the device's memory, and its units of work.
    pub(super) fn memory_report(&self) -> DeviceMemoryReport {
        let memory = self.engine.memory();
        DeviceMemoryReport {
            device: self.device.clone(),
            name: self.engine.name(),
            units: self.ledger.units(),
            work: self.work,
            reserved_by_plan: self.ledger.peak(),
            context: CONTEXT,
            peak_allocated: memory.map(|memory| memory.peak_allocated),
            peak_reserved: memory.map(|memory| memory.peak_reserved),
        }
    }
}

fn unit_name(layer: &DecoderLayer, phase: Phase, sample: usize) -> String {
    format!("model.layers.{} ({phase}, sample {sample})", layer.index())
}
