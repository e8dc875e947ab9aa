//! Sums of products of 64 columns at a time: the traits that a set of instructions implements, and the implementation for any CPU.
//!
//! ```text
//! sums_j,l += w_c · x_c    for column c = 64·g + lanes·(4·i + j) + l of group g
//! ```
//!
//! A row has four vectors of partial sums, j = 0..4, because an addition would wait for the addition before it. [`Step::dense`] and
//! [`Step::kept`] add the same products in the same order, so a weight has the same product with and without its zeros stored.

use half::{bf16, f16};

use super::super::bitmask::WORD;
use super::super::int8;

/// Columns of a group: the bits of a mask's word.
pub(super) const GROUP: usize = WORD;

/// Columns that share a scale of 8-bit codes.
pub(super) const CODES: usize = int8::GROUP;

/// The sums of a row on one set of instructions. A value of such a type exists only where the CPU has these instructions.
pub(super) trait Vectors: Copy {
    /// Four vectors of partial sums.
    type Sums: Copy;

    /// Rows whose sums fit into registers together: 1, 2 or 4.
    const ROWS: usize;

    fn zero(self) -> Self::Sums;

    /// sums + scale·part
    fn plus_scaled(self, sums: Self::Sums, part: Self::Sums, scale: f32) -> Self::Sums;

    fn total(self, sums: Self::Sums) -> f32;

    /// sums + scale·Σ code·x over [`CODES`] columns; `codes` begins with the first kept code, `kept` has a bit per column.
    fn plus_codes(self, sums: Self::Sums, kept: [u64; 2], factors: CodeFactors<'_>) -> Self::Sums;
}

/// An activation, in a group whose 32 columns each have the 16 even columns first and the odd columns behind them: a register of bf16
/// weights becomes f32 by a shift, which leaves the even columns, and a mask, which leaves the odd ones.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct Parted(pub f32);

/// Activations of a block as 8-bit codes from -127 to 127.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(in super::super) struct CodedInput {
    pub codes: [i8; CODES],
    /// The codes plus 128, for an instruction that takes an unsigned factor.
    pub shifted: [u8; CODES],
}

/// The bit of a code that changes when 128 is added.
pub(super) const SHIFT: u8 = 1 << 7;

/// The factors of a product of 8-bit codes.
#[derive(Clone, Copy)]
pub(super) struct CodeFactors<'a> {
    /// Kept weights of the group and of the groups behind it.
    pub codes: &'a [i8; CODES],
    /// Activations.
    pub x: &'a CodedInput,
    /// The scale of the weights times the scale of the activations.
    pub scale: f32,
}

/// Products of weights that are stored as `E` with activations in `X`: f32 or [`Parted`] with f32 products, or bf16 with products of bf16
/// pairs.
pub(super) trait Step<E, X>: Vectors {
    /// sums + w·x
    fn dense(self, sums: Self::Sums, weights: &[E; GROUP], x: &[X; GROUP]) -> Self::Sums;

    /// sums + w·x, where `values` begins with the weights whose bit is set; the other weights are +0.
    fn kept(self, sums: Self::Sums, values: &[E; GROUP], kept: u64, x: &[X; GROUP]) -> Self::Sums;
}

/// A stored weight.
pub(in super::super) trait StoredWeight: Copy + Default + Send + Sync {
    fn wide(self) -> f32;
}

impl StoredWeight for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
}

impl StoredWeight for f16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

impl StoredWeight for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        // A bfloat16 is the upper half of an f32.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl StoredWeight for i8 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self.into()
    }
}

/// Writes the kept values of a group to their columns, and zeros elsewhere. `values` begins with the first kept value.
#[inline(always)]
fn spread<E: Copy + Default>(values: &[E; GROUP], kept: u64, out: &mut [E; GROUP]) {
    let mut next = 0;
    for (column, out) in out.iter_mut().enumerate() {
        let bit = (kept >> column) as usize & 1;
        // A mask's bits are unpredictable, so a value is read in any case. Not more values are used than columns passed.
        let value = values[next % GROUP];
        *out = if bit == 1 { value } else { E::default() };
        next += bit;
    }
}

/// Vectors of eight lanes, as the compiler translates them.
#[derive(Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 8;

#[inline(always)]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    // Without the instruction, `mul_add` is a call of the C library.
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

impl Vectors for Portable {
    type Sums = [[f32; LANES]; 4];
    const ROWS: usize = 1;

    fn zero(self) -> Self::Sums {
        [[0.0; LANES]; 4]
    }

    #[inline(always)]
    fn plus_scaled(self, mut sums: Self::Sums, part: Self::Sums, scale: f32) -> Self::Sums {
        for (sum, part) in sums.as_flattened_mut().iter_mut().zip(part.as_flattened()) {
            *sum = multiply_add(*part, scale, *sum);
        }
        sums
    }

    fn total(self, [a, b, c, d]: Self::Sums) -> f32 {
        (0..LANES).map(|lane| (a[lane] + b[lane]) + (c[lane] + d[lane])).sum()
    }

    #[inline(always)]
    fn plus_codes(
        self,
        mut sums: Self::Sums,
        kept: [u64; 2],
        factors: CodeFactors<'_>,
    ) -> Self::Sums {
        let (mut at, mut sum) = (0, 0);
        for (kept, x) in kept.into_iter().zip(factors.x.codes.as_chunks::<GROUP>().0) {
            let mut codes = [0; GROUP];
            if let Some(values) = factors.codes[at..].first_chunk() {
                spread(values, kept, &mut codes);
            }
            let products = codes.iter().zip(x).map(|(&code, &x)| i32::from(code) * i32::from(x));
            sum += products.sum::<i32>();
            at += kept.count_ones() as usize;
        }
        sums[0][0] = multiply_add(sum as f32, factors.scale, sums[0][0]);
        sums
    }
}

impl<E: StoredWeight> Step<E, f32> for Portable {
    #[inline(always)]
    fn dense(self, mut sums: Self::Sums, weights: &[E; GROUP], x: &[f32; GROUP]) -> Self::Sums {
        let (weights, x) = (weights.as_chunks::<LANES>().0, x.as_chunks::<LANES>().0);
        for (number, (weights, x)) in weights.iter().zip(x).enumerate() {
            for ((sum, weight), x) in sums[number % 4].iter_mut().zip(weights).zip(x) {
                *sum = multiply_add(weight.wide(), *x, *sum);
            }
        }
        sums
    }

    #[inline(always)]
    fn kept(
        self,
        sums: Self::Sums,
        values: &[E; GROUP],
        kept: u64,
        x: &[f32; GROUP],
    ) -> Self::Sums {
        let mut weights = [E::default(); GROUP];
        spread(values, kept, &mut weights);
        self.dense(sums, &weights, x)
    }
}

/// Two products at a time, as the instruction of [`super::avx512`] adds them.
impl Step<bf16, bf16> for Portable {
    #[inline(always)]
    fn dense(self, mut sums: Self::Sums, weights: &[bf16; GROUP], x: &[bf16; GROUP]) -> Self::Sums {
        let pairs = weights.as_chunks::<2>().0.iter().zip(x.as_chunks::<2>().0);
        for (sum, (weights, x)) in sums.as_flattened_mut().iter_mut().zip(pairs) {
            *sum = multiply_add(weights[1].wide(), x[1].wide(), *sum);
            *sum = multiply_add(weights[0].wide(), x[0].wide(), *sum);
        }
        sums
    }

    #[inline(always)]
    fn kept(
        self,
        sums: Self::Sums,
        values: &[bf16; GROUP],
        kept: u64,
        x: &[bf16; GROUP],
    ) -> Self::Sums {
        let mut weights = [bf16::ZERO; GROUP];
        spread(values, kept, &mut weights);
        self.dense(sums, &weights, x)
    }
}
