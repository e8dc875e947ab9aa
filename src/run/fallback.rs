//! Records of devices: units of work that a device had no memory for, its memory, and its work.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;

/// A unit of work that a device had no memory for at first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FallbackReport {
    /// `cuda:0`.
    pub device: String,
    /// The unit: `model.layers.7.mlp.up_proj (upload)`, `model.layers.7 (calibrate, sample 12)`, `lm_head (window 3)`.
    pub unit: String,
    /// The bytes that the unit needs.
    pub needed: ByteSize,
    /// The free bytes of the device.
    pub free: ByteSize,
    /// The usable bytes of the device.
    pub budget: ByteSize,
    /// The outcome.
    pub outcome: FallbackOutcome,
}

/// The way in which a unit was done in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FallbackOutcome {
    /// As planned, after unused memory was given back.
    Retried,
    /// In smaller pieces.
    Smaller,
    /// On the CPU.
    Cpu,
}

impl FallbackOutcome {
    /// The outcome, in words.
    pub fn name(self) -> &'static str {
        match self {
            Self::Retried => "retried",
            Self::Smaller => "smaller pieces",
            Self::Cpu => "on the CPU",
        }
    }
}

impl fmt::Display for FallbackReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, unit, needed, free, budget, outcome } = self;
        write!(
            formatter,
            "GPU out of memory on {unit}, {} ({needed} needed, {free} free of {budget} on {device})",
            match outcome {
                FallbackOutcome::Retried => "done after giving unused memory back",
                FallbackOutcome::Smaller => "using smaller pieces",
                FallbackOutcome::Cpu => "using CPU",
            }
        )
    }
}

/// The work that the host has given to a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceWork {
    /// Kernels and copies inside the device.
    pub launches: u64,
    /// Waits of the host for the device.
    pub waits: u64,
    /// Bytes from the host.
    pub uploaded: ByteSize,
    /// Bytes to the host.
    pub downloaded: ByteSize,
}

impl AddAssign for DeviceWork {
    fn add_assign(&mut self, more: Self) {
        self.launches += more.launches;
        self.waits += more.waits;
        self.uploaded = self.uploaded + more.uploaded;
        self.downloaded = self.downloaded + more.downloaded;
    }
}

/// The peak memory of a device, by its own counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemoryReport {
    /// `cuda:0`.
    pub device: String,
    /// The device's name as reported by the driver.
    pub name: String,
    /// Units of work that the device was given.
    pub units: u64,
    /// The work of passes and of their weights. Operators of trainings and of merges are not counted.
    #[serde(default)]
    pub work: DeviceWork,
    /// The peak of reservations in this program's own account, the context included.
    pub reserved_by_plan: ByteSize,
    /// The planned bytes of the context, which the driver's pool does not count.
    pub context: ByteSize,
    /// The peak of allocations from the driver's pool; absent without such a counter.
    pub peak_allocated: Option<ByteSize>,
    /// The peak of the pool's own memory.
    pub peak_reserved: Option<ByteSize>,
}
