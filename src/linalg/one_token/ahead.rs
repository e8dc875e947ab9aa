//! Software prefetches, and the choice of rows that pass at once: both follow how a CPU reads memory.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "an instruction that reads nothing")
)]

use std::sync::OnceLock;

/// Bytes of a cache line.
pub(in super::super) const LINE: usize = 64;

/// Asks for the cache line at a distance behind a reference. The address need not exist.
#[inline(always)]
pub(in super::super) fn ask_for<T: ?Sized>(from: &T, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address reads nothing.
    unsafe {
        let at = std::ptr::from_ref(from).cast::<u8>().wrapping_add(bytes);
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}

/// Bytes of activations that leave no room for weights in a first-level cache of 32 KiB.
const CROWDING: usize = 16 << 10;

/// Rows that pass at once. Where activations crowd the first-level cache, they are read from the second for each row. AMD's CPUs are up to 1.7
/// times as fast then with `most` rows at once, and up to 1.7 times as slow with fewer activations (Zen 4). Intel's are faster with one.
pub(super) fn rows_together<X>(x: &[X], most: usize) -> usize {
    if is_intel() || size_of_val(x) < CROWDING { 1 } else { most }
}

/// Returns whether dense rows are asked for, which makes Intel's CPUs 15 % faster (Cascade Lake), and AMD's 10 to 20 % slower (Zen 4).
pub(super) fn asks_for_dense() -> bool {
    is_intel()
}

fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // A virtual machine leaves its guest for this instruction, which takes as long as some rows.
        static IS_INTEL: OnceLock<bool> = OnceLock::new();
        *IS_INTEL.get_or_init(|| {
            // "GenuineIntel", in the order of the registers.
            let of = std::arch::x86_64::__cpuid(0);
            [of.ebx, of.edx, of.ecx] == [0x756e_6547, 0x4965_6e69, 0x6c65_746e]
        })
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}
