//! The editor: calibration, pruning, writing and propagation of one decoder layer.
//!
//! calibrate on the dense layer → score and mask its matrices → pass the calibration samples through the pruned layer, and write it
//! meanwhile. Statistics of all its matrices come from the one dense pass, whose inputs come from pruned layers: the
//! order of the reference. A matrix that rests on disk is in memory while it is scored and written, and returns to rest with its
//! mask, which from then on says which of its weights are zero.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};

use super::calibrate::{Calibrator, LayerStatistics};
use super::output::Output;
use super::output_error::DenseOutput;
use super::targets::TargetPlan;
use crate::linalg::{StoredMatrix, Weight};
use crate::model::{DecoderLayer, Projection};
use crate::pruning::{Mask, Request, Statistics, Target, Technique};
use crate::run::manifest::{LayerReport, MatrixReport};
use crate::run::{Event, Events, Phase};
use crate::runtime::{Clock, Compute, Editor};

/// A matrix at the moment its mask is known and its zeros are not yet written.
#[derive(Clone, Copy)]
pub struct PrunedMatrix<'a> {
    /// The decoder layer.
    pub layer: usize,
    /// The matrix within the layer.
    pub projection: Projection,
    /// Its weights, removed ones included.
    pub weight: &'a StoredMatrix,
    /// Statistics of its input; `None` for methods that need none.
    pub statistics: Option<&'a Statistics>,
    /// The ratio and the pattern.
    pub target: Target,
    /// The weights to remove.
    pub mask: &'a Mask,
}

/// The editor of a pruning run.
pub struct Pruner<'a> {
    technique: &'a Technique,
    targets: &'a TargetPlan,
    calibrator: Calibrator<'a>,
    output: Output<'a>,
    layers: Vec<LayerReport>,
    clock: &'a Clock,
    events: &'a dyn Events,
}

impl<'a> Pruner<'a> {
    /// `finished` are the reports of layers that an earlier process finished.
    pub fn new(
        technique: &'a Technique,
        targets: &'a TargetPlan,
        calibrator: Calibrator<'a>,
        output: Output<'a>,
        finished: Vec<LayerReport>,
    ) -> Self {
        Self {
            technique,
            targets,
            clock: calibrator.clock,
            events: calibrator.events,
            calibrator,
            output,
            layers: finished,
        }
    }

    /// The reports of all layers, after the sweep.
    pub fn into_layers(self) -> Vec<LayerReport> {
        self.layers
    }

    /// Masks all matrices of a layer. Returns a report of each, and the matrices that are not yet written.
    fn prune_matrices(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<(Vec<MatrixReport>, Vec<Projection>)> {
        let mut reports = Vec::new();
        let mut unwritten = Vec::new();
        for projection in layer.projections().collect::<Vec<_>>() {
            let at_rest = match layer.linear(projection).weight() {
                Weight::Held(_) => None,
                Weight::AtRest(_) => self.clock.measure(Phase::Read, || {
                    layer.linear_mut(projection).weight_mut().hold()
                })?,
            };
            let (report, mask) = match self.targets.of(layer.index(), projection) {
                None => (report_untouched(layer, projection)?, None),
                Some(target) => {
                    let (report, mask) =
                        self.prune_matrix(layer, projection, target, statistics, compute)?;
                    (report, Some(mask))
                }
            };
            match (&at_rest, &mask) {
                (Some(_), Some(_)) => self
                    .clock
                    .measure(Phase::Write, || self.output.write(layer, projection))?,
                (None, Some(_)) => unwritten.push(projection),
                (_, None) => {}
            }
            // The source does not have weights that the method changed: they stay in memory.
            if let Some(at_rest) = at_rest.filter(|_| !self.technique.changes_weights()) {
                let at_rest = match mask {
                    Some(mask) => at_rest.without(mask.into_bits()),
                    None => at_rest,
                };
                *layer.linear_mut(projection).weight_mut() = Weight::AtRest(at_rest);
            }
            self.events.emit(Event::MatrixPruned(report.clone()));
            reports.push(report);
        }
        Ok((reports, unwritten))
    }

    /// Chooses the weights of one matrix, which is in memory, writes the zeros, and measures the error of its output.
    fn prune_matrix(
        &mut self,
        layer: &mut DecoderLayer,
        projection: Projection,
        target: Target,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<(MatrixReport, Mask)> {
        let clock = self.clock;
        let dense = statistics.map(|statistics| {
            clock.measure(Phase::OutputError, || {
                let rows = statistics.rows(projection);
                let linear = layer.linear(projection);
                DenseOutput::of(linear, rows, compute.workspace().product_context())
            })
        });
        let dense = dense.transpose()?;
        let statistics = statistics.map(|statistics| statistics.of(projection));
        let (mut report, mask) = clock.measure(Phase::Score, || -> Result<_> {
            let mut report = report_untouched(layer, projection)?;
            let events = self.events;
            let request = Request {
                warn: &|text| events.warn(text),
                ..Request::new(&report.name, statistics, target)
            };
            let index = layer.index();
            // Only here is the layer changed: copies of other matrices, packed or on a GPU, stay valid.
            let weight = layer.linear_mut(projection).weight_mut().held_mut();
            let weight =
                weight.with_context(|| format!("`{}` is scored in memory", request.name))?;
            let mask = self.technique.prune(weight, &request)?;
            self.output.show(&PrunedMatrix {
                layer: index,
                projection,
                weight,
                statistics,
                target,
                mask: &mask,
            })?;
            weight.zero_bits(mask.bits());
            report.zeros = weight.count_zeros();
            report.pruned = Some(mask.count());
            report.mask_sha256 = Some(mask.sha256());
            Ok((report, mask))
        })?;
        if let Some(dense) = dense {
            report.relative_output_error = clock.measure(Phase::OutputError, || {
                let linear = layer.linear(projection);
                dense.error_of(linear, compute.workspace().product_context())
            })?;
        }
        Ok((report, mask))
    }

    /// Writes the pruned layer and records it as finished, while the samples pass through it: a later process repeats their pass from
    /// the written weights. The phase "write" counts only the time that the run waits.
    fn save_and_pass(
        &mut self,
        layer: &DecoderLayer,
        unwritten: &[Projection],
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        let Self {
            calibrator,
            output,
            layers,
            clock,
            events,
            ..
        } = self;
        if !calibrator.continues_after(layer) {
            clock.measure(Phase::Write, || output.save(layer, unwritten, layers))?;
            events.check()?;
            return calibrator.pass(layer, compute);
        }
        let is_over = AtomicBool::new(false);
        let (saved, passed) = thread::scope(|scope| -> Result<_> {
            let saving = thread::Builder::new()
                .name("saving".to_string())
                .spawn_scoped(scope, || {
                    output.save(layer, unwritten, layers)?;
                    output.copy_untouched_until(&|| is_over.load(Ordering::Relaxed))
                })
                .context("starting the thread that writes")?;
            let passed = events
                .check()
                .map_err(Into::into)
                .and_then(|()| calibrator.pass(layer, compute));
            is_over.store(true, Ordering::Relaxed);
            let saved = clock.measure(Phase::Write, || saving.join());
            Ok((saved, passed))
        })?;
        saved.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        passed
    }
}

impl Editor for Pruner<'_> {
    fn edit(&mut self, mut layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let start = Instant::now();
        let statistics = self.calibrator.observe(&layer, compute)?;
        let (matrices, unwritten) =
            self.prune_matrices(&mut layer, statistics.as_ref(), compute)?;
        drop(statistics);
        let (index, sparsity) = (layer.index(), sparsity(&matrices));
        self.layers.push(LayerReport {
            layer: index,
            seconds: start.elapsed().as_secs_f64(),
            sparsity,
            matrices,
        });
        self.save_and_pass(&layer, &unwritten, compute)?;
        if let Some(report) = self.layers.last_mut() {
            report.seconds = start.elapsed().as_secs_f64();
        }
        self.events.emit(Event::LayerPruned {
            layer: index,
            sparsity,
            elapsed: start.elapsed(),
        });
        Ok(layer)
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.calibrator.pass(layer, compute)
    }

    fn has_samples(&self) -> bool {
        self.calibrator.has_samples()
    }
}

/// Zeros over weights.
fn sparsity(matrices: &[MatrixReport]) -> f64 {
    let zeros: u64 = matrices.iter().map(|matrix| matrix.zeros).sum();
    let weights = matrices
        .iter()
        .map(|matrix| matrix.shape.iter().product::<usize>());
    zeros as f64 / weights.sum::<usize>() as f64
}

fn report_untouched(layer: &DecoderLayer, projection: Projection) -> Result<MatrixReport> {
    let name = projection.full_name(layer.index());
    let weight = layer.linear(projection).weight().held();
    let weight = weight.with_context(|| format!("`{name}` is scored in memory"))?;
    let zeros = weight.count_zeros();
    Ok(MatrixReport {
        name,
        shape: [weight.rows(), weight.columns()],
        zeros_before: zeros,
        zeros,
        pruned: None,
        mask_sha256: None,
        relative_output_error: None,
    })
}
