//! The one loop of the program: every decoder layer once, in order.
//!
//! For each layer: passengers see it dense, the editor changes it, passengers see it pruned. Weights are read once for
//! calibration, pruning and all perplexities; peak memory is one layer, the next one's stored bytes, the hidden states
//! and one workspace, whatever the depth. With tighter [`Knobs`] it is less.

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
use crate::model::{DecoderLayer, Head, LayerContext, LlamaConfig};
use crate::run::fallback::{DeviceMemoryReport, FallReport};
use crate::run::{Events, Knobs};

/// Changes layers: calibrates, prunes, writes.
pub trait Editor {
    /// Takes a dense layer and gives back the one that goes on.
    ///
    /// # Errors
    /// Ends the sweep.
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer>;
}

/// Rides along: sees each layer before and after the editor, and the head at the end.
pub trait Passenger {
    /// The layer as it was read.
    ///
    /// # Errors
    /// Ends the sweep.
    fn dense(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()>;

    /// The layer as the editor left it.
    ///
    /// # Errors
    /// Ends the sweep.
    fn pruned(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()>;

    /// The end of the model, after the last layer.
    ///
    /// # Errors
    /// Ends the run.
    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()>;
}

/// What a sweep goes over.
pub struct Sweep<'a> {
    /// Where layers are read from.
    pub source: Arc<dyn WeightSource>,
    /// The model's shape.
    pub config: Arc<LlamaConfig>,
    /// Tokens per sample, at most.
    pub seqlen: usize,
    /// How the work is cut up.
    pub knobs: Knobs,
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
            let knobs = self.knobs.clone();
            let context = LayerContext::with_knobs(&self.config, self.seqlen, knobs)?;
            Ok(context.with_products(self.products))
        };
        let (seats, by_layer) =
            self.devices
                .seats(&self.config, self.seqlen, &self.knobs, &context)?;
        let mut compute = Compute::new(context()?, &self.config, seats, by_layer, self.events);
        let mut loader = LayerLoader::new(
            Arc::clone(&self.source),
            Arc::clone(&self.config),
            self.knobs.clone(),
            compute.copies_ahead(),
        );
        for index in 0..self.config.num_hidden_layers {
            let in_layer = || format!("in layer {index}");
            let mut layer = self
                .clock
                .measure("read", || loader.take(index))
                .with_context(in_layer)?;
            compute.layer_begins();
            loader.read_ahead(index + 1);
            for passenger in passengers.iter_mut() {
                passenger
                    .dense(&layer, &mut compute)
                    .with_context(in_layer)?;
            }
            if let Some(editor) = editor.as_deref_mut() {
                layer = editor.edit(layer, &mut compute).with_context(in_layer)?;
            }
            for passenger in passengers.iter_mut() {
                passenger
                    .pruned(&layer, &mut compute)
                    .with_context(in_layer)?;
            }
            // Layers are allocated by the reader's thread and freed by this one. Without this, glibc keeps about one
            // layer's worth per arena, and the peak grows with the depth (by 25 MiB over 32 layers of 24.5 MiB).
            drop(layer);
            memory::release_freed();
            self.clock.mark(format!("layer_{index}"), self.events);
        }
        drop(loader);
        if editor.is_some() {
            self.clock.mark("04_after_pruning", self.events);
        }
        if !passengers.is_empty() {
            self.clock.mark("05_before_eval", self.events);
            let head = self
                .clock
                .measure("read", || match self.knobs.head_rows {
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
