//! Everything that runs the whole program, in one binary: the real commands on small checkpoints, the reference's goldens,
//! candle's Llama as oracle, and the rules the source tree keeps.
#![expect(
    clippy::print_stderr,
    reason = "tests say aloud what they skip and what they measured"
)]

mod cli;
mod demo;
mod determinism;
mod errors;
mod golden;
mod layering;
mod memory;
mod oracle;
mod support;
