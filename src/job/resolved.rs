//! The pruning part of a run: method, way of the samples and targets, resolved against the model.

use std::path::PathBuf;

use anyhow::Result;

use super::folder::RunFolder;
use crate::failure::Failure;
use crate::model::ModelConfig;
use crate::pipeline::allocation::Allocation;
use crate::pipeline::{Flow, LayerRatios, Selection, TargetPlan, check_verification, permute};
use crate::pruning::{Pattern, Technique};
use crate::run::AllocationReport;
use crate::run::manifest::PerplexityReport;
use crate::settings::{Settings, SparsitySettings};

/// The pruning part of a run.
#[derive(Clone)]
pub(super) struct Pruning {
    pub(super) technique: Technique,
    pub(super) flow: Flow,
    pub(super) targets: TargetPlan,
    /// Matrices are scored with statistics.
    pub(super) calibrates: bool,
    /// The allocation of the ratios, where they were measured.
    pub(super) allocation: Option<AllocationReport>,
    /// The file of `--save-masks`.
    pub(super) masks: Option<PathBuf>,
    /// The dense perplexity, where an earlier run has measured it.
    pub(super) dense: Option<PerplexityReport>,
    /// The runs that share its sweep, itself included.
    pub(super) runs_at_once: usize,
}

impl Pruning {
    /// Resolves method, matrices and ratios, and writes what they come to into the settings. `None` where the run does not prune.
    pub(super) fn resolve(
        settings: &mut Settings,
        config: &ModelConfig,
        folder: &RunFolder,
    ) -> Result<Option<Self>> {
        let Some(sparsity) = &mut settings.sparsity else {
            return Ok(None);
        };
        let technique = sparsity.technique()?;
        sparsity.flow().check(&technique)?;
        check_allocation(sparsity)?;
        check_verification(&technique, settings.output.verify)?;
        let masks = settings.output.save_masks.then(|| folder.masks());
        let masks = masks.transpose()?;
        let (is_permuted, flow) = (sparsity.permute_channels, sparsity.flow());
        let selection = &mut sparsity.selection;
        let targets = TargetPlan::resolve(selection, technique.method, config)?;
        let pattern = targets.pattern;
        permute::check(is_permuted, pattern, flow, &targets, config)?;
        selection.sparsity_ratio = Some(targets.sparsity_ratio);
        selection.layer_ratios = targets.uneven_ratios().map(LayerRatios::All);
        let calibrates = calibrates(&technique, &targets);
        // Layers are scored with the samples, too.
        let is_measured = sparsity.allocate != Allocation::Uniform;
        let drops = settings.layer_drop.is_some() || settings.width_drop.is_some();
        if !calibrates && !drops && !is_measured {
            settings.calibration = None;
        }
        Ok(Some(Self {
            flow: sparsity.flow(),
            technique,
            targets,
            calibrates,
            allocation: None,
            masks,
            dense: None,
            runs_at_once: 1,
        }))
    }
}

impl Pruning {
    /// The same with measured ratios of the layers.
    pub(super) fn with_ratios(
        &self,
        report: AllocationReport,
        selection: &Selection,
        config: &ModelConfig,
    ) -> Result<Self> {
        let selection = Selection {
            layer_ratios: Some(LayerRatios::All(report.ratios.clone())),
            ..selection.clone()
        };
        Ok(Self {
            targets: TargetPlan::resolve(&selection, self.technique.method, config)?,
            allocation: Some(report),
            ..self.clone()
        })
    }
}

/// Returns whether the ratios of layers are measured.
pub(super) fn allocates(settings: &Settings, pruning: &Pruning) -> bool {
    let sparsity = settings.sparsity.as_ref();
    let is_uniform = sparsity.is_none_or(|sparsity| sparsity.allocate == Allocation::Uniform);
    !is_uniform && !prunes_nothing(&pruning.targets)
}

/// Returns true if any matrix is scored with statistics.
fn calibrates(technique: &Technique, targets: &TargetPlan) -> bool {
    technique.statistics().is_some() && !prunes_nothing(targets)
}

pub(super) fn prunes_nothing(targets: &TargetPlan) -> bool {
    targets.pattern == Pattern::Unstructured
        && targets.sparsity_ratio == 0.0
        && targets.uneven_ratios().is_none()
}

/// Checks the flags of the allocation.
///
/// # Errors
/// Fails with exit code 2 for flags that contradict the allocation or that it does not read.
fn check_allocation(sparsity: &SparsitySettings) -> Result<(), Failure> {
    let (allocate, selection) = (sparsity.allocate, &sparsity.selection);
    let name = allocate.name();
    if sparsity.owl_outliers.is_some() && allocate != Allocation::Owl {
        return Err(Failure::usage("--owl-outliers belongs to --allocate owl")
            .hint("add --allocate owl, or leave --owl-outliers out"));
    }
    if allocate == Allocation::Uniform {
        return match sparsity.ratio_band {
            None => Ok(()),
            Some(_) => Err(Failure::usage("--ratio-band belongs to --allocate owl or error")
                .hint("add --allocate error, or leave --ratio-band out")),
        };
    }
    if selection.layer_ratios.is_some() {
        return Err(Failure::usage(format!("--allocate {name} contradicts --layer-ratios"))
            .detail("both say the ratio of every layer")
            .hint("leave one of them out"));
    }
    if selection.sparsity_type != Pattern::Unstructured {
        let pattern = selection.sparsity_type;
        return Err(Failure::usage(format!(
            "--allocate {name} cannot be combined with the {pattern} pattern"
        ))
        .detail("an N:M pattern fixes the ratio of every layer")
        .hint("leave --allocate out"));
    }
    let band = allocate.band(sparsity.ratio_band);
    if !(band > 0.0 && band < 0.5) {
        return Err(Failure::usage(format!("--ratio-band is {band}"))
            .hint("use a number between 0 and 0.5, like 0.08"));
    }
    match sparsity.owl_outliers {
        Some(outliers) if !(outliers > 1.0 && outliers.is_finite()) => {
            Err(Failure::usage(format!("--owl-outliers is {outliers}"))
                .hint("use a multiple of the mean score above 1, like 5"))
        }
        _ => Ok(()),
    }
}
