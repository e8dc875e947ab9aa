//! `prune` removes the weights that matter least from language models, layer by layer within a memory budget, and
//! measures what that cost. The binary is a thin shell over this library.
//!
//! A run begins in [`cli`], which turns flags into [`settings`], and in [`job`], which has a function for every command. docs/dev/architecture.md
//! draws the rooms; each `mod.rs` has a table of its files.
//!
//! | rooms | content |
//! | --- | --- |
//! | `cli`, `settings` | the command line; one field per flag |
//! | `job` | the story of each command: settle, compute, write, record |
//! | `pipeline`, `pruning` | the sweep that prunes layer by layer; scores, masks, solvers |
//! | `recovery`, `merging`, `adapter` | trainings, merges of models, low-rank adapters |
//! | `quantized`, `packed` | codes of 4 bits; checkpoints without their zeros |
//! | `eval`, `tasks`, `generation` | perplexity and divergence, zero-shot tasks, text |
//! | `model`, `linalg` | families and layers of models; products, kernels, factorisations |
//! | `runtime`, `ranks`, `placement` | passes over layers and devices; several processes; the plan of memory and time |
//! | `checkpoint`, `data`, `hub`, `input`, `disk`, `bytes` | weights, texts, downloads, files, sizes |
//! | `run`, `report`, `failure` | records and events of a run; tables and pictures; errors |
//! | `demo`, `synthetic`, `selftest` | the model inside the program; checkpoints and checks for tests |

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
