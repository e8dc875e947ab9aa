//! The end of all changes: before the process releases its folders, operations under way end, and later operations wait for ever.
//!
//! Threads of a process run until it has ended. Without this gate they could change a file of a folder that another process
//! has taken meanwhile.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::time::{Duration, Instant};

/// The pause between two looks at operations that are under way.
const PAUSE: Duration = Duration::from_millis(5);

/// A gate that operations pass until it is closed. It never opens again.
#[derive(Debug, Default)]
pub(super) struct Gate {
    under_way: RwLock<()>,
}

impl Gate {
    pub(super) const fn new() -> Self {
        Self { under_way: RwLock::new(()) }
    }

    /// Lets an operation pass. The operation is under way until the guard is dropped.
    pub(super) fn pass(&self) -> RwLockReadGuard<'_, ()> {
        self.under_way.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the gate once no operation is under way. Returns `false` if an operation is not done within `patience`.
    pub(super) fn close(&self, patience: Duration) -> bool {
        let began = Instant::now();
        loop {
            match self.under_way.try_write() {
                Ok(closed) => {
                    std::mem::forget(closed);
                    return true;
                }
                Err(TryLockError::Poisoned(closed)) => {
                    std::mem::forget(closed.into_inner());
                    return true;
                }
                Err(TryLockError::WouldBlock) if began.elapsed() < patience => {
                    std::thread::sleep(PAUSE);
                }
                Err(TryLockError::WouldBlock) => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;

    #[test]
    fn a_gate_closes_after_the_operations_under_way_and_holds_later_ones() {
        static GATE: Gate = Gate::new();
        let operation = GATE.pass();
        assert!(!GATE.close(Duration::from_millis(20)), "one is under way");
        drop(operation);
        assert!(GATE.close(Duration::ZERO));
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            let _operation = GATE.pass();
            done.send(())
        });
        let waited = is_done.recv_timeout(Duration::from_millis(50));
        assert_eq!(waited, Err(RecvTimeoutError::Timeout));
    }
}
