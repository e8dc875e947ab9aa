//! The one loop of the program: every decoder layer once, in order.
//!
//! For each layer: passengers see it dense, the editor changes it, passengers see it pruned. Weights are read once for
//! calibration, pruning and all perplexities; peak memory is one layer, the next one's stored bytes, the hidden states
//! and one workspace, whatever the depth. With tighter [`MemorySettings`] it is less.
//!
//! A sweep may begin in the middle, where an earlier process has finished the layers before: then the samples alone pass through
//! those, the editor's and the pruned ones through what was written, the dense ones through the source's. Nothing else is done twice.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::clock::Clock;
use super::compute::Compute;
use super::devices::Devices;
use super::loader::LayerLoader;
use super::memory;
use crate::checkpoint::WeightSource;
use crate::linalg::Products;
use crate::linalg::profile::Watch;
use crate::model::{DecoderLayer, Head, LayerContext, ModelConfig};
use crate::run::fallback::{DeviceMemoryReport, FallReport};
use crate::run::{Events, MemorySettings};

/// Which version of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// As it was read.
    Dense,
    /// As the editor left it.
    Pruned,
}

impl Side {
    /// `dense` or `pruned`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Pruned => "pruned",
        }
    }
}

/// Changes layers: calibrates, prunes, writes.
pub trait Editor {
    /// Takes a dense layer and gives back the one that goes on.
    ///
    /// # Errors
    /// Ends the sweep.
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer>;

    /// Takes samples of its own through a layer that it gave back in an earlier process.
    ///
    /// # Errors
    /// Ends the sweep.
    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()>;

    /// Whether it has samples of its own.
    fn has_samples(&self) -> bool;
}

/// Rides along: sees each layer before or after the editor, and the head at the end.
pub trait Passenger {
    /// Which version it sees.
    fn side(&self) -> Side;

    /// The next layer.
    ///
    /// # Errors
    /// Ends the sweep.
    fn layer(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()>;

    /// The end of the model, after the last layer.
    ///
    /// # Errors
    /// Ends the run.
    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()>;
}

/// The layers an earlier process finished.
pub struct Finished {
    /// How many, from the first on.
    pub layers: usize,
    /// The model with these as they were written.
    pub written: Arc<dyn WeightSource>,
}

/// What a sweep goes over.
pub struct Sweep<'a> {
    /// Where layers are read from.
    pub source: Arc<dyn WeightSource>,
    /// What need not be done again; `None` to begin with the first layer.
    pub finished: Option<Finished>,
    /// The model's shape.
    pub config: Arc<ModelConfig>,
    /// Tokens per sample, at most.
    pub seqlen: usize,
    /// How the work is cut up.
    pub settings: MemorySettings,
    /// How products with bf16 weights are computed on the CPU.
    pub products: Products,
    /// Who computes beside the CPU.
    pub devices: &'a Devices,
    /// Where time goes.
    pub clock: &'a Clock,
    /// Who is told of memory at each layer.
    pub events: &'a dyn Events,
}

impl Sweep<'_> {
    /// Goes over all layers, then shows the head to the passengers.
    ///
    /// # Errors
    /// Fails when a device cannot be set up or a layer not be read, and with the first error of the editor or a passenger; these
    /// name the layer.
    pub fn run(
        self,
        mut editor: Option<&mut dyn Editor>,
        passengers: &mut [&mut dyn Passenger],
    ) -> Result<Swept> {
        let context = || -> Result<LayerContext> {
            let settings = self.settings.clone();
            let context = LayerContext::with_settings(&self.config, self.seqlen, settings)?;
            Ok(context.with_products(self.products))
        };
        let (seats, by_layer) =
            self.devices
                .seats(&self.config, self.seqlen, &self.settings, &context)?;
        let mut compute = Compute::new(context()?, &self.config, seats, by_layer, self.events);
        let mut first = 0;
        if let Some(finished) = &self.finished {
            first = finished.layers;
            // One side after the other, so that never more than one layer is in memory, and one read ahead.
            for (side, source) in [
                (Side::Pruned, &finished.written),
                (Side::Dense, &self.source),
            ] {
                let moves = editor
                    .as_deref()
                    .is_some_and(|editor| side == Side::Pruned && editor.has_samples());
                if !moves && !passengers.iter().any(|passenger| passenger.side() == side) {
                    continue;
                }
                self.each_layer(
                    "passed",
                    source,
                    0..first,
                    &mut compute,
                    &mut |layer, compute| {
                        if let Some(editor) = editor.as_deref_mut().filter(|_| moves) {
                            editor.pass(&layer, compute)?;
                        }
                        show(passengers, side, &layer, compute)?;
                        Ok(layer)
                    },
                )?;
            }
        }
        let layers = first..self.config.num_hidden_layers;
        self.each_layer(
            "layer",
            &self.source,
            layers,
            &mut compute,
            &mut |mut layer, compute| {
                show(passengers, Side::Dense, &layer, compute)?;
                if let Some(editor) = editor.as_deref_mut() {
                    layer = editor.edit(layer, compute)?;
                }
                show(passengers, Side::Pruned, &layer, compute)?;
                Ok(layer)
            },
        )?;
        if editor.is_some() {
            self.clock.mark("04_after_pruning", self.events);
        }
        if !passengers.is_empty() {
            self.clock.mark("05_before_eval", self.events);
            let head = self
                .clock
                .measure("read", || match self.settings.head_rows {
                    None => Head::load(&*self.source, &self.config),
                    Some(rows) => Head::at_rest(&self.source, &self.config, rows),
                })
                .context("in the head")?;
            for passenger in passengers {
                passenger
                    .finish(&head, &mut compute)
                    .context("in the head")?;
            }
            self.clock.mark("06_after_eval", self.events);
        }
        Ok(compute.finish())
    }

    /// Takes some layers in their order through `body`, which gives back what is left of each. `mark` begins the name of the memory
    /// sample after each.
    fn each_layer(
        &self,
        mark: &str,
        source: &Arc<dyn WeightSource>,
        layers: Range<usize>,
        compute: &mut Compute<'_>,
        body: &mut dyn FnMut(DecoderLayer, &mut Compute<'_>) -> Result<DecoderLayer>,
    ) -> Result<()> {
        let mut loader = LayerLoader::new(
            Arc::clone(source),
            Arc::clone(&self.config),
            self.settings.clone(),
            compute.copies_ahead(),
            layers.clone(),
        );
        for index in layers {
            let in_layer = || format!("in layer {index}");
            let layer = self
                .clock
                .measure("read", || loader.take(index))
                .with_context(in_layer)?;
            compute.layer_begins();
            loader.read_ahead(index + 1);
            let layer = body(layer, compute).with_context(in_layer)?;
            // Layers are allocated by the reader's thread and freed by this one. Without this, glibc keeps about one
            // layer's worth per arena, and the peak grows with the depth (by 25 MiB over 32 layers of 24.5 MiB).
            drop(layer);
            memory::release_freed();
            self.clock.mark(format!("{mark}_{index}"), self.events);
        }
        Ok(())
    }
}

/// Shows a layer to those who see this side.
fn show(
    passengers: &mut [&mut dyn Passenger],
    side: Side,
    layer: &DecoderLayer,
    compute: &mut Compute<'_>,
) -> Result<()> {
    for passenger in passengers.iter_mut() {
        if passenger.side() == side {
            passenger.layer(layer, compute)?;
        }
    }
    Ok(())
}

/// What there is to say of the devices after a sweep.
#[derive(Debug, Clone, Default)]
pub struct Swept {
    /// Units a device had no memory for at first.
    pub fallbacks: Vec<FallReport>,
    /// What devices held at most.
    pub devices: Vec<DeviceMemoryReport>,
    /// Where the CPU's time went.
    pub watch: Watch,
}
