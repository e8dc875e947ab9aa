//! The plan of masks that close: ranges of sparsity by layer, and the flags that contradict such a training.

use std::sync::Arc;

use anyhow::Result;

use crate::failure::Failure;
use crate::pipeline::allocation::Allocation;
use crate::pruning::Pattern;
use crate::recovery::ClosingRange;
use crate::run::AllocationReport;
use crate::settings::{RecoverySettings, RecoveryWay, TrainedKind};

/// The ranges of the sparsity of all matrices, by layer.
#[derive(Debug, Clone)]
pub(in crate::job) struct ClosingPlan {
    pub(super) ranges: Arc<[Vec<ClosingRange>]>,
    /// The allocation of the ratios, where they were measured.
    pub(in crate::job) allocation: Option<AllocationReport>,
}

impl ClosingPlan {
    /// The sparsity of every layer in the end; empty where all layers have the same `target`.
    pub(super) fn layer_ratios(&self, target: f64) -> Vec<f64> {
        let of_layer = |ranges: &Vec<ClosingRange>| ranges.first().map(|range| range.target.ratio);
        let ratios: Vec<f64> = self.ranges.iter().filter_map(of_layer).collect();
        match ratios.iter().all(|ratio| *ratio == target) {
            true => Vec::new(),
            false => ratios,
        }
    }
}

/// Refuses flags that contradict each other.
///
/// # Errors
/// Fails with exit code 2, naming the flags.
pub(super) fn check(recovery: &RecoverySettings) -> Result<()> {
    let closing = &recovery.closing;
    if let Some(flag) = closing.flag_without_target() {
        return Err(Failure::usage(format!("{flag} is about masks that close, and none closes"))
            .hint(format!("add --close-to 0.8, or leave {flag} out"))
            .into());
    }
    let Some(target) = closing.close_to else { return Ok(()) };
    let refused = match (recovery.how, recovery.trains, closing.allocate) {
        (RecoveryWay::Lora, _, _) => Some((
            format!(
                "--close-to {target} does not fit --how lora: which weights of W + s·B·A are the lowest is not known before the merge"
            ),
            "use --how full, or --how blocks where memory is short",
        )),
        (_, TrainedKind::Factors, _) => Some((
            format!(
                "--close-to {target} needs trained weights, and --train factors trains factors"
            ),
            "leave --train out",
        )),
        (_, _, Some(Allocation::Error)) => Some((
            "--allocate error tries masks without a training".to_string(),
            "use --allocate owl, or --layer-ratios FILE",
        )),
        (_, _, Some(Allocation::Owl)) if closing.layer_ratios.is_some() => {
            Some(("--allocate owl contradicts --layer-ratios".to_string(), "leave one of them out"))
        }
        _ if closing.close_by == Some(0.0) => Some((
            "--close-by 0 leaves no step to remove weights in".to_string(),
            "use a share above 0, like --close-by 0.6",
        )),
        _ if target.0.pattern != Pattern::Unstructured
            && (closing.layer_ratios.is_some() || closing.allocate == Some(Allocation::Owl)) =>
        {
            Some((
                format!("--close-to {target} fixes the sparsity of every layer"),
                "leave --layer-ratios and --allocate out, or use a ratio, like --close-to 0.8",
            ))
        }
        _ => None,
    };
    match refused {
        None => Ok(()),
        Some((message, hint)) => Err(Failure::usage(message).hint(hint).into()),
    }
}
