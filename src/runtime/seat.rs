//! The ladder: how one unit of work is done on a device that may have less memory than was planned.
//!
//! A unit is a matrix that is copied, a sample that passes a layer, a window at the head. Its results count only once it is whole.
//!
//! ```text
//! reserve what the unit takes, do it
//!   out of memory → give unused memory back, wait for the device, once more
//!   out of memory → in smaller pieces, halved until nothing is left to halve
//!   out of memory → this unit on the CPU; the next one tries the device again
//!   three units in a row → cut so that what is free now is enough; where nothing is, the device rests until the next layer
//! ```
//!
//! A reservation the [`Ledger`] refuses and an allocation the device refuses are one event. Any other error ends the run. Hidden
//! states rest in host memory anyway, so there is nothing of them to evict.

use anyhow::{Context, Result};

use super::engine::{Engine, OutOfMemory};
use super::ledger::{Ledger, Refused};
use crate::bytes::ByteSize;
use crate::linalg::Weight;
use crate::model::head::HeadChunk;
use crate::model::on_device::{CONTEXT, Cut, Seen};
use crate::model::{DecoderLayer, ModelConfig, Observer, Projection};
use crate::run::fallback::{DeviceMemoryReport, FallOutcome, FallReport};
use crate::run::{Event, Events};
use candle_core::Tensor;

/// Units in a row that may fall to the CPU before the work is cut anew.
const FALLS_BEFORE_REPLAN: u32 = 3;

/// Of what is free, how much a new cut may use.
const REPLANNED_SHARE: f64 = 0.9;

/// What of the model is on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loaded {
    Nothing,
    /// A layer of a revision.
    Layer(usize, u64),
    /// The rows of the head from this one on.
    Head(usize),
}

/// A device at work: its engine, its account, and how its work is cut up.
pub struct Seat {
    /// `cuda:0`.
    device: String,
    engine: Box<dyn Engine>,
    ledger: Ledger,
    cut: Cut,
    loaded: Loaded,
    /// What did not fit; it is not tried again.
    failed: Loaded,
    loaded_bytes: ByteSize,
    /// Reserved for a layer that is copied ahead.
    ahead: ByteSize,
    seqlen: usize,
    falls_in_a_row: u32,
    /// Nothing fits any more until weights are exchanged.
    rests: bool,
    falls: Vec<FallReport>,
}

impl Seat {
    /// A device that holds nothing yet.
    ///
    /// # Arguments
    /// * `ahead`: what of its memory is for a layer that is copied while another one is in use
    pub fn new(
        device: String,
        engine: Box<dyn Engine>,
        mut ledger: Ledger,
        cut: Cut,
        seqlen: usize,
        ahead: ByteSize,
    ) -> Self {
        ledger.keep(ahead);
        Self {
            ahead,
            device,
            engine,
            ledger,
            cut,
            loaded: Loaded::Nothing,
            failed: Loaded::Nothing,
            loaded_bytes: ByteSize::ZERO,
            seqlen,
            falls_in_a_row: 0,
            rests: false,
            falls: Vec::new(),
        }
    }

    /// Takes a layer up, if it is not there already. Whether it is there now: a matrix that does not fit leaves the whole layer to
    /// the CPU.
    ///
    /// # Errors
    /// When the device fails for another reason than lack of memory.
    pub(super) fn take_layer(
        &mut self,
        layer: &DecoderLayer,
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<bool> {
        let wanted = Loaded::Layer(layer.index(), layer.revision());
        if self.loaded == wanted {
            return Ok(!self.rests);
        }
        if self.failed == wanted {
            return Ok(false);
        }
        self.exchange();
        self.failed = wanted;
        let element = self.engine.element();
        let norms = ByteSize::of(2 * config.hidden_size, element);
        let cast = |projection: Projection, elements: usize| match layer.linear(projection).weight()
        {
            Weight::Held(matrix) => cast_bytes(elements, matrix.dtype().bytes(), element),
            Weight::AtRest(_) => ByteSize::ZERO,
        };
        let name = format!("model.layers.{}", layer.index());
        let begun = self.upload(
            &format!("{name} (norms)"),
            norms,
            ByteSize::ZERO,
            events,
            |engine| engine.begin(layer),
        )?;
        if !begun {
            return Ok(false);
        }
        for projection in Projection::ALL {
            let (rows, columns) = projection.shape(config);
            let bytes = ByteSize::of(rows * columns, element);
            let unit = format!("{} (upload)", projection.full_name(layer.index()));
            let cast = cast(projection, rows * columns);
            if !self.upload(&unit, bytes, cast, events, |engine| {
                engine.take_up(layer, projection)
            })? {
                return Ok(false);
            }
        }
        (self.loaded, self.failed) = (wanted, Loaded::Nothing);
        Ok(true)
    }

    /// Takes some rows of the head up; as [`Seat::take_layer`].
    ///
    /// # Errors
    /// When the device fails for another reason than lack of memory.
    pub(super) fn take_head(
        &mut self,
        chunk: &HeadChunk<'_>,
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<bool> {
        let wanted = Loaded::Head(chunk.rows.start);
        if self.loaded == wanted {
            return Ok(!self.rests);
        }
        if self.failed == wanted {
            return Ok(false);
        }
        self.exchange();
        self.failed = wanted;
        // No layer follows.
        self.ledger.give_back(std::mem::take(&mut self.ahead));
        let bytes = ByteSize::of(
            (chunk.rows.len() + 1) * config.hidden_size,
            self.engine.element(),
        );
        let stored = chunk.stored_bytes();
        let cast = cast_bytes(
            chunk.rows.len() * config.hidden_size,
            stored,
            self.engine.element(),
        );
        let taken = self.upload("lm_head (upload)", bytes, cast, events, |engine| {
            engine.begin_head(chunk)
        })?;
        if taken {
            (self.loaded, self.failed) = (wanted, Loaded::Nothing);
        }
        Ok(taken)
    }

    /// A layer's turn has come: the one before goes, and its copy, where there is one, makes room for that of the next.
    pub(super) fn layer_begins(&mut self) {
        self.exchange();
        self.engine.adopt();
    }

    /// Drops what is on the device. What had to be cut small stays so: memory that was short once is likely to be so again.
    fn exchange(&mut self) {
        self.engine.drop_weights();
        self.ledger.give_back(self.loaded_bytes);
        self.loaded_bytes = ByteSize::ZERO;
        self.loaded = Loaded::Nothing;
        self.falls_in_a_row = 0;
        self.rests = false;
    }

    /// Copies something that stays, `cast` being what it takes on the way; what came before it goes where it does not fit.
    fn upload(
        &mut self,
        unit: &str,
        bytes: ByteSize,
        cast: ByteSize,
        events: &dyn Events,
        mut copy: impl FnMut(&mut dyn Engine) -> Result<()>,
    ) -> Result<bool> {
        let done = self.attempt(unit, events, false, &|_| bytes + cast, &mut |engine, _| {
            copy(engine)
        })?;
        if done.is_some() {
            // The attempt gave its reservation back, and what it copied stays.
            self.ledger.keep(bytes);
            self.loaded_bytes = self.loaded_bytes + bytes;
            return Ok(true);
        }
        self.engine.drop_weights();
        self.ledger.give_back(self.loaded_bytes);
        self.loaded_bytes = ByteSize::ZERO;
        Ok(false)
    }

    /// Passes one sample through the layer that is there. `None` leaves it to the CPU.
    ///
    /// # Errors
    /// When the device fails for another reason than lack of memory.
    pub(super) fn forward(
        &mut self,
        phase: &str,
        sample: usize,
        layer: &DecoderLayer,
        state: &Tensor,
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<Option<Tensor>> {
        let unit = unit_name(layer, phase, sample);
        let bytes = self.pass_bytes(config);
        self.attempt(&unit, events, true, &bytes, &mut |engine, cut| {
            engine.forward(layer, state, cut)
        })
    }

    /// Observes one sample in the layer that is there, with an observer of its own. `None` leaves it to the CPU.
    ///
    /// # Errors
    /// When the device fails for another reason than lack of memory.
    pub(super) fn capture<O: Observer>(
        &mut self,
        sample: usize,
        layer: &DecoderLayer,
        state: &Tensor,
        new: &(dyn Fn(usize) -> O + Sync),
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<Option<O>> {
        let unit = unit_name(layer, "calibrate", sample);
        let bytes = self.pass_bytes(config);
        self.attempt(&unit, events, true, &bytes, &mut |engine, cut| {
            // A new one for each attempt: what a failed one saw does not count.
            let mut observer = new(sample);
            engine.capture(layer, state, cut, &mut observer)?;
            Ok(observer)
        })
    }

    /// Shows one window to the rows of the head that are there. `None` leaves it to the CPU.
    ///
    /// # Errors
    /// When the device fails for another reason than lack of memory.
    pub(super) fn see(
        &mut self,
        window: usize,
        chunk: &HeadChunk<'_>,
        state: &Tensor,
        tokens: &[u32],
        config: &ModelConfig,
        events: &dyn Events,
    ) -> Result<Option<Vec<Seen>>> {
        let unit = format!("lm_head (window {window})");
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let config = config.clone();
        let rows = chunk.rows.len();
        let bytes = move |cut: &Cut| cut.head_bytes(&config, seqlen, rows, element);
        self.attempt(&unit, events, true, &bytes, &mut |engine, cut| {
            engine.see(chunk, state, tokens, cut)
        })
    }

    fn pass_bytes(&self, config: &ModelConfig) -> impl Fn(&Cut) -> ByteSize + use<> {
        let (seqlen, element) = (self.seqlen, self.engine.element());
        let config = config.clone();
        move |cut| cut.pass_bytes(&config, seqlen, element)
    }

    /// The ladder of the file's first lines.
    fn attempt<R>(
        &mut self,
        unit: &str,
        events: &dyn Events,
        can_be_cut: bool,
        bytes: &dyn Fn(&Cut) -> ByteSize,
        work: &mut dyn FnMut(&mut dyn Engine, &Cut) -> Result<R>,
    ) -> Result<Option<R>> {
        if self.rests {
            return Ok(None);
        }
        self.ledger.begin_unit();
        let mut cut = self.cut;
        let mut refused: Option<Refused> = None;
        let mut outcome = FallOutcome::Retried;
        loop {
            let needed = bytes(&cut);
            let result = match self.ledger.reserve(needed) {
                Err(refused) => Err(refused.into()),
                Ok(()) => {
                    let result = work(&mut *self.engine, &cut);
                    self.ledger.give_back(needed);
                    result
                }
            };
            let error = match result {
                Ok(done) => {
                    if let Some(refused) = refused {
                        self.report(unit, refused, outcome, events);
                    }
                    self.cut = cut;
                    self.falls_in_a_row = 0;
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
                OutOfMemory::Device => Refused {
                    needed,
                    free: self.observed_free(),
                },
            };
            refused.get_or_insert(by);
            drop(error);
            let device = self.device.clone();
            self.engine
                .release()
                .with_context(|| format!("on {device}, which was out of memory: {unit}"))?;
            // What was kept for a layer copied ahead is free for this one.
            self.ledger.give_back(std::mem::take(&mut self.ahead));
            if is_first {
                continue;
            }
            match cut.smaller() {
                Some(smaller) if can_be_cut => {
                    (cut, outcome) = (smaller, FallOutcome::Smaller);
                }
                _ => break,
            }
        }
        if let Some(refused) = refused {
            self.report(unit, refused, FallOutcome::Cpu, events);
        }
        self.falls_in_a_row += 1;
        if can_be_cut && self.falls_in_a_row >= FALLS_BEFORE_REPLAN {
            self.replan(bytes, events);
        }
        Ok(None)
    }

    /// What the device has left, by its own count and by the ledger's.
    fn observed_free(&self) -> ByteSize {
        let free = self.ledger.free();
        self.engine
            .memory()
            .map_or(free, |memory| memory.free.min(free))
    }

    /// The largest cut that fits what is free now; without one, the device rests until its weights are exchanged.
    fn replan(&mut self, bytes: &dyn Fn(&Cut) -> ByteSize, events: &dyn Events) {
        let free = self.observed_free();
        let usable = ByteSize((free.0 as f64 * REPLANNED_SHARE) as u64);
        let fitting = std::iter::successors(Some(self.cut), Cut::smaller)
            .skip(1)
            .find(|cut| bytes(cut) <= usable);
        self.falls_in_a_row = 0;
        let device = &self.device;
        match fitting {
            Some(cut) => {
                events.warn(format!(
                    "{device}: {FALLS_BEFORE_REPLAN} units in a row were out of memory, {free} are free: work is cut smaller from now on"
                ));
                self.cut = cut;
            }
            None => {
                events.warn(format!(
                    "{device}: {FALLS_BEFORE_REPLAN} units in a row were out of memory and {free} are free: the CPU computes until other weights are taken up"
                ));
                self.rests = true;
            }
        }
    }

    fn report(&mut self, unit: &str, by: Refused, outcome: FallOutcome, events: &dyn Events) {
        let report = FallReport {
            device: self.device.clone(),
            unit: unit.to_string(),
            needed: by.needed,
            free: by.free,
            budget: self.ledger.capacity(),
            outcome,
        };
        events.emit(Event::Fallback(report.clone()));
        self.falls.push(report);
    }

    /// Its name.
    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// Every unit it had no memory for at first.
    pub(super) fn take_falls(&mut self) -> Vec<FallReport> {
        std::mem::take(&mut self.falls)
    }

    /// Its engine.
    pub(super) fn engine(&self) -> &dyn Engine {
        &*self.engine
    }

    /// What it held at most, and how many units it was given.
    pub(super) fn memory_report(&self) -> DeviceMemoryReport {
        let memory = self.engine.memory();
        DeviceMemoryReport {
            device: self.device.clone(),
            name: self.engine.name(),
            units: self.ledger.units(),
            reserved_by_plan: self.ledger.peak(),
            context: CONTEXT,
            peak_allocated: memory.map(|memory| memory.peak_allocated),
            peak_reserved: memory.map(|memory| memory.peak_reserved),
        }
    }
}

/// What a copy holds beside its result where it is stored in another dtype than that of the arithmetic.
fn cast_bytes(elements: usize, stored: usize, element: usize) -> ByteSize {
    match stored == element {
        true => ByteSize::ZERO,
        false => ByteSize::of(elements, stored),
    }
}

fn unit_name(layer: &DecoderLayer, phase: &str, sample: usize) -> String {
    format!("model.layers.{} ({phase}, sample {sample})", layer.index())
}
