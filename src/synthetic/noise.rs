//! Random numbers by index instead of in sequence, so that element `i` of a tensor is the same on any number of threads.
//!
//! Value i = mix(key + i·φ), the splitmix64 generator (Steele, Lea, Flood 2014) entered at any step. Its 64 bits are four
//! 16-bit uniforms. Their sum is close enough to a normal distribution for weights: mean 0, deviation 1, at most 3.47 from the mean. A
//! weight costs one chain of multiplications.

/// 2⁶⁴ divided by the golden ratio: the step of splitmix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The deviation of a sum of four uniforms on 0..=65535: sqrt(4 · (65536² − 1) / 12).
const DEVIATION: f32 = 37_837.22;

/// Four times the mean of a uniform on 0..=65535.
const CENTRE: i32 = 131_070;

/// The random numbers of a tensor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Noise {
    key: u64,
}

impl Noise {
    /// The stream of tensor number `tensor` under `seed`.
    pub(super) fn new(seed: u64, tensor: u64) -> Self {
        // The key is mixed twice. Mixed once, seeds 0, 1, 2 and tensors 0, 1, 2 would give shifted copies of the same stream.
        Self { key: mix(mix(seed.wrapping_add(STEP)).wrapping_add(tensor.wrapping_mul(STEP))) }
    }

    /// Returns number `index`, nearly normal with mean 0 and deviation 1.
    pub(super) fn normal(self, index: u64) -> f32 {
        let bits = mix(self.key.wrapping_add(index.wrapping_mul(STEP)));
        let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
        (sum as i32 - CENTRE) as f32 * (1.0 / DEVIATION)
    }
}

/// The output function of splitmix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_mean_zero_and_deviation_one() {
        let noise = Noise::new(7, 3);
        let count = 1_000_000;
        let (mut sum, mut squares) = (0.0, 0.0);
        for index in 0..count {
            let value = f64::from(noise.normal(index));
            sum += value;
            squares += value * value;
        }
        let mean = sum / count as f64;
        // Five standard errors: 5/√10⁶ for the mean, about as much for the deviation.
        assert!(mean.abs() < 0.005, "{mean}");
        let deviation = (squares / count as f64 - mean * mean).sqrt();
        assert!((deviation - 1.0).abs() < 0.005, "{deviation}");
    }

    #[test]
    fn mix_is_the_published_generator() {
        // splitmix64 seeded with 0 begins with this value (Vigna's splitmix64.c).
        assert_eq!(mix(STEP), 0xe220_a839_7b1d_cdaf);
    }
}
