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
//! | `packed` | packed factors: cache lines in the order in which blocks read them |
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
mod packed;
mod products;
#[cfg(test)]
mod tests;
mod tiles;

use std::sync::OnceLock;

use super::rectangles::assert_holds;
use super::stored::StoredDtype;
use packed::BlockSizes;

pub use cut::{Product, packed_bytes, parts_of_product};
pub use fused::{InBlocks, UNROLLED, block_of_c, in_blocks, plus_block};
pub(super) use interleave::interleave;
pub(super) use packed::resize;
pub use packed::{Factor, Factors, Line, PackedWeight, Strided, Values};
pub use products::{Packed, ProductJob, product_in_parts, products, products_of};

/// A kernel of products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// f32, multiplied and added in one step.
    Fused,
    /// f32 as sums of bf16 parts, on AMX tiles: three parts for X, the given number for W ([`Kernel::split`]).
    Split(u8),
    /// bf16, on tiles of Intel's Advanced Matrix Extensions.
    Amx,
    /// bf16, AVX-512 with `vdpbf16ps`.
    Avx512,
}

impl Kernel {
    /// The name in a run's protocol. Kernels with different bits for the same weights have different names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fused if fused::in_one_step() => "f32 products, multiplied and added in one step",
            Self::Fused => "f32 products, multiplied and added in two steps",
            Self::Split(_) => "f32 products, as sums of bf16 products by AMX tiles",
            Self::Amx => "bf16 products by AMX tiles",
            Self::Avx512 => "bf16 products by AVX-512",
        }
    }

    /// Returns whether factors are rounded to bf16.
    pub fn is_bf16(self) -> bool {
        matches!(self, Self::Amx | Self::Avx512)
    }

    /// The number of bf16 products per product; 1 for a kernel that does not split.
    pub fn terms(self) -> usize {
        match self {
            Self::Fused | Self::Amx | Self::Avx512 => 1,
            Self::Split(1) => 3,
            Self::Split(2) => 5,
            Self::Split(_) => 6,
        }
    }

    /// Returns whether weights may be packed in advance ([`PackedWeight`]).
    pub fn keeps(self) -> bool {
        self != Self::Fused
    }

    /// The kernel for AMX tiles that splits weights of a dtype into parts without loss.
    pub fn split(dtype: StoredDtype) -> Self {
        Self::Split(match dtype {
            StoredDtype::Bf16 => 1,
            StoredDtype::F16 => 2,
            StoredDtype::F32 => 3,
        })
    }

    /// Returns whether this CPU has [`Kernel::Split`].
    pub fn has_split() -> bool {
        static HAS: OnceLock<bool> = OnceLock::new();
        *HAS.get_or_init(|| Self::all().contains(&Self::Split(1)))
    }

    /// The bf16 kernel that is faster than f32 products on this CPU, if there is one. Intel's CPUs have `vdpbf16ps` at a third of the rate
    /// of f32 (measured on Sapphire Rapids), so without tiles they widen bf16.
    pub fn best_bf16() -> Option<Self> {
        static BEST: OnceLock<Option<Kernel>> = OnceLock::new();
        *BEST.get_or_init(|| {
            let is_worth_it = |kernel: &Self| match kernel {
                Self::Fused | Self::Split(_) => false,
                Self::Amx => true,
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => avx512::is_fast(),
                #[cfg(not(target_arch = "x86_64"))]
                Self::Avx512 => false,
            };
            Self::all().into_iter().find(is_worth_it)
        })
    }

    /// All kernels of this CPU, fastest first.
    pub fn all() -> Vec<Self> {
        let mut kernels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if amx::is_granted() {
                kernels.extend([Self::Amx, Self::Split(1), Self::Split(2), Self::Split(3)]);
            }
            if avx512::is_there() {
                kernels.push(Self::Avx512);
            }
        }
        kernels.push(Self::Fused);
        kernels
    }

    /// Multiplies registers for some hundredths of a second, for [`super::peak`]; returns the number of operations.
    pub(super) fn spin(self) -> usize {
        match self {
            Self::Fused => fused::spin(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx | Self::Split(_) => amx::spin(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::spin(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Split(_) | Self::Amx | Self::Avx512 => 0,
        }
    }

    fn shape(self) -> BlockSizes {
        match self {
            Self::Fused => fused::shape(),
            Self::Split(parts) => tiles::split(parts.into()),
            Self::Amx => BlockSizes {
                slab: 512,
                task: 2 * packed::TASK_ELEMENTS,
                columns: 2 * packed::TILE,
                unit: 2 * packed::TILE,
                ..tiles::SHAPE
            },
            Self::Avx512 => tiles::SHAPE,
        }
    }

    /// Lines of packed rows of X, of at most a slab of `inner`.
    ///
    /// Within a slab, the lines of any rows follow the lines of the rows before, if the rows before are whole blocks.
    pub fn row_lines(self, rows: usize, inner: usize) -> usize {
        self.shape().packed_rows(rows, inner)
    }

    /// Lines of packed columns of W, of at most a slab of `inner`.
    pub fn column_lines(self, columns: usize, inner: usize) -> usize {
        self.shape().packed_columns(columns, inner)
    }

    /// Elements of `inner` that are multiplied at once.
    pub fn slab(self) -> usize {
        self.shape().slab
    }

    /// Packs rows of a factor, at most a slab of `inner`, with zeros up to whole blocks.
    /// `rows` is f32, `[rows, inner]` in any layout, and `packed` has [`Kernel::row_lines`] lines.
    pub fn pack_rows(self, rows: Strided<'_>, count: usize, inner: usize, packed: &mut [Line]) {
        match self {
            Self::Fused => fused::pack_rows(rows, count, inner, packed),
            Self::Split(_) => tiles::pack_rows::<{ tiles::ROW_PARTS }>(rows, count, inner, packed),
            Self::Amx | Self::Avx512 => tiles::pack_rows::<1>(rows, count, inner, packed),
        }
    }

    /// Packs columns of a product, which are rows of W, at most a slab of `inner`, with zeros up to whole units.
    /// `packed` has [`Kernel::column_lines`] lines.
    pub fn pack_columns(
        self,
        columns: Strided<'_>,
        count: usize,
        inner: usize,
        packed: &mut [Line],
    ) {
        match self {
            Self::Fused => fused::pack_columns(columns, count, inner, packed),
            Self::Avx512 => tiles::pack_columns::<1>(columns, count, inner, 1, packed),
            Self::Amx | Self::Split(1) => {
                tiles::pack_columns::<1>(columns, count, inner, 2, packed);
            }
            Self::Split(2) => tiles::pack_columns::<2>(columns, count, inner, 2, packed),
            Self::Split(_) => tiles::pack_columns::<3>(columns, count, inner, 2, packed),
        }
    }

    /// Multiplies packed factors of at most a slab, on this thread.
    ///
    /// # Arguments
    /// * `out`: `[rows, columns]`, rows `stride` elements apart
    /// * `adds`: the product is added to `out`
    ///
    /// # Panics
    /// Panics when a factor or `out` is smaller than its shape.
    pub fn multiply(self, factors: Factors<'_>, out: &mut [f32], stride: usize, adds: bool) {
        assert!(
            factors.columns <= stride && factors.rows > 0,
            "rows of the result must not overlap"
        );
        assert_holds(out.len(), factors.rows, factors.columns, stride);
        match self {
            Self::Fused => fused::multiply(factors, &mut fused::Slice { out, stride }, adds),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => amx::multiply(amx::Terms::Whole, factors, out, stride, adds),
            #[cfg(target_arch = "x86_64")]
            Self::Split(parts) => {
                amx::multiply(amx::Terms::Split(parts), factors, out, stride, adds);
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::multiply(factors, out, stride, adds),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Split(_) | Self::Amx | Self::Avx512 => {
                unreachable!("this CPU does not list such kernels")
            }
        }
    }
}
