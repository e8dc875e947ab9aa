//! Planning on numbers alone: the memory of a machine, the part that may be used, the memory of a run, and the fastest option that fits.
//!
//! | file | story |
//! | --- | --- |
//! | `inventory` | memory and rates of this machine, or of a machine described in a file |
//! | `system_memory` | the memory of this machine where the system has no `/proc` |
//! | `budget` | `--max-memory` |
//! | `device_map` | `--device-map` |
//! | `policy` | the devices that may be used, and the user's choices |
//! | `workload` | a run in numbers |
//! | `machine` | the devices that may compute, and the layers on them |
//! | `planner` | the fastest option that fits |
//! | `rate` | rates of networks and of storage, as flags give them |
//! | `residency` | layers of a generating model that stay in memory |

pub mod budget;
pub mod device_map;
pub mod inventory;
mod machine;
pub mod planner;
mod policy;
pub mod rate;
pub mod residency;
#[cfg(any(test, not(target_os = "linux")))]
mod system_memory;
pub mod workload;

pub use budget::Budget;
pub use device_map::{Device, DeviceMap};
pub use inventory::Inventory;
pub use machine::usable_gpus;
pub use planner::{PlanFailure, Shortage, plan};
pub use policy::{Policy, USABLE, cpu_budget};
pub use rate::Rate;
pub use residency::{Residency, Sizes};
pub use workload::{Demand, ExecutionOption, PhaseMemory, Processors, Work, Workload};
