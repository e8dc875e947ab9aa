//! Clipping of gradients by their global norm.
//!
//! ```text
//! norm   = √(Σ over all gradients g²)                 f64
//! factor = min(1, limit / (norm + 1e-6))
//! ```
//!
//! The reference is `torch.nn.utils.clip_grad_norm_`, which sums in f32. Here parts of 16,384 elements are summed, and their sums are
//! added in order, so threads do not change the result.

use rayon::prelude::*;

use super::kept::TASK;

/// Addend of the denominator, as in the reference.
const ADDEND: f64 = 1e-6;

/// Partial sums of a part.
const LANES: usize = 8;

/// The sum of the squares of a gradient. Gradients of several parameters are added in a fixed order.
pub fn sum_of_squares(gradient: &[f32]) -> f64 {
    let parts: Vec<f64> = gradient.par_chunks(TASK).map(part).collect();
    parts.iter().sum()
}

fn part(values: &[f32]) -> f64 {
    let (whole, rest) = values.as_chunks::<LANES>();
    let mut sums = [0f64; LANES];
    for values in whole {
        for (sum, &value) in sums.iter_mut().zip(values) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    let rest: f64 = rest.iter().map(|&value| f64::from(value).powi(2)).sum();
    sums.iter().sum::<f64>() + rest
}

/// The factor that brings gradients with this norm to at most `limit`. `None` where the norm is infinite or no number: a step with
/// such gradients is to be left out.
pub fn clip_factor(norm: f64, limit: f64) -> Option<f32> {
    norm.is_finite().then(|| (limit / (norm + ADDEND)).min(1.0) as f32)
}

/// Multiplies a gradient by a factor.
pub fn scale(gradient: &mut [f32], factor: f32) {
    if factor == 1.0 {
        return;
    }
    gradient.par_chunks_mut(TASK).for_each(|part| {
        for value in part {
            *value *= factor;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_above_the_limit_get_its_norm_and_others_stay() {
        let mut gradient = vec![3.0f32; 40_000];
        gradient.push(4.0);
        let norm = sum_of_squares(&gradient).sqrt();
        assert_eq!(norm, 360_016f64.sqrt());
        let factor = clip_factor(norm, 1.0).unwrap();
        scale(&mut gradient, factor);
        assert!((sum_of_squares(&gradient).sqrt() - 1.0).abs() < 1e-6);
        assert_eq!(clip_factor(0.5, 1.0), Some(1.0));
        assert_eq!(clip_factor(0.0, 1.0), Some(1.0));
        // Exactly the limit: the addend makes the factor smaller than 1.
        assert_eq!(clip_factor(1.0, 1.0), Some((1.0 / 1.000_001f64) as f32));
    }

    #[test]
    fn gradients_without_a_finite_norm_have_no_factor() {
        assert_eq!(clip_factor(sum_of_squares(&[1.0, f32::NAN]).sqrt(), 1.0), None);
        assert_eq!(clip_factor(sum_of_squares(&[f32::INFINITY]).sqrt(), 1.0), None);
        // Squares of these leave f32, not f64.
        assert!(clip_factor(sum_of_squares(&[1e30; 100]).sqrt(), 1.0).is_some());
    }
}
