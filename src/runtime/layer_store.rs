//! The layers of a generating model, which uses them again for every token: in memory, or read at each use.
//!
//! [`Residency`] decides which layers are streamed. A thread reads the next streamed layer while the layers before it compute; after the
//! last streamed layer it reads the first. Used layers are dropped. At most two streamed layers exist at a time.

use std::borrow::Cow;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};

use super::layer_source::LayerSource;
use super::memory;
use crate::model::DecoderLayer;
use crate::placement::Residency;
use crate::run::{Event, Events, WeightsHeld};

const PHASE: &str = "read layers";

/// Hands out layers in ascending order, again and again.
pub struct LayerStore {
    layers: LayerSource,
    residency: Residency,
    /// By index; `None` for a streamed layer.
    resident: Vec<Option<DecoderLayer>>,
    reader: Option<Reader>,
}

impl LayerStore {
    /// Reads the layers that stay in memory, and begins to read the first streamed layer.
    ///
    /// # Errors
    /// Fails when a layer cannot be read, or a thread cannot be started.
    pub fn load(layers: LayerSource, residency: Residency, events: &dyn Events) -> Result<Self> {
        let began = Instant::now();
        events.emit(Event::PhaseStarted {
            phase: PHASE.to_string(),
            unit: "layers",
            steps: residency.resident() as u64,
        });
        let mut resident = Vec::with_capacity(layers.config.num_hidden_layers);
        let mut done = 0;
        for index in 0..layers.config.num_hidden_layers {
            resident.push(if residency.is_streamed(index) {
                None
            } else {
                let layer = layers
                    .layer(WeightsHeld::Layer, index)
                    .with_context(|| format!("in model.layers.{index}"))?;
                done += 1;
                events.emit(Event::Progress { done });
                // Rows that were made compact were in memory of every thread.
                memory::release_freed();
                Some(layer)
            });
        }
        events.emit(Event::PhaseDone { phase: PHASE.to_string(), elapsed: began.elapsed() });
        let mut store = Self { layers, residency, resident, reader: None };
        if residency.reads_ahead() && residency.streamed() > 0 {
            let mut reader = Reader::start(store.layers.clone())?;
            if let Some(first) = store.next_streamed(0) {
                reader.ask(first);
            }
            store.reader = Some(reader);
        }
        Ok(store)
    }

    /// The division into resident and streamed layers.
    pub fn residency(&self) -> Residency {
        self.residency
    }

    /// The layers in memory.
    pub fn resident(&self) -> impl Iterator<Item = &DecoderLayer> {
        self.resident.iter().flatten()
    }

    /// Calls `body` with the layer `index`.
    ///
    /// # Errors
    /// Fails when the layer cannot be read, and when `body` does.
    pub fn with_layer<R>(
        &mut self,
        index: usize,
        body: impl FnOnce(&DecoderLayer) -> Result<R>,
    ) -> Result<R> {
        let next = self.next_streamed(index + 1);
        let layer = match (&self.resident[index], &mut self.reader) {
            (Some(layer), _) => Cow::Borrowed(layer),
            (None, Some(reader)) => {
                let layer = reader.take(index)?;
                if let Some(next) = next {
                    reader.ask(next);
                }
                Cow::Owned(layer)
            }
            (None, None) => Cow::Owned(self.layers.layer(WeightsHeld::Layer, index)?),
        };
        let result = body(&layer);
        if let Cow::Owned(layer) = layer {
            // As in the sweep: without this the C library keeps about one layer per thread.
            drop(layer);
            memory::release_freed();
        }
        result
    }

    /// Returns the first streamed layer from `from` on, and after the last layer from the first.
    fn next_streamed(&self, from: usize) -> Option<usize> {
        let layers = self.resident.len();
        (from..from + layers)
            .map(|index| index % layers)
            .find(|&index| self.residency.is_streamed(index))
    }
}

/// A thread that reads a layer when asked.
struct Reader {
    /// `None` once the thread must end.
    asked: Option<SyncSender<usize>>,
    read: Receiver<(usize, Result<DecoderLayer>)>,
    /// An answer is expected.
    is_busy: bool,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn start(layers: LayerSource) -> Result<Self> {
        let (asked, questions) = sync_channel::<usize>(1);
        // Capacity 0: the thread keeps a layer until it is taken, and does not begin a second layer.
        let (answers, read) = sync_channel(0);
        let thread = std::thread::Builder::new()
            .name("layer-reader".to_string())
            .spawn(move || {
                for index in questions {
                    let layer = layers.layer(WeightsHeld::Layer, index);
                    if answers.send((index, layer)).is_err() {
                        return;
                    }
                }
            })
            .context("starting the thread that reads layers")?;
        Ok(Self { asked: Some(asked), read, is_busy: false, thread: Some(thread) })
    }

    fn ask(&mut self, index: usize) {
        self.is_busy = true;
        // If the thread has ended, `take` fails.
        if let Some(asked) = &self.asked {
            let _ = asked.send(index);
        }
    }

    /// Returns the layer `index`. It was asked for last, unless a pass ended early.
    fn take(&mut self, index: usize) -> Result<DecoderLayer> {
        loop {
            if !self.is_busy {
                self.ask(index);
            }
            let (read, layer) =
                self.read.recv().map_err(|_| anyhow!("the reader of layer {index} is gone"))?;
            self.is_busy = false;
            if read == index {
                return layer.with_context(|| format!("in model.layers.{index}"));
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // The thread ends at its next question or answer. The memory of its layer is free when this function returns.
        self.asked = None;
        let (_, closed) = sync_channel(0);
        self.read = closed;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
