//! AdamW in f32.
//!
//! ```text
//! p ← p · (1 - rate · decay)                            before the update
//! m ← m + (1 - β₁) (g - m)
//! v ← β₂ v + (1 - β₂) g²
//! p ← p - rate / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
//! ```
//!
//! p, g, m and v are f32; factors are computed in f64 and rounded once. State: m of all elements, then v, both f32, little endian.
//!
//! Sources: I. Loshchilov, F. Hutter, "Decoupled weight decay regularization" (2017, arXiv 1711.05101), algorithm 2; the reference is
//! `torch.optim.AdamW` of PyTorch 2, whose order of operations this is.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::kept::{F32, KeptMask, TASK, is_kept, parts};
use super::optimizer::{Hyperparameters, Optimizer, TrainingStep, check, roots_of};

/// AdamW; see the module's first lines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    settings: Hyperparameters,
}

impl AdamW {
    /// AdamW with these settings.
    pub fn new(settings: Hyperparameters) -> Self {
        Self { settings }
    }
}

impl Optimizer for AdamW {
    fn state_bytes(&self, elements: usize) -> usize {
        2 * F32 * elements
    }

    fn update(
        &self,
        step: TrainingStep,
        parameter: &mut [f32],
        gradient: &[f32],
        kept: Option<&KeptMask>,
        state: &mut [u8],
    ) {
        check(self, parameter, gradient, kept, state);
        let (first, second) = state.split_at_mut(F32 * parameter.len());
        let factors = StepFactors::new(&self.settings, step);
        parameter
            .par_chunks_mut(TASK)
            .zip(gradient.par_chunks(TASK))
            .zip(first.par_chunks_mut(F32 * TASK))
            .zip(second.par_chunks_mut(F32 * TASK))
            .zip(parts(kept, TASK, gradient.len().div_ceil(TASK)))
            .for_each(|((((parameter, gradient), first), second), kept)| {
                Arch::new().dispatch(AdamPart {
                    factors,
                    parameter,
                    gradient,
                    first: first.as_chunks_mut().0,
                    second: second.as_chunks_mut().0,
                    kept,
                });
            });
    }

    fn root_second_moments(&self, state: &[u8], elements: usize, first: usize, roots: &mut [f32]) {
        roots_of(&state[F32 * elements..], first, roots);
    }

    fn clear_first_moments(&self, state: &mut [u8], kept: &KeptMask) {
        let first = &mut state[..F32 * kept.elements()];
        kept.fill_pruned(first.as_chunks_mut().0, [0; F32]);
    }
}

/// The numbers of a step that all elements share.
#[derive(Debug, Clone, Copy)]
struct StepFactors {
    decay: f32,
    first_weight: f32,
    second_decay: f32,
    second_weight: f32,
    root_correction: f32,
    epsilon: f32,
    size: f32,
}

impl StepFactors {
    fn new(settings: &Hyperparameters, step: TrainingStep) -> Self {
        let power = |beta: f64| beta.powf(step.number as f64);
        Self {
            decay: (1.0 - step.rate * settings.weight_decay) as f32,
            first_weight: (1.0 - settings.beta1) as f32,
            second_decay: settings.beta2 as f32,
            second_weight: (1.0 - settings.beta2) as f32,
            root_correction: (1.0 - power(settings.beta2)).sqrt() as f32,
            epsilon: settings.epsilon as f32,
            size: (-step.rate / (1.0 - power(settings.beta1))) as f32,
        }
    }
}

struct AdamPart<'a> {
    factors: StepFactors,
    parameter: &'a mut [f32],
    gradient: &'a [f32],
    first: &'a mut [[u8; F32]],
    second: &'a mut [[u8; F32]],
    kept: Option<&'a [u8]>,
}

impl WithSimd for AdamPart<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let by = self.factors;
        let moments = self.first.iter_mut().zip(&mut *self.second);
        for ((parameter, gradient), (first, second)) in
            self.parameter.iter_mut().zip(self.gradient).zip(moments)
        {
            let mut m = f32::from_le_bytes(*first);
            let mut v = f32::from_le_bytes(*second);
            m += by.first_weight * (gradient - m);
            v = v * by.second_decay + by.second_weight * gradient * gradient;
            *first = m.to_le_bytes();
            *second = v.to_le_bytes();
            let denominator = v.sqrt() / by.root_correction + by.epsilon;
            *parameter = *parameter * by.decay + by.size * m / denominator;
        }
        let Some(kept) = self.kept else { return };
        let moments = self.first.iter_mut().zip(self.second);
        for (at, (parameter, (first, second))) in self.parameter.iter_mut().zip(moments).enumerate()
        {
            if !is_kept(kept, at) {
                (*parameter, *first, *second) = (0.0, [0; F32], [0; F32]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_formula_in_f64() {
        let settings = Hyperparameters { weight_decay: 0.01, ..Hyperparameters::default() };
        let optimizer = AdamW::new(settings);
        let count = 4000;
        let gradient = |number: u64| -> Vec<f32> {
            let value =
                |i: u64| (((i * 7919 + number * 104_729) % 10_007) as f32 / 10_007.0 - 0.5) * 0.1;
            (0..count as u64).map(value).collect()
        };
        let mut parameter: Vec<f32> = gradient(1000);
        let mut exact: Vec<f64> = parameter.iter().map(|&p| f64::from(p)).collect();
        let (mut m, mut v) = (vec![0f64; count], vec![0f64; count]);
        let mut state = vec![0; optimizer.state_bytes(count)];
        for number in 1..=100 {
            let rate = 1e-3 * number as f64 / 100.0;
            let gradient = gradient(number);
            optimizer.update(
                TrainingStep { number, rate },
                &mut parameter,
                &gradient,
                None,
                &mut state,
            );
            for at in 0..count {
                let g = f64::from(gradient[at]);
                exact[at] *= 1.0 - rate * 0.01;
                m[at] = 0.9 * m[at] + 0.1 * g;
                v[at] = 0.999 * v[at] + 0.001 * g * g;
                let m_hat = m[at] / (1.0 - 0.9f64.powi(number as i32));
                let v_hat = v[at] / (1.0 - 0.999f64.powi(number as i32));
                exact[at] -= rate * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        // 100 steps of at most 1e-3 on numbers below 0.1: a few units of 2^-27 per step.
        for (at, (found, exact)) in parameter.iter().zip(&exact).enumerate() {
            assert!((f64::from(*found) - exact).abs() < 3e-7, "{at}: {found} {exact}");
        }
    }

    #[test]
    fn the_first_step_moves_by_the_rate_against_the_sign() {
        // m/(1-b1) = g and sqrt(v/(1-b2)) = |g|: the step is rate · sign(g), whatever the size.
        let optimizer = AdamW::new(Hyperparameters::default());
        let mut parameter = [1.0, 1.0, 1.0];
        let mut state = vec![0; optimizer.state_bytes(3)];
        let step = TrainingStep { number: 1, rate: 0.25 };
        optimizer.update(step, &mut parameter, &[3.0, -1e-3, 0.0], None, &mut state);
        for (found, expected) in parameter.into_iter().zip([0.75, 1.25, 1.0]) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
}
