//! `tdpbf16ps`: 16 × 16 outputs of 32 products each per instruction, by Intel's Advanced Matrix Extensions.
//!
//! A block is two row tiles by two column tiles: four accumulators and four operands, which are all eight tiles of the CPU. The
//! intrinsics are not stable, so the instructions are in `asm!`. The tiles belong to a thread and are configured for each call. The
//! instruction treats subnormal numbers as zero. Loads and products of a step:
//!
//! | kernel | tiles loaded | products |
//! | --- | --- | --- |
//! | bf16 | 4 | 4 |
//! | split, W in 1 part | 8 | 12 |
//! | split, W in 2 parts | 12 | 20 |
//! | split, W in 3 parts | 14 | 24 |

#![expect(unsafe_code, reason = "instructions without intrinsics, on memory of checked length")]

use std::arch::asm;
use std::sync::OnceLock;

use super::super::rectangles::assert_holds;
use super::packed::{Factors, Line, TILE, TILE_DEPTH as DEPTH, TILE_LINES};
use super::tiles::ROW_PARTS;

/// Rows and columns of a block: two tiles.
const BLOCK: usize = 2 * TILE;

const TILE_BYTES: usize = TILE_LINES * size_of::<Line>();

/// `ldtilecfg`'s operand: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

const CONFIGURATION: Configuration = {
    let mut configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes_per_row: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        configuration.bytes_per_row[tile] = size_of::<Line>() as u16;
        configuration.rows[tile] = TILE as u8;
        tile += 1;
    }
    configuration
};

/// [`is_granted`], called once.
fn is_granted_here() -> bool {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(is_granted)
}

/// Requests the tiles; returns whether the CPU has bf16 tiles and the system grants them. Linux saves their 8 KiB per thread only for
/// processes that request them (`arch_prctl`, since 5.16).
pub(super) fn is_granted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        let leaf = std::arch::x86_64::__cpuid_count(7, 0);
        let (has_tiles, has_bf16) = (leaf.edx & (1 << 24) != 0, leaf.edx & (1 << 22) != 0);
        // SAFETY: the call takes two numbers and touches no memory of ours; older kernels refuse it.
        has_tiles
            && has_bf16
            && unsafe {
                libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
            } == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// The terms of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Terms {
    /// Products of bf16 factors.
    Whole,
    /// Products of parts: [`ROW_PARTS`] of X and the given number of W, without the products too small for an f32 sum.
    Split(u8),
}

impl Terms {
    /// Parts of X and of W.
    fn parts(self) -> (usize, usize) {
        match self {
            Self::Whole => (1, 1),
            Self::Split(parts) => (ROW_PARTS, parts.into()),
        }
    }
}

/// Writes the product of packed factors to `out`, or adds it.
pub(super) fn multiply(
    sums: Terms,
    factors: Factors<'_>,
    out: &mut [f32],
    stride: usize,
    adds: bool,
) {
    assert!(is_granted_here(), "AMX tiles are not granted to this process");
    let Factors { x, w, rows, columns, inner } = factors;
    let steps = inner.div_ceil(DEPTH);
    let (x_parts, w_parts) = sums.parts();
    // Lines of two rows of tiles.
    let lines = |parts: usize| steps.checked_mul(2 * parts * TILE_LINES);
    let (row_pairs, column_pairs) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    let fits = |factor: &[Line], pairs: usize, lines: usize| {
        pairs.checked_mul(lines).is_some_and(|needed| needed <= factor.len())
    };
    let (Some(x_lines), Some(w_lines)) = (lines(x_parts), lines(w_parts)) else {
        panic!("factors must be as large as their shapes say");
    };
    assert!(
        (1..=3).contains(&w_parts)
            && steps > 0
            && fits(x, row_pairs, x_lines)
            && fits(w, column_pairs, w_lines),
        "factors must be as large as their shapes say"
    );
    assert_holds(out.len(), rows, columns, stride);
    // SAFETY: the kernel is chosen only where `is_granted`; the operand is a valid configuration of 64 bytes.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly));
    }
    for (row, x_pair) in x.chunks_exact(x_lines).enumerate().take(row_pairs) {
        for (column, w_pair) in w.chunks_exact(w_lines).enumerate().take(column_pairs) {
            let (high, wide) =
                ((rows - row * BLOCK).min(BLOCK), (columns - column * BLOCK).min(BLOCK));
            // Each block of columns prefetches an even share of the next rows of X; beyond the last row, prefetching has no effect.
            let next = x_pair.as_ptr().wrapping_add(x_lines + column * x_lines / column_pairs);
            let target = &mut out[row * BLOCK * stride + column * BLOCK..];
            if high == BLOCK && wide == BLOCK {
                assert_holds(target.len(), BLOCK, BLOCK, stride);
                let target = BlockTarget { out: target.as_mut_ptr(), stride, adds };
                // SAFETY: tiles are configured; factors hold two rows of tiles, `steps` of each part; the target 32 rows of 32
                // elements, which was checked above.
                unsafe { block(sums, steps, x_pair, w_pair, target, next) };
            } else {
                let mut edge = [0.0f32; BLOCK * BLOCK];
                for line in 0..if adds { high } else { 0 } {
                    edge[line * BLOCK..][..wide].copy_from_slice(&target[line * stride..][..wide]);
                }
                let target_edge = BlockTarget { out: edge.as_mut_ptr(), stride: BLOCK, adds };
                // SAFETY: as above, the target being `edge`.
                unsafe { block(sums, steps, x_pair, w_pair, target_edge, next) };
                for line in 0..high {
                    target[line * stride..][..wide].copy_from_slice(&edge[line * BLOCK..][..wide]);
                }
            }
        }
    }
    // SAFETY: this releases the tiles, which hold no used values.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, nomem)
        );
    }
}

/// Runs the instruction on four accumulators in turn; returns the number of operations.
pub(super) fn spin() -> usize {
    const ROUNDS: usize = 1_000_000;
    assert!(is_granted(), "AMX tiles are not granted to this process");
    // SAFETY: tiles are granted; the operand is a valid configuration of 64 bytes; tiles are zeroed before they are multiplied
    // and released at the end.
    unsafe {
        asm!(
            "ldtilecfg [{configuration}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tdpbf16ps tmm1, tmm4, tmm5",
            "tdpbf16ps tmm2, tmm4, tmm5",
            "tdpbf16ps tmm3, tmm4, tmm5",
            "dec {rounds}",
            "jnz 2b",
            "tilerelease",
            configuration = in(reg) &CONFIGURATION,
            rounds = inout(reg) ROUNDS => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly)
        );
    }
    4 * ROUNDS * 2 * TILE * TILE * DEPTH
}

/// The target of a block's sums.
struct BlockTarget {
    /// 32 rows of 32 elements.
    out: *mut f32,
    /// Elements from row to row.
    stride: usize,
    /// The sums are added to the old content.
    adds: bool,
}

/// Computes 32 × 32 outputs over `steps` steps, and prefetches the bytes from `next` on into the second-level cache, some hundred bytes
/// a step.
///
/// # Safety
/// Tiles are configured; each factor holds two rows of tiles, `steps` of each part; the target has 32 rows of 32 elements. `next` may be
/// any address: prefetching does not fault.
unsafe fn block(
    sums: Terms,
    steps: usize,
    x: &[Line],
    w: &[Line],
    target: BlockTarget,
    next: *const Line,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match sums {
            Terms::Whole => whole(steps, x, w, target, next),
            Terms::Split(1) => split_1(steps, x, w, target, next),
            Terms::Split(2) => split_2(steps, x, w, target, next),
            Terms::Split(_) => split_3(steps, x, w, target, next),
        }
    }
}

/// Defines `$name`, the function of a block: four accumulators are loaded or zeroed, a loop over the steps adds to them, and they are
/// stored. The instructions of a step use `x0` and `x1` for the tiles of X, and `w0` and `w1` for the tiles of W. A step has `$x` tiles
/// of a row of X, and `$w` of W. `next` is the address to prefetch, `$ahead` bytes a step.
///
/// A block is a single `asm!` that declares all eight tiles. Between two `asm!`, the compiler may use the tiles itself.
macro_rules! block_of {
    ($name:ident, $x:literal, $w:literal, $ahead:literal, $($instruction:expr),+ $(,)?) => {
        /// Writes or adds to the target.
        ///
        /// # Safety
        /// As [`block`].
        #[inline(always)]
        unsafe fn $name(steps: usize, x: &[Line], w: &[Line], target: BlockTarget, next: *const Line) {
            let BlockTarget { out, stride, adds } = target;
            // SAFETY: the caller's contract; every address is inside a factor or the target, and `steps` is at least 1.
            unsafe {
                asm!(
                    "test {adds}, {adds}",
                    "jz 3f",
                    "tileloadd tmm0, [{upper} + {bytes}]",
                    "tileloadd tmm1, [{upper} + {bytes} + 64]",
                    "tileloadd tmm2, [{lower} + {bytes}]",
                    "tileloadd tmm3, [{lower} + {bytes} + 64]",
                    "jmp 2f",
                    "3:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "2:",
                    $($instruction,)+
                    "add {x0}, {x_step}",
                    "add {x1}, {x_step}",
                    "add {w0}, {w_step}",
                    "add {w1}, {w_step}",
                    "add {next}, {ahead}",
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{upper} + {bytes}], tmm0",
                    "tilestored [{upper} + {bytes} + 64], tmm1",
                    "tilestored [{lower} + {bytes}], tmm2",
                    "tilestored [{lower} + {bytes} + 64], tmm3",
                    adds = in(reg) usize::from(adds),
                    upper = in(reg) out,
                    lower = in(reg) out.add(TILE * stride),
                    bytes = in(reg) stride * size_of::<f32>(),
                    x0 = inout(reg) x.as_ptr() => _,
                    x1 = inout(reg) x.as_ptr().add(steps * $x * TILE_LINES) => _,
                    w0 = inout(reg) w.as_ptr() => _,
                    w1 = inout(reg) w.as_ptr().add(steps * $w * TILE_LINES) => _,
                    next = inout(reg) next => _,
                    steps = inout(reg) steps => _,
                    line = in(reg) size_of::<Line>(),
                    x_step = const $x * TILE_BYTES,
                    w_step = const $w * TILE_BYTES,
                    ahead = const $ahead,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

/// Loads the tiles of a part of X, `$at` bytes after the tiles of the first part, and multiplies them by the loaded tiles of W.
macro_rules! x_part {
    ($at:literal, $ahead:literal) => {
        concat!(
            "tileloadd tmm4, [{x0} + {line} + ",
            $at,
            "]\n",
            "prefetcht1 [{next} + ",
            $ahead,
            "]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tileloadd tmm5, [{x1} + {line} + ",
            $at,
            "]\n",
            "prefetcht1 [{next} + ",
            $ahead,
            " + 64]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7",
        )
    };
}

/// Multiplies the loaded tiles of X by the loaded tiles of W.
macro_rules! same_x {
    () => {
        "tdpbf16ps tmm0, tmm4, tmm6\n\
         tdpbf16ps tmm1, tmm4, tmm7\n\
         tdpbf16ps tmm2, tmm5, tmm6\n\
         tdpbf16ps tmm3, tmm5, tmm7"
    };
}

/// Loads the tiles of a part of W.
macro_rules! w_part {
    ($at:literal) => {
        concat!(
            "tileloadd tmm6, [{w0} + {line} + ",
            $at,
            "]\n",
            "tileloadd tmm7, [{w1} + {line} + ",
            $at,
            "]",
        )
    };
}

// All loads come before the products. If two threads share a core, a load among products is three times as slow, and this order takes
// 6 % less time per step; for a thread alone on its core, the time is equal (measured).
// A slab of a block of X is 32 KiB and stays in the first-level cache while the columns of W pass by: their loads leave that cache to X.
// With slabs of twice the size, or loads that take part in the cache, both factors come from the second-level cache, and a product of
// 2048 x 256 takes 1.2 to 1.25 times as long (measured).
block_of!(
    whole,
    1,
    1,
    256,
    "tileloadd tmm4, [{x0} + {line}]",
    "tileloaddt1 tmm6, [{w0} + {line}]",
    "prefetcht1 [{next}]",
    "tileloaddt1 tmm7, [{w1} + {line}]",
    "prefetcht1 [{next} + 64]",
    "tileloadd tmm5, [{x1} + {line}]",
    "prefetcht1 [{next} + 128]",
    "tdpbf16ps tmm0, tmm4, tmm6",
    "tdpbf16ps tmm1, tmm4, tmm7",
    "prefetcht1 [{next} + 192]",
    "tdpbf16ps tmm2, tmm5, tmm6",
    "tdpbf16ps tmm3, tmm5, tmm7",
);

// x₂w₀ + x₁w₀ + x₀w₀: all terms.
block_of!(split_1, 3, 1, 384, w_part!(0), x_part!(2048, 0), x_part!(1024, 128), x_part!(0, 256),);

// x₀w₁ + x₁w₁ + x₁w₀ + x₂w₀ + x₀w₀; x₂w₁ is at most 2⁻²⁴ of the product.
block_of!(
    split_2,
    3,
    2,
    512,
    w_part!(1024),
    x_part!(0, 0),
    x_part!(1024, 128),
    w_part!(0),
    same_x!(),
    x_part!(2048, 256),
    x_part!(0, 384),
);

// x₀w₂ + x₀w₁ + x₁w₁ + x₁w₀ + x₂w₀ + x₀w₀; x₂w₁, x₁w₂ and x₂w₂ are at most 2⁻²³ of the product together.
block_of!(
    split_3,
    3,
    3,
    512,
    w_part!(2048),
    x_part!(0, 0),
    w_part!(1024),
    same_x!(),
    x_part!(1024, 128),
    w_part!(0),
    same_x!(),
    x_part!(2048, 256),
    x_part!(0, 384),
);

const _: () = assert!(TILE_BYTES == 1024 && DEPTH == 32 && BLOCK == 2 * TILE);
