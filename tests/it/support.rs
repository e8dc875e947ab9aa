//! What the integration tests share: where the reference's files are, how the binary is run, how a run is done in process.

use std::path::{Path, PathBuf};

use clap::Parser;
use prune::cli::console::Console;
use prune::cli::prune::{PruneArgs, execute};
use prune::pipeline::Watcher;
use prune::run::Manifest;

/// Real texts, models and goldens: `PRUNE_SHARED`, else `../shared` beside the checkout. `None`, said aloud, where absent.
pub(crate) fn shared() -> Option<PathBuf> {
    let folder = std::env::var_os("PRUNE_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"),
        PathBuf::from,
    );
    if folder.join("goldens").is_dir() {
        return Some(folder);
    }
    eprintln!(
        "skipped: no goldens in `{}` (set PRUNE_SHARED)",
        folder.display()
    );
    None
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    args: PruneArgs,
}

/// A pruning run in this process, so that a watcher can see every mask.
pub(crate) fn prune_in_process(
    arguments: &[&str],
    watcher: Option<&mut dyn Watcher>,
) -> anyhow::Result<Manifest> {
    let flags = Flags::try_parse_from(std::iter::once(&"prune").chain(arguments))?;
    execute(&flags.args, Vec::new(), &Console::quiet(), watcher)
}
