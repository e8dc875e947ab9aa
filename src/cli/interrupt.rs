//! Signals and panics: the terminal is left clean, and a message names the files that remain and the command that continues.
//!
//! The files on the disk are valid at every moment: an unfinished checkpoint has names that no reader loads, its state names only
//! what was synced, and hidden states on disk are unlinked as soon as they are opened. So the process may end at any point. A run
//! that can be continued gets a few seconds to finish its layer, because a calibrated layer is worth minutes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::console::Console;
use super::lines::print_line;
use crate::failure;

/// Longest time for the last messages.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest time for a run to reach a place where nothing is half-done.
#[cfg(unix)]
const GRACE: Duration = Duration::from_secs(7);

/// The exit code of an interrupted run that can be continued.
pub(super) const RESUMABLE: u8 = 3;

/// Handles SIGINT, SIGTERM and SIGUSR1 (batch systems send SIGUSR1 before they end a job).
///
/// A run that can be continued stops at the next safe place. It ends immediately at a second signal, after [`GRACE`], or if it has
/// no files yet. The exit code is 3 in each case. Everything else ends immediately, with 128 plus the number of the signal, as in
/// shells. SIGHUP keeps its default action, so that `nohup` works.
#[cfg(unix)]
pub(super) fn watch(console: &Arc<Console>) {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};

    let all = [SIGINT, SIGTERM, SIGUSR1, SIGXFSZ];
    let Ok(mut signals) = signal_hook::iterator::Signals::new(all) else {
        // The system's own way of ending a process remains.
        return;
    };
    let console = Arc::clone(console);
    let watching = std::thread::Builder::new().name("signals".to_string()).spawn(move || {
        let mut is_first = true;
        for signal in signals.forever() {
            let name = match signal {
                // A file exceeds a size limit. The write fails, and its error says more than the signal.
                SIGXFSZ => continue,
                SIGINT => "SIGINT",
                SIGUSR1 => "SIGUSR1",
                _ => "SIGTERM",
            };
            let unfinished = console.unfinished().filter(|run| run.is_resumable);
            let Some(unfinished) = unfinished else {
                end(128 + signal, &console, move |console| console.interrupted(name));
            };
            let ending = Arc::clone(&console);
            let end_now = move || -> () {
                end(RESUMABLE.into(), &ending, move |console| {
                    console.interrupted(name);
                })
            };
            if !unfinished.has_begun || !std::mem::take(&mut is_first) {
                return end_now();
            }
            console.stop(name);
            let later = end_now.clone();
            let waiting = std::thread::Builder::new().spawn(move || {
                std::thread::sleep(GRACE);
                later();
            });
            if waiting.is_err() {
                end_now();
            }
        }
    });
    drop(watching);
}

/// Ends the process because it has lost its lock of `folder`. Anything it still wrote could damage the run of the next owner.
pub(super) fn end_for_another(folder: &str, why: &str) {
    let words = format!(
        "error: this process has lost its lock of `{folder}`\n  {why}\n\
         hint: give the same command again when no other prune works in that folder: it continues from the finished layers"
    );
    end(1, &Arc::default(), move |_| print_line(&words))
}

/// Ends the process at a panic, with exit code 101, as Rust does. Programs are compiled without unwinding, and an abort could leave
/// a core dump of gigabytes. A panic of a library over a file becomes the refusal of that file: exit code 1.
pub(super) fn end_on_panic(console: &Arc<Console>) {
    let console = Arc::clone(console);
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(failure) = failure::blamed() {
            end(1, &console, move |console| {
                console.error(&failure::describe(&failure.into()));
            });
        }
        let mut what = panic.to_string().replace('\n', " ");
        let backtrace = std::backtrace::Backtrace::capture();
        if backtrace.status() == std::backtrace::BacktraceStatus::Captured {
            what += &format!("\n{backtrace}");
        }
        end(101, &console, move |console| console.broken(&what));
    }));
}

/// Prints a last message and ends the process. The message has a thread and a time limit of its own: its reader may have stopped
/// reading, or the panicked thread may hold a lock that printing needs. Neither may keep the process alive or its folders locked.
fn end(code: i32, console: &Arc<Console>, words: impl FnOnce(&Console) + Send + 'static) -> ! {
    let words = Arc::new(Mutex::new(Some(words)));
    let telling = Arc::clone(console);
    let tell = move || {
        let words = words.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(words) = words {
            words(&telling);
        }
    };
    match std::thread::Builder::new().spawn(tell.clone()) {
        Ok(telling) => {
            let began = Instant::now();
            while !telling.is_finished() && began.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        // The system gives no thread.
        Err(_) => tell(),
    }
    console.release_folders();
    std::process::exit(code)
}

/// Nothing to watch for.
#[cfg(not(unix))]
pub(super) fn watch(_console: &Arc<Console>) {}
