//! `tdpbf16ps`: 16 × 16 outputs of 32 products each per instruction, by Intel's Advanced Matrix Extensions.
//!
//! Two row tiles by two column tiles at a time: four accumulators, four operands, the eight tiles there are. The intrinsics are
//! not stable, so the instructions are written out. The tiles belong to a thread and are configured for each call. The instruction
//! takes subnormal numbers for zero.
//!
//! Where factors are split there are more tiles to read, and more to do with each: 12, 20 or 24 products for 8, 12 or 14 tiles,
//! where bf16 has 4 for 4.

#![expect(
    unsafe_code,
    reason = "instructions without intrinsics, on memory of checked length"
)]

use std::arch::asm;
use std::sync::OnceLock;

use super::tiles::{DEPTH, ROW_PARTS, TILE, TILE_LINES};
use super::{Factors, Line};

/// Rows and columns of a block: two tiles.
const BLOCK: usize = 2 * TILE;

/// Bytes of a tile.
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

/// [`is_granted`], asked once.
fn is_granted_here() -> bool {
    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(is_granted)
}

/// Whether the CPU has bf16 tiles and the system lets this process use them. Linux saves their 8 KiB per thread only for
/// processes that asked (`arch_prctl`, since 5.16).
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
                libc::syscall(
                    libc::SYS_arch_prctl,
                    ARCH_REQ_XCOMP_PERM,
                    XFEATURE_XTILEDATA,
                )
            } == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// What an output is a sum of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// Products of factors that are bf16.
    Whole,
    /// Products of the parts of factors: [`ROW_PARTS`] of X, so many of W, less those that an f32 sum would not see.
    Split(u8),
}

impl Sums {
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
    sums: Sums,
    factors: Factors<'_>,
    out: &mut [f32],
    stride: usize,
    adds: bool,
) {
    assert!(
        is_granted_here(),
        "the kernel is listed where tiles are granted"
    );
    let Factors {
        x,
        w,
        rows,
        columns,
        inner,
    } = factors;
    let steps = inner.div_ceil(DEPTH);
    let (x_parts, w_parts) = sums.parts();
    let (x_lines, w_lines) = (
        2 * steps * x_parts * TILE_LINES,
        2 * steps * w_parts * TILE_LINES,
    );
    let (row_pairs, column_pairs) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    assert!(
        (1..=3).contains(&w_parts)
            && steps > 0
            && x.len() >= row_pairs * x_lines
            && w.len() >= column_pairs * w_lines,
        "factors must be as large as their shapes say"
    );
    // SAFETY: the kernel is chosen only where `is_granted`; the operand is a valid configuration of 64 bytes.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly));
    }
    for (row, x_pair) in x.chunks_exact(x_lines).enumerate().take(row_pairs) {
        for (column, w_pair) in w.chunks_exact(w_lines).enumerate().take(column_pairs) {
            let (high, wide) = (
                (rows - row * BLOCK).min(BLOCK),
                (columns - column * BLOCK).min(BLOCK),
            );
            // The next rows of X, an even share with each block of columns; where there are none it reads nothing.
            let next = x_pair
                .as_ptr()
                .wrapping_add(x_lines + column * x_lines / column_pairs);
            let target = &mut out[row * BLOCK * stride + column * BLOCK..];
            if high == BLOCK && wide == BLOCK {
                assert!(
                    (BLOCK - 1) * stride + BLOCK <= target.len(),
                    "a block reaches beyond its slice"
                );
                let target = Target {
                    out: target.as_mut_ptr(),
                    stride,
                    adds,
                };
                // SAFETY: tiles are configured; factors hold two rows of tiles, `steps` of each part; the target 32 rows of 32
                // elements, which was checked above.
                unsafe { block(sums, steps, x_pair, w_pair, target, next) };
            } else {
                let mut edge = [0.0f32; BLOCK * BLOCK];
                for line in 0..if adds { high } else { 0 } {
                    edge[line * BLOCK..][..wide].copy_from_slice(&target[line * stride..][..wide]);
                }
                let target_edge = Target {
                    out: edge.as_mut_ptr(),
                    stride: BLOCK,
                    adds,
                };
                // SAFETY: as above, the target being `edge`.
                unsafe { block(sums, steps, x_pair, w_pair, target_edge, next) };
                for line in 0..high {
                    target[line * stride..][..wide].copy_from_slice(&edge[line * BLOCK..][..wide]);
                }
            }
        }
    }
    // SAFETY: gives the tiles back; nothing of ours is in them any more.
    unsafe {
        asm!("tilerelease", options(nostack, nomem));
    }
}

/// The instruction alone, on four accumulators in turn; returns the operations.
pub(super) fn spin() -> usize {
    const ROUNDS: usize = 1_000_000;
    assert!(is_granted(), "the kernel is listed where tiles are granted");
    // SAFETY: tiles are granted; the operand is a valid configuration of 64 bytes; tiles are zeroed before they are multiplied
    // and given back at the end, and nothing of ours is in them.
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
            options(nostack, readonly)
        );
    }
    4 * ROUNDS * 2 * TILE * TILE * DEPTH
}

/// Where a block's sums go.
struct Target {
    /// 32 rows of 32 elements.
    out: *mut f32,
    /// From row to row, in elements.
    stride: usize,
    /// Whether they are added to what is there.
    adds: bool,
}

/// 32 × 32 outputs over `steps` steps, while `next` and what follows is brought into the second-level cache, some hundred bytes a
/// step.
///
/// # Safety
/// Tiles are configured; each factor holds two rows of tiles, `steps` of each part; the target is as large as it says. `next` may be
/// anywhere: prefetching does not fault.
unsafe fn block(
    sums: Sums,
    steps: usize,
    x: &[Line],
    w: &[Line],
    target: Target,
    next: *const Line,
) {
    let Target { out, stride, adds } = target;
    let bytes = stride * size_of::<f32>();
    // SAFETY: the caller's contract; every address is inside a factor or the target, and all eight tiles are declared clobbered
    // by being used nowhere else between `ldtilecfg` and `tilerelease`.
    unsafe {
        let lower = out.add(TILE * stride);
        if adds {
            asm!(
                "tileloadd tmm0, [{upper} + {bytes}]",
                "tileloadd tmm1, [{upper} + {bytes} + 64]",
                "tileloadd tmm2, [{lower} + {bytes}]",
                "tileloadd tmm3, [{lower} + {bytes} + 64]",
                upper = in(reg) out, lower = in(reg) lower, bytes = in(reg) bytes,
                options(nostack, readonly)
            );
        } else {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem)
            );
        }
        match sums {
            Sums::Whole => whole(steps, x, w, next),
            Sums::Split(1) => split_1(steps, x, w, next),
            Sums::Split(2) => split_2(steps, x, w, next),
            Sums::Split(_) => split_3(steps, x, w, next),
        }
        asm!(
            "tilestored [{upper} + {bytes}], tmm0",
            "tilestored [{upper} + {bytes} + 64], tmm1",
            "tilestored [{lower} + {bytes}], tmm2",
            "tilestored [{lower} + {bytes} + 64], tmm3",
            upper = in(reg) out, lower = in(reg) lower, bytes = in(reg) bytes,
            options(nostack)
        );
    }
}

/// A loop over the steps of a block: `$name` is made of these instructions, in which `x0` and `x1` are the rows of tiles of X, `w0`
/// and `w1` those of W, each with `$x` and `$w` tiles a step, and `next` what is asked for, `$ahead` bytes a step.
macro_rules! steps {
    ($name:ident, $x:literal, $w:literal, $ahead:literal, $($instruction:expr),+ $(,)?) => {
        /// Adds to the four accumulators.
        ///
        /// # Safety
        /// As [`block`].
        #[inline(always)]
        unsafe fn $name(steps: usize, x: &[Line], w: &[Line], next: *const Line) {
            // SAFETY: the caller's contract; every address is inside a factor, and all eight tiles are used nowhere else between
            // `ldtilecfg` and `tilerelease`.
            unsafe {
                asm!(
                    "2:",
                    $($instruction,)+
                    "add {x0}, {x_step}",
                    "add {x1}, {x_step}",
                    "add {w0}, {w_step}",
                    "add {w1}, {w_step}",
                    "add {next}, {ahead}",
                    "dec {steps}",
                    "jnz 2b",
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
                    options(nostack, readonly)
                );
            }
        }
    };
}

/// The tiles of a part of X, loaded from `$at` bytes behind those of the first, by the tiles of W that are loaded.
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

/// The tiles of X that are loaded by those of W that are.
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

// All loads before the products: nothing is lost where the core is this thread's own, and where another shares it, which makes a load
// among products three times as slow, a step takes 6 % less (measured).
steps!(
    whole,
    1,
    1,
    256,
    "tileloadd tmm4, [{x0} + {line}]",
    "tileloadd tmm6, [{w0} + {line}]",
    "prefetcht1 [{next}]",
    "tileloadd tmm7, [{w1} + {line}]",
    "prefetcht1 [{next} + 64]",
    "tileloadd tmm5, [{x1} + {line}]",
    "prefetcht1 [{next} + 128]",
    "tdpbf16ps tmm0, tmm4, tmm6",
    "tdpbf16ps tmm1, tmm4, tmm7",
    "prefetcht1 [{next} + 192]",
    "tdpbf16ps tmm2, tmm5, tmm6",
    "tdpbf16ps tmm3, tmm5, tmm7",
);

// x₂w₀ + x₁w₀ + x₀w₀: all there is.
steps!(
    split_1,
    3,
    1,
    384,
    w_part!(0),
    x_part!(2048, 0),
    x_part!(1024, 128),
    x_part!(0, 256),
);

// x₀w₁ + x₁w₁ + x₁w₀ + x₂w₀ + x₀w₀; x₂w₁ is at most 2⁻²⁴ of the product.
steps!(
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
steps!(
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
