//! Stored values of f32 master values: bf16, rounded to the nearest or stochastically.
//!
//! Stochastic rounding takes the neighbour above with the probability of the distance to the neighbour below:
//!
//! ```text
//! stored = upper half of (bits of the value + r),   r uniform in 0…2^16-1
//! ```
//!
//! So small updates are not lost on average where no master values are kept. r is a hash of the seed, the step and the element, so it
//! does not depend on threads, and a resumed run draws the same. Zero stays zero in both ways.

use rayon::prelude::*;

use super::kept::TASK;

/// The way of rounding to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bf16Rounding {
    /// The nearest, and ties to even.
    Nearest,
    /// A neighbour at random.
    Stochastic {
        /// The seed of the training, or of a parameter in it.
        seed: u64,
        /// The number of the step.
        step: u64,
    },
}

impl Bf16Rounding {
    /// The same rounding with random bits of its own for a parameter with this number.
    #[must_use]
    pub fn of_parameter(self, number: u64) -> Self {
        match self {
            Self::Nearest => Self::Nearest,
            Self::Stochastic { seed, step } => {
                Self::Stochastic { seed: finalised(seed ^ finalised(number + 1)), step }
            }
        }
    }
}

/// Rounds master values to stored bf16 elements, little endian.
///
/// # Panics
/// Panics where `stored` does not have two bytes per value.
pub fn round_to_bf16(values: &[f32], rounding: Bf16Rounding, stored: &mut [u8]) {
    assert_eq!(stored.len(), 2 * values.len(), "two bytes per value");
    values.par_chunks(TASK).zip(stored.par_chunks_mut(2 * TASK)).enumerate().for_each(
        |(part, (values, stored))| {
            let elements = stored.as_chunks_mut::<2>().0.iter_mut().zip(values);
            for (at, (stored, value)) in elements.enumerate() {
                let half = match rounding {
                    Bf16Rounding::Nearest => half::bf16::from_f32(*value).to_bits(),
                    Bf16Rounding::Stochastic { seed, step } => {
                        stochastic(*value, mixed(seed, step, (part * TASK + at) as u64))
                    }
                };
                *stored = half.to_le_bytes();
            }
        },
    );
}

/// Rounds a value with 16 random bits.
fn stochastic(value: f32, random: u16) -> u16 {
    let nearest = half::bf16::from_f32(value);
    // The largest numbers, infinities and NaN: an addend would change their kind.
    if !nearest.is_finite() {
        return nearest.to_bits();
    }
    let rounded = (value.to_bits() + u32::from(random)) >> 16;
    let is_finite = rounded & 0x7f80 != 0x7f80;
    if is_finite { rounded as u16 } else { nearest.to_bits() }
}

/// 16 random bits of an element: the finaliser over a sum of multiples of odd numbers.
fn mixed(seed: u64, step: u64, element: u64) -> u16 {
    let x = seed
        .wrapping_add(step.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(element.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (finalised(x) >> 48) as u16
}

/// The finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014).
fn finalised(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    fn rounded(values: &[f32], rounding: Bf16Rounding) -> Vec<f32> {
        let mut stored = vec![0; 2 * values.len()];
        round_to_bf16(values, rounding, &mut stored);
        let halves = stored.as_chunks::<2>().0.iter();
        halves.map(|&half| bf16::from_le_bytes(half).to_f32()).collect()
    }

    #[test]
    fn stochastic_rounding_is_right_on_average_and_to_a_neighbour() {
        // A quarter of the way from 1 to the next bf16, 1 + 2^-7.
        let value = 1.0 + 2f32.powi(-9);
        let count = 1 << 16;
        for sign in [1.0, -1.0] {
            let rounding = Bf16Rounding::Stochastic { seed: 3, step: 8 };
            let found = rounded(&vec![sign * value; count], rounding);
            let above = found.iter().filter(|&&v| v == sign * (1.0 + 2f32.powi(-7))).count();
            assert!(found.iter().all(|v| v.abs() == 1.0 || v.abs() == 1.0 + 2f32.powi(-7)));
            // Expected 16,384 with a standard deviation of 111.
            assert!((above as f64 - 16_384.0).abs() < 500.0, "{above}");
            assert_ne!(
                found,
                rounded(&vec![sign * value; count], Bf16Rounding::Stochastic { seed: 3, step: 9 })
            );
        }
    }

    #[test]
    fn every_parameter_has_random_bits_of_its_own() {
        let rounding = Bf16Rounding::Stochastic { seed: 3, step: 8 };
        let values = vec![1.0 + 2f32.powi(-8); 1 << 12];
        let of = |number| rounded(&values, rounding.of_parameter(number));
        assert_eq!(of(1), of(1));
        for (a, b) in [(0, 1), (1, 2), (0, 16)] {
            let (a, b) = (of(a), of(b));
            let same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
            // Half of 4096 with a standard deviation of 32.
            assert!(same.abs_diff(2048) < 200, "{same}");
        }
        assert_eq!(Bf16Rounding::Nearest.of_parameter(4), Bf16Rounding::Nearest);
    }

    #[test]
    fn exact_values_zeros_and_extremes_keep_their_kind() {
        let values = [0.0, -0.0, 1.5, -3.0, f32::INFINITY, f32::MAX, bf16::MAX.to_f32()];
        for step in 0..50 {
            let found = rounded(&values, Bf16Rounding::Stochastic { seed: 1, step });
            let nearest = rounded(&values, Bf16Rounding::Nearest);
            for (found, nearest) in found.iter().zip(nearest) {
                assert_eq!(found.to_bits(), nearest.to_bits());
            }
            let largest = f32::from_bits(bf16::MAX.to_f32().to_bits() + 0x7000);
            assert!(rounded(&[largest], Bf16Rounding::Stochastic { seed: 1, step })[0].is_finite());
            assert!(rounded(&[f32::NAN], Bf16Rounding::Stochastic { seed: 1, step })[0].is_nan());
        }
    }
}
