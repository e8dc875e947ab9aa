//! The integration tests, in one binary: the real commands on small checkpoints, the goldens of the reference, candle's Llama as
//! oracle, and the rules of the source tree.
#![expect(clippy::print_stderr, reason = "tests print skipped parts and measurements")]

mod adapters;
mod arithmetic;
mod circles;
mod cli;
mod cli_page;
mod code_rules;
mod demo;
mod determinism;
mod differentiable;
mod docs;
mod errors;
mod fallback;
mod generate;
mod golden;
mod guide;
mod hostile;
mod hub;
mod inputs;
mod inspect;
mod layer_drop;
mod layering;
mod licences;
mod memory;
mod memory_settings;
mod merging;
mod messages;
mod methods;
mod on_device;
mod oracle;
mod origin;
mod permute;
mod plan;
mod publishing;
mod quantize;
mod recover;
mod report;
mod resume;
mod run_folder;
mod saliency;
mod source_tree;
mod stories;
mod support;
mod sweep;
mod width_drop;
