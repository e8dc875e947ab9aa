//! What a run leaves in its manifest.

use anyhow::Result;

use super::PruneArgs;
use crate::data::Calibration;
use crate::pipeline::TargetPlan;
use crate::run::manifest::{LayerReport, PruningSettings, SparsityReport};
use crate::run::{Events, Manifest};

/// The settings as resolved.
pub(super) fn settings(args: &PruneArgs, targets: &TargetPlan, layers: usize) -> PruningSettings {
    PruningSettings {
        method: args.sparsity.prune_method.clone(),
        sparsity_ratio: targets.sparsity_ratio,
        sparsity_type: targets.pattern.to_string(),
        use_variant: targets.use_variant,
        include: args.sparsity.include.clone(),
        exclude: args.sparsity.exclude.clone(),
        matrices: targets.matrices(),
        matrices_in_model: layers * 7,
        layer_ratios: targets.uneven_ratios(),
        propagate: "pruned".to_string(),
    }
}

/// The calibration text and the samples drawn from it.
pub(super) fn calibration_record(samples: &Calibration) -> Result<serde_json::Value> {
    let mut record = serde_json::to_value(&samples.protocol)?;
    if let Some(fields) = record.as_object_mut() {
        fields.insert("starts".into(), serde_json::to_value(&samples.starts)?);
        if let Some(documents) = &samples.documents {
            fields.insert("documents".into(), serde_json::to_value(documents)?);
        }
    }
    Ok(record)
}

/// Zeros over all decoder linears.
pub(super) fn sparsity(layers: &[LayerReport]) -> SparsityReport {
    let matrices = || layers.iter().flat_map(|layer| &layer.matrices);
    let zeros = matrices().map(|matrix| matrix.zeros).sum();
    let weights = matrices()
        .map(|matrix| (matrix.shape[0] * matrix.shape[1]) as u64)
        .sum();
    SparsityReport {
        zeros,
        zeros_before: matrices().map(|matrix| matrix.zeros_before).sum(),
        weights,
        ratio: zeros as f64 / weights as f64,
    }
}

/// A perplexity that is no number must not pass for one.
pub(super) fn warn_of_infinite(manifest: &Manifest, events: &dyn Events) {
    for (side, report) in [
        ("dense", manifest.perplexity.dense),
        ("pruned", manifest.perplexity.pruned),
    ] {
        if report.is_some_and(|report| !report.perplexity.is_finite()) {
            events.warn(format!(
                "the {side} perplexity is not finite: the model's outputs overflow or are NaN"
            ));
        }
    }
}
