//! Layers of several ranks: every rank reads them from the storage, or the first rank reads them for all.
//!
//! ```text
//! layer 0     every rank reads it                         t_own     the slowest rank, with all ranks at the storage
//! layer 1     rank 0 reads a part and sends it to rank 1, rank r sends it to rank r + 1 as soon as it arrives     t_passed   rank 0
//! then        the quicker way: every rank by itself where t_own ≤ t_passed
//! ```
//!
//! In a chain every rank sends each byte once, so the time does not grow with the number of ranks. The reading thread of a rank does it all,
//! while the rank computes the layer before. A rank gets at most [`WINDOW`] parts ahead of the rank after it, which bounds the memory of
//! messages. Only whole layers are passed on, in the order of their tensors; matrices that stay on the disk or become compact while they are
//! read are read by every rank.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Result, ensure};

use super::layer_source::LayerSource;
use crate::bytes::ByteSize;
use crate::checkpoint::{TensorEntry, WeightSource};
use crate::model::{DecoderLayer, WeightForm};
use crate::ranks::Ranks;
use crate::run::WeightsHeld;

/// Bytes of a part; less in tests, so that a small layer has many.
const PART: usize = if cfg!(test) { 1 << 10 } else { 8 << 20 };
/// Parts that a rank may be ahead of the next rank.
const WINDOW: usize = 8;
/// Parts after which a rank tells the rank before it that it has them.
const RECEIPT: usize = WINDOW / 2;

/// Bytes of parts on their way at a rank, for layers of so many bytes.
pub fn bytes_on_the_way(layer: ByteSize) -> ByteSize {
    // Parts that have arrived, parts that leave, and the part in hand.
    ByteSize(layer.0.min(((2 * WINDOW + 1) * PART) as u64))
}

/// The layers of a rank.
pub(super) struct RankReads {
    source: LayerSource,
    ranks: Ranks,
    held: WeightsHeld,
    choice: Mutex<ReaderChoice>,
}

/// The choice between the two ways.
#[derive(Debug, Default)]
struct ReaderChoice {
    layers: usize,
    /// Seconds of the first layer, which every rank reads, and of the second layer, which is passed on.
    seconds: [f64; 2],
    is_passed_on: bool,
}

impl RankReads {
    pub(super) fn new(source: LayerSource, ranks: &Ranks, held: WeightsHeld) -> Self {
        Self { source, ranks: ranks.for_weights(), held, choice: Mutex::default() }
    }

    /// Reads a layer, or opens it where weights are held by matrix. Ranks ask for the same layers in the same order.
    ///
    /// # Errors
    /// Fails as [`LayerSource::layer`], and when a rank has left.
    pub(super) fn layer(&self, index: usize) -> Result<DecoderLayer> {
        let source = &self.source;
        let is_whole = self.held == WeightsHeld::Layer && source.forms.form() == WeightForm::Dense;
        if self.ranks.is_alone() || !is_whole {
            return source.layer(self.held, index);
        }
        let mut choice = self.choice.lock().unwrap_or_else(PoisonError::into_inner);
        let (way, start) = (choice.layers, Instant::now());
        let layer = match way == 1 || (way > 1 && choice.is_passed_on) {
            false => source.layer(self.held, index)?,
            true => {
                let passed = PassedOn::new(&*source.source, &self.ranks);
                let layer = DecoderLayer::load_in(&passed, &source.config, index, &source.forms)?;
                passed.finish()?;
                layer
            }
        };
        if let Some(seconds) = choice.seconds.get_mut(way) {
            *seconds = start.elapsed().as_secs_f64();
        }
        choice.layers += 1;
        if choice.layers == 2 {
            let all = self.ranks.all_gather_values(&choice.seconds)?;
            let slowest = all.iter().map(|[own, _]| *own).fold(0.0, f64::max);
            choice.is_passed_on = all[0][1] < slowest;
        }
        Ok(layer)
    }
}

/// The weights of a layer that the first rank reads and each rank passes on.
struct PassedOn<'a> {
    source: &'a dyn WeightSource,
    ranks: &'a Ranks,
    /// Parts of this layer so far, and the receipts of the next rank.
    parts: Mutex<[usize; 2]>,
}

impl<'a> PassedOn<'a> {
    fn new(source: &'a dyn WeightSource, ranks: &'a Ranks) -> Self {
        Self { source, ranks, parts: Mutex::default() }
    }

    fn next(&self) -> Option<usize> {
        let next = self.ranks.rank() + 1;
        (next < self.ranks.size()).then_some(next)
    }

    fn before(&self) -> Option<usize> {
        self.ranks.rank().checked_sub(1)
    }

    /// Waits for the receipts of all parts but the last few.
    fn finish(self) -> Result<()> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let [sent, receipts] = &mut *parts;
        while self.next().is_some() && *receipts < *sent / RECEIPT {
            self.take_receipt(receipts)?;
        }
        Ok(())
    }

    fn take_receipt(&self, receipts: &mut usize) -> Result<()> {
        if let Some(next) = self.next() {
            self.ranks.receive(next)?;
            *receipts += 1;
        }
        Ok(())
    }
}

impl WeightSource for PassedOn<'_> {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.source.entry(name)
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> Result<()> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let [done, receipts] = &mut *parts;
        for (at, part) in buffer.chunks_mut(PART).enumerate() {
            match self.before() {
                None => self.source.read(entry, start + (at * PART) as u64, part)?,
                Some(before) => {
                    let arrived = self.ranks.receive(before)?;
                    ensure!(
                        arrived.len() == part.len(),
                        "rank {before} passed on {} bytes of `{}`, and {} were expected",
                        arrived.len(),
                        entry.name,
                        part.len()
                    );
                    part.copy_from_slice(&arrived);
                }
            }
            if let Some(next) = self.next() {
                while *done >= *receipts * RECEIPT + WINDOW {
                    self.take_receipt(receipts)?;
                }
                self.ranks.send(next, part)?;
            }
            *done += 1;
            if let Some(before) = self.before().filter(|_| done.is_multiple_of(RECEIPT)) {
                self.ranks.send(before, &[])?;
            }
        }
        Ok(())
    }

    fn place(&self) -> String {
        self.source.place()
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        self.source.file_of(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use safetensors::Dtype;

    use super::*;
    use crate::ranks::threads;

    /// A source with one tensor, which counts the bytes that are read.
    struct OneTensor {
        entry: TensorEntry,
        read: AtomicUsize,
    }

    impl OneTensor {
        fn of(bytes: usize) -> Self {
            let entry = TensorEntry {
                name: "w".to_string(),
                dtype: Dtype::U8,
                shape: vec![bytes],
                shard: 0,
                offset: 0,
                bytes: bytes as u64,
            };
            Self { entry, read: AtomicUsize::new(0) }
        }

        fn byte(at: u64) -> u8 {
            (at % 251) as u8
        }
    }

    impl WeightSource for OneTensor {
        fn entry(&self, _name: &str) -> Option<&TensorEntry> {
            Some(&self.entry)
        }

        fn read(&self, _entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> Result<()> {
            self.read.fetch_add(buffer.len(), Ordering::Relaxed);
            (start..).zip(buffer).for_each(|(at, byte)| *byte = Self::byte(at));
            Ok(())
        }
    }

    #[test]
    fn the_first_rank_reads_and_all_ranks_get_the_bytes() {
        // A part and less, whole parts, more parts than a window, and a layer of several reads.
        for bytes in [7, PART, 3 * PART + 5, (3 * WINDOW + 2) * PART + 1] {
            for size in [2, 3, 8] {
                let outcomes = threads::run(size, |ranks| {
                    let (source, ranks) = (OneTensor::of(bytes), ranks.for_weights());
                    for layer in 0..2 {
                        let passed = PassedOn::new(&source, &ranks);
                        for start in [0, bytes as u64 / 3] {
                            let mut buffer = vec![0; bytes - start as usize];
                            passed.read(&source.entry, start, &mut buffer)?;
                            let is_right = (start..)
                                .zip(&buffer)
                                .all(|(at, byte)| *byte == OneTensor::byte(at));
                            ensure!(is_right, "layer {layer} from {start}");
                        }
                        passed.finish()?;
                    }
                    // No receipt is left where the next value is expected.
                    let all = ranks.all_gather(&[ranks.rank() as u8])?;
                    ensure!(all.iter().enumerate().all(|(rank, own)| own == &[rank as u8]));
                    Ok(source.read.into_inner())
                });
                let read: Vec<usize> = outcomes.into_iter().map(Result::unwrap).collect();
                let once = 2 * (bytes + bytes - bytes / 3);
                assert_eq!(read[0], once, "{bytes} on {size}");
                assert!(read[1..].iter().all(|read| *read == 0), "{bytes} on {size}: {read:?}");
            }
        }
    }

    #[test]
    fn a_rank_that_leaves_ends_the_reads_of_all() {
        let bytes = 4 * WINDOW * PART;
        let outcomes = threads::run(3, |ranks| {
            if ranks.rank() == 2 {
                ranks.leave(Some("no memory".to_string()));
                return Ok(());
            }
            let (source, of_weights) = (OneTensor::of(bytes), ranks.for_weights());
            PassedOn::new(&source, &of_weights).read(&source.entry, 0, &mut vec![0; bytes])
        });
        for outcome in &outcomes[..2] {
            assert_eq!(outcome.as_ref().unwrap_err().to_string(), "rank 2: no memory");
        }
    }
}
