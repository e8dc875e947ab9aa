//! The target of every matrix: ratio, pattern, per-layer ratios and globs, resolved into a list before anything runs.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use clap::Args;
use glob::Pattern as Glob;
use serde::Serialize;

use super::layer_ratios::LayerRatios;
use crate::failure::Failure;
use crate::model::{LinearId, LinearRole, ModelConfig};
use crate::pruning::method::check_pattern;
use crate::pruning::{Pattern, PruningMethod, SparsityRule, Target, Technique};
use crate::run::manifest::LayerReport;

/// The user's choice of matrices, ratio and pattern.
#[derive(Debug, Clone, Default, Args, Serialize)]
#[command(next_help_heading = "Sparsity")]
pub struct Selection {
    /// Fraction of the weights that is removed
    ///
    /// From 0 up to but not including 1. May be left out with an N:M pattern, where it must equal N/M. 0 prunes nothing: a dense evaluation.
    #[arg(long, value_name = "RATIO", allow_negative_numbers = true)]
    pub sparsity_ratio: Option<f64>,

    /// `unstructured`, or N:M
    ///
    /// N:M prunes N of each M neighbours of a row, like 2:4.
    #[arg(long, value_name = "TYPE", default_value = "unstructured")]
    pub sparsity_type: Pattern,

    /// Prune only matrices that match a glob; may be repeated
    ///
    /// Matched against model.layers.0.self_attn.q_proj, self_attn.q_proj and q_proj. What is chosen is printed.
    #[arg(hide_short_help = true, long, value_name = "GLOB")]
    pub include: Vec<String>,

    /// Leave matrices alone that match a glob; may be repeated
    #[arg(hide_short_help = true, long, value_name = "GLOB")]
    pub exclude: Vec<String>,

    /// Ratios per layer, from a file.
    #[arg(skip)]
    pub layer_ratios: Option<LayerRatios>,
}

/// The largest difference between planned and removed share that passes without a warning.
const MISSED: f64 = 0.005;

/// The target of every matrix.
#[derive(Debug, Clone)]
pub struct TargetPlan {
    /// `[num_hidden_layers]`: the targets of a layer's chosen matrices. A matrix without a target is left alone.
    targets: Vec<BTreeMap<LinearId, Target>>,
    /// All matrices of the model's layers, chosen or not.
    pub matrices_in_model: usize,
    /// The overall ratio asked for.
    pub sparsity_ratio: f64,
    /// The pattern asked for.
    pub pattern: Pattern,
}

impl TargetPlan {
    /// Resolves a selection against a model.
    ///
    /// # Errors
    /// Fails with exit code 2 for a ratio outside [0, 1), a pattern that contradicts it, a glob that is malformed or matches nothing, and
    /// layer ratios for layers that do not exist; with exit code 1 for in_features that the pattern does not divide.
    pub fn resolve(
        selection: &Selection,
        method: &dyn PruningMethod,
        config: &ModelConfig,
    ) -> Result<Self> {
        let pattern = selection.sparsity_type;
        let sparsity_ratio = overall_ratio(selection, pattern, config)?;
        let ratios = layer_ratios(selection, sparsity_ratio, config.num_hidden_layers)?;
        let (include, exclude) = (
            Globs::new("--include", &selection.include)?,
            Globs::new("--exclude", &selection.exclude)?,
        );
        let mut matched = (vec![false; include.globs.len()], vec![false; exclude.globs.len()]);
        let mut targets = Vec::with_capacity(ratios.len());
        let mut misfits = Misfits::default();
        for (layer, &ratio) in ratios.iter().enumerate() {
            let mut row = BTreeMap::new();
            for id in config.linears() {
                let name = id.full_name(layer);
                let is_included =
                    include.matches(&name, &mut matched.0) || include.globs.is_empty();
                let is_excluded = exclude.matches(&name, &mut matched.1);
                if !is_included || is_excluded {
                    continue;
                }
                let width = id.shape(config).1;
                if let Err(error) = check_pattern(method, &name, width, pattern) {
                    misfits.first.get_or_insert(error);
                    misfits.matrices.insert(id);
                }
                misfits.widths.insert(width);
                row.insert(id, Target { ratio, pattern });
            }
            targets.push(row);
        }
        misfits.refuse(pattern, config)?;
        include.all_matched(&matched.0, config)?;
        exclude.all_matched(&matched.1, config)?;
        let plan = Self {
            matrices_in_model: targets.len() * config.linears().len(),
            targets,
            sparsity_ratio,
            pattern,
        };
        if plan.matrices() == 0 {
            return Err(Failure::usage("--include and --exclude leave no matrix to prune")
                .hint("names look like model.layers.0.self_attn.q_proj; try --include '*q_proj'")
                .into());
        }
        Ok(plan)
    }

    /// The target of a matrix; `None` for a matrix that stays as it is.
    pub fn of(&self, layer: usize, id: LinearId) -> Option<Target> {
        self.targets.get(layer)?.get(&id).copied()
    }

    /// The names of the tensors that are pruned.
    pub fn tensors(&self) -> Vec<String> {
        let rows = self.targets.iter().enumerate();
        rows.flat_map(|(layer, row)| row.keys().map(move |id| id.tensor_name(layer))).collect()
    }

    /// Matrices chosen.
    pub fn matrices(&self) -> usize {
        self.targets.iter().map(BTreeMap::len).sum()
    }

    /// The ratio of each layer; `None` if all are alike.
    pub fn uneven_ratios(&self) -> Option<Vec<f64>> {
        let ratios: Vec<f64> = self
            .targets
            .iter()
            .map(|row| row.values().next().map_or(0.0, |target| target.ratio))
            .collect();
        ratios.iter().any(|ratio| *ratio != self.sparsity_ratio).then_some(ratios)
    }

    /// A warning where the zeros are not the share that the plan says, by more than 0.005: the source has more of them, or a method that
    /// prunes near the ratio missed it.
    pub fn missed(&self, technique: &Technique, layers: &[LayerReport]) -> Option<String> {
        let (mut weights, mut planned, mut removed, mut before) = (0.0, 0.0, 0.0, 0.0);
        for layer in layers {
            for matrix in &layer.matrices {
                let mut targets = self.targets.get(layer.layer).into_iter().flatten();
                let is_it = |p: &LinearId| p.full_name(layer.layer) == matrix.name;
                let target = targets.find(|(id, _)| is_it(id));
                if let (Some((_, target)), Some(pruned)) = (target, matrix.pruned) {
                    let elements = (matrix.shape[0] * matrix.shape[1]) as f64;
                    weights += elements;
                    planned += elements * target.ratio;
                    removed += pruned as f64;
                    before += matrix.zeros_before as f64;
                }
            }
        }
        let (planned, removed) = (planned / weights, removed / weights);
        let before = before / weights;
        // All three are not a number without weights.
        if before - planned > MISSED {
            return Some(format!(
                "the source has {before:.4} zeros in the pruned matrices, more than the {planned:.4} that were asked for; they stay zero"
            ));
        }
        let may_miss = technique.removes() == SparsityRule::NearRatio;
        (may_miss && (planned - removed).abs() > MISSED).then(|| {
            format!(
                "{} removed {removed:.4} of the weights, {planned:.4} were asked for",
                technique.name()
            )
        })
    }

    /// Describes the chosen matrices: a single line if all are chosen, else a line with their number and a line per run of equal layers.
    pub fn describe(&self) -> Vec<String> {
        let total = self.matrices_in_model;
        if self.matrices() == total {
            return vec![format!("all {total} matrices of {} layers", self.targets.len())];
        }
        let names = |row: &BTreeMap<LinearId, Target>| {
            let chosen: Vec<_> =
                row.keys().map(|p| p.name().rsplit('.').next().unwrap_or_default()).collect();
            if chosen.is_empty() { "nothing".to_string() } else { chosen.join(" ") }
        };
        let mut lines = vec![format!("{} of {total} matrices:", self.matrices())];
        let mut first = 0;
        while first < self.targets.len() {
            let chosen = names(&self.targets[first]);
            let last = (first..self.targets.len())
                .take_while(|&layer| names(&self.targets[layer]) == chosen)
                .last()
                .unwrap_or(first);
            let layers = if first == last {
                format!("layer {first}")
            } else {
                format!("layers {first}-{last}")
            };
            lines.push(format!("  {layers}: {chosen}"));
            first = last + 1;
        }
        lines
    }
}

fn overall_ratio(selection: &Selection, pattern: Pattern, config: &ModelConfig) -> Result<f64> {
    if let Pattern::NOfM { n, m } = pattern {
        let implied = n as f64 / m as f64;
        if selection.layer_ratios.is_some() {
            return Err(Failure::usage(format!(
                "--layer-ratios cannot be combined with the {pattern} pattern"
            ))
            .detail("an N:M pattern fixes the ratio of every layer")
            .into());
        }
        return match selection.sparsity_ratio {
            None => Ok(implied),
            Some(ratio) if (ratio - implied).abs() < 1e-9 => Ok(implied),
            Some(ratio) => Err(Failure::usage(format!("--sparsity-ratio {ratio} contradicts --sparsity-type {pattern}, which removes {implied}"))
                .hint(format!("leave --sparsity-ratio out, or use {implied}"))
                .into()),
        };
    }
    match (selection.sparsity_ratio, &selection.layer_ratios) {
        (Some(ratio), _) => check_ratio("--sparsity-ratio", ratio),
        (None, Some(LayerRatios::All(ratios))) => {
            Ok(ratios.iter().sum::<f64>() / config.num_hidden_layers.max(1) as f64)
        }
        (None, _) => Err(Failure::usage("--sparsity-ratio is missing")
            .hint("name the fraction to remove, like --sparsity-ratio 0.5 or --sparsity-type 2:4")
            .into()),
    }
}

/// Matrices that a pattern does not fit.
#[derive(Default)]
struct Misfits {
    /// The refusal of the first.
    first: Option<anyhow::Error>,
    matrices: BTreeSet<LinearId>,
    /// The widths of all chosen matrices.
    widths: BTreeSet<usize>,
}

impl Misfits {
    /// Fails with the first refusal, and a fix for all matrices: a pattern that fits, or the matrices to leave out.
    fn refuse(self, pattern: Pattern, config: &ModelConfig) -> Result<()> {
        let Some(error) = self.first else { return Ok(()) };
        let (Pattern::NOfM { n, m }, Some(failure)) = (pattern, error.downcast_ref::<Failure>())
        else {
            return Err(error);
        };
        // The method has no pattern at all.
        if failure.is_usage {
            return Err(error);
        }
        let is_common = |of: &usize| self.widths.iter().all(|width| width.is_multiple_of(*of));
        let fitting = (2..=m).rev().find(is_common).map(|fitting| {
            let nearest = (n * fitting + m / 2) / m;
            format!("{}:{fitting}", nearest.clamp(1, fitting - 1))
        });
        let mut fixes = vec![match fitting {
            Some(fitting) => format!("use the pattern {fitting}"),
            None => "use no pattern but a ratio, like --sparsity-ratio 0.5".to_string(),
        }];
        let modules = self.matrices.iter().map(|id| id.module());
        // A run without any matrix is refused, too.
        if self.matrices.len() < config.linears().len() {
            let globs: Vec<String> = modules.map(|one| format!("--exclude '*{one}'")).collect();
            fixes.push(format!("leave matrices out with {}", globs.join(" ")));
        }
        Err(failure.clone().hint(fixes.join(", or ")).into())
    }
}

/// Returns a ratio from 0 up to but not including 1; −0 becomes 0.
fn check_ratio(what: &str, ratio: f64) -> Result<f64> {
    if (0.0..1.0).contains(&ratio) {
        return Ok(ratio + 0.0);
    }
    let hint = match ratio > 1.0 && ratio < 100.0 {
        true => format!("for {ratio} percent write {}", ratio / 100.0),
        false => "write a fraction like 0.5, which removes half of the weights".to_string(),
    };
    Err(Failure::usage(format!(
        "{what} is {ratio}; it is the fraction removed, from 0 up to but not including 1"
    ))
    .hint(hint)
    .into())
}

fn layer_ratios(selection: &Selection, overall: f64, layers: usize) -> Result<Vec<f64>> {
    let mut ratios = vec![overall; layers];
    match &selection.layer_ratios {
        None => {}
        Some(LayerRatios::All(given)) => {
            if given.len() != layers {
                return Err(Failure::usage(format!(
                    "--layer-ratios has {} ratios, the model {layers} layers",
                    given.len()
                ))
                .hint(format!("write {layers} ratios, or name some layers: {{\"0\": 0.3}}"))
                .into());
            }
            ratios.clone_from(given);
        }
        Some(LayerRatios::Some(given)) => {
            for &(layer, ratio) in given {
                let slot = ratios.get_mut(layer);
                *slot.ok_or_else(|| {
                    Failure::usage(format!(
                        "--layer-ratios names layer {layer}, the model has layers 0 to {}",
                        layers - 1
                    ))
                    .hint(format!("leave layer {layer} out of the file"))
                })? = ratio;
            }
        }
    }
    for (layer, ratio) in ratios.iter_mut().enumerate() {
        *ratio = check_ratio(&format!("the ratio of layer {layer}"), *ratio)?;
    }
    Ok(ratios)
}

struct Globs<'a> {
    flag: &'static str,
    texts: &'a [String],
    globs: Vec<Glob>,
}

impl<'a> Globs<'a> {
    fn new(flag: &'static str, texts: &'a [String]) -> Result<Self> {
        let globs = texts
            .iter()
            .map(|text| {
                Glob::new(text).map_err(|error| {
                    Failure::usage(format!("{flag} `{text}` is not a glob: {error}"))
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { flag, texts, globs })
    }

    /// Returns whether any glob matches the full name (`model.layers.0.mlp.up_proj`), the name inside the layer, or its last part.
    fn matches(&self, name: &str, matched: &mut [bool]) -> bool {
        let inside = name.splitn(4, '.').nth(3).unwrap_or(name);
        let last = name.rsplit('.').next().unwrap_or(name);
        let mut any = false;
        for (glob, matched) in self.globs.iter().zip(matched) {
            if glob.matches(name) || glob.matches(inside) || glob.matches(last) {
                (*matched, any) = (true, true);
            }
        }
        any
    }

    fn all_matched(&self, matched: &[bool], config: &ModelConfig) -> Result<()> {
        let Some(unmatched) = matched.iter().position(|matched| !matched) else {
            return Ok(());
        };
        let failure = Failure::usage(format!(
            "{} `{}` matches no matrix of this model",
            self.flag, self.texts[unmatched]
        ));
        // A name of other families for rows of a matrix that holds several.
        let names_part = |role: &LinearRole| {
            let mut names = vec![false; self.globs.len()];
            let layers = 0..config.num_hidden_layers;
            for layer in layers {
                self.matches(&LinearId::alone(*role).full_name(layer), &mut names);
            }
            names[unmatched]
        };
        let mut fused = config.linears().filter(|id| id.roles().len() > 1);
        Err(match fused.find(|id| id.roles().iter().any(names_part)) {
            Some(id) => {
                let parts = id.roles().iter().map(|role| LinearId::alone(*role).module());
                failure
                    .detail(format!(
                        "this model stores {} as one matrix, {}, which is pruned as a whole",
                        parts.collect::<Vec<_>>().join(", "),
                        id.module()
                    ))
                    .hint(format!("use {} '*{}'", self.flag, id.module()))
            }
            None => failure.hint(
                "names look like model.layers.0.self_attn.q_proj; try '*q_proj' or 'model.layers.[0-3].*'",
            ),
        }
        .into())
    }
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
