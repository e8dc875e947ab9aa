//! Planning on numbers alone: what a machine has, what may be used of it, what a job asks, and the fastest way that fits.
//!
//! | file | story |
//! | --- | --- |
//! | `inventory` | what this machine has, or another one described in a file |
//! | `budget` | `--max-memory` |
//! | `device_map` | `--device-map` |
//! | `workload` | what a job asks, as numbers |
//! | `planner` | the fastest way that fits |
//! | `residency` | which layers of a writing model stay in memory |

pub mod budget;
pub mod device_map;
pub mod inventory;
pub mod planner;
pub mod residency;
pub mod workload;

pub use budget::Budget;
pub use device_map::{Device, DeviceMap};
pub use inventory::Inventory;
pub use planner::{PlanFailure, Policy, Shortage, plan};
pub use residency::{Residency, Sizes};
pub use workload::{Need, Way, Work, Workload};
