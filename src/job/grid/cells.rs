//! The cells of a grid: methods × targets × seeds, and the settings of each.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::pruning::{self, Pattern, Technique};
use crate::run::grid::GridCell;
use crate::settings::{GridSettings, Settings, SparsitySettings};

/// A cell, its folder, its settings, and the technique that they name.
#[derive(Debug, Clone)]
pub(super) struct PlannedCell {
    pub(super) cell: GridCell,
    pub(super) folder: PathBuf,
    pub(super) settings: Settings,
    pub(super) technique: Technique,
}

impl PlannedCell {
    /// The name of its folder.
    pub(super) fn name(&self) -> String {
        self.cell.name()
    }
}

/// The settings of a method of the list, METHOD or METHOD+REFINEMENT. Options that its method does not read are left out: they are
/// for methods elsewhere in the list.
fn sparsity_of(settings: &GridSettings, name: &str) -> Result<SparsitySettings> {
    let common = settings.run.sparsity.clone().unwrap_or_default();
    let (method, refine) = match name.split_once('+') {
        Some((method, refine)) => (method, Some(refine.to_string())),
        None => (name, common.refine.clone()),
    };
    let found = pruning::method(method);
    let found = found.with_context(|| format!("there is no method `{method}`"))?;
    let of_step = refine.as_deref().and_then(pruning::refinement);
    let of_step = of_step.map_or(&[][..], |step| step.options());
    let read = [found.options(), of_step].concat();
    Ok(SparsitySettings {
        prune_method: method.to_string(),
        options: common.options.clone().only(&read),
        refine,
        ..common
    })
}

/// The cells in order: by method, then by target, then by seed. A method without calibration has seed 0 only.
///
/// # Errors
/// Fails for a method that does not exist.
pub(super) fn of(settings: &GridSettings, out: &Path) -> Result<Vec<PlannedCell>> {
    let mut cells = Vec::new();
    for name in &settings.methods {
        let sparsity = sparsity_of(settings, name)?;
        let technique = sparsity.unchecked_technique()?;
        let seeds: &[u64] = match technique.statistics() {
            Some(_) => &settings.seeds,
            None => &[0],
        };
        for target in &settings.targets {
            for &seed in seeds {
                let cell = GridCell {
                    method: name.clone(),
                    sparsity_ratio: target
                        .sparsity_ratio
                        .filter(|_| target.sparsity_type == Pattern::Unstructured),
                    sparsity_type: target.sparsity_type.to_string(),
                    seed,
                };
                let folder = out.join(cell.name());
                let mut run = settings.run.clone();
                run.sparsity =
                    Some(SparsitySettings { selection: target.clone(), ..sparsity.clone() });
                if let Some(calibration) = &mut run.calibration {
                    calibration.seed = seed;
                }
                run.output.save = Some(folder.clone());
                let technique = technique.clone();
                cells.push(PlannedCell { cell, folder, settings: run, technique });
            }
        }
    }
    Ok(cells)
}
