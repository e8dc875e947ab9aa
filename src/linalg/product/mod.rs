//! C = X·Wᵀ with f32 sums, the products that take most of a run's time.
//!
//! X `[tokens, inner]` is f32, W `[columns, inner]` is in its stored dtype and never copied as a whole, C `[tokens, columns]` is f32.
//!
//! | kernel | factors | instruction | CPUs |
//! | --- | --- | --- | --- |
//! | `Fused` | f32, weights widened while they are packed | fused multiply-add on the CPU's widest vectors | any |
//! | `Split` | f32, as sums of bf16 parts | `tdpbf16ps` on 16 × 16 tiles | Intel from Sapphire Rapids on; Linux must grant the tiles |
//! | `Amx` | bf16 | the same | the same |
//! | `Avx512` | bf16 | `vdpbf16ps` | AMD from Zen 4 on, Intel from Cooper Lake on |
//!
//! | file | content |
//! | --- | --- |
//! | `amx` | `tdpbf16ps`: 16 × 16 outputs of 32 products each per instruction, by Intel's Advanced Matrix Extensions |
//! | `avx512` | `vdpbf16ps`: 16 outputs of two products each per instruction |
//! | `cut` | the cut of a product into tasks, and its memory |
//! | `fused` | f32 products for any CPU: blocks of C in registers, one multiply-add per product, on the widest vectors of the CPU |
//! | `interleave` | packing for f32 products: rows of a factor side by side, `[steps, rows of a block]`, widened to f32 |
//! | `kernel` | the kernels, and the choice among them |
//! | `packed` | packed factors: cache lines in the order in which blocks read them |
//! | `packed_weight` | weights that are packed once for many products |
//! | `products` | products of a common X on all threads |
//! | `tiles` | packing for the bf16 kernels: tiles of 16 rows or columns by 32 elements of `inner`, 1 KiB each |
//!
//! `Split` splits a number x: x₀, x₁ and x₂ are the bf16 numbers nearest to x, to x − x₀, and to x − x₀ − x₁. Then x = x₀ + x₁ + x₂ in
//! all 24 bits of the significand. So x·w = Σ xᵢ·wⱼ, and f32 holds each product xᵢ·wⱼ exactly. Products with i + j > 2 are left out;
//! they are at most 2⁻²³ of x·w. A bf16 weight is its own first part, an f16 weight has two parts. So 3, 5 or 6 products of bf16 make a
//! product of f32 (bounds: Henry, Tang and Heinecke 2019, arXiv:1904.06376).
//!
//! Every output is a single chain of sums along `inner`, from the first element to the last (the bf16 instructions add two products at a
//! time, `Split` the parts of 32 products in turn). So the bits do not depend on the number of threads, the number of tokens, or the
//! cuts of a product. `Fused` gives the same bits on every CPU that multiplies and adds in one step.
//!
//! A product is cut three times: into rectangles of C, one per task; along `inner` into slabs, so that the data of a core stay in its
//! second-level cache; and into blocks of C that fit the registers. Factors are packed slab by slab, in the order in which blocks read
//! them ([`Kernel::pack_rows`], [`Kernel::pack_columns`]). Unpacked rows whose length is a power of two would share a few lines of the
//! cache. `Fused` packs all factors slab by slab while it multiplies. `Split`, `Amx` and `Avx512` pack X as a whole, sum in scratch
//! (memory is too slow for C), and accept weights packed once for many products ([`PackedWeight`]).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cut;
mod fused;
mod interleave;
mod kernel;
mod packed;
mod packed_weight;
mod products;
#[cfg(test)]
mod tests;
mod tiles;

pub use cut::{Product, packed_bytes, parts_of_product};
pub use fused::{InBlocks, UNROLLED, block_of_c, in_blocks, plus_block};
pub(super) use interleave::interleave;
pub use kernel::Kernel;
pub(super) use packed::resize;
pub use packed::{Factors, Line, Strided, Values};
pub use packed_weight::{Factor, PackedWeight, RestoredWeight, RowBuffer};
pub use products::{Packed, ProductJob, StridedFactors, product_in_parts, products};
