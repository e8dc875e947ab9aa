//! A run as plain records: its events, its plan, its state on disk, and its manifest.
//!
//! Nothing here computes or prints. Every other room may use these records.

pub mod allocation;
pub mod command_line;
pub mod events;
pub mod fallback;
pub mod generation;
pub mod grid;
pub mod inspection;
pub mod layer_drop;
pub mod manifest;
pub mod memory_settings;
pub mod merging;
mod meter;
pub mod phase;
pub mod plan;
pub mod profile;
pub mod pruning_record;
pub mod quantization;
pub mod recovery;
pub mod state;
pub mod verification;
pub mod width_drop;

pub use allocation::AllocationReport;
pub use events::{Event, Events, Silent, Stopped, Unfinished};
pub use fallback::FallbackReport;
pub use generation::GenerationReport;
pub use inspection::Inspection;
pub use layer_drop::LayerDropReport;
pub use manifest::{Manifest, TextProtocol};
pub use memory_settings::{MemorySettings, WeightsHeld};
pub use meter::Meter;
pub use phase::{Moment, Phase};
pub use plan::{HiddenStatesStorage, Plan};
pub use pruning_record::PruningRecord;
pub use quantization::QuantizationReport;
pub use recovery::RecoveryReport;
pub use state::RunState;
pub use width_drop::WidthDropReport;
