//! Pruning runs that share a sweep: their calibration samples pass dense layers only, so the statistics of a layer serve all of them.
//!
//! Each run is a cell, and all cells together are a passenger of the dense layers. For each layer: observe its inputs once → pass the
//! samples → for each cell: copy the layer, prune the copy, write it, and pass the cell's windows through it. At most a single copy exists.
//! Every cell makes the same calls in the same order as a run of its own, so its files have the same bytes.
//!
//! A cell that an earlier process began has its finished layers on the disk. They are read from there, and only its windows pass them.

use std::sync::Arc;

use anyhow::{Context, Result, bail};

use super::calibrate::{Calibrator, LayerStatistics};
use super::prune::Pruner;
use crate::model::{DecoderLayer, Head, InputId, ModelConfig};
use crate::run::{Events, Moment, Stopped};
use crate::runtime::{Clock, Compute, Finished, Passenger, Side, memory};

/// A pruning run of a shared sweep.
pub struct SharingCell<'a> {
    /// Its editor, whose calibrator has no samples of its own.
    pub pruner: Pruner<'a>,
    /// Passengers of both sides.
    pub passengers: Vec<&'a mut dyn Passenger>,
    /// The layers that an earlier process finished.
    pub finished: Option<Finished>,
    /// Its clock; `None` for the cell whose clock is the sweep's.
    pub clock: Option<&'a Clock>,
    /// The receiver of its events.
    pub events: &'a dyn Events,
    /// The error that has ended it.
    pub error: Option<anyhow::Error>,
}

impl SharingCell<'_> {
    /// Returns whether an editor of this cell needs the statistics of a layer.
    fn prunes(&self, layer: usize) -> bool {
        let finished = self.finished.as_ref().map_or(0, |of| of.layers);
        self.error.is_none() && layer >= finished
    }

    fn layer(
        &mut self,
        dense: &DecoderLayer,
        version: u32,
        statistics: Option<&LayerStatistics>,
        compute: &mut Compute<'_>,
    ) -> Result<()> {
        let index = dense.index();
        self.show(Side::Dense, dense, compute)?;
        let own = match &self.finished {
            Some(of) if index < of.layers => {
                if !self.passengers.iter().any(|of| of.side() == Side::Pruned) {
                    return Ok(());
                }
                let written = of.written.layer(compute.settings().weights, index)?;
                written.as_version(version)
            }
            _ => {
                let copy = dense.clone().as_version(version);
                self.pruner.prune_with(copy, statistics, compute)?
            }
        };
        self.show(Side::Pruned, &own, compute)?;
        drop(own);
        memory::release_freed();
        if let Some(clock) = self.clock {
            clock.mark(Moment::Layer(index), self.events);
        }
        Ok(())
    }

    fn show(&mut self, side: Side, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        let mut of_side = (self.passengers.iter_mut()).filter(|passenger| passenger.side() == side);
        of_side.try_for_each(|passenger| passenger.layer(layer, compute))
    }

    /// Takes the outcome of a step. An error ends only its own cell.
    ///
    /// # Errors
    /// Fails when the run is asked to stop.
    fn take(&mut self, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if error.is::<Stopped>() => Err(error),
            Err(error) => {
                self.error = Some(error);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// The passenger that prunes a copy of every dense layer for each of its cells.
pub struct SharedPruning<'a> {
    /// The samples of all cells, with the kind of statistics that serves all of their techniques.
    pub calibrator: Calibrator<'a>,
    /// The shape of the model.
    pub config: Arc<ModelConfig>,
    /// The cells, in the order in which they are pruned.
    pub cells: Vec<SharingCell<'a>>,
}

impl Passenger for SharedPruning<'_> {
    fn side(&self) -> Side {
        Side::Dense
    }

    fn layer(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()> {
        let index = layer.index();
        if self.cells.iter().all(|cell| cell.error.is_some()) {
            bail!("no cell is left");
        }
        let statistics = match self.cells.iter().any(|cell| cell.prunes(index)) {
            true => self.calibrator.observe(layer, &InputId::ALL, compute)?,
            false => None,
        };
        self.calibrator.pass(layer, compute)?;
        for (number, cell) in (1..).zip(&mut self.cells) {
            if cell.error.is_none() {
                let done = cell.layer(layer, number, statistics.as_ref(), compute);
                cell.take(done.with_context(|| format!("in model.layers.{index}")))?;
            }
        }
        Ok(())
    }

    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()> {
        for cell in &mut self.cells {
            if cell.error.is_none() {
                let mut passengers = cell.passengers.iter_mut();
                let done = passengers.try_for_each(|passenger| passenger.finish(head, compute));
                cell.take(done.context("in the head"))?;
            }
        }
        Ok(())
    }
}
