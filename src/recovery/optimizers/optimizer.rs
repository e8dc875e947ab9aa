//! [`Optimizer`]: a step on a flattened parameter.
//!
//! The state of a parameter is a slice of bytes that the caller owns: in memory, or read from and written to a file between steps
//! (paging). It is written as it is into a file to resume from. A fresh state is zeros. The file of every optimizer documents the
//! layout of its state.

use std::fmt;

use super::kept::KeptMask;

/// The settings of an optimizer that no schedule changes. The learning rate is part of [`TrainingStep`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyperparameters {
    /// Decay of the first moment per step.
    pub beta1: f64,
    /// Decay of the second moment per step.
    pub beta2: f64,
    /// Addend of the denominator.
    pub epsilon: f64,
    /// Decoupled weight decay: a step multiplies parameters by 1 - rate · decay. `sgd` adds decay · parameter to the gradient.
    pub weight_decay: f64,
    /// Momentum of `sgd`; 0 needs no state.
    pub momentum: f64,
    /// Rules that keep the 8-bit optimizer from dividing by zero moments; see `adamw8bit.rs`.
    pub safeguards: bool,
}

impl Default for Hyperparameters {
    /// PyTorch's defaults, without decay.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            safeguards: true,
        }
    }
}

/// The position of a step in the training, and its learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainingStep {
    /// The number of the step, from 1. Bias corrections depend on it.
    pub number: u64,
    /// The learning rate.
    pub rate: f64,
}

/// A rule that changes parameters by their gradients.
pub trait Optimizer: fmt::Debug + Send + Sync {
    /// The bytes of the state of a parameter with so many elements.
    fn state_bytes(&self, elements: usize) -> usize;

    /// Performs a step on a parameter.
    ///
    /// # Arguments
    /// * `parameter`, `gradient`: the same number of elements, flattened
    /// * `kept`: the mask of kept weights; pruned weights and their states get +0
    /// * `state`: [`Optimizer::state_bytes`], zeros before the first step
    ///
    /// # Panics
    /// Panics where the lengths disagree.
    fn update(
        &self,
        step: TrainingStep,
        parameter: &mut [f32],
        gradient: &[f32],
        kept: Option<&KeptMask>,
        state: &mut [u8],
    );

    /// Writes √v of some elements, where v is the second moment; 1 for an optimizer without it.
    ///
    /// # Arguments
    /// * `state`: the state of a parameter with `elements` elements
    /// * `first`: the element of the first root
    fn root_second_moments(&self, state: &[u8], elements: usize, first: usize, roots: &mut [f32]);

    /// Returns whether the moments of a parameter are rounded to codes, so that many are equal.
    fn has_coded_moments(&self, _elements: usize) -> bool {
        false
    }

    /// Sets the first moments, or velocities, of pruned weights to +0.
    fn clear_first_moments(&self, state: &mut [u8], kept: &KeptMask);
}

/// The roots of second moments that are stored in f32, of the elements from `first` on.
pub(super) fn roots_of(second: &[u8], first: usize, roots: &mut [f32]) {
    let stored = second.as_chunks().0[first..].iter();
    roots.iter_mut().zip(stored).for_each(|(root, v)| *root = f32::from_le_bytes(*v).sqrt());
}

/// Checks the lengths of a step.
pub(super) fn check(
    optimizer: &dyn Optimizer,
    parameter: &[f32],
    gradient: &[f32],
    kept: Option<&KeptMask>,
    state: &[u8],
) {
    let elements = parameter.len();
    assert_eq!(gradient.len(), elements, "one gradient per element");
    assert!(kept.is_none_or(|kept| kept.elements() == elements), "one bit per element");
    assert_eq!(state.len(), optimizer.state_bytes(elements), "the state of this parameter");
}
