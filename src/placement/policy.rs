//! [`Policy`]: the devices that may be used, and the user's choices.

use super::budget::Budget;
use super::device_map::DeviceMap;
use super::inventory::Inventory;
use crate::bytes::ByteSize;
use crate::run::HiddenStatesStorage;

/// The devices that may be used, and the choices made by the user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// `--max-memory`.
    pub budget: Budget,
    /// `--device-map`.
    pub map: DeviceMap,
    /// Only the CPU computes.
    pub cpu_only: bool,
    /// Only this GPU computes.
    pub only_gpu: Option<usize>,
    /// The plan fails where no GPU can compute.
    pub must_use_gpu: bool,
    /// The place of hidden states between layers; `None` leaves it to the plan.
    pub storage: Option<HiddenStatesStorage>,
}

/// The share of the free memory that a plan uses without a budget; the rest is for other programs.
pub const USABLE: f64 = 0.8;

/// Returns the usable bytes of the process: the budget, or a part of the available memory. `None` where neither is known.
pub fn cpu_budget(inventory: &Inventory, budget: &Budget) -> Option<ByteSize> {
    budget.cpu().or_else(|| {
        let available = inventory.cpu.memory?;
        Some(ByteSize((available.0 as f64 * USABLE) as u64))
    })
}
