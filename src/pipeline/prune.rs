//! The editor: calibration, pruning, writing and propagation of a decoder layer.
//!
//! calibrate on the dense layer → score and mask its matrices → pass the calibration samples through the pruned layer, and write it
//! meanwhile. The statistics of all its matrices come from the dense layer, and the samples enter it as pruned layers left them: the order
//! of the reference. A matrix that rests on disk is in memory while it is scored and written, and returns to rest with its mask, which
//! from then on says which of its weights are zero.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};

use super::calibrate::{Calibrator, LayerStatistics};
use super::flow::{Flow, ObservationOrder, Propagation};
use super::output::{Output, PrunedMatrix};
use super::output_error::DenseOutput;
use super::permute::permute;
use super::solve;
use super::targets::TargetPlan;
use crate::linalg::Weight;
use crate::model::{DecoderLayer, InputId, LinearId};
use crate::pruning::{Mask, Request, StatisticsKind, Target, Technique};
use crate::run::manifest::{LayerReport, MatrixReport, PermutationReport};
use crate::run::memory_settings::StatisticsHeld;
use crate::run::{Event, Phase};
use crate::runtime::{Compute, Editor, Reporter, Side, memory};

/// The pruned matrices of a layer.
#[derive(Default)]
struct PrunedMatrices {
    reports: Vec<MatrixReport>,
    /// The pruned matrices that are not yet written.
    unwritten: Vec<LinearId>,
    permutation: Option<PermutationReport>,
}

/// The editor of a pruning run.
pub struct Pruner<'a> {
    technique: &'a Technique,
    targets: &'a TargetPlan,
    flow: Flow,
    calibrator: Calibrator<'a>,
    output: Output<'a>,
    layers: Vec<LayerReport>,
    reporter: Reporter<'a>,
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
            flow: Flow::default(),
            reporter: calibrator.reporter,
            calibrator,
            output,
            layers: finished,
        }
    }

    /// Sets the way of the samples through a layer, in place of the default.
    #[must_use]
    pub fn with_flow(self, flow: Flow) -> Self {
        Self { flow, ..self }
    }

    /// The reports of all layers, after the sweep.
    pub fn into_layers(self) -> Vec<LayerReport> {
        self.layers
    }

    /// The inputs that each pass of the samples observes, in the order of the passes.
    fn passes(&self, compute: &Compute<'_>) -> Vec<Vec<InputId>> {
        let each = InputId::ALL.map(|point| vec![point]);
        let is_in_place = |kind: &'static dyn StatisticsKind| kind.is_in_place();
        let is_large = self.technique.statistics().is_some_and(is_in_place);
        match self.flow.sequence {
            ObservationOrder::Inputs => each.into(),
            ObservationOrder::Layer
                if is_large
                    && self.flow.propagation == Propagation::Pruned
                    && compute.settings().statistics == StatisticsHeld::Input =>
            {
                // From the last input to the first: what is pruned then does not change the inputs that are still to be observed.
                each.into_iter().rev().collect()
            }
            ObservationOrder::Layer => vec![InputId::ALL.into()],
        }
    }

    /// Permutes the channels of a layer where the technique says so, before any matrix is pruned.
    fn permute(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: Option<&mut LayerStatistics>,
    ) -> Result<Option<PermutationReport>> {
        let (technique, targets) = (self.technique, self.targets);
        let Reporter { clock, events } = self.reporter;
        let permuted = clock
            .measure(Phase::Score, || permute(layer, technique, targets, statistics, events))?;
        let Some(permuted) = permuted else {
            return Ok(None);
        };
        self.output.write_permuted(&permuted.biases, &permuted.order)?;
        Ok(Some(permuted.report))
    }

    /// Observes the inputs of a layer and masks its matrices.
    fn calibrate_and_prune(
        &mut self,
        layer: &mut DecoderLayer,
        compute: &mut Compute<'_>,
    ) -> Result<PrunedMatrices> {
        let mut done = PrunedMatrices::default();
        let passes = self.passes(compute);
        let propagates_dense = self.flow.propagation == Propagation::Dense;
        for (at, points) in passes.iter().enumerate() {
            let mut statistics = self.calibrator.observe(layer, points, compute)?;
            if propagates_dense && at + 1 == passes.len() {
                self.calibrator.pass(layer, compute)?;
            }
            // A run that permutes observes down's input first, or together with all inputs, so nothing is pruned yet.
            if points.contains(&InputId::Down) {
                done.permutation = self.permute(layer, statistics.as_mut())?;
            }
            for &point in points {
                self.prune_matrices(layer, point, statistics.as_ref(), compute, &mut done)?;
                // What the method has derived from them is large, too.
                if let Some(statistics) = &mut statistics {
                    statistics.release(point);
                }
            }
        }
        Ok(done)
    }

    /// Prunes a layer with statistics that the caller has collected for several editors, writes it and returns it.
    pub(super) fn prune_with(
        &mut self,
        mut layer: DecoderLayer,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<DecoderLayer> {
        let start = Instant::now();
        let mut done = PrunedMatrices::default();
        for point in InputId::ALL {
            self.prune_matrices(&mut layer, point, statistics, compute, &mut done)?;
            // The next editor may have a different method.
            if let Some(statistics) = statistics {
                statistics.forget_derived(point);
            }
        }
        self.end_layer(&layer, start, done, compute)?;
        Ok(layer)
    }

    /// Records, writes and passes a layer whose matrices are pruned.
    fn end_layer(
        &mut self,
        layer: &DecoderLayer,
        start: Instant,
        done: PrunedMatrices,
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        let PrunedMatrices { mut reports, unwritten, permutation } = done;
        let order: Vec<String> =
            (layer.linear_ids()).map(|id| id.full_name(layer.index())).collect();
        reports.sort_by_key(|report| order.iter().position(|name| *name == report.name));
        let (index, sparsity) = (layer.index(), sparsity(&reports));
        self.layers.push(LayerReport {
            layer: index,
            seconds: start.elapsed().as_secs_f64(),
            sparsity,
            permutation,
            training: None,
            matrices: reports,
        });
        // Calibration rows and outputs of small matrices are blocks that glibc would keep while the samples pass.
        memory::release_freed();
        self.save_and_pass(layer, &unwritten, compute)?;
        if let Some(report) = self.layers.last_mut() {
            report.seconds = start.elapsed().as_secs_f64();
        }
        self.reporter.events.emit(Event::LayerPruned {
            layer: index,
            sparsity,
            cell: None,
            elapsed: start.elapsed(),
        });
        Ok(())
    }

    /// Masks the matrices that share an input.
    fn prune_matrices(
        &mut self,
        layer: &mut DecoderLayer,
        point: InputId,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
        done: &mut PrunedMatrices,
    ) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let of_point = |id: &LinearId| id.input() == point;
        let matrices: Vec<LinearId> = layer.linear_ids().filter(of_point).collect();
        for id in matrices {
            let at_rest = match layer.linear(id).weight() {
                Weight::Held(_) | Weight::Compact(_) => None,
                Weight::AtRest(_) => {
                    clock.measure(Phase::Read, || layer.linear_mut(id).weight_mut().hold())?
                }
            };
            let (report, mask) = match self.targets.of(layer.index(), id) {
                None => (report_untouched(layer, id)?, None),
                Some(target) => {
                    let (report, mask) =
                        self.prune_matrix(layer, id, target, statistics, compute)?;
                    (report, Some(mask))
                }
            };
            match (&at_rest, &mask) {
                (Some(_), Some(_)) => {
                    clock.measure(Phase::Write, || self.output.write(layer, id))?
                }
                (None, Some(_)) => done.unwritten.push(id),
                (_, None) => {}
            }
            // The source does not have weights that the method changed: they stay in memory.
            if let Some(at_rest) = at_rest.filter(|_| !self.technique.changes_weights()) {
                let at_rest = match mask {
                    Some(mask) => at_rest.without(mask.into_bits()),
                    None => at_rest,
                };
                *layer.linear_mut(id).weight_mut() = Weight::AtRest(at_rest);
            }
            events.emit(Event::MatrixPruned(report.clone()));
            done.reports.push(report);
        }
        Ok(())
    }

    /// Chooses the weights to remove from a matrix, which is in memory, writes the zeros, and measures the error of its output.
    fn prune_matrix(
        &mut self,
        layer: &mut DecoderLayer,
        id: LinearId,
        target: Target,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<(MatrixReport, Mask)> {
        let Reporter { clock, events } = self.reporter;
        let dense = statistics.map(|statistics| {
            clock.measure(Phase::OutputError, || {
                DenseOutput::of(layer, id, statistics.rows(id), compute)
            })
        });
        let dense = dense.transpose()?;
        let statistics = statistics.and_then(|statistics| statistics.of(id));
        let (mut report, mask) = clock.measure(Phase::Score, || -> Result<_> {
            let mut report = report_untouched(layer, id)?;
            let request = Request {
                warn: &|text| events.warn(text),
                ..Request::new(&report.name, statistics, target)
            };
            let index = layer.index();
            let chosen = self.choose_on_device(layer, id, &request, compute)?;
            // Only this matrix of the layer changes, and only here: copies of unchanged matrices, packed or on a GPU, stay valid.
            let weight = layer.linear_mut(id).weight_mut().held_mut();
            let weight =
                weight.with_context(|| format!("`{}` is scored in memory", request.name))?;
            let is_on_device = chosen.is_some();
            let mask = match chosen {
                Some(mask) => mask,
                None => solve::prune(self.technique, weight, &request, compute.ranks())?,
            };
            self.output.show(&PrunedMatrix {
                layer: index,
                id,
                weight,
                statistics,
                target,
                mask: &mask,
            })?;
            let (zeros, hash) = rayon::join(
                || {
                    weight.zero_bits(mask.bits());
                    weight.count_zeros()
                },
                || mask.sha256(),
            );
            report.zeros = zeros;
            report.pruned = Some(mask.count());
            report.mask_sha256 = Some(hash);
            if is_on_device {
                compute.zero_chosen(layer, id)?;
            }
            Ok((report, mask))
        })?;
        if let Some(dense) = dense {
            let error = clock.measure(Phase::OutputError, || dense.error_of(layer, compute));
            report.relative_output_error = error?;
        }
        Ok((report, mask))
    }

    /// The mask that the technique would choose, from a device that has the matrix; `None` leaves the choice to the CPU.
    fn choose_on_device(
        &self,
        layer: &DecoderLayer,
        id: LinearId,
        request: &Request<'_>,
        compute: &mut Compute<'_>,
    ) -> Result<Option<Mask>> {
        let (rows, columns) = id.shape(self.calibrator.config());
        let Some((factors, quota)) = self.technique.lowest(columns, request)? else {
            return Ok(None);
        };
        let bits = compute.choose_lowest(layer, id, &factors, quota)?;
        Ok(bits.map(|bits| Mask::from_bits(rows, columns, bits)))
    }

    /// Writes the pruned layer and records it as finished, while the samples pass through it: a later process repeats their pass from
    /// the written weights. The phase "write" counts only the time that the run waits.
    fn save_and_pass(
        &mut self,
        layer: &DecoderLayer,
        unwritten: &[LinearId],
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let Self { calibrator, output, layers, flow, targets, .. } = self;
        let has_passed = flow.propagation == Propagation::Dense;
        if has_passed || !calibrator.continues_after(layer) {
            clock.measure(Phase::Write, || output.save(layer, unwritten, layers))?;
            events.check()?;
            return match has_passed {
                true => Ok(()),
                false => calibrator.pass(layer, compute),
            };
        }
        let is_over = AtomicBool::new(false);
        let (saved, passed) = thread::scope(|scope| -> Result<_> {
            let saving = thread::Builder::new()
                .name("saving".to_string())
                .spawn_scoped(scope, || {
                    output.save(layer, unwritten, layers)?;
                    let is_over = || is_over.load(Ordering::Relaxed);
                    output.go_on_until(&is_over, layers, targets.pattern)
                })
                .context("starting the thread that writes")?;
            let passed =
                events.check().map_err(Into::into).and_then(|()| calibrator.pass(layer, compute));
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
        let done = self.calibrate_and_prune(&mut layer, compute)?;
        self.end_layer(&layer, start, done, compute)?;
        Ok(layer)
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        self.calibrator.pass(layer, compute)
    }

    fn has_samples(&self) -> bool {
        self.calibrator.has_samples()
    }

    fn side(&self) -> Side {
        match self.flow.propagation {
            Propagation::Pruned => Side::Pruned,
            Propagation::Dense => Side::Dense,
        }
    }
}

/// Zeros over weights.
fn sparsity(matrices: &[MatrixReport]) -> f64 {
    let zeros: u64 = matrices.iter().map(|matrix| matrix.zeros).sum();
    let weights = matrices.iter().map(|matrix| matrix.shape.iter().product::<usize>());
    zeros as f64 / weights.sum::<usize>() as f64
}

fn report_untouched(layer: &DecoderLayer, id: LinearId) -> Result<MatrixReport> {
    let name = id.full_name(layer.index());
    let weight = layer.linear(id).weight().held();
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
