//! Ctrl-C, a polite kill, and mistakes of ours: the terminal is left clean, and what stays behind is said.
//!
//! Nothing is finished here: files of an unfinished checkpoint have names that no reader loads, and hidden states on disk are
//! unlinked as soon as they are opened. So the process may end at any point.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::console::Console;
use crate::failure;

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
                end(128 + signal, move || console.interrupted(name));
            }
        });
    drop(watching);
}

/// Ends the process where it panics, with exit code 101, which is Rust's own for it: programs are compiled without unwinding, and an
/// abort would leave a core dump of gigabytes. A panic in other people's code over a file is that file's refusal: exit code 1.
pub(super) fn end_on_panic(console: &Arc<Console>) {
    let console = Arc::clone(console);
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(failure) = failure::blamed() {
            let console = Arc::clone(&console);
            end(1, move || console.error(&super::describe(&failure.into())));
        }
        let mut what = panic.to_string().replace('\n', " ");
        let backtrace = std::backtrace::Backtrace::capture();
        if backtrace.status() == std::backtrace::BacktraceStatus::Captured {
            what += &format!("\n{backtrace}");
        }
        let console = Arc::clone(&console);
        end(101, move || console.broken(&what));
    }));
}

/// Ends the process after its last words. Whoever reads our messages may have stopped reading, and a panic may hold what they need:
/// they must not keep the process.
fn end(code: i32, words: impl FnOnce() + Send + 'static) -> ! {
    let words = std::thread::spawn(words);
    let began = Instant::now();
    while !words.is_finished() && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::process::exit(code)
}

/// Nothing to watch for.
#[cfg(not(unix))]
pub(super) fn watch(_console: &Arc<Console>) {}
