//! `prune selftest` (hidden): flags.

use anyhow::Result;
use clap::Args;

use super::console::Console;
use crate::selftest::selftest;
use crate::settings::DeviceChoice;

/// Flags of `prune selftest`.
#[derive(Debug, Clone, Args)]
pub struct SelftestArgs {
    /// `cpu`, or in a build with CUDA `cuda:N`
    #[arg(long, default_value = "cpu")]
    device: DeviceChoice,
    /// Panics, to show the message of a panic
    #[arg(long)]
    panic: bool,
}

/// Runs the checks.
pub fn command(args: &SelftestArgs, console: &Console) -> Result<()> {
    assert!(!args.panic, "asked to panic");
    selftest(&args.device, console)
}
