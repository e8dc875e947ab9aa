//! Reads decoder layers: the next layer while the current layer is in use, if the plan says so (`prefetch`).
//!
//! A waiting layer has its stored dtype. At most two layers exist at a time; without reading ahead, one.
//! The thread that reads a layer also copies it to the GPU that will compute it, while the GPU works on the layer before.
//! If weights are held by matrix, a layer has only its norms and biases in memory.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Result, anyhow};

use super::engine::CopyAhead;
use super::rank_reads::RankReads;
use crate::model::DecoderLayer;

/// Hands out layers in ascending order.
pub struct LayerLoader {
    reads: Arc<RankReads>,
    /// Reads the next layer while a layer is in use.
    prefetch: bool,
    /// Copies a layer to its devices as soon as it is read ahead.
    copy: Arc<CopyAhead>,
    /// The index after the last layer.
    end: usize,
    ahead: Option<(usize, JoinHandle<Result<DecoderLayer>>)>,
}

impl LayerLoader {
    /// Begins to read the first of `layers`, if it may read ahead. The reading thread calls `copy` with every layer.
    ///
    /// # Arguments
    /// * `prefetch`: reads the next layer while a layer is in use
    pub(super) fn new(
        reads: RankReads,
        prefetch: bool,
        copy: CopyAhead,
        layers: Range<usize>,
    ) -> Self {
        let (copy, reads) = (Arc::new(copy), Arc::new(reads));
        let mut loader = Self { reads, prefetch, copy, end: layers.end, ahead: None };
        loader.read_ahead(layers.start);
        loader
    }

    /// Returns the layer `index`.
    pub fn take(&mut self, index: usize) -> Result<DecoderLayer> {
        let layer = match self.ahead.take() {
            Some((ahead, reading)) if ahead == index => {
                reading.join().map_err(|_| anyhow!("the reader of layer {index} panicked"))??
            }
            _ => self.reads.layer(index)?,
        };
        Ok(layer)
    }

    /// Begins to read the layer `index`, if it may read ahead and the layer exists.
    pub fn read_ahead(&mut self, index: usize) {
        if self.prefetch && index < self.end {
            let (reads, copy) = (Arc::clone(&self.reads), Arc::clone(&self.copy));
            let reading =
                std::thread::Builder::new().name("reading ahead".to_string()).spawn(move || {
                    let layer = reads.layer(index)?;
                    copy(&layer);
                    Ok(layer)
                });
            // If the system refuses a thread, `take` reads the layer.
            self.ahead = reading.ok().map(|reading| (index, reading));
        }
    }
}
