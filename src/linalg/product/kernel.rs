//! [`Kernel`]: the kernels of products, and the choice among them.

use std::sync::OnceLock;

use super::super::rectangles::assert_holds;
use super::super::stored::StoredDtype;
use super::packed::{self, BlockSizes, Factors, Line, Strided};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx512};
use super::{fused, tiles};

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

    /// Returns whether weights may be packed in advance ([`PackedWeight`](super::PackedWeight)).
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

    /// Multiplies registers for some hundredths of a second, for `linalg/peak`; returns the number of operations.
    pub(in super::super) fn spin(self) -> usize {
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

    pub(super) fn shape(self) -> BlockSizes {
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
