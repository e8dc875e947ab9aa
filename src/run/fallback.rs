//! What happened where a device had less memory than was planned.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// One unit of work that a device had no memory for at first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FallReport {
    /// `cuda:0`.
    pub device: String,
    /// The unit: `model.layers.7.mlp.up_proj (upload)`, `model.layers.7 (calibrate, sample 12)`, `lm_head (window 3)`.
    pub unit: String,
    /// What it was to take.
    pub needed: ByteSize,
    /// What the device had left.
    pub free: ByteSize,
    /// What may be used of it.
    pub budget: ByteSize,
    /// How it went on.
    pub outcome: FallOutcome,
}

/// How a unit was done after all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FallOutcome {
    /// As planned, once memory that was not in use had been given back.
    Retried,
    /// In smaller pieces.
    Smaller,
    /// On the CPU.
    Cpu,
}

impl FallOutcome {
    /// How it went on, for a table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Retried => "retried",
            Self::Smaller => "smaller pieces",
            Self::Cpu => "on the CPU",
        }
    }
}

impl fmt::Display for FallReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            unit,
            needed,
            free,
            budget,
            outcome,
        } = self;
        write!(
            formatter,
            "GPU out of memory on {unit}: {needed} needed, {free} free of {budget} on {device}, {}",
            match outcome {
                FallOutcome::Retried => "done after giving unused memory back",
                FallOutcome::Smaller => "using smaller pieces",
                FallOutcome::Cpu => "using CPU",
            }
        )
    }
}

/// The most a device held, as its own counters have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemoryReport {
    /// `cuda:0`.
    pub device: String,
    /// As its driver calls it.
    pub name: String,
    /// Units of work it was given.
    pub units: u64,
    /// What was reserved at once, at most, by this program's own account, the context included.
    pub reserved_by_plan: ByteSize,
    /// What was planned for the context, which the pool does not count.
    pub context: ByteSize,
    /// The most the driver's pool held in allocations; absent where it has no such counter.
    pub peak_allocated: Option<ByteSize>,
    /// The most the driver's pool had from the device.
    pub peak_reserved: Option<ByteSize>,
}
