//! `prune` removes the weights that matter least from language models, layer by layer within a memory budget, and
//! measures what that cost. The binary is a thin shell over this library; docs/dev/architecture.md shows the rooms.

pub mod adapter;
pub mod bytes;
pub mod checkpoint;
pub mod cli;
pub mod data;
pub mod demo;
pub mod disk;
pub mod eval;
pub mod failure;
pub mod generation;
pub mod hub;
pub mod input;
pub mod job;
pub mod linalg;
pub mod merging;
pub mod model;
pub mod packed;
pub mod pipeline;
pub mod placement;
pub mod pruning;
pub mod quantized;
pub mod ranks;
pub mod recovery;
pub mod report;
pub mod run;
pub mod runtime;
#[cfg(feature = "selftest")]
pub mod selftest;
pub mod settings;
#[cfg(feature = "synthetic")]
pub mod synthetic;
pub mod tasks;

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian and are read without conversion");
