//! Ctrl-C, a polite kill, and mistakes of ours: the terminal is left clean, what stays behind is said, and how to go on.
//!
//! What is on the disk is good at any moment: files of an unfinished checkpoint have names that no reader loads, its state says only
//! what was synced, and hidden states on disk are unlinked as soon as they are opened. So the process may end at any point. A run
//! that can be gone on with is still given a few seconds to finish what it has in hand: the scores of a layer are worth minutes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::console::{Console, print_line};
use crate::failure;

/// How long the last words may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a run may take to a place where nothing is half-done.
#[cfg(unix)]
const GRACE: Duration = Duration::from_secs(7);

/// The exit code of a run that was interrupted and can be gone on with.
pub(super) const RESUMABLE: u8 = 3;

/// Ends the process on SIGINT, SIGTERM and SIGUSR1 (batch systems send it ahead of time): a run that can be gone on with at the next
/// place where nothing is half-done, [`GRACE`] later or at the second signal wherever it is, with exit code 3; everything else at
/// once, with the exit code shells use, 128 and the signal's number. SIGHUP is left as it is, so that `nohup` works.
#[cfg(unix)]
pub(super) fn watch(console: &Arc<Console>) {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

    let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1]) else {
        // The system's own way of ending a process remains.
        return;
    };
    let console = Arc::clone(console);
    let watching = std::thread::Builder::new()
        .name("signals".to_string())
        .spawn(move || {
            let mut is_first = true;
            for signal in signals.forever() {
                let name = match signal {
                    SIGINT => "SIGINT",
                    SIGUSR1 => "SIGUSR1",
                    _ => "SIGTERM",
                };
                let told = Arc::clone(&console);
                let unfinished = console.unfinished().filter(|run| run.is_resumable);
                let Some(unfinished) = unfinished else {
                    end(128 + signal, move || told.interrupted(name));
                };
                if !unfinished.has_begun || !std::mem::take(&mut is_first) {
                    end(RESUMABLE.into(), move || told.interrupted(name));
                }
                console.stop(name);
                std::thread::spawn(move || {
                    std::thread::sleep(GRACE);
                    end(RESUMABLE.into(), move || told.interrupted(name));
                });
            }
        });
    drop(watching);
}

/// Ends the process because `other` works in `folder` now: whatever this one would still write could only do harm.
pub(super) fn end_for_another(folder: &str, other: &str) -> ! {
    let words = format!(
        "error: another prune took over `{folder}`\n  {other}, because this process gave no sign for long\n\
         hint: let that one finish"
    );
    end(1, move || print_line(&words))
}

/// Ends the process where it panics, with exit code 101, which is Rust's own for it: programs are compiled without unwinding, and an
/// abort would leave a core dump of gigabytes. A panic in other people's code over a file is that file's refusal: exit code 1.
pub(super) fn end_on_panic(console: &Arc<Console>) {
    let console = Arc::clone(console);
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(failure) = failure::blamed() {
            let console = Arc::clone(&console);
            end(1, move || {
                console.error(&super::describe(&failure.into()));
                console.release_locks();
            });
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
