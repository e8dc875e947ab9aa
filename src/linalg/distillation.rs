//! The loss of a student that learns from tokens and from a teacher's logits, and its gradient.
//!
//! ```text
//! p = softmax(logits of the student),  q = softmax(logits of the teacher)
//! loss of a token   (1 − w)·(−ln p_target) + w·Σ_v q_v·ln(q_v / p_v)
//! its gradient      dz_v = p_v − (1 − w)·[v = target] − w·q_v
//! ```
//!
//! The second term is the divergence KL(q‖p) at temperature 1 (Hinton et al. 2015, arXiv:1503.02531, §2). Where one vocabulary is longer,
//! as with padding, the second term has the ids of both: p' and q are softmaxes over these ids,
//!
//! ```text
//! dz_v = (1 − w)·(p_v − [v = target]) + w·(p'_v − q_v)      the last term for common ids only
//! ```
//!
//! Sums over the vocabulary are f32 in sixteen lanes and f64 over pieces, in a fixed order.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::exp;

/// Lanes of a sum.
const LANES: usize = 16;
/// Elements whose sums are f32.
const PIECE: usize = 64 * LANES;

/// The sizes and factors of a loss with a teacher.
#[derive(Debug, Clone, Copy)]
pub struct DistillationTerms {
    /// Logits of a token of the student, and of the teacher.
    pub vocab_sizes: [usize; 2],
    /// w, from 0 to 1.
    pub weight: f32,
    /// The factor of the gradients.
    pub scale: f32,
}

/// Replaces the student's logits by the gradients of `scale` times the sum of the losses; returns the sum itself, in nat.
///
/// # Arguments
/// * `logits`: of the student, `[tokens, vocab_size]`
/// * `teacher`: logits of the teacher, `[tokens, its vocab_size]`; their content is unspecified afterwards
/// * `targets`: `[tokens]`; a token without a target has no loss, and gradients of 0
///
/// # Panics
/// Panics when logits are not `[tokens, vocab_size]`, or a target is not in the student's vocabulary.
pub fn distillation_backward(
    logits: &mut [f32],
    teacher: &mut [f32],
    targets: &[Option<u32>],
    terms: DistillationTerms,
) -> f64 {
    let DistillationTerms { vocab_sizes: [own, taught], weight, scale } = terms;
    assert!(
        logits.len() == targets.len() * own && teacher.len() == targets.len() * taught,
        "logits must be [tokens, vocab_size]"
    );
    let common = own.min(taught);
    let losses: Vec<f64> = logits
        .par_chunks_mut(own.max(1))
        .zip(teacher.par_chunks_mut(taught.max(1)))
        .zip(targets)
        .map(|((logits, teacher), target)| {
            let Some(target) = target else {
                logits.fill(0.0);
                return 0.0;
            };
            let target = *target as usize;
            let chosen = f64::from(logits[target]);
            let teacher = &mut teacher[..common];
            let [apart, log_sum, log_sum_of_common] =
                Arch::new().dispatch(DistilledRow { logits, teacher, weight, scale });
            logits[target] -= (1.0 - weight) * scale;
            let weight = f64::from(weight);
            (1.0 - weight) * (log_sum - chosen) + weight * (apart + log_sum_of_common)
        })
        .collect();
    losses.iter().sum()
}

/// The gradient of a token, but for its target.
struct DistilledRow<'a> {
    logits: &'a mut [f32],
    /// The logits of common ids.
    teacher: &'a mut [f32],
    weight: f32,
    scale: f32,
}

impl WithSimd for DistilledRow<'_> {
    /// Σ q·(teacher − student) − ln Σ e^teacher; ln Σ e^student over all ids and over common ids. The first and the last together are the
    /// divergence.
    type Output = [f64; 3];

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> [f64; 3] {
        let Self { logits, teacher, weight, scale } = self;
        let highest = exp::largest_of(simd, teacher);
        let (mut sum, mut apart) = (0.0f64, 0.0f64);
        for (teacher, logits) in teacher.chunks_mut(PIECE).zip(logits.chunks(PIECE)) {
            let (mut sums, mut products) = ([0.0f32; LANES], [0.0f32; LANES]);
            for (teacher, logits) in teacher.chunks_mut(LANES).zip(logits.chunks(LANES)) {
                let values = teacher.iter_mut().zip(logits);
                for ((value, logit), (sum, product)) in
                    values.zip(sums.iter_mut().zip(&mut products))
                {
                    let power = exp::exp(*value - highest);
                    *sum += power;
                    // A logit of −∞ has no share.
                    if power > 0.0 {
                        *product += power * (*value - logit);
                    }
                    *value = power;
                }
            }
            for (lane, product) in sums.iter().zip(&products) {
                sum += f64::from(*lane);
                apart += f64::from(*product);
            }
        }
        let largest = exp::largest_of(simd, logits);
        let (common, own) = logits.split_at_mut(teacher.len());
        let of_common = exp::exp_minus(simd, common, 1.0, largest);
        let of_teacher = (f64::from(scale * weight) / sum) as f32;
        let mut all = of_common;
        let mut of_student = f64::from(scale) / of_common;
        if !own.is_empty() {
            all += exp::exp_minus(simd, own, 1.0, largest);
            let of_tokens = f64::from(scale * (1.0 - weight)) / all;
            own.iter_mut().for_each(|logit| *logit *= of_tokens as f32);
            of_student = of_tokens + f64::from(scale * weight) / of_common;
        }
        let of_student = of_student as f32;
        for (logit, power) in common.iter_mut().zip(teacher) {
            *logit = *logit * of_student - *power * of_teacher;
        }
        let largest = f64::from(largest);
        let apart = apart / sum - f64::from(highest) - sum.ln();
        [apart, largest + all.ln(), largest + of_common.ln()]
    }
}

#[cfg(test)]
mod tests {
    use super::super::derivatives::cross_entropy_backward;
    use super::*;

    fn wave(count: usize, pace: f32) -> Vec<f32> {
        (0..count).map(|i| 3.0 * (i as f32 * pace).sin()).collect()
    }

    /// The loss of a row in f64.
    fn loss(student: &[f64], teacher: &[f64], target: usize, weight: f64) -> f64 {
        let log_softmax = |logits: &[f64]| -> Vec<f64> {
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            logits.iter().map(|logit| logit - sum.ln()).collect()
        };
        let common = student.len().min(teacher.len());
        let (p, q) = (log_softmax(&student[..common]), log_softmax(&teacher[..common]));
        let divergence: f64 = p.iter().zip(&q).map(|(p, q)| q.exp() * (q - p)).sum();
        weight * divergence - (1.0 - weight) * log_softmax(student)[target]
    }

    /// Terms of equal vocabularies.
    fn terms(vocab_size: usize, weight: f32, scale: f32) -> DistillationTerms {
        DistillationTerms { vocab_sizes: [vocab_size; 2], weight, scale }
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        // More than a piece, and less than a lane at the end.
        for (vocab_size, taught) in [(7, 7), (PIECE + 21, PIECE + 21), (40, 33), (33, 40)] {
            let (tokens, weight, scale) = (3, 0.25f32, 0.5f32);
            let student = wave(tokens * vocab_size, 0.37);
            let teacher = wave(tokens * taught, 0.71);
            let targets = [Some(3), None, Some(vocab_size as u32 - 1)];
            let mut gradient = student.clone();
            let sum = distillation_backward(
                &mut gradient,
                &mut teacher.clone(),
                &targets,
                DistillationTerms { vocab_sizes: [vocab_size, taught], weight, scale },
            );
            let mut exact = 0.0;
            for (row, target) in targets.iter().enumerate() {
                let of_teacher = &teacher[row * taught..(row + 1) * taught];
                let row = row * vocab_size..(row + 1) * vocab_size;
                let Some(target) = target.map(|target| target as usize) else {
                    assert!(gradient[row].iter().all(|slope| *slope == 0.0));
                    continue;
                };
                let wide =
                    |values: &[f32]| -> Vec<f64> { values.iter().map(|v| f64::from(*v)).collect() };
                let (mut student, teacher) = (wide(&student[row.clone()]), wide(of_teacher));
                let at = |student: &[f64]| loss(student, &teacher, target, f64::from(weight));
                exact += at(&student);
                for column in (0..vocab_size).step_by(5).chain([target]) {
                    let (step, here) = (1e-4, student[column]);
                    student[column] = here + step;
                    let above = at(&student);
                    student[column] = here - step;
                    let slope = f64::from(scale) * (above - at(&student)) / (2.0 * step);
                    student[column] = here;
                    let got = f64::from(gradient[row.start + column]);
                    assert!((got - slope).abs() < 1e-6, "{column}: {got} {slope}");
                }
            }
            assert!((sum - exact).abs() < 1e-5 * exact.abs(), "{sum} {exact}");
        }
    }

    #[test]
    fn without_weight_the_teacher_is_not_heard_and_an_equal_one_has_no_distance() {
        let (vocab_size, targets) = (50, [Some(3), Some(4)]);
        let student = wave(2 * vocab_size, 0.37);
        let (mut alone, mut with) = (student.clone(), student.clone());
        let entropy = cross_entropy_backward(&mut alone, &targets, vocab_size, 1.0);
        let mut teacher = wave(2 * vocab_size, 0.71);
        let sum =
            distillation_backward(&mut with, &mut teacher, &targets, terms(vocab_size, 0.0, 1.0));
        assert!((sum - entropy).abs() < 1e-6);
        for (with, alone) in with.iter().zip(&alone) {
            assert!((with - alone).abs() < 1e-6);
        }
        let (mut same, mut teacher) = (student.clone(), student);
        let sum =
            distillation_backward(&mut same, &mut teacher, &targets, terms(vocab_size, 1.0, 1.0));
        assert!(sum.abs() < 1e-6 && same.iter().all(|slope| slope.abs() < 1e-6));
    }
}
