//! The memory of a machine whose system has no `/proc`: macOS and Windows, through a library. Tests read it on Linux, too.

use sysinfo::{MemoryRefreshKind, System};

use crate::bytes::ByteSize;

/// The memory of the machine.
pub(super) struct SystemMemory {
    pub(super) total: ByteSize,
    /// Memory that no program uses: free, or filled with files that can be read again.
    pub(super) available: ByteSize,
}

/// Reads the memory; `None` where the system does not report it.
pub(super) fn read() -> Option<SystemMemory> {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let (total, used) = (system.total_memory(), system.used_memory());
    // On macOS the library's own "available" includes the memory of running programs, as it could be compressed.
    (total > 0).then_some(SystemMemory {
        total: ByteSize(total),
        available: ByteSize(total.saturating_sub(used)),
    })
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::super::inventory::total_memory;
    use super::*;

    /// Programs and tests that run at the same time allocate between two readings.
    const TOLERANCE: u64 = 1 << 30;

    #[test]
    fn the_library_agrees_with_proc() {
        let library = read().expect("a total");
        assert_eq!(Some(library.total), total_memory());
        let text = std::fs::read_to_string("/proc/meminfo").expect("procfs");
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1));
        let available = 1024 * kib.expect("a number").parse::<u64>().expect("a number");
        assert!(
            library.available.0.abs_diff(available) < TOLERANCE,
            "{} and {available}",
            library.available.0
        );
    }
}
