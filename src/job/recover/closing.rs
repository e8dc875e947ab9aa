//! Masks that close: the sparsity of every trained matrix before the training and at its end.
//!
//! The zeros of the model are counted before anything runs, so a model that is too sparse is refused early. The share of zeros is rounded
//! to a thousandth: a pruning removes int(s · n) of n weights, and the schedule begins with s.

use std::sync::Arc;

use anyhow::Result;

use super::super::allocate;
use super::super::opened::OpenedModel;
use super::closing_plan::ClosingPlan;
use super::resolved::Recovery;
use super::teacher::{PIECE, values};
use crate::failure::Failure;
use crate::model::{LinearId, ModelConfig};
use crate::pipeline::allocation::Allocation;
use crate::pipeline::{LayerRatios, Selection, TargetPlan};
use crate::pruning::{Pattern, Target, method};
use crate::recovery::optimizers::ClosingSchedule;
use crate::recovery::{ClosingMasks, ClosingRange};
use crate::run::recovery::{ChoiceReport, ClosingReport};
use crate::run::{AllocationReport, Events};
use crate::settings::{CloseTarget, ClosingSettings, PRUNE_METHOD, Settings, SparsitySettings};

/// The parts of 1 that a first sparsity is rounded to.
const PLACES: f64 = 1000.0;

/// Samples that layers are measured with, at most.
const SAMPLES: u32 = 128;

/// Gives a training the ranges of its masks, where they close. `known` is the allocation that an earlier process measured.
///
/// # Errors
/// Fails for layer ratios that do not fit the model, for a model that is sparser than the target, and when a matrix cannot be read.
pub(in crate::job) fn settle(
    settings: &Settings,
    model: OpenedModel,
    recovery: Option<&mut Recovery>,
    known: Option<AllocationReport>,
    events: &dyn Events,
) -> Result<OpenedModel> {
    let Some(recovery) = recovery else { return Ok(model) };
    let closing = recovery.settings.closing.clone();
    let Some(target) = closing.close_to else { return Ok(model) };
    let (model, allocation) = match (closing.allocate, known) {
        (Some(Allocation::Owl), None) => {
            let (model, report) = measured(settings, model, target.0.ratio, events)?;
            (model, Some(report))
        }
        (Some(Allocation::Owl), known) => (model, known),
        _ => (model, None),
    };
    let targets = targets((&closing, target), allocation.as_ref(), &recovery.part.ids, &model)?;
    let layers = 0..model.config.num_hidden_layers;
    let ranges = layers.map(|layer| {
        let of = |&id: &LinearId| range(&model, layer, id, (&targets, &closing));
        recovery.part.ids.iter().map(of).collect()
    });
    let ranges = ranges.collect::<Result<Vec<_>>>()?;
    recovery.closing = Some(ClosingPlan { ranges: ranges.into(), allocation });
    Ok(model)
}

/// Measures the model for `--allocate owl`.
fn measured(
    settings: &Settings,
    model: OpenedModel,
    ratio: f64,
    events: &dyn Events,
) -> Result<(OpenedModel, AllocationReport)> {
    let mut settings = settings.clone();
    if let Some(calibration) = &mut settings.calibration {
        calibration.nsamples = calibration.nsamples.min(SAMPLES);
    }
    let sparsity = SparsitySettings { allocate: Allocation::Owl, ..SparsitySettings::default() };
    let (model, report) = allocate::ratios((&settings, &sparsity), model, ratio, events)?;
    allocate::announce(&report, events);
    Ok((model, report))
}

/// The target of every matrix.
fn targets(
    (closing, target): (&ClosingSettings, CloseTarget),
    allocation: Option<&AllocationReport>,
    ids: &[LinearId],
    model: &OpenedModel,
) -> Result<TargetPlan> {
    let of_layers = allocation.map(|report| LayerRatios::All(report.ratios.clone()));
    let is_free = target.0.pattern == Pattern::Unstructured;
    let selection = Selection {
        sparsity_ratio: is_free.then_some(target.0.ratio),
        sparsity_type: target.0.pattern,
        layer_ratios: of_layers.or_else(|| closing.layer_ratios.clone()),
        // Other matrices keep their weights, so the pattern need not divide them.
        include: ids.iter().map(|id| id.name().to_string()).collect(),
        ..Selection::default()
    };
    let by_score = method(PRUNE_METHOD).ok_or_else(|| Failure::new("there is no method"))?;
    TargetPlan::resolve(&selection, by_score, &model.config).map_err(|error| {
        match error.downcast::<Failure>() {
            Ok(failure) if !is_free => {
                let hint = "use a ratio, like --close-to 0.5, or train other matrices with --target-modules";
                failure.hint(hint).into()
            }
            Ok(failure) => failure.into(),
            Err(error) => error,
        }
    })
}

/// The range of a matrix, whose zeros are counted in pieces.
fn range(
    model: &OpenedModel,
    layer: usize,
    id: LinearId,
    (targets, closing): (&TargetPlan, &ClosingSettings),
) -> Result<ClosingRange> {
    let target =
        targets.of(layer, id).unwrap_or(Target { ratio: 0.0, pattern: Pattern::Unstructured });
    let (rows, columns) = id.shape(&model.config);
    let (elements, name) = (rows * columns, id.tensor_name(layer));
    let entry = model.source.require(&name, &[rows, columns])?;
    let size = match target.pattern {
        Pattern::Unstructured => PIECE,
        Pattern::NOfM { m, .. } => (PIECE / m).max(1) * m,
    };
    let (mut zeros, mut most) = (0, 0);
    for first in (0..elements).step_by(size) {
        let piece = values(&*model.source, entry, first, size.min(elements - first))?;
        let count = |values: &[f32]| values.iter().filter(|value| **value == 0.0).count();
        zeros += count(&piece);
        if let Pattern::NOfM { m, .. } = target.pattern {
            most = piece.chunks(m).map(count).fold(most, usize::max);
        }
    }
    match target.pattern {
        Pattern::NOfM { n, m } if most > n => Err(Failure::usage(format!(
            "`{name}` has a group of {m} weights with {most} zeros, and --close-to {n}:{m} is to leave {n}"
        ))
        .hint("close to a ratio, like --close-to 0.8, or begin with the dense model or one of that pattern")
        .into()),
        Pattern::Unstructured if zeros > target.count_of(elements) => {
            let goal = target.count_of(elements);
            Err(Failure::usage(format!(
                "`{name}` has {zeros} zeros of {elements} weights, and its mask closes to {goal} ({:.4})",
                target.ratio
            ))
            .detail("a removed weight never comes back")
            .hint(match (&closing.layer_ratios, closing.allocate) {
                (Some(_), _) => "name a higher sparsity for this layer in the file of --layer-ratios",
                (None, Some(_)) => "close to a higher sparsity, or leave --allocate out",
                (None, None) => "close to a higher sparsity, or train without --close-to and keep the mask of the model",
            })
            .into())
        }
        _ => Ok(ClosingRange {
            first: (zeros as f64 / elements as f64 * PLACES).round() / PLACES,
            target,
        }),
    }
}

impl Recovery {
    /// The record of masks that closed in a training of so many steps.
    pub(super) fn closing_report(&self, steps: u64, config: &ModelConfig) -> Option<ClosingReport> {
        let masks = self.closing_masks(steps)?;
        let elements: Vec<usize> = self.part.ids.iter().map(|id| id.elements(config)).collect();
        let sparsity = |step: u64| masks.sparsity(step, &elements);
        let last_step = masks.last_change();
        let choices = (1..=last_step).filter(|&step| masks.schedule.closes_in(step));
        let (plan, target) = (self.closing.as_ref()?, self.settings.closing.close_to?);
        Some(ClosingReport {
            to: target.to_string(),
            layer_ratios: plan.layer_ratios(target.0.ratio),
            before: sparsity(0),
            last_step,
            choices: choices.map(|step| ChoiceReport { step, sparsity: sparsity(step) }).collect(),
        })
    }

    /// The pattern of the zeros that a training makes.
    pub(super) fn pattern(&self) -> Pattern {
        let target = self.settings.closing.close_to;
        target.map_or(Pattern::Unstructured, |target| target.0.pattern)
    }

    /// The masks of a training of so many steps that close; `None` where they stand still.
    pub(super) fn closing_masks(&self, steps: u64) -> Option<ClosingMasks> {
        let (plan, settings) = (self.closing.as_ref()?, &self.settings.closing);
        let schedule = ClosingSchedule { steps, by: settings.by(), every: settings.every(steps) };
        let (ranges, receiver) = (Arc::clone(&plan.ranges), self.given.masks.clone());
        Some(ClosingMasks { schedule, ranges, receiver })
    }
}
