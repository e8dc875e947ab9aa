//! Ctrl-C and a polite kill: the terminal is left clean, and what stays behind is said.
//!
//! Nothing is finished here: files of an unfinished checkpoint have names that no reader loads, and hidden states on disk are
//! unlinked as soon as they are opened. So the process may end at any point.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::console::Console;

/// How long the last words may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Ends the process on SIGINT and SIGTERM, with the exit code shells use: 128 and the signal's number. SIGHUP is left as it is,
/// so that `nohup` works.
#[cfg(unix)]
pub(super) fn watch(console: &Arc<Console>) {
    use signal_hook::consts::{SIGINT, SIGTERM};

    let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]) else {
        // The system's own way of ending a process remains.
        return;
    };
    let console = Arc::clone(console);
    let watching = std::thread::Builder::new()
        .name("signals".to_string())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                let name = if signal == SIGINT {
                    "SIGINT"
                } else {
                    "SIGTERM"
                };
                // Whoever reads our messages may have stopped reading: the last words must not keep the process.
                let words = std::thread::spawn(move || console.interrupted(name));
                let began = Instant::now();
                while !words.is_finished() && began.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(5));
                }
                std::process::exit(128 + signal);
            }
        });
    drop(watching);
}

/// Nothing to watch for.
#[cfg(not(unix))]
pub(super) fn watch(_console: &Arc<Console>) {}
