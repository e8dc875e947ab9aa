//! [`RestorePass`]: a packed checkpoint in, the original weight files out.
//!
//! Each tensor is written at its place in the original files, whose headers `packed.json` has. Threads restore the parts of a piece, while
//! the piece before is written.

use anyhow::{Context, Result};
use rayon::prelude::*;

use super::scan::PackJournal;
use super::source::PackedSource;
use crate::bytes::ByteSize;
use crate::checkpoint::{LayoutWriter, TensorEntry, WeightSource};
use crate::run::{Events, Meter};

/// Parts of a piece that threads restore on their own, for each thread.
const PARTS_PER_THREAD: usize = 2;

/// Memory that a thread restores rows with: their dense bytes, and the parts as they are stored.
const THREAD_BYTES: usize = 3 << 20;

/// The restoration of a packed checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct RestorePass<'a> {
    /// The packed checkpoint.
    pub source: &'a PackedSource,
    /// Bytes that are restored at once.
    pub piece: usize,
}

/// Memory of a restoration beyond the program: two pieces, and the rows of each thread.
///
/// # Arguments
/// * `row_bytes`: the largest of all matrices
pub fn restore_bytes(row_bytes: usize, piece: usize, threads: usize) -> ByteSize {
    ByteSize((2 * piece + threads * (THREAD_BYTES + 3 * row_bytes)) as u64)
}

impl RestorePass<'_> {
    /// Writes every tensor that the writer does not have.
    ///
    /// # Errors
    /// Fails where a file cannot be read or written, and for a packed matrix that is broken.
    pub fn run(
        &self,
        writer: &LayoutWriter,
        journal: &mut dyn PackJournal,
        events: &dyn Events,
    ) -> Result<()> {
        let tensors = writer.layout().tensors();
        let bytes = tensors.iter().map(|entry| entry.bytes).sum();
        let mut meter = Meter::start(events, "unpack", bytes);
        for planned in tensors {
            events.check()?;
            if !writer.is_recorded(&planned.name) {
                let entry = self.source.entry(&planned.name);
                let entry = entry.with_context(|| format!("`{}` is missing", planned.name))?;
                self.tensor(writer, entry)?;
                if self.source.matrix(&planned.name).is_some() {
                    journal.tensors_written(writer.sync()?)?;
                }
            }
            meter.add(planned.bytes);
        }
        meter.finish();
        Ok(())
    }

    fn tensor(&self, writer: &LayoutWriter, entry: &TensorEntry) -> Result<()> {
        let mut stream = writer.begin(&entry.name)?;
        // Whole rows, so that no row is restored twice.
        let matrix = self.source.matrix(&entry.name);
        let row_bytes = matrix.map_or(1, |matrix| matrix.row_bytes().max(1));
        let piece = (self.piece / row_bytes).max(1) * row_bytes;
        let read = |start: u64, buffer: &mut Vec<u8>| -> Result<()> {
            let length = entry.bytes.saturating_sub(start).min(piece as u64) as usize;
            buffer.resize(length, 0);
            let parts = PARTS_PER_THREAD * rayon::current_num_threads();
            let of_part = (length / row_bytes).div_ceil(parts).max(1) * row_bytes;
            let all = buffer.par_chunks_mut(of_part).enumerate();
            all.try_for_each(|(at, part)| {
                self.source.read(entry, start + (at * of_part) as u64, part)
            })
        };
        let (mut current, mut next) = (Vec::new(), Vec::new());
        read(0, &mut current)?;
        for start in (0..entry.bytes).step_by(piece) {
            let (written, more) =
                rayon::join(|| stream.write(&current), || read(start + piece as u64, &mut next));
            written?;
            more?;
            std::mem::swap(&mut current, &mut next);
        }
        stream.finish()
    }
}
