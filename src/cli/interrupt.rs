//! Ctrl-C, a polite kill, and mistakes of ours: the terminal is left clean, what stays behind is said, and how to go on.
//!
//! The files on the disk are good at any moment: files of an unfinished checkpoint have names that no reader loads, its state says only
//! what was synced, and hidden states on disk are unlinked as soon as they are opened. So the process may end at any point. A run
//! that can be gone on with is still given a few seconds to finish what it has in hand: the scores of a layer are worth minutes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::console::{Console, print_line};
use crate::failure;

/// Longest time for the last messages.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest time for a run to reach a place where nothing is half-done.
#[cfg(unix)]
const GRACE: Duration = Duration::from_secs(7);

/// The exit code of a run that was interrupted and can be gone on with.
pub(super) const RESUMABLE: u8 = 3;

/// Ends the process on SIGINT, SIGTERM and SIGUSR1 (batch systems send it ahead of time): a run that can be gone on with at the next
/// place where nothing is half-done, [`GRACE`] later or at the second signal wherever it is, with exit code 3; everything else at
/// once, with the exit code shells use, 128 and the signal's number. SIGHUP is left as it is, so that `nohup` works.
#[cfg(unix)]
pub(super) fn watch(console: &Arc<Console>) {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};

    let all = [SIGINT, SIGTERM, SIGUSR1, SIGXFSZ];
    let Ok(mut signals) = signal_hook::iterator::Signals::new(all) else {
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
                    // A file grows beyond a limit: who writes it gets an error, and has more to say.
                    SIGXFSZ => continue,
                    SIGINT => "SIGINT",
                    SIGUSR1 => "SIGUSR1",
                    _ => "SIGTERM",
                };
                let unfinished = console.unfinished().filter(|run| run.is_resumable);
                let Some(unfinished) = unfinished else {
                    end(128 + signal, &console, move |console| {
                        console.interrupted(name)
                    });
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

/// Ends the process because it has `folder` to itself no more: whatever it would still write could only do harm.
pub(super) fn end_for_another(folder: &str, why: &str) {
    let words = format!(
        "error: this process has lost its lock of `{folder}`\n  {why}\n\
         hint: give the same command again where no other prune works there: it goes on from what is kept"
    );
    end(1, &Arc::default(), move |_| print_line(&words))
}

/// Ends the process where it panics, with exit code 101, which is Rust's own for it: programs are compiled without unwinding, and an
/// abort would leave a core dump of gigabytes. A panic in other people's code over a file is that file's refusal: exit code 1.
pub(super) fn end_on_panic(console: &Arc<Console>) {
    let console = Arc::clone(console);
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(failure) = failure::blamed() {
            end(1, &console, move |console| {
                console.error(&super::describe(&failure.into()));
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

/// Ends the process after its last words. Whoever reads our messages may have stopped reading, and a panic may hold what they need:
/// they must not keep the process, nor the folders it works in.
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
        // No thread can be had.
        Err(_) => tell(),
    }
    console.let_go();
    std::process::exit(code)
}

/// Nothing to watch for.
#[cfg(not(unix))]
pub(super) fn watch(_console: &Arc<Console>) {}
