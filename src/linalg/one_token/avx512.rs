//! Sums on vectors of 16 f32: AVX-512. Kept values are put into place by expanding instructions: of 32-bit lanes on every such CPU
//! ([`Avx512`]), of bytes and 16-bit words with VBMI2, where products of bf16 pairs and of 8-bit codes have instructions too
//! ([`Avx512Pairs`]).

#![expect(unsafe_code, reason = "intrinsics on memory of fixed length")]

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::avx2::Avx2;
use super::vectors::{CODES, CodeFactors, GROUP, Step, Vectors};

/// Proof that the CPU has AVX-512 with its byte, double-word and length extensions.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Proof that the CPU has VBMI2, VNNI and bf16 products, too.
#[derive(Clone, Copy)]
pub(super) struct Avx512Pairs(Avx512);

impl Avx512 {
    /// The instructions, if the CPU has them.
    pub(super) fn detect() -> Option<Self> {
        let has = std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl");
        Avx2::detect().filter(|_| has).map(|_| Self(()))
    }
}

impl Avx512Pairs {
    /// The instructions, if the CPU has them.
    pub(super) fn detect() -> Option<Self> {
        let has = std::is_x86_feature_detected!("avx512bf16")
            && std::is_x86_feature_detected!("avx512vbmi2")
            && std::is_x86_feature_detected!("avx512vnni");
        Avx512::detect().filter(|_| has).map(Self)
    }
}

/// Implements [`Step`] for a dtype: `$wide` widens 16 elements at a pointer.
macro_rules! widen {
    ($element:ty, $wide:expr) => {
        impl Step<$element, f32> for Avx512 {
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

        impl Step<$element, f32> for Avx512Pairs {
            #[inline(always)]
            fn dense(
                self,
                sums: Self::Sums,
                weights: &[$element; GROUP],
                x: &[f32; GROUP],
            ) -> Self::Sums {
                self.0.dense(sums, weights, x)
            }

            #[inline(always)]
            fn kept(
                self,
                sums: Self::Sums,
                values: &[$element; GROUP],
                kept: u64,
                x: &[f32; GROUP],
            ) -> Self::Sums {
                self.0.kept(sums, values, kept, x)
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

impl Vectors for Avx512 {
    type Sums = [__m512; 4];

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
        let mut codes = factors.codes.as_ptr();
        // SAFETY: 16 columns of 128 at a time; before part p at most 16·p codes are used, so 16 more are within 128. `self` exists, so
        // the CPU has the instructions.
        unsafe {
            let mut parts = [_mm512_setzero_si512(); 2];
            for part in 0..CODES / 16 {
                let kept = (kept[part / 4] >> (16 * (part % 4))) as u16;
                let weights = _mm512_cvtepi8_epi32(_mm_loadu_si128(codes.cast()));
                let weights = _mm512_maskz_expand_epi32(kept, weights);
                codes = codes.add(kept.count_ones() as usize);
                let x = _mm512_loadu_si512(factors.x.words.as_ptr().add(16 * part).cast());
                // The upper word of a weight, its sign, meets a 0.
                let products = _mm512_madd_epi16(weights, x);
                parts[part % 2] = _mm512_add_epi32(parts[part % 2], products);
            }
            let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(parts[0], parts[1]));
            sums[0] = _mm512_fmadd_ps(sum, _mm512_set1_ps(factors.scale), sums[0]);
        }
        sums
    }
}

impl Vectors for Avx512Pairs {
    type Sums = [__m512; 4];

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        self.0.zero()
    }

    #[inline(always)]
    fn plus_scaled(self, sums: Self::Sums, part: Self::Sums, scale: f32) -> Self::Sums {
        self.0.plus_scaled(sums, part, scale)
    }

    #[inline(always)]
    fn total(self, sums: Self::Sums) -> f32 {
        self.0.total(sums)
    }

    /// The instruction takes unsigned and signed bytes. Expanded codes have zeros that must stay zero, so x gets 128 more, and 128·Σ code
    /// is subtracted.
    #[inline(always)]
    fn plus_codes(
        self,
        mut sums: Self::Sums,
        kept: [u64; 2],
        factors: CodeFactors<'_>,
    ) -> Self::Sums {
        let mut codes = factors.codes.as_ptr();
        // SAFETY: 64 columns of 128 at a time; the second half begins after at most 64 codes. `self` exists, so the CPU has the
        // instructions.
        unsafe {
            let shift = _mm512_set1_epi8(-128);
            let (mut with_shift, mut of_shift) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for (half, kept) in kept.into_iter().enumerate() {
                let weights = _mm512_maskz_expand_epi8(kept, _mm512_loadu_si512(codes.cast()));
                codes = codes.add(kept.count_ones() as usize);
                let x = _mm512_loadu_si512(factors.x.codes.as_ptr().add(GROUP * half).cast());
                with_shift = _mm512_dpbusd_epi32(with_shift, _mm512_xor_si512(x, shift), weights);
                of_shift = _mm512_dpbusd_epi32(of_shift, shift, weights);
            }
            let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(with_shift, of_shift));
            sums[0] = _mm512_fmadd_ps(sum, _mm512_set1_ps(factors.scale), sums[0]);
        }
        sums
    }
}

impl Step<bf16, bf16> for Avx512Pairs {
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
