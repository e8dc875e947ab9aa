//! What a run is, as plain records: the events it emits while it works and the manifest it leaves behind.
//!
//! Nothing here computes or prints; every other room may speak in these terms.

pub mod events;
pub mod fallback;
pub mod generation;
pub mod inspection;
pub mod manifest;
pub mod memory_settings;
mod meter;
pub mod plan;
pub mod profile;
pub mod state;

pub use events::{Event, Events, Silent, Stopped};
pub use fallback::FallReport;
pub use generation::GenerationReport;
pub use inspection::Inspection;
pub use manifest::Manifest;
pub use memory_settings::{MemorySettings, WeightsHeld};
pub use meter::Meter;
pub use plan::{HiddenStatesStorage, Plan};
pub use state::RunState;
