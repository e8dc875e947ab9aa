//! The memory of this process, measured by the operating system.
//!
//! "Peak anonymous memory" is the high-water mark of the resident set without the pages of files. No part of a
//! checkpoint is mapped, so the rest is allocated memory. Outside Linux, systems report the resident set only, and no peak that
//! can be reset: `resident_set` reads the resident set over and over.

use crate::bytes::ByteSize;

/// A reading of the process's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resident {
    /// Anonymous pages now; outside Linux all resident pages.
    pub anonymous: ByteSize,
    /// The peak since the last [`reset_peak`], without file pages; outside Linux the highest of the readings.
    pub peak_anonymous: ByteSize,
}

/// Reads the process's memory.
pub fn resident() -> Option<Resident> {
    #[cfg(target_os = "linux")]
    let found = parse(&std::fs::read_to_string("/proc/self/status").ok()?);
    #[cfg(not(target_os = "linux"))]
    let found = super::resident_set::GAUGE.resident();
    found
}

#[cfg(any(target_os = "linux", test))]
fn parse(status: &str) -> Option<Resident> {
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib * 1024)
    };
    let file_pages = field("RssFile:")? + field("RssShmem:").unwrap_or(0);
    let anonymous = field("RssAnon:")?;
    let peak = field("VmHWM:")?.saturating_sub(file_pages).max(anonymous);
    Some(Resident { anonymous: ByteSize(anonymous), peak_anonymous: ByteSize(peak) })
}

/// Resets the high-water mark to the resident memory (`5` to `clear_refs`, see proc(5)). Does nothing where the system refuses;
/// the peak then covers the whole process.
pub fn reset_peak() {
    #[cfg(target_os = "linux")]
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    #[cfg(not(target_os = "linux"))]
    super::resident_set::GAUGE.reset_peak();
}

/// Gives memory that was freed in small pieces back to the system. glibc keeps it otherwise: after tokenizing 5 MB of
/// text with Llama 3's tokenizer 411 MB stay resident, 38 MB after this call. Does nothing without glibc.
pub fn release_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        #[expect(unsafe_code, reason = "a call into the C library")]
        // SAFETY: `malloc_trim` takes a number and locks the allocator itself; it touches free memory only.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// The least bytes of blocks that go back to the system as soon as they are freed.
pub const RETURNED_AT_ONCE: usize = 4 << 20;

/// Makes glibc give large blocks back to the system when they are freed. By default, glibc takes blocks of up to 32 MiB from its
/// heap once a block of that size was freed, and keeps free memory below blocks in use: with hidden states of 16 MiB on disk a run's peak
/// was 63 MiB above its allocations. Does nothing without glibc. Must be called once, at the start.
pub fn return_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        #[expect(unsafe_code, reason = "a call into the C library")]
        // SAFETY: `mallopt` takes two numbers and sets a parameter of the allocator under its own lock.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, RETURNED_AT_ONCE as libc::c_int);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests/it/memory.rs compares the system's report with a counting allocator in a separate process.
    // Here, tests that run at the same time allocate, free and reset the peak.
    #[test]
    fn file_pages_are_taken_off_the_peak() {
        let status = "Name:\tprune\nVmHWM:\t    5000 kB\nVmRSS:\t    3000 kB\nRssAnon:\t    2000 kB\nRssFile:\t     900 kB\nRssShmem:\t     100 kB\n";
        let expected =
            Resident { anonymous: ByteSize(2000 << 10), peak_anonymous: ByteSize(4000 << 10) };
        assert_eq!(parse(status), Some(expected));
        assert_eq!(parse("Name:\tprune\n"), None);
    }

    #[test]
    fn the_peak_is_never_below_what_is_there_now() {
        // File pages may be newer than the high-water mark.
        let status = "VmHWM: 2100 kB\nRssAnon: 2000 kB\nRssFile: 900 kB\n";
        assert_eq!(
            parse(status).map(|resident| resident.peak_anonymous),
            Some(ByteSize(2000 << 10))
        );
    }
}
