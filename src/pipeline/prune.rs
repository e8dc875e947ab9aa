//! The editor: what happens to one decoder layer.
//!
//! calibrate on the dense layer → score and mask its matrices → write them → pass the calibration samples through what
//! is left. Statistics of all seven matrices come from the one dense pass, whose inputs come from pruned layers: the
//! order of the reference. A matrix that rests on disk is held while it is scored and written, and goes back to rest with its
//! mask, which from then on says what is zero.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result};

use super::calibrate::{CalibrationStream, LayerStatistics};
use super::output_error::DenseOutput;
use super::resume;
use super::targets::TargetPlan;
use crate::checkpoint::{ExpectedMatrix, WeightSink};
use crate::linalg::{StoredMatrix, Weight};
use crate::model::{DecoderLayer, Projection};
use crate::pruning::{Mask, PruningMethod, Request, ScoreTime, Target};
use crate::run::manifest::{LayerReport, MatrixReport};
use crate::run::{Event, Events};
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
pub trait Watcher {
    /// Called once per matrix, in order.
    ///
    /// # Errors
    /// Ends the sweep.
    fn matrix(&mut self, matrix: &PrunedMatrix<'_>) -> Result<()>;

    /// Called after the last matrix of a layer, before the layer is recorded as finished.
    ///
    /// # Errors
    /// Ends the sweep.
    fn layer_done(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Records finished layers, so that another process can go on.
pub trait Record {
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
    pub sink: Option<&'a mut dyn WeightSink>,
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
        let matrices = self.mask(&mut layer, statistics.as_ref(), compute)?;
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
        // From here on the samples' way through this layer can be found again from what is on the disk.
        self.record()?;
        self.events.check()?;
        self.pass(&layer, compute)?;
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
        if layer.index() + 1 < self.num_hidden_layers {
            self.propagate(layer, compute)
        } else {
            // The samples have come to their end.
            self.calibration = None;
            Ok(())
        }
    }

    fn has_samples(&self) -> bool {
        self.calibration.is_some()
    }
}

impl Pruner<'_> {
    /// Waits for the disk, then says that the last layer is finished.
    fn record(&mut self) -> Result<()> {
        let Some(record) = self.record.as_deref_mut() else {
            return Ok(());
        };
        self.clock.measure("write", || {
            for watcher in &mut self.watchers {
                watcher.layer_done()?;
            }
            let tensors = match self.sink.as_deref_mut() {
                Some(sink) => sink.sync()?,
                None => return Ok(()),
            };
            record.layer_done(&self.layers, tensors)
        })
    }

    fn phase(&self, index: usize, what: &str, samples: usize) {
        let phase = format!("layer {}/{}: {what}", index + 1, self.num_hidden_layers);
        self.events.emit(Event::PhaseStarted {
            phase,
            unit: "samples",
            steps: samples as u64,
        });
    }

    fn calibrate(
        &mut self,
        layer: &DecoderLayer,
        compute: &mut Compute<'_>,
    ) -> Result<Option<LayerStatistics>> {
        let Some(samples) = self.calibration.as_ref().map(CalibrationStream::samples) else {
            return Ok(None);
        };
        self.phase(layer.index(), "calibrate", samples);
        let Some(stream) = self.calibration.as_mut() else {
            return Ok(None);
        };
        self.clock
            .measure("calibrate", || stream.capture(layer, compute, self.events))
            .map(Some)
    }

    fn propagate(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        let Some(samples) = self.calibration.as_ref().map(CalibrationStream::samples) else {
            return Ok(());
        };
        self.phase(layer.index(), "propagate", samples);
        let Some(stream) = self.calibration.as_mut() else {
            return Ok(());
        };
        self.clock.measure("propagate", || {
            stream.propagate(layer, compute, self.events)
        })
    }

    fn mask(
        &mut self,
        layer: &mut DecoderLayer,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<Vec<MatrixReport>> {
        let mut matrices = Vec::with_capacity(Projection::ALL.len());
        let clock = self.clock;
        for projection in Projection::ALL {
            let at_rest = match layer.linear(projection).weight() {
                Weight::Held(_) => None,
                Weight::AtRest(_) => {
                    clock.measure("read", || layer.linear_mut(projection).weight_mut().hold())?
                }
            };
            let rows = statistics
                .filter(|_| self.targets.of(layer.index(), projection).is_some())
                .map(|statistics| statistics.rows(projection));
            let dense = rows.map(|rows| {
                clock.measure("output error", || {
                    let linear = layer.linear(projection);
                    DenseOutput::of(linear, rows, compute.workspace().panel())
                })
            });
            let dense = dense.transpose()?;
            let (mut report, mask) = clock.measure("score and mask", || {
                self.mask_one(layer, projection, statistics)
            })?;
            if let Some(dense) = dense {
                report.relative_output_error = clock.measure("output error", || {
                    let linear = layer.linear(projection);
                    dense.error_of(linear, compute.workspace().panel())
                })?;
            }
            if mask.is_some() {
                clock.measure("write", || self.write(layer, projection))?;
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
        Ok(matrices)
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
            .push(resume::expected(&report, target.pattern));
        Ok((report, Some(mask)))
    }

    fn write(&mut self, layer: &DecoderLayer, projection: Projection) -> Result<()> {
        let Some(sink) = self.sink.as_deref_mut() else {
            return Ok(());
        };
        let name = projection.tensor_name(layer.index());
        let weight = layer.linear(projection).weight().held();
        let weight = weight.with_context(|| format!("`{name}` is written from memory"))?;
        sink.write(&name, weight.as_bytes())
            .with_context(|| format!("writing `{name}`"))
    }
}
