//! What a run is, as plain records: the events it emits while it works and the manifest it leaves behind.
//!
//! Nothing here computes or prints; every other room may speak in these terms.

pub mod events;
pub mod inspection;
pub mod manifest;

pub use events::{Event, Events, Silent};
pub use inspection::Inspection;
pub use manifest::Manifest;
