//! The main loop of the program: every decoder layer once, in order.
//!
//! For each layer, passengers get the dense layer, the editor changes it, and passengers get the pruned layer. Weights are read once for
//! calibration, pruning and all perplexities; at any depth, memory holds the layer in use (with some kernels also packed),
//! the next layer's stored bytes, the hidden states and one workspace. Some [`MemorySettings`] need less memory.
//!
//! A sweep can continue the work of an earlier process. Then only the samples pass through the finished layers: the samples of
//! the pruned side through the written layers, the samples of the dense side through the source's layers.
//! [`Editor::side`] names the side of the editor's samples.

use std::ops::Range;

use anyhow::{Context, Result};

use super::clock::Reporter;
use super::compute::{Compute, SweepReport};
use super::devices::Devices;
use super::layer_source::LayerSource;
use super::loader::LayerLoader;
use super::memory;
use super::rank_reads::RankReads;
use crate::linalg::{CodedActivations, Products};
use crate::model::{DecoderLayer, Head};
use crate::ranks::Ranks;
use crate::run::{MemorySettings, Moment, Phase};

/// A version of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The layer as it was read.
    Dense,
    /// The layer that the editor returned.
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

    /// The phase in which evaluation windows pass this version.
    pub fn phase(self) -> Phase {
        match self {
            Self::Dense => Phase::EvaluateDense,
            Self::Pruned => Phase::EvaluatePruned,
        }
    }
}

/// An editor changes layers: it calibrates, prunes and writes.
pub trait Editor {
    /// Edits a dense layer and returns the layer for the pruned side.
    fn edit(&mut self, layer: DecoderLayer, compute: &mut Compute<'_>) -> Result<DecoderLayer>;

    /// Passes the editor's samples through a layer that it returned in an earlier process.
    fn pass(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()>;

    /// Returns whether the editor has samples.
    fn has_samples(&self) -> bool;

    /// The version of the layers that the editor's samples pass.
    fn side(&self) -> Side {
        Side::Pruned
    }
}

/// A passenger of the sweep gets each layer before or after the editor, and the head at the end.
pub trait Passenger {
    /// The version of the layers that the passenger gets.
    fn side(&self) -> Side;

    /// Takes the next layer.
    fn layer(&mut self, layer: &DecoderLayer, compute: &mut Compute<'_>) -> Result<()>;

    /// Takes the head, after the last layer.
    fn finish(&mut self, head: &Head, compute: &mut Compute<'_>) -> Result<()>;
}

/// The layers that an earlier process finished.
pub struct Finished {
    /// The number of finished layers, from the first on.
    pub layers: usize,
    /// The model with the finished layers as they were written.
    pub written: LayerSource,
}

/// A sweep: its model, its settings and its devices.
pub struct Sweep<'a> {
    /// The source of layers, with the model's shape.
    pub source: LayerSource,
    /// The layers of an earlier process; `None` to begin with the first layer.
    pub finished: Option<Finished>,
    /// Layers that all passengers have passed in an earlier process.
    pub passed: usize,
    /// Tokens per sample, at most.
    pub seqlen: usize,
    /// Settings that trade memory for time.
    pub settings: MemorySettings,
    /// The arithmetic of products on the CPU.
    pub products: Products,
    /// The activations that 8-bit codes are multiplied with.
    pub activations: CodedActivations,
    /// The devices that compute in addition to the CPU.
    pub devices: &'a Devices,
    /// The ranks that share samples and windows.
    pub ranks: Ranks,
    /// The clock of the run, and the receiver of its events.
    pub reporter: Reporter<'a>,
}

impl Sweep<'_> {
    /// Sweeps over all layers, and gives the head to the passengers.
    ///
    /// # Errors
    /// Fails when a device cannot be opened or a layer cannot be read, and with the first error of the editor or a passenger. Errors
    /// name the layer.
    pub fn run(
        self,
        mut editor: Option<&mut dyn Editor>,
        passengers: &mut [&mut dyn Passenger],
    ) -> Result<SweepReport> {
        let Reporter { clock, events } = self.reporter;
        let config = &self.source.config;
        let arithmetic = (&self.settings, self.products);
        let compute = self.devices.compute(config, self.seqlen, arithmetic, events)?;
        let mut compute =
            compute.with_coded_activations(self.activations).with_ranks(self.ranks.clone());
        let mut first = self.passed;
        if let Some(finished) = &self.finished {
            first = finished.layers;
            // The sides pass in turn, so that memory holds only the layer in use and the layer that is read ahead.
            for (side, source) in [(Side::Pruned, &finished.written), (Side::Dense, &self.source)] {
                let moves = editor
                    .as_deref()
                    .is_some_and(|editor| side == editor.side() && editor.has_samples());
                if !moves && !passengers.iter().any(|passenger| passenger.side() == side) {
                    continue;
                }
                self.each_layer(
                    Moment::PassedLayer,
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
        let layers = first..config.num_hidden_layers;
        self.each_layer(
            Moment::Layer,
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
            clock.mark(Moment::AfterPruning, events);
        }
        if !passengers.is_empty() {
            clock.mark(Moment::BeforeEvaluation, events);
            let head = clock
                .measure(Phase::Read, || {
                    Head::open(&self.source.source, config, self.settings.head_rows)
                })
                .context("in the head")?;
            for passenger in passengers {
                passenger.finish(&head, &mut compute).context("in the head")?;
            }
            clock.mark(Moment::AfterEvaluation, events);
        }
        Ok(compute.finish())
    }

    fn each_layer(
        &self,
        moment: fn(usize) -> Moment,
        source: &LayerSource,
        layers: Range<usize>,
        compute: &mut Compute<'_>,
        body: &mut dyn FnMut(DecoderLayer, &mut Compute<'_>) -> Result<DecoderLayer>,
    ) -> Result<()> {
        let Reporter { clock, events } = self.reporter;
        let mut loader = LayerLoader::new(
            RankReads::new(source.clone(), &self.ranks, self.settings.weights),
            self.settings.prefetch,
            compute.copies_ahead(),
            layers.clone(),
        );
        for index in layers {
            let in_layer = || format!("in model.layers.{index}");
            let layer = clock.measure(Phase::Read, || loader.take(index)).with_context(in_layer)?;
            compute.begin_layer();
            loader.read_ahead(index + 1);
            let layer = body(layer, compute).with_context(in_layer)?;
            // Layers are allocated by the reader's thread and freed by this thread. Without the release, glibc keeps about one
            // layer's worth per arena, and the peak grows with the depth (by 25 MiB over 32 layers of 24.5 MiB).
            drop(layer);
            memory::release_freed();
            clock.mark(moment(index), events);
        }
        Ok(())
    }
}

/// Gives a layer to the passengers of its side.
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
