//! Executes a run: the sweep over the layers, the loader that reads ahead, the layers of a generating model, hidden states in
//! RAM or on disk, the devices that compute, and the measurement of time and memory.
//!
//! | file | story |
//! | --- | --- |
//! | `sweep` | the loop over the layers |
//! | `layer_source`, `loader`, `layer_store` | a layer that is read; layers read ahead; the layers of a generating model |
//! | `hidden_states`, `spill` | the samples between two layers; files that go with the process |
//! | `compute`, `pass` | a pass of all samples through a layer, on the CPU and on GPUs |
//! | `blocks` | blocks of samples: the order of large sums |
//! | `one_sample` | a pass of a single sample, forwards or backwards, for trainings |
//! | `device_worker`, `ledger` | a device: the fallback ladder of a unit of work, and the account of the memory |
//! | `share` | the samples of a rank |
//! | `ordered_sums` | sums of gradients over ranks, in a fixed order |
//! | `engine` | the arithmetic of a device |
//! | `devices` | the opened devices of a plan |
//! | `clock`, `memory` | measured time and memory |
//! | `rank_reads` | layers that every rank reads, or that the first rank reads for all |
//! | `resident_set` | measured memory where the system has no `/proc` |

pub mod blocks;
pub mod clock;
pub mod compute;
pub mod device_worker;
pub mod devices;
pub mod engine;
pub mod hidden_states;
pub mod layer_source;
pub mod layer_store;
pub mod ledger;
pub mod loader;
pub mod memory;
mod one_sample;
mod ordered_sums;
mod pass;
mod rank_reads;
#[cfg(any(test, not(target_os = "linux")))]
mod resident_set;
pub mod share;
mod spill;
pub mod sweep;

pub use clock::{Clock, Reporter};
pub use compute::{Accumulation, Compute, GramsOnDevices, SweepReport};
pub use devices::{Devices, Simulation};
pub use hidden_states::{HiddenStates, PackedSamples};
pub use layer_source::LayerSource;
pub use layer_store::LayerStore;
pub use loader::LayerLoader;
pub use ordered_sums::{OrderedSums, gathered};
pub use pass::ResultOrder;
pub use rank_reads::bytes_on_the_way;
pub use share::SampleShare;
pub use spill::{check_spill_folder, random, spill_file};
pub use sweep::{Editor, Finished, Passenger, Side, Sweep};
