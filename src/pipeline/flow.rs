//! The way of the calibration samples through a layer.

use clap::ValueEnum;
use serde::Serialize;

use crate::failure::Failure;
use crate::pruning::Technique;

/// The layers that samples have passed when they reach the next layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Propagation {
    /// Pruned layers
    #[default]
    Pruned,
    /// Dense layers
    Dense,
}

/// The matrices whose inputs are observed before any of them is pruned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ObservationOrder {
    /// All matrices of a layer.
    #[default]
    Layer,
    /// The matrices with the same input: q, k and v, then o, then gate and up, then down.
    Inputs,
}

/// `--propagate` and `--true-sequential`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flow {
    /// `--propagate`.
    pub propagation: Propagation,
    /// `--true-sequential`.
    pub sequence: ObservationOrder,
}

impl Flow {
    /// Checks that propagation and sequence fit together, and that they fit the technique.
    ///
    /// # Errors
    /// Fails for contradicting flags, and for `--true-sequential` with a technique that needs no samples.
    pub fn check(self, technique: &Technique) -> Result<(), Failure> {
        let is_sequential = self.sequence == ObservationOrder::Inputs;
        if is_sequential && self.propagation == Propagation::Dense {
            return Err(Failure::usage(
                "--true-sequential contradicts --propagate dense",
            )
            .detail("the first observes inputs behind pruned matrices, the second behind dense ones")
            .hint("leave one of them out"));
        }
        if is_sequential && technique.statistics().is_none() {
            let name = technique.name();
            return Err(Failure::usage(format!(
                "--true-sequential has no use: {name} needs no samples"
            ))
            .hint("leave --true-sequential out"));
        }
        Ok(())
    }
}
