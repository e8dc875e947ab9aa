//! The editor: what happens to one decoder layer.
//!
//! calibrate on the dense layer → score and mask its matrices → pass the calibration samples through what is left, and write it
//! meanwhile. Statistics of all seven matrices come from the one dense pass, whose inputs come from pruned layers: the
//! order of the reference. A matrix that rests on disk is held while it is scored and written, and goes back to rest with its
//! mask, which from then on says what is zero.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};

use super::calibrate::{CalibrationStream, LayerStatistics};
use super::expected;
use super::output_error::DenseOutput;
use super::targets::TargetPlan;
use crate::checkpoint::{CheckpointWriter, ExpectedMatrix};
use crate::linalg::{StoredMatrix, Weight};
use crate::model::{DecoderLayer, Projection};
use crate::pruning::{Mask, PruningMethod, Request, ScoreTime, Target};
use crate::run::manifest::{LayerReport, MatrixReport};
use crate::run::{Event, Events, Phase};
use crate::runtime::{Clock, Compute, Editor};

/// A matrix at the moment its mask is known and its zeros are not yet written.
#[derive(Debug, Clone, Copy)]
pub struct PrunedMatrix<'a> {
    /// The decoder layer.
    pub layer: usize,
    /// Which matrix of it.
    pub projection: Projection,
    /// Its weights before pruning.
    pub weight: &'a StoredMatrix,
    /// s_j of its input `[in_features]`; empty for methods that need none.
    pub statistics: &'a [f32],
    /// What was asked.
    pub target: Target,
    /// What goes.
    pub mask: &'a Mask,
}

/// Sees every pruned matrix; for masks written beside the model and for tests against the reference.
pub trait Watcher: Send {
    /// Called once per matrix, in order.
    ///
    /// # Errors
    /// Ends the sweep.
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()>;

    /// Called after the last matrix of a layer, before the layer is recorded as finished; it may be on another thread.
    ///
    /// # Errors
    /// Ends the sweep.
    fn layer_done(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Records finished layers, so that another process can go on.
pub trait Record: Send {
    /// Called when the tensors and masks of all these layers are on the disk; `tensors` has the SHA-256 of each, in hex.
    ///
    /// # Errors
    /// Ends the sweep.
    fn layer_done(
        &mut self,
        layers: &[LayerReport],
        tensors: BTreeMap<String, String>,
    ) -> Result<()>;
}

/// The editor of a pruning run.
pub struct Pruner<'a> {
    /// The method.
    pub method: &'static dyn PruningMethod,
    /// What goes where.
    pub targets: &'a TargetPlan,
    /// The calibration samples; `None` for methods that need none.
    pub calibration: Option<CalibrationStream>,
    /// Where pruned matrices are written; `None` when nothing is saved.
    pub sink: Option<&'a mut CheckpointWriter>,
    /// Where finished layers are recorded; `None` where nobody could go on from them.
    pub record: Option<&'a mut dyn Record>,
    /// Who else looks at every matrix, in this order.
    pub watchers: Vec<&'a mut dyn Watcher>,
    /// Where time goes.
    pub clock: &'a Clock,
    /// Who is told.
    pub events: &'a dyn Events,
    /// Layers in the model; after the last one no sample needs to go on.
    pub num_hidden_layers: usize,
    /// What choosing took so far.
    pub selection: SelectionTime,
    /// What was done so far.
    pub layers: Vec<LayerReport>,
    /// What the writer must find in the file afterwards.
    pub expected: Vec<ExpectedMatrix>,
}

/// What choosing weights took.
#[derive(Debug, Default)]
pub struct SelectionTime {
    /// Scoring, added over the threads.
    pub scoring: ScoreTime,
    /// Scoring and selecting, on the wall.
    pub seconds: f64,
}

impl Editor for Pruner<'_> {
    fn edit(&mut self, mut layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer> {
        let start = Instant::now();
        let index = layer.index();
        let statistics = self.calibrate(&layer, compute)?;
        let (matrices, unwritten) = self.mask(&mut layer, statistics.as_ref(), compute)?;
        drop(statistics);
        let zeros: u64 = matrices.iter().map(|matrix| matrix.zeros).sum();
        let weights: usize = matrices
            .iter()
            .map(|matrix| matrix.shape[0] * matrix.shape[1])
            .sum();
        let sparsity = zeros as f64 / weights as f64;
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
        self.way().pass(layer, compute)
    }

    fn has_samples(&self) -> bool {
        self.calibration.is_some()
    }
}

impl Pruner<'_> {
    /// The samples' way through the layers.
    fn way(&mut self) -> Way<'_> {
        Way {
            calibration: &mut self.calibration,
            num_hidden_layers: self.num_hidden_layers,
            clock: self.clock,
            events: self.events,
        }
    }

    /// Writes what was pruned of the layer and records it as finished, while the samples pass through it; from then on their way
    /// through this layer can be found again from what is on the disk. "write" is what the run waits for.
    fn save_and_pass(
        &mut self,
        layer: &DecoderLayer,
        unwritten: &[Projection],
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        let Self {
            sink,
            record,
            watchers,
            layers,
            calibration,
            clock,
            events,
            num_hidden_layers,
            ..
        } = self;
        let mut saving = Saving {
            sink: sink.as_deref_mut(),
            record: record.as_deref_mut(),
            watchers,
            layers,
        };
        let mut way = Way {
            calibration,
            num_hidden_layers: *num_hidden_layers,
            clock,
            events: *events,
        };
        if !way.goes_on_after(layer) {
            clock.measure(Phase::Write, || saving.save(layer, unwritten))?;
            events.check()?;
            return way.pass(layer, compute);
        }
        let is_over = AtomicBool::new(false);
        let (saved, passed) = thread::scope(|scope| -> Result<_> {
            let saving = thread::Builder::new()
                .name("saving".to_string())
                .spawn_scoped(scope, || {
                    saving.save(layer, unwritten)?;
                    saving.go_ahead(&|| is_over.load(Ordering::Relaxed))
                })
                .context("starting the thread that writes")?;
            let passed = events
                .check()
                .map_err(Into::into)
                .and_then(|()| way.pass(layer, compute));
            is_over.store(true, Ordering::Relaxed);
            let saved = clock.measure(Phase::Write, || saving.join());
            Ok((saved, passed))
        })?;
        saved.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        passed
    }

    fn calibrate(
        &mut self,
        layer: &DecoderLayer,
        compute: &mut Compute<'_>,
    ) -> Result<Option<LayerStatistics>> {
        let Some(stream) = self.calibration.as_mut() else {
            return Ok(None);
        };
        let samples = stream.samples();
        announce(
            self.events,
            layer,
            self.num_hidden_layers,
            Phase::Calibrate,
            samples,
        );
        self.clock
            .measure(Phase::Calibrate, || {
                stream.capture(layer, compute, self.events)
            })
            .map(Some)
    }

    /// Masks all matrices; returns what there is to say of each, and those that are yet to be written.
    fn mask(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<(Vec<MatrixReport>, Vec<Projection>)> {
        let mut matrices = Vec::new();
        let mut unwritten = Vec::new();
        let clock = self.clock;
        for projection in layer.projections().collect::<Vec<_>>() {
            let at_rest = match layer.linear(projection).weight() {
                Weight::Held(_) => None,
                Weight::AtRest(_) => clock.measure(Phase::Read, || {
                    layer.linear_mut(projection).weight_mut().hold()
                })?,
            };
            let rows = statistics
                .filter(|_| self.targets.of(layer.index(), projection).is_some())
                .map(|statistics| statistics.rows(projection));
            let dense = rows.map(|rows| {
                clock.measure(Phase::OutputError, || {
                    let linear = layer.linear(projection);
                    DenseOutput::of(linear, rows, compute.workspace().product_context())
                })
            });
            let dense = dense.transpose()?;
            let (mut report, mask) = clock.measure(Phase::Score, || {
                self.mask_one(layer, projection, statistics)
            })?;
            if let Some(dense) = dense {
                report.relative_output_error = clock.measure(Phase::OutputError, || {
                    let linear = layer.linear(projection);
                    dense.error_of(linear, compute.workspace().product_context())
                })?;
            }
            if mask.is_some() {
                if at_rest.is_some() {
                    clock.measure(Phase::Write, || {
                        write(self.sink.as_deref_mut(), layer, projection)
                    })?;
                } else {
                    unwritten.push(projection);
                }
            }
            // A weight that was changed and not only masked cannot be had from the source again.
            if let Some(at_rest) = at_rest.filter(|_| !self.method.changes_weights()) {
                let at_rest = match mask {
                    Some(mask) => at_rest.without(mask.into_bits()),
                    None => at_rest,
                };
                *layer.linear_mut(projection).weight_mut() = Weight::AtRest(at_rest);
            }
            self.events.emit(Event::MatrixPruned(report.clone()));
            matrices.push(report);
        }
        Ok((matrices, unwritten))
    }

    fn mask_one(
        &mut self,
        layer: &mut DecoderLayer,
        projection: Projection,
        statistics: Option<&LayerStatistics>,
    ) -> Result<(MatrixReport, Option<Mask>)> {
        let index = layer.index();
        let name = projection.full_name(index);
        let in_memory = || format!("`{name}` is scored in memory");
        let weight = layer.linear(projection).weight().held();
        let weight = weight.with_context(in_memory)?;
        let zeros_before = weight.count_zeros();
        let shape = [weight.rows(), weight.columns()];
        let Some(target) = self.targets.of(index, projection) else {
            let report = MatrixReport {
                name,
                shape,
                zeros_before,
                zeros: zeros_before,
                pruned: None,
                mask_sha256: None,
                relative_output_error: None,
            };
            return Ok((report, None));
        };
        // Only now is it changed: what was prepared of a matrix that is left alone, here or on a GPU, stays good.
        let weight = layer.linear_mut(projection).weight_mut().held_mut();
        let weight = weight.with_context(in_memory)?;
        let statistics = statistics.map_or(&[][..], |statistics| statistics.of(projection));
        let request = Request {
            name: &name,
            statistics,
            target,
            use_variant: self.targets.use_variant,
            score_time: Some(&self.selection.scoring),
        };
        let began = Instant::now();
        let mask = self.method.prune(weight, &request)?;
        self.selection.seconds += began.elapsed().as_secs_f64();
        for watcher in &mut self.watchers {
            watcher.matrix(&PrunedMatrix {
                layer: index,
                projection,
                weight,
                statistics,
                target,
                mask: &mask,
            })?;
        }
        weight.zero_bits(mask.bits());
        let zeros = weight.count_zeros();
        let report = MatrixReport {
            name,
            shape,
            zeros_before,
            zeros,
            pruned: Some(mask.count()),
            mask_sha256: Some(mask.sha256()),
            relative_output_error: None,
        };
        self.expected
            .push(expected::expected(&report, target.pattern));
        Ok((report, Some(mask)))
    }
}

/// The calibration samples on their way through the layers.
struct Way<'a> {
    calibration: &'a mut Option<CalibrationStream>,
    num_hidden_layers: usize,
    clock: &'a Clock,
    events: &'a dyn Events,
}

impl Way<'_> {
    /// Whether there are samples that a later layer needs.
    fn goes_on_after(&self, layer: &DecoderLayer) -> bool {
        self.calibration.is_some() && layer.index() + 1 < self.num_hidden_layers
    }

    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        if !self.goes_on_after(layer) {
            // The samples have come to their end.
            *self.calibration = None;
            return Ok(());
        }
        let Some(stream) = self.calibration.as_mut() else {
            return Ok(());
        };
        let samples = stream.samples();
        announce(
            self.events,
            layer,
            self.num_hidden_layers,
            Phase::Propagate,
            samples,
        );
        self.clock.measure(Phase::Propagate, || {
            stream.propagate(layer, compute, self.events)
        })
    }
}

fn announce(
    events: &dyn Events,
    layer: &DecoderLayer,
    layers: usize,
    phase: Phase,
    samples: usize,
) {
    events.emit(Event::PhaseStarted {
        phase: format!("layer {}/{layers}: {phase}", layer.index() + 1),
        unit: "samples",
        steps: samples as u64,
    });
}

/// What a finished layer leaves behind.
struct Saving<'a, 'w> {
    sink: Option<&'a mut CheckpointWriter>,
    record: Option<&'a mut (dyn Record + 'w)>,
    watchers: &'a mut [&'w mut dyn Watcher],
    layers: &'a [LayerReport],
}

impl Saving<'_, '_> {
    /// Writes the matrices, waits for the disk, then says that the layer is finished.
    fn save(&mut self, layer: &DecoderLayer, unwritten: &[Projection]) -> Result<()> {
        for &projection in unwritten {
            write(self.sink.as_deref_mut(), layer, projection)?;
        }
        let Some(record) = self.record.as_deref_mut() else {
            return Ok(());
        };
        for watcher in &mut *self.watchers {
            watcher.layer_done()?;
        }
        match self.sink.as_deref_mut() {
            Some(sink) => record.layer_done(self.layers, sink.sync()?),
            None => Ok(()),
        }
    }

    /// Does what else can be done of the output by now.
    fn go_ahead(&mut self, is_over: &dyn Fn() -> bool) -> Result<()> {
        match self.sink.as_deref_mut() {
            Some(sink) => sink.go_ahead(is_over),
            None => Ok(()),
        }
    }
}

/// Writes one matrix, which is in memory.
fn write(
    sink: Option<&mut CheckpointWriter>,
    layer: &DecoderLayer,
    projection: Projection,
) -> Result<()> {
    let Some(sink) = sink else {
        return Ok(());
    };
    let name = projection.tensor_name(layer.index());
    let weight = layer.linear(projection).weight().held();
    let weight = weight.with_context(|| format!("`{name}` is written from memory"))?;
    sink.write(&name, weight.as_bytes())
        .with_context(|| format!("writing `{name}`"))
}
