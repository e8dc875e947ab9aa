//! Everything that runs the whole program, in one binary: the real commands on small checkpoints, the reference's goldens,
//! candle's Llama as oracle, and the rules the source tree keeps.
#![expect(
    clippy::print_stderr,
    reason = "tests say aloud what they skip and what they measured"
)]

mod arithmetic;
mod cli;
mod cli_page;
mod code_rules;
mod demo;
mod determinism;
mod errors;
mod fallback;
mod generate;
mod golden;
mod hostile;
mod hub;
mod inspect;
mod layering;
mod licences;
mod memory;
mod memory_settings;
mod messages;
mod on_device;
mod oracle;
mod origin;
mod plan;
mod report;
mod resume;
mod source_tree;
mod stories;
mod support;
