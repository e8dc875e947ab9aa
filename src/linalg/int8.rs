//! 8-bit codes: a kept weight w becomes the code round(w / s), and is read as code · s, rounded to the dtype of the matrix.
//!
//! s is a scale in f16 for each row and each [`GROUP`] columns: the largest |w| / 127, rounded up. So a code is at most 127, and the error
//! of a weight is at most s / 2. Zeros are not stored and stay 0; a small kept weight may become 0.
//!
//! A scale has no smaller step than 2⁻²⁴. A group whose weights are smaller than that keeps an error of up to 2⁻²⁵, whatever its own
//! size. [`fits`] bounds this error by the largest weight of the matrix.

use anyhow::Result;
use half::f16;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::bitmask;
use super::stored::StoredMatrix;
use crate::failure::Failure;

/// Columns that share a scale.
pub const GROUP: usize = 128;

/// The largest code.
const LARGEST_CODE: f32 = 127.0;

/// The smallest and the largest magnitude that a matrix may have as its largest: from 2⁻¹⁰ on, an error of 2⁻²⁵ is below 1/32768 of the
/// largest weight; up to 2¹⁵, 127 steps stay in the range of f16.
const MAGNITUDES: [f32; 2] = [1.0 / 1024.0, 32768.0];

/// Returns whether the f16 scales serve a matrix with this largest magnitude. A matrix of zeros needs none.
pub fn fits(largest: f32) -> bool {
    largest == 0.0 || (MAGNITUDES[0]..=MAGNITUDES[1]).contains(&largest)
}

/// max |x|; NaN where x has a NaN.
pub fn largest(x: &[f32]) -> f32 {
    // Without their signs, the bits of numbers have the order of the numbers, and NaNs are behind infinity.
    f32::from_bits(x.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0))
}

/// Refuses weights that have no 8-bit codes.
///
/// # Errors
/// Fails where a weight is not finite, and where the largest weight has no scale.
pub fn check(dense: &StoredMatrix) -> Result<()> {
    let rows = (0..dense.rows()).into_par_iter();
    let of_row = |row: usize| {
        let mut wide = vec![0.0; dense.columns()];
        dense.widen_rows(row, &mut wide);
        largest(&wide)
    };
    let larger = |a: f32, b: f32| if a.is_nan() || a >= b { a } else { b };
    let largest = rows.map(of_row).reduce(|| 0.0, larger);
    if !largest.is_finite() || !fits(largest) {
        return Err(Failure::new("a matrix has no 8-bit codes")
            .detail(format!("its largest weight is {largest}; from 2^-10 to 2^15 there are scales"))
            .hint("leave int8 out of --weights and --head")
            .into());
    }
    Ok(())
}

/// The scale of a group with this largest magnitude, rounded up.
fn scale_of(largest: f32) -> f16 {
    let exact = largest / LARGEST_CODE;
    let nearest = f16::from_f32(exact);
    match nearest.to_f32() < exact {
        true => f16::from_bits(nearest.to_bits() + 1),
        false => nearest,
    }
}

/// 1.5 · 2²³: a sum with a small number has no digits behind the point, and its lowest byte is the whole number.
const TO_WHOLE: f32 = 12_582_912.0;

/// Rounds a number of at most 127 steps to the nearest code, ties to even. Without SSE 4.1, `round_ties_even` is a call of the C library.
#[inline(always)]
pub(super) fn code_of(steps: f32) -> i8 {
    (steps + TO_WHOLE).to_bits() as i8
}

/// Widens a scale, which is not negative. The library asks for the CPU's features at every conversion.
#[inline(always)]
pub(super) fn wide_scale(scale: f16) -> f32 {
    // The exponents of f16 and f32 begin 112 apart.
    const APART: u32 = 112 << 23;
    // 2⁻¹⁴, the least normal number of f16.
    const LEAST: u32 = 113 << 23;
    let bits = u32::from(scale.to_bits()) << 13;
    // A subnormal number is read above 2⁻¹⁴: CPUs take a hundred cycles or more for a subnormal f32.
    let subnormal = f32::from_bits(bits + LEAST) - f32::from_bits(LEAST);
    f32::from_bits(if bits < 1 << 23 { subnormal.to_bits() } else { bits + APART })
}

/// Appends the scales of a row (f16, little endian) and the codes of its kept weights.
///
/// # Arguments
/// * `row`: the weights, finite, each at most 2¹⁵
/// * `mask`: the kept columns
pub fn encode(row: &[f32], mask: &[u8], scales: &mut Vec<u8>, codes: &mut Vec<u8>) {
    // 128 columns are 16 whole bytes of the mask.
    for (group, bits) in row.chunks(GROUP).zip(mask.chunks(GROUP / 8)) {
        let scale = scale_of(largest(group));
        scales.extend_from_slice(&scale.to_le_bytes());
        let scale = scale.to_f32();
        let mut all = [0; GROUP];
        // A group whose scale is 0 has the code 0 only.
        if scale != 0.0 {
            for (code, weight) in all.iter_mut().zip(group) {
                *code = code_of((weight / scale).clamp(-LARGEST_CODE, LARGEST_CODE)) as u8;
            }
        }
        bitmask::gather(1, &all[..group.len()], bits, codes);
    }
}

/// Restores a row of rounded weights from one code per kept column.
///
/// # Arguments
/// * `scales`: f16, one per group
/// * `row`: replaced
pub fn decode(codes: &[u8], scales: &[u8], mask: &[u8], row: &mut [f32]) {
    Arch::new().dispatch(Decode { codes, scales, mask, row });
}

struct Decode<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    mask: &'a [u8],
    row: &'a mut [f32],
}

impl WithSimd for Decode<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { codes, scales, mask, row } = self;
        let mut at = 0;
        let groups =
            row.chunks_mut(GROUP).zip(mask.chunks(GROUP / 8)).zip(scales.as_chunks::<2>().0);
        for ((group, bits), &scale) in groups {
            let scale = f16::from_le_bytes(scale).to_f32();
            let mut all = [0; GROUP];
            bitmask::scatter(1, codes.get(at..).unwrap_or(&[]), bits, &mut all[..group.len()]);
            at += bitmask::set_bits(bits);
            for (weight, code) in group.iter_mut().zip(all) {
                *weight = f32::from(code.cast_signed()) * scale;
            }
        }
    }
}

/// The index of the first scale that is no scale: negative, infinite or NaN.
pub fn first_wrong_scale(scales: &[u8]) -> Option<usize> {
    let scales = scales.as_chunks::<2>().0.iter();
    scales
        .map(|&scale| f16::from_le_bytes(scale))
        .position(|scale| !scale.is_finite() || scale.is_sign_negative())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::bitmask::{kept, mark, mask_bytes};

    fn round_trip(row: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let bytes: Vec<u8> = row.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let mut mask = vec![0; mask_bytes(row.len())];
        mark(4, &bytes, &mut mask);
        let (mut scales, mut codes) = (Vec::new(), Vec::new());
        encode(row, &mask, &mut scales, &mut codes);
        assert_eq!((scales.len(), codes.len()), (2 * row.len().div_ceil(GROUP), kept(&mask)));
        assert_eq!(first_wrong_scale(&scales), None);
        let mut back = vec![9.0; row.len()];
        decode(&codes, &scales, &mask, &mut back);
        let scales = scales.as_chunks::<2>().0.iter();
        (back, scales.map(|&scale| f16::from_le_bytes(scale).to_f32()).collect())
    }

    #[test]
    fn errors_are_at_most_half_a_step_and_zeros_stay() {
        let weight = |at: usize| match at % 3 {
            0 => 0.0,
            _ => ((at as f32) * 0.7).sin() * 0.3,
        };
        for columns in [1, 127, 128, 129, 300] {
            let row: Vec<f32> = (0..columns).map(weight).collect();
            let (back, scales) = round_trip(&row);
            for (at, (before, after)) in row.iter().zip(&back).enumerate() {
                let scale = scales[at / GROUP];
                // The rounding of the quotient and of the product, in f32.
                assert!((before - after).abs() <= 0.5001 * scale, "{at}: {before} {after}");
                assert!(*before != 0.0 || *after == 0.0);
            }
        }
    }

    #[test]
    fn the_largest_weight_never_passes_127_steps() {
        for largest in [0.001f32, 0.0099999, 0.3, 1.0, 126.99, 3e4, 32768.0, 1e-6, 6e-8] {
            let (back, scales) = round_trip(&[largest, -largest]);
            assert!(scales[0] * LARGEST_CODE >= largest * (1.0 - 1e-6), "{largest}");
            assert!((back[0] - largest).abs() <= 0.5001 * scales[0] && back[1] == -back[0]);
        }
        assert!(fits(0.0) && fits(0.3) && !fits(1e-5) && !fits(5e4));
        // A group of zeros beside other groups.
        let mut row = vec![0.0; 256];
        row[200] = 1.0;
        assert_eq!(round_trip(&row).1[0], 0.0);
    }

    #[test]
    fn scales_that_are_none_are_found() {
        let bytes =
            |scales: [f32; 3]| scales.map(|scale| f16::from_f32(scale).to_le_bytes()).concat();
        assert_eq!(first_wrong_scale(&bytes([0.0, 1.0, 2.0])), None);
        for wrong in [-1.0, f32::INFINITY, f32::NAN] {
            assert_eq!(first_wrong_scale(&bytes([0.0, 1.0, wrong])), Some(2));
        }
    }

    #[test]
    fn every_scale_is_widened_exactly() {
        for bits in 0..f16::INFINITY.to_bits() {
            let scale = f16::from_bits(bits);
            assert_eq!(wide_scale(scale).to_bits(), scale.to_f32().to_bits(), "{bits}");
        }
    }
}
