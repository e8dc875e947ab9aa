//! [`MergeDevice`]: a device that computes formulas of the merge pass, and the ladder for the moments when it has too little memory.
//!
//! The CPU reads, measures and trims; the device gets the rows of a linear and computes the elementwise end of the merge.
//!
//! ```text
//! reserve the memory of the rows, compute them
//!   out of memory → give unused memory back, once more
//!   out of memory → half of the rows at a time, down to one
//!   out of memory → the rest of this linear on the CPU; the next linear tries the device again
//!   three linears in a row → half of the elements at a time from now on
//! ```
//!
//! Neither the number of rows at a time nor the device changes a bit of the result. An error that is not out of memory ends the merge.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};

use crate::bytes::ByteSize;
use crate::merging::methods::{Formula, Mixer, OnCpu};
use crate::run::fallback::{DeviceMemoryReport, FallbackOutcome, FallbackReport};
use crate::run::{Event, Events};
use crate::runtime::devices::DeviceAccount;
use crate::runtime::engine::OutOfMemory;
use crate::runtime::ledger::Refused;

/// Linears in a row that the CPU computes before the device gets fewer elements at a time.
const FALLBACKS_BEFORE_HALVING: u32 = 3;

/// Tensors of the size of the rows that exist at a time beside the copies of sources and their votes.
const INTERMEDIATE: usize = 8;

/// A device of a merge.
pub struct MergeDevice {
    name: String,
    state: Mutex<DeviceState>,
}

/// The state of a device, which its workers share.
struct DeviceState {
    account: DeviceAccount,
    mixer: Box<dyn Mixer + Send>,
    /// Elements that are computed at a time, at most.
    elements: usize,
    fallbacks_in_a_row: u32,
    fallbacks: Vec<FallbackReport>,
}

impl MergeDevice {
    /// A device that computes at most `elements` elements of a tensor at a time, by `mixer`.
    pub fn new(account: DeviceAccount, mixer: Box<dyn Mixer + Send>, elements: usize) -> Self {
        Self {
            name: account.name.clone(),
            state: Mutex::new(DeviceState {
                account,
                mixer,
                elements,
                fallbacks_in_a_row: 0,
                fallbacks: Vec::new(),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, DeviceState> {
        // A thread that panics ends the process.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All units that were out of memory at first, and the memory that the device had in use.
    pub fn report(self) -> (Vec<FallbackReport>, DeviceMemoryReport) {
        let state = self.state.into_inner();
        let state = state.unwrap_or_else(PoisonError::into_inner);
        (state.fallbacks, state.account.memory_report())
    }
}

/// The bytes of a formula's rows on a device.
fn bytes(formula: &Formula<'_>, rows: usize) -> ByteSize {
    let tensors = 2 * formula.sources() + INTERMEDIATE;
    ByteSize::of(rows * formula.columns() * tensors, size_of::<f32>())
}

/// The mixer of a linear.
pub(super) struct OnDevice<'a> {
    pub(super) device: &'a MergeDevice,
    /// The linear, for messages: `model.layers.7.mlp.up_proj`.
    pub(super) linear: &'a str,
    pub(super) events: &'a dyn Events,
    /// The CPU computes the rest.
    pub(super) is_left: bool,
}

impl Mixer for OnDevice<'_> {
    fn mix(&mut self, formula: &Formula<'_>, merged: &mut [f32]) -> Result<()> {
        if self.is_left {
            return OnCpu.mix(formula, merged);
        }
        let columns = formula.columns();
        let rows = merged.len() / columns;
        let done = self.device.state().unit(self, formula, merged)?;
        if done == rows {
            return Ok(());
        }
        self.is_left = true;
        OnCpu.mix(&formula.rows(done..rows), &mut merged[done * columns..])
    }
}

impl DeviceState {
    /// Computes the rows of a formula as far as the device has memory for them, and returns their number.
    fn unit(
        &mut self,
        of: &OnDevice<'_>,
        formula: &Formula<'_>,
        merged: &mut [f32],
    ) -> Result<usize> {
        let columns = formula.columns();
        let rows = merged.len() / columns;
        let mut step = (self.elements / columns).clamp(1, rows);
        let mut refused: Option<Refused> = None;
        let mut outcome = FallbackOutcome::Retried;
        let mut done = 0;
        self.account.ledger.begin_unit();
        while done < rows {
            let next = done..rows.min(done + step);
            let needed = bytes(formula, next.len());
            let out = &mut merged[next.start * columns..next.end * columns];
            let Err(error) = self.compute(&formula.rows(next.clone()), needed, out) else {
                done = next.end;
                continue;
            };
            let Some(cause) = OutOfMemory::of(&error) else {
                return Err(error).with_context(|| format!("on {}: {}", of.device.name, of.linear));
            };
            drop(error);
            let is_first = refused.is_none();
            refused.get_or_insert(match cause {
                OutOfMemory::Ledger(refused) => refused,
                OutOfMemory::Device => Refused { needed, free: self.account.ledger.free() },
            });
            self.account.release().with_context(|| {
                let name = &of.device.name;
                format!("on {name}, which was out of memory: {}", of.linear)
            })?;
            if is_first {
                continue;
            }
            if step == 1 {
                outcome = FallbackOutcome::Cpu;
                break;
            }
            (step, outcome) = (step.div_ceil(2), FallbackOutcome::Smaller);
        }
        if let Some(by) = refused {
            self.report(of, by, outcome);
        }
        if outcome == FallbackOutcome::Cpu {
            self.fell_back(of);
        } else {
            self.fallbacks_in_a_row = 0;
        }
        Ok(done)
    }

    fn compute(
        &mut self,
        formula: &Formula<'_>,
        needed: ByteSize,
        merged: &mut [f32],
    ) -> Result<()> {
        self.account.ledger.reserve(needed)?;
        let result = self.mixer.mix(formula, merged);
        self.account.ledger.give_back(needed);
        result
    }

    fn fell_back(&mut self, of: &OnDevice<'_>) {
        self.fallbacks_in_a_row += 1;
        if self.fallbacks_in_a_row < FALLBACKS_BEFORE_HALVING || self.elements == 1 {
            return;
        }
        self.fallbacks_in_a_row = 0;
        self.elements /= 2;
        of.events.warn(format!(
            "{}: {FALLBACKS_BEFORE_HALVING} linears in a row were out of memory: the next ones are computed {} elements at a time",
            of.device.name, self.elements
        ));
    }

    fn report(&mut self, of: &OnDevice<'_>, by: Refused, outcome: FallbackOutcome) {
        let report = FallbackReport {
            device: of.device.name.clone(),
            unit: of.linear.to_string(),
            needed: by.needed,
            free: by.free,
            budget: self.account.ledger.capacity(),
            outcome,
        };
        of.events.emit(Event::Fallback(report.clone()));
        self.fallbacks.push(report);
    }
}
