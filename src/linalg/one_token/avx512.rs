//! Sums on vectors of 16 f32: AVX-512. Kept values of 16 and 32 bits are put into place by an instruction that expands 32-bit lanes.
//!
//! A parameter has what further instructions change: [`Base`], [`Vnni`] with products of 8-bit codes, and [`Bf16Pairs`], which expands
//! bytes and 16-bit words (VBMI2), too, and multiplies pairs of bf16.

#![expect(unsafe_code, reason = "intrinsics on memory of fixed length")]

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::avx2::Avx2;
use super::vectors::{CODES, CodeFactors, CodedInput, GROUP, SHIFT, Step, Vectors};

/// Proof that the CPU has AVX-512 with its byte, double-word and length extensions, and what `L` proves.
#[derive(Clone, Copy)]
pub(super) struct Avx512<L>(L);

/// No further instructions.
#[derive(Clone, Copy)]
pub(super) struct Base(());

/// Proof that the CPU has VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni(());

/// Proof that the CPU has VBMI2, VNNI and bf16 products.
#[derive(Clone, Copy)]
pub(super) struct Bf16Pairs(Vnni);

impl Avx512<Base> {
    /// The instructions, if the CPU has them.
    pub(super) fn detect() -> Option<Self> {
        let has = std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl");
        Avx2::detect().filter(|_| has).map(|_| Self(Base(())))
    }

    /// The instructions with VNNI, if the CPU has it.
    pub(super) fn with_vnni(self) -> Option<Avx512<Vnni>> {
        std::is_x86_feature_detected!("avx512vnni").then_some(Avx512(Vnni(())))
    }
}

impl Avx512<Vnni> {
    /// The instructions with VBMI2 and bf16 products, if the CPU has both.
    pub(super) fn with_pairs(self) -> Option<Avx512<Bf16Pairs>> {
        let has = std::is_x86_feature_detected!("avx512bf16")
            && std::is_x86_feature_detected!("avx512vbmi2");
        has.then_some(Avx512(Bf16Pairs(self.0)))
    }
}

/// Implements [`Step`] for a dtype: `$wide` widens 16 elements at a pointer.
macro_rules! widen {
    ($element:ty, $wide:expr) => {
        impl<L: CodeSums> Step<$element, f32> for Avx512<L> {
            #[inline(always)]
            fn dense(
                self,
                mut sums: Self::Sums,
                weights: &[$element; GROUP],
                x: &[f32; GROUP],
            ) -> Self::Sums {
                for (part, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: a part of 16 of 64 elements; `self` exists, so the CPU has the instructions.
                    unsafe {
                        let weights = $wide(weights.as_ptr().add(16 * part));
                        let x = _mm512_loadu_ps(x.as_ptr().add(16 * part));
                        *sum = _mm512_fmadd_ps(weights, x, *sum);
                    }
                }
                sums
            }

            #[inline(always)]
            fn kept(
                self,
                mut sums: Self::Sums,
                values: &[$element; GROUP],
                kept: u64,
                x: &[f32; GROUP],
            ) -> Self::Sums {
                let mut values = values.as_ptr();
                for (part, sum) in sums.iter_mut().enumerate() {
                    let kept = (kept >> (16 * part)) as u16;
                    // SAFETY: before part p at most 16·p values are used, so 16 more are within 64; `self` exists, so the CPU has the
                    // instructions.
                    unsafe {
                        let weights = _mm512_maskz_expand_ps(kept, $wide(values));
                        let x = _mm512_loadu_ps(x.as_ptr().add(16 * part));
                        *sum = _mm512_fmadd_ps(weights, x, *sum);
                        values = values.add(kept.count_ones() as usize);
                    }
                }
                sums
            }
        }
    };
}

widen!(bf16, |at: *const bf16| {
    let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
});
widen!(f16, |at: *const f16| _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())));
widen!(f32, |at: *const f32| _mm512_loadu_ps(at));
widen!(i8, |at: *const i8| {
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
});

impl<L: CodeSums> Vectors for Avx512<L> {
    type Sums = [__m512; 4];
    const ROWS: usize = 4;

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `self` exists, so the CPU has the instructions.
        unsafe { [_mm512_setzero_ps(); 4] }
    }

    #[inline(always)]
    fn plus_scaled(self, mut sums: Self::Sums, part: Self::Sums, scale: f32) -> Self::Sums {
        for (sum, part) in sums.iter_mut().zip(part) {
            // SAFETY: `self` exists, so the CPU has the instructions.
            *sum = unsafe { _mm512_fmadd_ps(part, _mm512_set1_ps(scale), *sum) };
        }
        sums
    }

    #[inline(always)]
    fn total(self, [a, b, c, d]: Self::Sums) -> f32 {
        // SAFETY: `self` exists, so the CPU has the instructions.
        unsafe {
            let sum = _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
            _mm512_reduce_add_ps(sum)
        }
    }

    #[inline(always)]
    fn plus_codes(
        self,
        mut sums: Self::Sums,
        kept: [u64; 2],
        factors: CodeFactors<'_>,
    ) -> Self::Sums {
        // SAFETY: `self` exists, so the CPU has the instructions.
        unsafe {
            let mut parts = L::none();
            let mut codes = factors.codes.as_ptr();
            for (half, kept) in kept.into_iter().enumerate() {
                // 64 columns of 128 at a time; the second half begins after at most 64 codes.
                let weights = self.0.spread(codes, kept);
                parts = self.0.plus_products(parts, weights, factors.x, half);
                codes = codes.add(kept.count_ones() as usize);
            }
            let sum = _mm512_cvtepi32_ps(self.0.sums(parts));
            sums[0] = _mm512_fmadd_ps(sum, _mm512_set1_ps(factors.scale), sums[0]);
        }
        sums
    }
}

/// Sums of products of 8-bit codes, as whole numbers in 32-bit lanes.
pub(super) trait CodeSums: Copy {
    /// The kept codes of 64 columns in their places, and zeros elsewhere.
    ///
    /// # Safety
    /// 64 codes can be read.
    #[inline(always)]
    unsafe fn spread(self, codes: *const i8, kept: u64) -> __m512i {
        // SAFETY: as the function's own: before lane l at most 16·l codes are used, so 16 more are within 64. The value exists, so the CPU
        // has AVX-512.
        unsafe {
            // The place of a column in its lane is the number of kept columns before it: sums of ones in eight bytes, by three shifts,
            // and the sum of the first eight bytes for the eight bytes behind them.
            let ones = _mm512_mask_mov_epi8(load(&FIRST_BYTE), kept, load(&FIRST_BYTE_KEPT));
            let sums = _mm512_add_epi8(ones, _mm512_slli_epi64::<8>(ones));
            let sums = _mm512_add_epi8(sums, _mm512_slli_epi64::<16>(sums));
            let sums = _mm512_add_epi8(sums, _mm512_slli_epi64::<32>(sums));
            let first_eight = _mm512_shuffle_epi8(sums, load(&EIGHTH_BYTE));
            let places = _mm512_add_epi8(sums, first_eight);
            let before = |column: u32| (kept & ((1 << column) - 1)).count_ones() as usize;
            let lane = |number: u32| _mm_loadu_si128(codes.add(before(16 * number)).cast());
            let lanes = _mm512_castsi128_si512(lane(0));
            let lanes = _mm512_inserti32x4::<1>(lanes, lane(1));
            let lanes = _mm512_inserti32x4::<2>(lanes, lane(2));
            let lanes = _mm512_inserti32x4::<3>(lanes, lane(3));
            _mm512_maskz_shuffle_epi8(kept, lanes, places)
        }
    }

    /// Two vectors of sums.
    #[inline(always)]
    fn none() -> [__m512i; 2] {
        // SAFETY: only values that prove AVX-512 have this trait.
        unsafe { [_mm512_setzero_si512(); 2] }
    }

    /// sums + weights·x over the 64 columns of the first or the second half of a block.
    fn plus_products(
        self,
        sums: [__m512i; 2],
        weights: __m512i,
        x: &CodedInput,
        half: usize,
    ) -> [__m512i; 2];

    /// The sums of products from both vectors.
    fn sums(self, of: [__m512i; 2]) -> __m512i;
}

/// Bytes of lanes of 16: the first byte, which counts no column before it, and all other bytes.
const fn lanes(first: i8, others: i8) -> [i8; GROUP] {
    let mut bytes = [others; GROUP];
    let mut lane = 0;
    while lane < GROUP / 16 {
        bytes[16 * lane] = first;
        lane += 1;
    }
    bytes
}

/// Terms of the columns that are not kept, in the sums that give places: sums begin at -1, because a kept column counts itself.
static FIRST_BYTE: [i8; GROUP] = lanes(-1, 0);
/// Terms of the kept columns.
static FIRST_BYTE_KEPT: [i8; GROUP] = lanes(0, 1);
/// For the second eight bytes of a lane the byte before them, for the first eight none.
static EIGHTH_BYTE: [i8; GROUP] = {
    let mut bytes = [7; GROUP];
    let mut at = 0;
    while at < GROUP {
        if at % 16 < 8 {
            bytes[at] = i8::MIN;
        }
        at += 1;
    }
    bytes
};

#[inline(always)]
fn load(bytes: &[i8; GROUP]) -> __m512i {
    // SAFETY: 64 bytes; callers have AVX-512.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Products of 16-bit words, of the even and of the odd columns.
impl CodeSums for Base {
    #[inline(always)]
    fn plus_products(
        self,
        [even_sums, odd_sums]: [__m512i; 2],
        weights: __m512i,
        x: &CodedInput,
        half: usize,
    ) -> [__m512i; 2] {
        let x = load(&x.codes.as_chunks().0[half]);
        // SAFETY: the value exists, so the CPU has the instructions.
        unsafe {
            let even = |bytes| _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(bytes));
            let odd = |bytes| _mm512_srai_epi16::<8>(bytes);
            [
                _mm512_add_epi32(even_sums, _mm512_madd_epi16(even(weights), even(x))),
                _mm512_add_epi32(odd_sums, _mm512_madd_epi16(odd(weights), odd(x))),
            ]
        }
    }

    #[inline(always)]
    fn sums(self, [even, odd]: [__m512i; 2]) -> __m512i {
        // SAFETY: the value exists, so the CPU has the instructions.
        unsafe { _mm512_add_epi32(even, odd) }
    }
}

/// The instruction takes unsigned and signed bytes. Expanded codes have zeros that must stay zero, so x gets 128 more, and 128·Σ code
/// is subtracted.
impl CodeSums for Vnni {
    #[inline(always)]
    fn plus_products(
        self,
        [with_shift, of_shift]: [__m512i; 2],
        weights: __m512i,
        x: &CodedInput,
        half: usize,
    ) -> [__m512i; 2] {
        let shifted = load(bytemuck::cast_ref(&x.shifted.as_chunks::<GROUP>().0[half]));
        // SAFETY: the value exists, so the CPU has the instructions.
        unsafe {
            let shift = _mm512_set1_epi8(SHIFT.cast_signed());
            [
                _mm512_dpbusd_epi32(with_shift, shifted, weights),
                _mm512_dpbusd_epi32(of_shift, shift, weights),
            ]
        }
    }

    #[inline(always)]
    fn sums(self, [with_shift, of_shift]: [__m512i; 2]) -> __m512i {
        // SAFETY: the value exists, so the CPU has the instructions.
        unsafe { _mm512_sub_epi32(with_shift, of_shift) }
    }
}

impl CodeSums for Bf16Pairs {
    #[inline(always)]
    unsafe fn spread(self, codes: *const i8, kept: u64) -> __m512i {
        // SAFETY: as the function's own; the value exists, so the CPU has the instructions.
        unsafe { _mm512_maskz_expand_epi8(kept, _mm512_loadu_si512(codes.cast())) }
    }

    #[inline(always)]
    fn plus_products(
        self,
        sums: [__m512i; 2],
        weights: __m512i,
        x: &CodedInput,
        half: usize,
    ) -> [__m512i; 2] {
        self.0.plus_products(sums, weights, x, half)
    }

    #[inline(always)]
    fn sums(self, of: [__m512i; 2]) -> __m512i {
        self.0.sums(of)
    }
}

impl Step<bf16, bf16> for Avx512<Bf16Pairs> {
    #[inline(always)]
    fn dense(self, mut sums: Self::Sums, weights: &[bf16; GROUP], x: &[bf16; GROUP]) -> Self::Sums {
        for (half, sum) in sums.iter_mut().enumerate().take(2) {
            // SAFETY: a half of 64 elements; `self` exists, so the CPU has the instructions.
            unsafe {
                let weights = _mm512_loadu_si512(weights.as_ptr().add(32 * half).cast());
                let x = _mm512_loadu_si512(x.as_ptr().add(32 * half).cast());
                *sum = _mm512_dpbf16_ps(*sum, pairs(weights), pairs(x));
            }
        }
        in_turn(sums)
    }

    #[inline(always)]
    fn kept(
        self,
        mut sums: Self::Sums,
        values: &[bf16; GROUP],
        kept: u64,
        x: &[bf16; GROUP],
    ) -> Self::Sums {
        let mut values = values.as_ptr();
        for (half, sum) in sums.iter_mut().enumerate().take(2) {
            let kept = (kept >> (32 * half)) as u32;
            // SAFETY: the second half begins after at most 32 values; `self` exists, so the CPU has the instructions.
            unsafe {
                let weights = _mm512_maskz_expand_epi16(kept, _mm512_loadu_si512(values.cast()));
                let x = _mm512_loadu_si512(x.as_ptr().add(32 * half).cast());
                *sum = _mm512_dpbf16_ps(*sum, pairs(weights), pairs(x));
                values = values.add(kept.count_ones() as usize);
            }
        }
        in_turn(sums)
    }
}

/// The bits of a register as bf16 pairs.
#[inline(always)]
fn pairs(bits: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes without invalid values.
    unsafe { transmute::<__m512i, __m512bh>(bits) }
}

/// The sums with the other two first, so that four sums take turns.
#[inline(always)]
fn in_turn([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    [c, d, a, b]
}

const _: () = assert!(CODES == 2 * GROUP, "two registers of codes share a scale");
