//! From a manifest to something a person or another program reads. Sees no tensor.

pub mod demo_table;
pub mod log;
pub mod table;
