//! From a manifest to something a person or another program reads. Sees no tensor.

pub mod inspection;
pub mod log;
pub mod memory_log;
pub mod table;
