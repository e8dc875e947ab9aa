//! Conversion between stored bytes and f32, for rows that are read and written in pieces.
//!
//! Bytes are little endian and may begin at any address. Widening is exact. Narrowing rounds to the nearest, and ties to even.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};

use super::stored::StoredDtype;

/// Elements of f16 that are converted at once.
const BLOCK: usize = 256;

/// Widens stored elements to f32. `bytes` holds as many elements as `values`.
///
/// # Panics
/// Panics where the lengths differ.
pub fn widen(dtype: StoredDtype, bytes: &[u8], values: &mut [f32]) {
    assert_eq!(bytes.len(), values.len() * dtype.bytes(), "as many elements");
    match dtype {
        StoredDtype::F32 => Arch::new().dispatch(WidenF32(bytes, values)),
        StoredDtype::Bf16 => Arch::new().dispatch(WidenBf16(bytes, values)),
        StoredDtype::F16 => {
            let mut halves = [f16::ZERO; BLOCK];
            for (bytes, values) in bytes.chunks(2 * BLOCK).zip(values.chunks_mut(BLOCK)) {
                let halves = &mut halves[..values.len()];
                for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *half = f16::from_le_bytes(*bytes);
                }
                halves.convert_to_f32_slice(values);
            }
        }
    }
}

/// Rounds f32 to stored elements. `bytes` becomes as long as the values need.
pub fn narrow(dtype: StoredDtype, values: &[f32], bytes: &mut Vec<u8>) {
    bytes.resize(values.len() * dtype.bytes(), 0);
    match dtype {
        StoredDtype::F32 => Arch::new().dispatch(NarrowF32(values, bytes)),
        StoredDtype::Bf16 => Arch::new().dispatch(NarrowBf16(values, bytes)),
        StoredDtype::F16 => {
            let mut halves = [f16::ZERO; BLOCK];
            for (bytes, values) in bytes.chunks_mut(2 * BLOCK).zip(values.chunks(BLOCK)) {
                let halves = &mut halves[..values.len()];
                halves.convert_from_f32_slice(values);
                for (half, bytes) in halves.iter().zip(bytes.as_chunks_mut::<2>().0) {
                    *bytes = half.to_le_bytes();
                }
            }
        }
    }
}

struct WidenF32<'a>(&'a [u8], &'a mut [f32]);

impl WithSimd for WidenF32<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (value, bytes) in self.1.iter_mut().zip(self.0.as_chunks::<4>().0) {
            *value = f32::from_le_bytes(*bytes);
        }
    }
}

struct WidenBf16<'a>(&'a [u8], &'a mut [f32]);

impl WithSimd for WidenBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (value, bytes) in self.1.iter_mut().zip(self.0.as_chunks::<2>().0) {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }
    }
}

struct NarrowF32<'a>(&'a [f32], &'a mut [u8]);

impl WithSimd for NarrowF32<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (value, bytes) in self.0.iter().zip(self.1.as_chunks_mut::<4>().0) {
            *bytes = value.to_le_bytes();
        }
    }
}

struct NarrowBf16<'a>(&'a [f32], &'a mut [u8]);

impl WithSimd for NarrowBf16<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (value, bytes) in self.0.iter().zip(self.1.as_chunks_mut::<2>().0) {
            let bits = value.to_bits();
            // Half of the last kept bit, less 1 where that bit is even: ties go to even.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            // Rounding could turn the bits of a NaN into zero.
            let quiet = bits >> 16 | 0x40;
            let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *bytes = (if is_nan { quiet } else { rounded } as u16).to_le_bytes();
        }
    }
}

/// Returns a value after rounding to the dtype and back.
pub fn rounded(dtype: StoredDtype, value: f32) -> f32 {
    match dtype {
        StoredDtype::F32 => value,
        StoredDtype::F16 => f16::from_f32(value).to_f32(),
        StoredDtype::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_both_ways() {
        for dtype in [StoredDtype::F16, StoredDtype::Bf16] {
            let stored: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let mut wide = vec![0.0; 1 << 16];
            widen(dtype, &stored, &mut wide);
            let mut back = Vec::new();
            narrow(dtype, &wide, &mut back);
            for (at, (before, after)) in stored.chunks(2).zip(back.chunks(2)).enumerate() {
                // A signalling NaN becomes a quiet NaN.
                assert!(before == after || wide[at].is_nan(), "{dtype:?} {at:#x}");
            }
        }
    }

    #[test]
    fn rounding_is_that_of_half() {
        let values: Vec<f32> = (0..200_000u32)
            .map(|i| f32::from_bits(i.wrapping_mul(2_654_435_761)))
            .filter(|value| !value.is_nan())
            .chain([f32::INFINITY, -0.0, f32::MAX, f32::MIN_POSITIVE])
            .collect();
        for dtype in [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16] {
            let (mut bytes, mut wide) = (Vec::new(), vec![0.0; values.len()]);
            narrow(dtype, &values, &mut bytes);
            // At an odd address.
            let mut moved = vec![0];
            moved.extend(&bytes);
            widen(dtype, &moved[1..], &mut wide);
            for (value, found) in values.iter().zip(wide) {
                let expected = rounded(dtype, *value);
                assert_eq!(found.to_bits(), expected.to_bits(), "{dtype:?} {value:e}");
            }
        }
    }
}
