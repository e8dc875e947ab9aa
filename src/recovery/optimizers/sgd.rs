//! Gradient descent with optional momentum.
//!
//! ```text
//! g ← g + decay · p
//! b ← momentum · b + g          b = g without momentum
//! p ← p - rate · b
//! ```
//!
//! The decay is part of the gradient, as in the reference. State: b of all elements, f32, little endian; nothing without momentum.
//!
//! The reference is `torch.optim.SGD` of PyTorch 2, without dampening and Nesterov's rule.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::kept::{F32, KeptMask, TASK, is_kept, parts};
use super::optimizer::{Hyperparameters, Optimizer, TrainingStep, check};

/// Gradient descent; see the module's first lines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    momentum: f64,
    weight_decay: f64,
}

impl Sgd {
    /// Gradient descent with the momentum and decay of `settings`.
    pub fn new(settings: Hyperparameters) -> Self {
        Self { momentum: settings.momentum, weight_decay: settings.weight_decay }
    }
}

impl Optimizer for Sgd {
    fn state_bytes(&self, elements: usize) -> usize {
        if self.momentum == 0.0 { 0 } else { F32 * elements }
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
        let count = gradient.len().div_ceil(TASK);
        let velocities: Vec<&mut [u8]> = if state.is_empty() {
            (0..count).map(|_| &mut [][..]).collect()
        } else {
            state.chunks_mut(F32 * TASK).collect()
        };
        parameter
            .par_chunks_mut(TASK)
            .zip(gradient.par_chunks(TASK))
            .zip(velocities)
            .zip(parts(kept, TASK, count))
            .for_each(|(((parameter, gradient), velocity), kept)| {
                Arch::new().dispatch(Descent {
                    rate: step.rate as f32,
                    momentum: self.momentum as f32,
                    weight_decay: self.weight_decay as f32,
                    parameter,
                    gradient,
                    velocity: velocity.as_chunks_mut().0,
                    kept,
                });
            });
    }

    fn root_second_moments(&self, _: &[u8], _: usize, _: usize, roots: &mut [f32]) {
        roots.fill(1.0);
    }

    fn clear_first_moments(&self, state: &mut [u8], kept: &KeptMask) {
        if !state.is_empty() {
            kept.fill_pruned(state.as_chunks_mut().0, [0; F32]);
        }
    }
}

struct Descent<'a> {
    rate: f32,
    momentum: f32,
    weight_decay: f32,
    parameter: &'a mut [f32],
    gradient: &'a [f32],
    /// Empty without momentum.
    velocity: &'a mut [[u8; F32]],
    kept: Option<&'a [u8]>,
}

impl WithSimd for Descent<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let pairs = self.parameter.iter_mut().zip(self.gradient);
        if self.velocity.is_empty() {
            for (parameter, gradient) in pairs {
                *parameter -= self.rate * (gradient + self.weight_decay * *parameter);
            }
        } else {
            for ((parameter, gradient), velocity) in pairs.zip(&mut *self.velocity) {
                let decayed = gradient + self.weight_decay * *parameter;
                let b = self.momentum * f32::from_le_bytes(*velocity) + decayed;
                *velocity = b.to_le_bytes();
                *parameter -= self.rate * b;
            }
        }
        let Some(kept) = self.kept else { return };
        for (at, parameter) in self.parameter.iter_mut().enumerate() {
            if !is_kept(kept, at) {
                *parameter = 0.0;
                if let Some(velocity) = self.velocity.get_mut(at) {
                    *velocity = [0; F32];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momentum_and_decay_follow_a_hand_calculation() {
        let sgd = Sgd::new(Hyperparameters {
            momentum: 0.5,
            weight_decay: 0.25,
            ..Hyperparameters::default()
        });
        let (mut parameter, mut state) = ([2.0], vec![0; 4]);
        let step = |number| TrainingStep { number, rate: 0.5 };
        // b = 1 + 0.25·2 = 1.5, p = 2 - 0.75 = 1.25.
        sgd.update(step(1), &mut parameter, &[1.0], None, &mut state);
        assert_eq!(parameter, [1.25]);
        // b = 0.75 - 1 + 0.3125 = 0.0625, p = 1.25 - 0.03125.
        sgd.update(step(2), &mut parameter, &[-1.0], None, &mut state);
        assert_eq!(parameter, [1.21875]);
        // Without momentum: p = 2 - 0.5 (1 + 0.5).
        let plain = Sgd::new(Hyperparameters { weight_decay: 0.25, ..Hyperparameters::default() });
        let mut parameter = [2.0];
        plain.update(step(1), &mut parameter, &[1.0], None, &mut []);
        assert_eq!(parameter, [1.25]);
    }
}
