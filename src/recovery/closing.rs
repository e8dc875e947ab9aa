//! Masks that close while a model trains: the goal of every trained matrix after a step, and the change towards it.
//!
//! A choice happens in the update of a matrix, right after its step: its values and its state of the optimizer are in memory then. So no
//! file is read for it, and values, mask and moments of a matrix change together.

use std::fmt;
use std::sync::Arc;

use super::store::ChangedParameter;
use crate::pruning::{Pattern, Target};
use crate::recovery::optimizers::{
    ChoiceEdge, ClosingSchedule, KeptMask, Optimizer, TrainedMatrix,
};

/// The sparsity of a matrix before the training and at its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClosingRange {
    /// The share of zeros before the first step.
    pub first: f64,
    /// The sparsity in the end.
    pub target: Target,
}

/// A mask right after a choice.
#[derive(Debug)]
pub struct ChosenMask<'a> {
    /// The step, from 1.
    pub step: u64,
    /// The layer.
    pub layer: usize,
    /// The place of the matrix among the trained matrices of its layer.
    pub place: usize,
    /// The mask.
    pub kept: &'a KeptMask,
    /// The edge of the choice.
    pub edge: Option<ChoiceEdge>,
}

/// A receiver of masks.
pub type MaskReceiver = dyn Fn(&ChosenMask<'_>) + Send + Sync;

/// The masks of a training that close.
#[derive(Clone)]
pub struct ClosingMasks {
    /// The steps.
    pub schedule: ClosingSchedule,
    /// By layer and trained matrix.
    pub ranges: Arc<[Vec<ClosingRange>]>,
    /// Sees every mask after each choice.
    pub receiver: Option<Arc<MaskReceiver>>,
}

impl fmt::Debug for ClosingMasks {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?} over {} layers", self.schedule, self.ranges.len())
    }
}

impl ClosingMasks {
    /// The last step that changes a mask; 0 where every matrix has its last sparsity before the training.
    pub fn last_change(&self) -> u64 {
        let mut ranges = self.ranges.iter().flatten();
        match ranges.all(|range| range.first >= range.target.ratio) {
            true => 0,
            false => self.schedule.last(),
        }
    }

    /// Performs the choice of a parameter at the end of a step, if its mask closes then. A parameter without a mask stays as it is.
    ///
    /// # Panics
    /// Panics for a layer or a matrix without a goal.
    pub fn close(
        &self,
        step: u64,
        layer: usize,
        changed: ChangedParameter<'_>,
        optimizer: &dyn Optimizer,
    ) {
        let ChangedParameter { place, values, kept, state, .. } = changed;
        let Some(kept) = kept.filter(|_| self.schedule.closes_in(step)) else { return };
        let goal = self.goal(step, self.ranges[layer][place]);
        let edge = TrainedMatrix { values, kept, state }.close(goal, optimizer);
        if let Some(receiver) = &self.receiver {
            receiver(&ChosenMask { step, layer, place, kept, edge });
        }
    }

    /// The sparsity of a matrix after a step.
    fn goal(&self, step: u64, range: ClosingRange) -> Target {
        let ClosingRange { first, target } = range;
        let ratio = self.schedule.sparsity(step, first, target.ratio);
        let pattern = match target.pattern {
            Pattern::Unstructured => Pattern::Unstructured,
            Pattern::NOfM { m, .. } => {
                // The nearest number: groups of four would else lose their second weight in the last step that closes, with few steps left
                // to make up for it.
                Pattern::NOfM { n: (ratio * m as f64).round() as usize, m }
            }
        };
        Target { ratio, pattern }
    }

    /// The share of zeros in all matrices after a step; step 0 is before the training.
    ///
    /// # Arguments
    /// * `elements`: of each trained matrix of a layer
    pub fn sparsity(&self, step: u64, elements: &[usize]) -> f64 {
        let of_layer = |ranges: &Vec<ClosingRange>| -> f64 {
            let of = |(&range, &elements): (&ClosingRange, &usize)| {
                let goal = self.goal(step, range);
                let zeros = match goal.pattern {
                    Pattern::NOfM { n, m } => n as f64 / m as f64,
                    Pattern::Unstructured => goal.ratio,
                };
                zeros.max(range.first) * elements as f64
            };
            ranges.iter().zip(elements).map(of).sum()
        };
        let all = self.ranges.len() * elements.iter().sum::<usize>();
        self.ranges.iter().map(of_layer).sum::<f64>() / all.max(1) as f64
    }
}
