//! Sums on vectors of eight f32: AVX2, FMA, F16C.
//!
//! Kept values are put into place eight columns at a time, by a table with a row of positions for every byte of a mask. Weights in bf16
//! become f32 as even and odd columns ([`Parted`]): the instruction that widens neighbours takes the same unit as the table.

#![expect(unsafe_code, reason = "intrinsics on memory of fixed length")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::super::bitmask::PLACES;
use super::super::eight::NONE;
use super::vectors::{CODES, CodeFactors, GROUP, Parted, Step, Vectors};

/// Proof that the CPU has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// The instructions, if the CPU has them.
    pub(super) fn detect() -> Option<Self> {
        let has = std::is_x86_feature_detected!("avx2")
            && std::is_x86_feature_detected!("fma")
            && std::is_x86_feature_detected!("f16c")
            && std::is_x86_feature_detected!("bmi2")
            && std::is_x86_feature_detected!("popcnt");
        has.then_some(Self(()))
    }
}

/// [`PLACES`] in bytes of 16-bit values.
static HALF_PLACES: [[u8; 16]; 256] = {
    let mut table = [[NONE; 16]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut column = 0;
        while column < 8 {
            let place = PLACES[byte][column];
            if place != NONE {
                table[byte][2 * column] = 2 * place;
                table[byte][2 * column + 1] = 2 * place + 1;
            }
            column += 1;
        }
        byte += 1;
    }
    table
};

/// The byte of a mask that begins at a column, times 16: where the row of [`HALF_PLACES`] begins, with as many bits as the byte.
#[inline(always)]
fn place_row(kept: u64, column: usize) -> usize {
    let shifted = if column == 0 { kept << 4 } else { kept >> (column - 4) };
    shifted as usize & 0xff0
}

/// Eight 16-bit values at their columns.
///
/// # Safety
/// 16 bytes are read, and the CPU has the instructions.
#[inline(always)]
unsafe fn spread_halves(values: *const u16, byte: usize) -> __m128i {
    // SAFETY: as the function's own; a row of the table has 16 bytes.
    unsafe {
        let places = _mm_loadu_si128(HALF_PLACES[byte & 255].as_ptr().cast());
        _mm_shuffle_epi8(_mm_loadu_si128(values.cast()), places)
    }
}

/// Implements [`Step`] for a dtype: `$dense` widens eight weights at a pointer, `$kept` the eight columns of a byte of the mask.
macro_rules! widen {
    ($element:ty, $dense:expr, $kept:expr) => {
        impl Step<$element, f32> for Avx2 {
            #[inline(always)]
            fn dense(
                self,
                mut sums: Self::Sums,
                weights: &[$element; GROUP],
                x: &[f32; GROUP],
            ) -> Self::Sums {
                for part in 0..8 {
                    // SAFETY: a part of eight of 64 elements; `self` exists, so the CPU has the instructions.
                    unsafe {
                        let weights = $dense(weights.as_ptr().add(8 * part));
                        let x = _mm256_loadu_ps(x.as_ptr().add(8 * part));
                        sums[part % 4] = _mm256_fmadd_ps(weights, x, sums[part % 4]);
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
                for part in 0..8 {
                    let byte = (kept >> (8 * part)) as usize & 255;
                    // SAFETY: before part p at most 8·p values are used, so eight more are within 64; `self` exists, so the CPU has
                    // the instructions.
                    unsafe {
                        let weights = $kept(values, byte);
                        let x = _mm256_loadu_ps(x.as_ptr().add(8 * part));
                        sums[part % 4] = _mm256_fmadd_ps(weights, x, sums[part % 4]);
                        values = values.add(byte.count_ones() as usize);
                    }
                }
                sums
            }
        }
    };
}

widen!(
    f16,
    |weights: *const f16| _mm256_cvtph_ps(_mm_loadu_si128(weights.cast())),
    |values: *const f16, byte| _mm256_cvtph_ps(spread_halves(values.cast(), byte))
);
widen!(f32, |weights: *const f32| _mm256_loadu_ps(weights), |values: *const f32, byte: usize| {
    let places = _mm256_cvtepi8_epi32(_mm_loadl_epi64(PLACES[byte].as_ptr().cast()));
    let values = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), places);
    // A place of a column that is not kept is negative.
    let not_kept = _mm256_castsi256_ps(_mm256_srai_epi32::<31>(places));
    _mm256_andnot_ps(not_kept, values)
});
widen!(
    i8,
    |codes: *const i8| { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(codes.cast()))) },
    |codes: *const i8, byte: usize| {
        let places = _mm_loadl_epi64(PLACES[byte].as_ptr().cast());
        let codes = _mm_shuffle_epi8(_mm_loadl_epi64(codes.cast()), places);
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
    }
);

/// The even and the odd columns of 16 weights.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn evens_and_odds(weights: __m256i) -> [__m256; 2] {
    // SAFETY: as the function's own.
    unsafe {
        let odds = _mm256_and_si256(weights, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()));
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(weights)), _mm256_castsi256_ps(odds)]
    }
}

impl Avx2 {
    /// sums + w·x over 16 columns of a group, from column 16·`part` on.
    #[inline(always)]
    fn plus_parted(
        self,
        sums: &mut [__m256; 4],
        weights: __m256i,
        x: &[Parted; GROUP],
        part: usize,
    ) {
        let at = part / 2 * 32 + part % 2 * 8;
        // SAFETY: `self` exists, so the CPU has the instructions; eight even columns begin at `at`, eight odd ones 16 places behind.
        unsafe {
            for (odd, weights) in evens_and_odds(weights).into_iter().enumerate() {
                let x = _mm256_loadu_ps(x.as_ptr().add(at + 16 * odd).cast());
                let sum = &mut sums[part % 2 * 2 + odd];
                *sum = _mm256_fmadd_ps(weights, x, *sum);
            }
        }
    }
}

impl Step<bf16, Parted> for Avx2 {
    #[inline(always)]
    fn dense(
        self,
        mut sums: Self::Sums,
        weights: &[bf16; GROUP],
        x: &[Parted; GROUP],
    ) -> Self::Sums {
        for part in 0..GROUP / 16 {
            // SAFETY: 16 of 64 weights; `self` exists, so the CPU has the instructions.
            let weights = unsafe { _mm256_loadu_si256(weights.as_ptr().add(16 * part).cast()) };
            self.plus_parted(&mut sums, weights, x, part);
        }
        sums
    }

    #[inline(always)]
    fn kept(
        self,
        mut sums: Self::Sums,
        values: &[bf16; GROUP],
        kept: u64,
        x: &[Parted; GROUP],
    ) -> Self::Sums {
        let mut values = values.as_ptr();
        for part in 0..GROUP / 16 {
            let [low, high] = [16 * part, 16 * part + 8].map(|column| place_row(kept, column));
            // SAFETY: before part p at most 16·p values are used, so 16 more are within 64; a row of the table has 16 bytes; `self`
            // exists, so the CPU has the instructions.
            let weights = unsafe {
                let of = |values: *const bf16| _mm_loadu_si128(values.cast());
                let place = |row: usize| _mm_loadu_si128(HALF_PLACES.as_ptr().byte_add(row).cast());
                let behind = values.add(low.count_ones() as usize);
                let lanes = _mm256_set_m128i(of(behind), of(values));
                values = behind.add(high.count_ones() as usize);
                _mm256_shuffle_epi8(lanes, _mm256_set_m128i(place(high), place(low)))
            };
            self.plus_parted(&mut sums, weights, x, part);
        }
        sums
    }
}

impl Vectors for Avx2 {
    type Sums = [__m256; 4];
    const ROWS: usize = 2;

    #[inline(always)]
    fn zero(self) -> Self::Sums {
        // SAFETY: `self` exists, so the CPU has the instructions.
        unsafe { [_mm256_setzero_ps(); 4] }
    }

    #[inline(always)]
    fn plus_scaled(self, mut sums: Self::Sums, part: Self::Sums, scale: f32) -> Self::Sums {
        for (sum, part) in sums.iter_mut().zip(part) {
            // SAFETY: `self` exists, so the CPU has the instructions.
            *sum = unsafe { _mm256_fmadd_ps(part, _mm256_set1_ps(scale), *sum) };
        }
        sums
    }

    #[inline(always)]
    fn total(self, [a, b, c, d]: Self::Sums) -> f32 {
        let mut lanes = [0.0f32; 8];
        // SAFETY: `self` exists, so the CPU has the instructions; eight lanes are written.
        unsafe {
            let sum = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
            _mm256_storeu_ps(lanes.as_mut_ptr(), sum);
        }
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
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
            let mut sum = _mm256_setzero_si256();
            for part in 0..CODES / 16 {
                let bits = kept[part / 4] >> (16 * (part % 4));
                let (low, high) = (bits as usize & 255, (bits >> 8) as usize & 255);
                let place = |byte: usize| _mm_loadl_epi64(PLACES[byte].as_ptr().cast());
                let first = _mm_shuffle_epi8(_mm_loadl_epi64(codes.cast()), place(low));
                codes = codes.add(low.count_ones() as usize);
                let second = _mm_shuffle_epi8(_mm_loadl_epi64(codes.cast()), place(high));
                codes = codes.add(high.count_ones() as usize);
                let weights = _mm256_cvtepi8_epi16(_mm_unpacklo_epi64(first, second));
                let x = _mm_loadu_si128(factors.x.codes.as_ptr().add(16 * part).cast());
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weights, _mm256_cvtepi8_epi16(x)));
            }
            let scale = _mm256_set1_ps(factors.scale);
            sums[0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[0]);
        }
        sums
    }
}
