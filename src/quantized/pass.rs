//! [`QuantizePass`]: a dense checkpoint in, an NF4 checkpoint out, tensor by tensor.
//!
//! A matrix is read in pieces of whole blocks; its codes are written at once, and only its scales are held, a 64th of its weights. With
//! double quantisation the JSON of a matrix holds the mean of its scales, and the layout of the output needs the length of that JSON.
//! So the matrices are read once before the first write, for the scales alone.
//!
//! A [`QuantizeJournal`] keeps what is known after every matrix, so that a later process continues with the next matrix.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};

use super::stored::{
    ABSMAX, FourBitFormat, NESTED_ABSMAX, NESTED_QUANT_MAP, QUANT_MAP, STATE, maps,
};
use crate::bytes::ByteSize;
use crate::checkpoint::{
    Checkpoint, Layout, LayoutWriter, PlannedTensor, TensorEntry, TensorStream, WeightSource,
};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::linalg::convert::widen;
use crate::linalg::nf4::{self, BLOCK, NestedScales};
use crate::linalg::select::first_not_finite;
use crate::run::quantization::{QuantizedMatrix, QuantizedTotals};
use crate::run::{Events, Meter};

/// Weights that are read at once where memory allows: 8 MiB in f32.
pub const PIECE: usize = 1 << 21;

/// Weights that are read at once, at least.
pub const LEAST_PIECE: usize = 1 << 14;

/// The code of 0.
const ZERO_CODE: u8 = 7;

/// The largest file of an output, as transformers cuts it.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Keeps what a quantisation knows of its matrices.
pub trait QuantizeJournal {
    /// Keeps all that is known of matrices, and the hashes of the tensors that are on the disk, once there are files.
    ///
    /// # Errors
    /// Fails when the record cannot be written.
    fn matrix_done(
        &mut self,
        matrices: &BTreeMap<String, QuantizedMatrix>,
        digests: Option<BTreeMap<String, String>>,
    ) -> Result<()>;
}

/// A journal of a quantisation that is not continued.
impl QuantizeJournal for () {
    fn matrix_done(
        &mut self,
        _matrices: &BTreeMap<String, QuantizedMatrix>,
        _digests: Option<BTreeMap<String, String>>,
    ) -> Result<()> {
        Ok(())
    }
}

/// A checkpoint that is quantised, and the way.
#[derive(Debug, Clone, Copy)]
pub struct Quantization<'a> {
    /// The dense checkpoint.
    pub source: &'a Checkpoint,
    /// The format of the output's matrices.
    pub format: FourBitFormat,
    /// Weights that are read at once, from [`LEAST_PIECE`] to [`PIECE`], a power of two.
    pub piece: usize,
}

/// A pass that is settled: every matrix has its `quant_state`.
#[derive(Debug)]
pub struct QuantizePass<'a> {
    source: &'a Checkpoint,
    format: FourBitFormat,
    /// Weights that are read at once, a multiple of [`BLOCK`].
    piece: usize,
    /// The JSON of every matrix, by name.
    states: BTreeMap<String, String>,
    /// All matrices with double quantisation, else the written matrices.
    known: BTreeMap<String, QuantizedMatrix>,
}

/// The scales of a matrix, and its zeros.
struct Scales {
    absmax: Vec<f32>,
    zeros_before: u64,
    zeros_after: u64,
}

/// Memory of a pass beyond the program: a piece as stored, in f32 and packed, and the scales of the largest matrix in two forms; or a piece
/// of a tensor that is copied.
///
/// # Arguments
/// * `weights`: of the largest matrix
/// * `dtype_bytes`: of a stored weight
pub fn pass_bytes(weights: usize, dtype_bytes: usize, piece: usize) -> ByteSize {
    let read = piece.min(weights);
    let pieces = read * (dtype_bytes + size_of::<f32>()) + nf4::packed_bytes(read);
    let scales = 2 * size_of::<f32>() * nf4::blocks(weights);
    ByteSize((pieces + scales).max(4 * piece) as u64)
}

impl Scales {
    fn report(&self, offset: f32) -> QuantizedMatrix {
        QuantizedMatrix { offset, zeros_before: self.zeros_before, zeros_after: self.zeros_after }
    }
}

impl<'a> QuantizePass<'a> {
    /// Settles the quantisation of the `matrices` of a checkpoint. With double quantisation it reads the matrices that no earlier
    /// process has measured.
    ///
    /// # Arguments
    /// * `known`: the matrices that an earlier process has measured
    ///
    /// # Errors
    /// Fails for a matrix that is missing, stored as no floats, or not finite, and where a file cannot be read.
    pub fn new(
        quantization: Quantization<'a>,
        matrices: &BTreeSet<String>,
        known: BTreeMap<String, QuantizedMatrix>,
        journal: &mut dyn QuantizeJournal,
        events: &dyn Events,
    ) -> Result<Self> {
        let Quantization { source, format, piece } = quantization;
        let mut pass = Self { source, format, piece, states: BTreeMap::new(), known };
        let entries = matrices
            .iter()
            .map(|name| source.entry(name).with_context(|| format!("tensor `{name}` is missing")));
        let entries = entries.collect::<Result<Vec<_>>>()?;
        let bytes = entries.iter().map(|entry| entry.bytes).sum();
        let mut meter = Meter::start(events, "scales", bytes);
        for entry in entries {
            events.check()?;
            if format == FourBitFormat::Nf4Double && !pass.known.contains_key(&entry.name) {
                let scales = pass.quantise(entry, &mut |_| Ok(()))?;
                let offset = NestedScales::new(&scales.absmax).offset;
                let report = scales.report(offset);
                pass.known.insert(entry.name.clone(), report);
                journal.matrix_done(&pass.known, None)?;
            }
            let offset = pass.known.get(&entry.name).map_or(0.0, |of| of.offset);
            let state = format.state_json(entry, offset)?;
            pass.states.insert(entry.name.clone(), state);
            meter.add(entry.bytes);
        }
        meter.finish();
        Ok(pass)
    }

    /// The layout of the output: the tensors of the source in their order, each matrix as its parts.
    ///
    /// # Errors
    /// Fails as [`Layout::named_as`], so where the source has a tensor with the name of such a part.
    pub fn layout(&self) -> Result<Layout> {
        let mut planned = Vec::new();
        for entry in self.source.tensors() {
            match self.states.get(&entry.name) {
                Some(state) => planned.extend(self.parts(entry, state)),
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
    /// Fails where a file cannot be read or written, for weights that are not finite, and for a matrix that changed since the pass was
    /// settled.
    pub fn run(
        &mut self,
        writer: &LayoutWriter,
        journal: &mut dyn QuantizeJournal,
        events: &dyn Events,
    ) -> Result<QuantizedTotals> {
        let mut meter = Meter::start(events, "quantise", self.source.total_bytes().0);
        for entry in self.source.tensors() {
            events.check()?;
            match self.states.get(&entry.name) {
                Some(state) if !self.is_written(writer, entry, state) => {
                    let scales = self.write_matrix(writer, entry, state)?;
                    let offset = self.known.get(&entry.name).map_or(0.0, |of| of.offset);
                    let report = scales.report(offset);
                    self.known.insert(entry.name.clone(), report);
                    journal.matrix_done(&self.known, Some(writer.sync()?))?;
                }
                None if !writer.is_recorded(&entry.name) => self.copy(writer, entry)?,
                Some(_) | None => {}
            }
            meter.add(entry.bytes);
        }
        meter.finish();
        Ok(self.totals())
    }

    /// All that is known of matrices.
    pub fn known(&self) -> &BTreeMap<String, QuantizedMatrix> {
        &self.known
    }

    /// The parts of a matrix in the output.
    fn parts(&self, entry: &TensorEntry, state: &str) -> Vec<PlannedTensor> {
        self.format.tensors(&entry.name, entry.elements(), state.len())
    }

    /// Returns whether all parts of a matrix are written, and its zeros are known.
    fn is_written(&self, writer: &LayoutWriter, entry: &TensorEntry, state: &str) -> bool {
        let mut parts = self.parts(entry, state).into_iter();
        self.known.contains_key(&entry.name) && parts.all(|part| writer.is_recorded(&part.name))
    }

    fn totals(&self) -> QuantizedTotals {
        let entries = self.states.keys().filter_map(|name| self.source.entry(name));
        QuantizedTotals {
            matrices: self.states.len(),
            weights: entries.map(|entry| entry.elements() as u64).sum(),
            zeros_before: self.known.values().map(|of| of.zeros_before).sum(),
            zeros_after: self.known.values().map(|of| of.zeros_after).sum(),
        }
    }

    fn write_matrix(
        &self,
        writer: &LayoutWriter,
        entry: &TensorEntry,
        state: &str,
    ) -> Result<Scales> {
        // An earlier process may have left some of the parts whole.
        let put = |end: &str, bytes: &[u8]| {
            let name = format!("{}{end}", entry.name);
            if writer.is_recorded(&name) {
                return Ok(());
            }
            let mut stream = writer.begin(&name)?;
            stream.write(bytes)?;
            stream.finish()
        };
        let bytes = |values: &[f32]| -> Vec<u8> {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        };
        let has_codes = writer.is_recorded(&entry.name);
        let mut codes = (!has_codes).then(|| writer.begin(&entry.name)).transpose()?;
        let scales = self.quantise(entry, &mut |packed| match &mut codes {
            Some(codes) => codes.write(packed),
            None => Ok(()),
        })?;
        codes.map(TensorStream::finish).transpose()?;
        let [codebook, nested_map] = maps();
        put(QUANT_MAP, &codebook)?;
        let offset = match self.format {
            FourBitFormat::Nf4 => {
                put(ABSMAX, &bytes(&scales.absmax))?;
                0.0
            }
            FourBitFormat::Nf4Double => {
                let nested = NestedScales::new(&scales.absmax);
                put(ABSMAX, &nested.codes)?;
                put(NESTED_ABSMAX, &bytes(&nested.absmax))?;
                put(NESTED_QUANT_MAP, &nested_map)?;
                nested.offset
            }
        };
        if self.format.state_json(entry, offset)? != state {
            return Err(Failure::new(format!(
                "tensor `{}` changed while it was quantised",
                entry.name
            ))
            .detail(format!("it is in `{}`", self.source.file_of(entry)))
            .hint("run again when nothing else writes to that folder")
            .into());
        }
        put(STATE, state.as_bytes())?;
        Ok(scales)
    }

    /// Quantises a matrix piece by piece and hands the codes over.
    fn quantise(
        &self,
        entry: &TensorEntry,
        put: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<Scales> {
        let dtype = StoredDtype::of_file(entry.dtype)
            .with_context(|| format!("tensor `{}` is stored as {}", entry.name, entry.dtype))?;
        let weights = entry.elements();
        let mut scales =
            Scales { absmax: vec![0.0; nf4::blocks(weights)], zeros_before: 0, zeros_after: 0 };
        let (mut stored, mut wide, mut packed) = (Vec::new(), Vec::new(), Vec::new());
        for start in (0..weights).step_by(self.piece) {
            let count = self.piece.min(weights - start);
            stored.resize(count * dtype.bytes(), 0);
            wide.resize(count, 0.0);
            packed.resize(nf4::packed_bytes(count), 0);
            self.source.read(entry, (start * dtype.bytes()) as u64, &mut stored)?;
            widen(dtype, &stored, &mut wide);
            if let Some(at) = first_not_finite(&wide) {
                return Err(
                    Failure::new(format!("tensor `{}` cannot be quantised", entry.name))
                        .detail(format!(
                            "element {} is {}; it is in `{}`",
                            start + at,
                            wide[at],
                            self.source.file_of(entry)
                        ))
                        .hint("download the checkpoint again, or take an earlier state of its training, and repeat the command with --force")
                        .lasting()
                        .into(),
                );
            }
            let first = start / BLOCK;
            let absmax = &mut scales.absmax[first..first + nf4::blocks(count)];
            nf4::quantise(&wide, &mut packed, absmax);
            scales.zeros_before += wide.iter().filter(|&&weight| weight == 0.0).count() as u64;
            let codes = packed.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(count);
            scales.zeros_after += codes.filter(|&code| code == ZERO_CODE).count() as u64;
            put(&packed)?;
        }
        Ok(scales)
    }

    /// Copies a tensor as it is.
    fn copy(&self, writer: &LayoutWriter, entry: &TensorEntry) -> Result<()> {
        let mut stream = writer.begin(&entry.name)?;
        let mut buffer = Vec::new();
        let mut start = 0;
        while start < entry.bytes {
            buffer.resize((entry.bytes - start).min(4 * self.piece as u64) as usize, 0);
            self.source.read(entry, start, &mut buffer)?;
            stream.write(&buffer)?;
            start += buffer.len() as u64;
        }
        stream.finish()
    }
}
