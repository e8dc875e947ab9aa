//! [`PackPass`]: a checkpoint in, a packed checkpoint out, tensor by tensor.
//!
//! A matrix is read in pieces of whole rows. All threads pack the rows of a piece, while the piece before is written. Only the offsets of a
//! matrix's rows are held beside two pieces.

use anyhow::{Context, Result};
use rayon::prelude::*;

use super::choice::PackChoice;
use super::matrix::{
    BITMASK, COMPRESSED, MatrixSize, PackForm, PackedValues, ROW_OFFSETS, SCALE, SHAPE, module_of,
};
use super::scan::PackJournal;
use crate::bytes::ByteSize;
use crate::checkpoint::{
    CHUNK_BYTES, Checkpoint, Layout, LayoutWriter, PlannedTensor, TensorEntry, TensorStream,
    WeightSource,
};
use crate::failure::Failure;
use crate::linalg::bitmask::{fill_two_of_four, gather, kept, mark, mask_bytes};
use crate::linalg::convert::widen;
use crate::linalg::int8;
use crate::run::{Events, Meter};

/// Bytes that are read at once where memory allows.
pub const PIECE: usize = 8 << 20;

/// Bytes that are read at once, at least. A row may be longer.
pub const LEAST_PIECE: usize = 64 << 10;

/// The largest file of an output, as transformers cuts it.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Parts of a piece that threads pack on their own, for each thread.
const PARTS_PER_THREAD: usize = 2;

/// The packing of a checkpoint whose forms are chosen.
#[derive(Debug, Clone, Copy)]
pub struct PackPass<'a> {
    /// The original checkpoint.
    pub source: &'a Checkpoint,
    /// The form of each matrix.
    pub choice: &'a PackChoice,
    /// Bytes that are read at once.
    pub piece: usize,
}

/// Packed rows.
#[derive(Debug, Default)]
struct PackedPart {
    values: Vec<u8>,
    mask: Vec<u8>,
    scales: Vec<u8>,
    /// Values of each row.
    counts: Vec<usize>,
}

/// The streams of a matrix; `None` for a part that an earlier process left whole.
struct PartStreams<'w> {
    values: Option<TensorStream<'w>>,
    mask: Option<TensorStream<'w>>,
    scales: Option<TensorStream<'w>>,
    /// The index of each row's first value, then their number.
    offsets: Vec<u64>,
    /// Stored values of the whole matrix, as they were counted.
    expected: u64,
}

/// Memory of a pass beyond the program: pieces as stored and packed, the offsets of a matrix, and a row per thread.
///
/// # Arguments
/// * `rows`, `row_bytes`: the largest of all matrices
pub fn pass_bytes(rows: usize, row_bytes: usize, piece: usize, threads: usize) -> ByteSize {
    let piece = piece.max(row_bytes);
    // Two pieces while files are counted; then one piece as stored and two packed, with their masks and scales.
    let pieces = 4 * piece + piece / 2;
    let rows = 16 * rows + threads * PARTS_PER_THREAD * 4 * row_bytes;
    // Tensors that stay as they are pass in pieces of a copy.
    ByteSize((pieces + rows).max(CHUNK_BYTES) as u64)
}

impl<'a> PackPass<'a> {
    /// The layout of the output: the tensors of the source in their order, each packed matrix as its parts.
    ///
    /// # Errors
    /// Fails as [`Layout::named_as`], so where the source has a tensor with the name of such a part.
    pub fn layout(&self) -> Result<Layout> {
        let mut planned = Vec::new();
        for entry in self.source.tensors() {
            match self.choice.parts(self.source, &entry.name) {
                Some(parts) => planned.extend(parts),
                None => planned.push(PlannedTensor {
                    name: entry.name.clone(),
                    dtype: entry.dtype,
                    shape: entry.shape.clone(),
                }),
            }
        }
        Layout::named_as(self.source, planned, SHARD_BYTES)
    }

    /// Writes every tensor that the writer does not have.
    ///
    /// # Errors
    /// Fails where a file cannot be read or written, and for a matrix that changed since it was counted.
    pub fn run(
        &self,
        writer: &LayoutWriter,
        journal: &mut dyn PackJournal,
        events: &dyn Events,
    ) -> Result<()> {
        let mut meter = Meter::start(events, "pack", self.source.total_bytes().0);
        for entry in self.source.tensors() {
            events.check()?;
            match self.choice.parts(self.source, &entry.name) {
                Some(parts) if !parts.iter().all(|part| writer.is_recorded(&part.name)) => {
                    self.matrix(writer, entry)?;
                    journal.tensors_written(writer.sync()?)?;
                }
                None if !writer.is_recorded(&entry.name) => {
                    writer.copy(self.source, &entry.name)?
                }
                Some(_) | None => {}
            }
            meter.add(entry.bytes);
        }
        meter.finish();
        Ok(())
    }

    /// Writes the parts of a matrix.
    fn matrix(&self, writer: &LayoutWriter, entry: &TensorEntry) -> Result<()> {
        let size = MatrixSize::of(entry).context("only matrices are packed")?;
        let module = module_of(&entry.name);
        let begin = |end: &str| {
            let name = format!("{module}{end}");
            (!writer.is_recorded(&name)).then(|| writer.begin(&name)).transpose()
        };
        let has_scales = self.choice.values == PackedValues::Int8;
        let mut streams = PartStreams {
            values: begin(COMPRESSED)?,
            mask: begin(BITMASK)?,
            scales: if has_scales { begin(SCALE)? } else { None },
            offsets: vec![0],
            expected: self.stored(size, &entry.name),
        };
        let row_bytes = size.columns * size.dtype.bytes();
        let rows = (self.piece / row_bytes.max(1)).max(1);
        let mut stored = Vec::new();
        let mut pack = |first: usize| -> Result<Vec<PackedPart>> {
            let count = rows.min(size.rows.saturating_sub(first));
            stored.resize(count * row_bytes, 0);
            self.source.read(entry, (first * row_bytes) as u64, &mut stored)?;
            Ok(self.pack(size, &stored))
        };
        let mut current = pack(0)?;
        for first in (rows..size.rows + rows).step_by(rows) {
            let (written, next) = rayon::join(
                || streams.write(&current, &|| changed(self.source, entry)),
                || if first < size.rows { pack(first) } else { Ok(Vec::new()) },
            );
            written?;
            current = next?;
        }
        self.finish(writer, entry, streams)
    }

    /// Stored values of a matrix, as its counts say. 2:4 stores half of the elements.
    fn stored(&self, size: MatrixSize, name: &str) -> u64 {
        match self.choice.form {
            PackForm::TwoOfFour => (size.rows * (size.columns / 2)) as u64,
            PackForm::Bitmask => self.choice.packed.get(name).copied().unwrap_or(0),
        }
    }

    /// Packs rows on all threads.
    fn pack(&self, size: MatrixSize, stored: &[u8]) -> Vec<PackedPart> {
        let (each, of_mask) = (size.dtype.bytes(), mask_bytes(size.columns));
        let row_bytes = size.columns * each;
        let rows = stored.len() / row_bytes.max(1);
        let parts = PARTS_PER_THREAD * rayon::current_num_threads();
        let of_part = rows.div_ceil(parts).max(1) * row_bytes;
        let pack = |stored: &[u8]| {
            let rows = stored.chunks_exact(row_bytes);
            // Enough for all weights, so that the buffer never grows; what is not written takes no memory.
            let mut part = PackedPart {
                values: Vec::with_capacity(stored.len() + 8 * each),
                mask: vec![0; rows.len() * of_mask],
                ..PackedPart::default()
            };
            let mut wide = Vec::new();
            for (row, mask) in rows.zip(part.mask.chunks_mut(of_mask)) {
                mark(each, row, mask);
                if self.choice.form == PackForm::TwoOfFour {
                    fill_two_of_four(mask, size.columns);
                }
                match self.choice.values {
                    PackedValues::Exact => gather(each, row, mask, &mut part.values),
                    PackedValues::Int8 => {
                        wide.resize(size.columns, 0.0);
                        widen(size.dtype, row, &mut wide);
                        int8::encode(&wide, mask, &mut part.scales, &mut part.values);
                    }
                }
                part.counts.push(kept(mask));
            }
            part
        };
        stored.par_chunks(of_part.max(1)).map(pack).collect()
    }

    /// Writes the small parts of a matrix, and records all parts.
    fn finish(
        &self,
        writer: &LayoutWriter,
        entry: &TensorEntry,
        streams: PartStreams<'_>,
    ) -> Result<()> {
        let PartStreams { values, mask, scales, mut offsets, expected } = streams;
        let total = offsets.pop().unwrap_or(0);
        if total != expected {
            return Err(changed(self.source, entry).into());
        }
        let of_two = |value: usize| (value as i64).to_le_bytes();
        let put = |end: &str, bytes: &[u8]| {
            let name = format!("{}{end}", module_of(&entry.name));
            if writer.is_recorded(&name) {
                return Ok(());
            }
            let mut stream = writer.begin(&name)?;
            stream.write(bytes)?;
            stream.finish()
        };
        put(SHAPE, &entry.shape.iter().flat_map(|&size| of_two(size)).collect::<Vec<_>>())?;
        if self.choice.form == PackForm::Bitmask {
            let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
            put(ROW_OFFSETS, &bytes)?;
        }
        [values, mask, scales].into_iter().flatten().try_for_each(TensorStream::finish)
    }
}

impl PartStreams<'_> {
    fn write(
        &mut self,
        parts: &[PackedPart],
        changed: &(dyn Fn() -> Failure + Sync),
    ) -> Result<()> {
        for part in parts {
            let before = self.offsets.last().copied().unwrap_or(0);
            let mut end = before;
            self.offsets.extend(part.counts.iter().map(|&count| {
                end += count as u64;
                end
            }));
            if end > self.expected {
                return Err(changed().into());
            }
            for (stream, bytes) in [
                (&mut self.values, &part.values),
                (&mut self.mask, &part.mask),
                (&mut self.scales, &part.scales),
            ] {
                if let Some(stream) = stream {
                    stream.write(bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// The failure of a matrix that was counted with other weights.
fn changed(source: &Checkpoint, entry: &TensorEntry) -> Failure {
    Failure::new(format!("tensor `{}` changed while it was packed", entry.name))
        .detail(format!("it is in `{}`", source.file_of(entry)))
        .hint("repeat the command with another --save folder, when nothing else writes to that folder")
}
