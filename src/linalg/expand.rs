//! Rows of 8 and 16 bit elements with their zeros, by the instructions of AVX-512 VBMI2 that expand a vector.
//!
//! The last values are taken by a masked load, which reads no byte behind them. [`super::bitmask`] has the same for every CPU.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "intrinsics on memory within slices")
)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Restores a row: elements whose bits are set come from `values` in order, all others are 0. Returns false, and leaves the row alone, where the
/// CPU lacks the instructions.
///
/// # Arguments
/// * `N`: the bytes of an element, 1 or 2
/// * `mask`: a bit per element, the lowest of a byte first, no bit after the last element
pub(super) fn expand<const N: usize>(values: &[u8], mask: &[u8], row: &mut [u8]) -> bool {
    #[cfg(target_arch = "x86_64")]
    if N <= 2
        && row.len() <= 8 * N * mask.len()
        && std::is_x86_feature_detected!("avx512f")
        && std::is_x86_feature_detected!("avx512bw")
        && std::is_x86_feature_detected!("avx512vbmi2")
        && std::is_x86_feature_detected!("bmi2")
        && std::is_x86_feature_detected!("popcnt")
    {
        // SAFETY: the CPU has the instructions.
        unsafe { expand_in_vectors::<N>(values, mask, row) };
        return true;
    }
    let _ = (values, mask, row);
    false
}

/// Bytes of a vector.
#[cfg(target_arch = "x86_64")]
const VECTOR: usize = 64;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,bmi2,popcnt")]
fn expand_in_vectors<const N: usize>(mut values: &[u8], mask: &[u8], row: &mut [u8]) {
    let (whole, rest) = row.as_chunks_mut::<VECTOR>();
    let mut bits_of = mask.chunks_exact(VECTOR / N / 8);
    for (part, bits) in whole.iter_mut().zip(&mut bits_of) {
        let bits = match N {
            1 => bits.first_chunk().map_or(0, |bits| u64::from_le_bytes(*bits)),
            _ => bits.first_chunk().map_or(0, |bits| u64::from(u32::from_le_bytes(*bits))),
        };
        *part = next_vector::<N>(&mut values, bits);
    }
    if !rest.is_empty() {
        let mut word = [0; 8];
        let last = mask[whole.len() * (VECTOR / N / 8)..].iter();
        word.iter_mut().zip(last).for_each(|(byte, last)| *byte = *last);
        let last = next_vector::<N>(&mut values, u64::from_le_bytes(word));
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Takes the values of as many elements as a vector has, and returns the elements.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2,bmi2,popcnt")]
fn next_vector<const N: usize>(values: &mut &[u8], bits: u64) -> [u8; VECTOR] {
    let kept = bits.count_ones();
    let loaded = match values.first_chunk::<VECTOR>() {
        // SAFETY: a reference to 64 bytes.
        Some(next) => unsafe { _mm512_loadu_si512(next.as_ptr().cast()) },
        // SAFETY: the mask allows the bytes of the slice to be read, and no others.
        None => unsafe {
            let mask = _bzhi_u64(u64::MAX, values.len() as u32);
            _mm512_maskz_loadu_epi8(mask, values.as_ptr().cast())
        },
    };
    *values = values.get(N * kept as usize..).unwrap_or(&[]);
    let all = match N {
        1 => _mm512_maskz_expand_epi8(bits, loaded),
        _ => _mm512_maskz_expand_epi16(bits as u32, loaded),
    };
    let mut out = [0; VECTOR];
    // SAFETY: a reference to 64 bytes.
    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), all) };
    out
}

#[cfg(test)]
mod tests {
    use super::super::bitmask::{kept, mask_bytes, scatter_by_eight};
    use super::*;

    #[test]
    fn rows_equal_those_of_the_loop_for_every_cpu() {
        for columns in [1, 7, 31, 32, 33, 63, 64, 65, 130, 257] {
            for period in [1, 2, 3, 7, 1000] {
                let mut mask = vec![0u8; mask_bytes(columns)];
                (0..columns)
                    .filter(|at| at % period == 0 || at % 5 == 1)
                    .for_each(|at| mask[at / 8] |= 1 << (at % 8));
                check::<1>(columns, &mask);
                check::<2>(columns, &mask);
            }
        }
    }

    fn check<const N: usize>(columns: usize, mask: &[u8]) {
        // The values end where the memory ends.
        let all: Vec<u8> = (0..N * kept(mask)).map(|at| (at * 37 + 1) as u8).collect();
        let (mut row, mut expected) = (vec![9; N * columns], vec![7; N * columns]);
        for missing in [0, N, 3 * N] {
            let values = all[..all.len().saturating_sub(missing)].to_vec();
            scatter_by_eight(N, &values, mask, &mut expected);
            if expand::<N>(&values, mask, &mut row) {
                assert_eq!(row, expected, "{N} {columns} {missing}");
            }
        }
    }
}
