//! `tdpbf16ps`: 16 × 16 outputs of 32 products each per instruction, by Intel's Advanced Matrix Extensions.
//!
//! Two row tiles by two column tiles at a time: four accumulators, four operands, the eight tiles there are. The intrinsics are
//! not stable, so the instructions are written out. The tiles belong to a thread and are configured for each call.

#![expect(
    unsafe_code,
    reason = "instructions without intrinsics, on memory of checked length"
)]

use std::arch::asm;
use std::ops::Range;

use super::{DEPTH, Line, Part, TILE, TILE_LINES};

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

/// Adds the products over the tiles `depth` to `out`, or writes them where `depth` begins at 0.
pub(super) fn multiply(part: &Part<'_>, depth: Range<usize>, out: &mut [f32], stride: usize) {
    let is_first = depth.start == 0;
    let steps = depth.len();
    // SAFETY: the kernel is chosen only where `is_granted`; the operand is a valid configuration of 64 bytes.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly));
    }
    for column in (0..part.columns).step_by(2 * TILE) {
        let tile = column / TILE;
        let weights = [
            part.weight_tiles(tile, &depth),
            part.weight_tiles(tile + 1, &depth),
        ];
        for row in (0..part.rows).step_by(2 * TILE) {
            let tile = row / TILE;
            let activations = [
                part.activation_tiles(tile, &depth),
                part.activation_tiles(tile + 1, &depth),
            ];
            for factor in weights.iter().chain(&activations) {
                assert!(
                    factor.len() == steps * TILE_LINES,
                    "a factor has {steps} tiles"
                );
            }
            let (rows, columns) = (
                (part.rows - row).min(2 * TILE),
                (part.columns - column).min(2 * TILE),
            );
            let target = &mut out[row * stride + column..];
            if rows == 2 * TILE && columns == 2 * TILE {
                assert!(
                    (2 * TILE - 1) * stride + 2 * TILE <= target.len(),
                    "a block reaches beyond its slice"
                );
                // SAFETY: tiles are configured; factors hold `steps` tiles each, the target 32 rows of 32, both checked above.
                unsafe {
                    block(
                        steps,
                        activations,
                        weights,
                        target.as_mut_ptr(),
                        stride,
                        is_first,
                    )
                };
            } else {
                let mut edge = [0.0f32; 4 * TILE * TILE];
                for line in 0..if is_first { 0 } else { rows } {
                    edge[line * 2 * TILE..][..columns]
                        .copy_from_slice(&target[line * stride..][..columns]);
                }
                // SAFETY: as above, the target being `edge`.
                unsafe {
                    block(
                        steps,
                        activations,
                        weights,
                        edge.as_mut_ptr(),
                        2 * TILE,
                        is_first,
                    )
                };
                for line in 0..rows {
                    target[line * stride..][..columns]
                        .copy_from_slice(&edge[line * 2 * TILE..][..columns]);
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

/// 32 × 32 outputs over `steps` tiles.
///
/// # Safety
/// Tiles are configured; each factor holds `steps` tiles; `out` points to 32 rows of 32 elements, `stride` elements apart.
unsafe fn block(
    steps: usize,
    activations: [&[Line]; 2],
    weights: [&[Line]; 2],
    out: *mut f32,
    stride: usize,
    is_first: bool,
) {
    let bytes = stride * size_of::<f32>();
    // SAFETY: the caller's contract; every address is inside a factor or the target, and all eight tiles are declared clobbered
    // by being used nowhere else between `ldtilecfg` and `tilerelease`.
    unsafe {
        let lower = out.add(TILE * stride);
        if is_first {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem)
            );
        } else {
            asm!(
                "tileloadd tmm0, [{upper} + {bytes}]",
                "tileloadd tmm1, [{upper} + {bytes} + 64]",
                "tileloadd tmm2, [{lower} + {bytes}]",
                "tileloadd tmm3, [{lower} + {bytes} + 64]",
                upper = in(reg) out, lower = in(reg) lower, bytes = in(reg) bytes,
                options(nostack, readonly)
            );
        }
        asm!(
            "2:",
            "tileloadd tmm4, [{x0} + {line}]",
            "tileloadd tmm6, [{w0} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w1} + {line}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{x1} + {line}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {x0}, {tile}",
            "add {x1}, {tile}",
            "add {w0}, {tile}",
            "add {w1}, {tile}",
            "dec {steps}",
            "jnz 2b",
            x0 = inout(reg) activations[0].as_ptr() => _,
            x1 = inout(reg) activations[1].as_ptr() => _,
            w0 = inout(reg) weights[0].as_ptr() => _,
            w1 = inout(reg) weights[1].as_ptr() => _,
            steps = inout(reg) steps => _,
            line = in(reg) size_of::<Line>(),
            tile = const TILE_BYTES,
            options(nostack, readonly)
        );
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

const _: () = assert!(TILE_BYTES == 1024 && DEPTH == 32);
