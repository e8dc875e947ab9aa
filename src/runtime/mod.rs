//! Executes a run: the sweep over the layers, the loader that reads ahead, the layers of a model that writes, hidden states in
//! RAM or on disk, the devices that compute, and the measurement of time and memory.
//!
//! | file | story |
//! | --- | --- |
//! | `sweep` | the one loop over the layers |
//! | `loader`, `layer_store` | layers read ahead; layers that are passed again and again |
//! | `hidden_states` | the samples between two layers |
//! | `compute` | a pass of all samples through a layer, on the CPU and the devices beside it |
//! | `seat`, `ledger` | one device: the ladder a unit goes down when memory is out, and the account of that memory |
//! | `engine` | what a device computes with |
//! | `devices` | devices opened as a plan says |
//! | `clock`, `memory` | time and memory, measured |

pub mod clock;
pub mod compute;
pub mod devices;
pub mod engine;
pub mod hidden_states;
pub mod layer_store;
pub mod ledger;
pub mod loader;
pub mod memory;
pub mod seat;
pub mod sweep;

pub use clock::Clock;
pub use compute::Compute;
pub use devices::{Devices, Simulation};
pub use hidden_states::HiddenStates;
pub use layer_store::LayerStore;
pub use loader::LayerLoader;
pub use sweep::{Editor, Finished, Passenger, Side, Sweep, Swept};
