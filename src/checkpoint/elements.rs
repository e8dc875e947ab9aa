//! Stored elements as bits: zeros, changes and positions, without arithmetic or conversion.
//!
//! Zero means the value 0 of either sign; a *pruned* weight is +0, all bits zero.

use half::{bf16, f16};
use safetensors::Dtype;

use super::header::TensorEntry;

/// Bytes per element; 1 for the types below a byte, which are only compared.
pub(super) fn element_bytes(dtype: Dtype) -> usize {
    (dtype.bitsize() / 8).max(1)
}

/// Returns whether the element `now` is neither +0 nor equal to `before`.
#[inline]
pub(super) fn is_changed(now: &[u8], before: &[u8]) -> bool {
    now != before && now.iter().any(|&byte| byte != 0)
}

/// The row and column of the flat element `at` in a matrix.
pub(super) fn row_and_column(entry: &TensorEntry, at: usize) -> (usize, usize) {
    let columns = entry.shape.last().copied().unwrap_or(1).max(1);
    (at / columns, at % columns)
}

/// The number of elements equal to 0, of either sign: all bits but the sign are zero. Always 0 unless the type is f32, f16 or bf16.
pub(super) fn count_zeros(dtype: Dtype, bytes: &[u8]) -> u64 {
    match dtype {
        Dtype::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().filter(|word| u32::from_le_bytes(**word) & 0x7fff_ffff == 0).count() as u64
        }
        Dtype::F16 | Dtype::BF16 => {
            let (words, _) = bytes.as_chunks::<2>();
            words.iter().filter(|word| u16::from_le_bytes(**word) & 0x7fff == 0).count() as u64
        }
        _ => 0,
    }
}

/// The bit layout of a type of weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct FloatBits {
    /// All bits except the sign; none of them is set in the value 0.
    pub(super) magnitude: u32,
    /// The exponent; all of its bits are set in an infinity or NaN.
    pub(super) exponent: u32,
}

/// The bit layout of `dtype`; `None` unless it is f32, f16 or bf16.
pub(super) fn float_bits(dtype: Dtype) -> Option<FloatBits> {
    let (magnitude, exponent) = match dtype {
        Dtype::F32 => (0x7fff_ffff, 0x7f80_0000),
        Dtype::F16 => (0x7fff, 0x7c00),
        Dtype::BF16 => (0x7fff, 0x7f80),
        _ => return None,
    };
    Some(FloatBits { magnitude, exponent })
}

/// The value of a stored element; NaN for types without weights.
pub(super) fn value(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Dtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_of_either_sign_count_and_denormals_do_not() {
        let f32s: Vec<u8> = [0.0f32, -0.0, f32::from_bits(1), f32::NAN]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        assert_eq!(count_zeros(Dtype::F32, &f32s), 2);
        // +0, -0, the smallest denormal, infinity: the same bits in f16 and (but for infinity) bf16.
        let halves: Vec<u8> =
            [0u16, 0x8000, 0x0001, 0x7c00].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(count_zeros(Dtype::F16, &halves), 2);
        assert_eq!(count_zeros(Dtype::BF16, &halves), 2);
    }

    #[test]
    fn plus_zero_is_pruned_and_minus_zero_is_a_change() {
        let (one, minus_zero) = (1f32.to_le_bytes(), (-0f32).to_le_bytes());
        assert!(!is_changed(&[0; 4], &one));
        assert!(!is_changed(&minus_zero, &minus_zero));
        assert!(is_changed(&minus_zero, &one));
    }

    #[test]
    fn values_are_those_of_the_stored_type() {
        assert_eq!(value(Dtype::F32, &(-2.5f32).to_le_bytes()), -2.5);
        assert_eq!(value(Dtype::F16, &f16::from_f32(0.25).to_le_bytes()), 0.25);
        assert_eq!(value(Dtype::BF16, &bf16::from_f32(3.0).to_le_bytes()), 3.0);
    }
}
