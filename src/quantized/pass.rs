//! [`QuantizePass`]: a dense checkpoint in, an NF4 checkpoint out, tensor by tensor.
//!
//! A matrix is read in pieces of whole blocks; its codes are written at once, and only its scales are held, a 64th of its weights. With double
//! quantisation the JSON of a matrix holds the mean of its scales, and the layout of the output needs the length of that JSON. So
//! the matrices are read once before the first write, for the scales alone.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};

use super::stored::{
    ABSMAX, FourBitFormat, NESTED_ABSMAX, NESTED_QUANT_MAP, QUANT_MAP, STATE, maps,
};
use crate::checkpoint::{
    Checkpoint, Layout, MergedWriter, PlannedTensor, TensorEntry, WeightSource,
};
use crate::failure::Failure;
use crate::linalg::StoredDtype;
use crate::linalg::convert::widen;
use crate::linalg::nf4::{self, BLOCK, NestedScales};
use crate::linalg::select::first_not_finite;
use crate::run::{Events, Meter};

/// Weights that are read at once: 8 MiB in f32. A multiple of [`BLOCK`].
const PIECE: usize = 1 << 21;

/// Bytes of tensors that are copied at once.
const COPY_BYTES: u64 = 8 << 20;

/// The code of 0.
const ZERO_CODE: u8 = 7;

/// The largest file of an output, as transformers cuts it.
const SHARD_BYTES: u64 = 5_000_000_000;

/// The numbers of a finished pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QuantizedTotals {
    /// Quantised matrices.
    pub matrices: usize,
    /// Their weights.
    pub weights: u64,
    /// Weights that were 0.
    pub zeros_before: u64,
    /// Weights that are 0 now.
    pub zeros_after: u64,
}

/// A pass that is settled: every matrix has its `quant_state`.
#[derive(Debug)]
pub struct QuantizePass<'a> {
    source: &'a Checkpoint,
    format: FourBitFormat,
    /// The JSON of every matrix, by name.
    states: BTreeMap<String, String>,
}

/// The scales of a matrix, and its zeros.
struct Scales {
    absmax: Vec<f32>,
    zeros_before: u64,
    zeros_after: u64,
}

impl<'a> QuantizePass<'a> {
    /// Settles the quantisation of the `matrices` of a checkpoint. With double quantisation it reads them.
    ///
    /// # Errors
    /// Fails for a matrix that is missing, stored as no floats, or not finite, and where a file cannot be read.
    pub fn new(
        source: &'a Checkpoint,
        matrices: &BTreeSet<String>,
        format: FourBitFormat,
        events: &dyn Events,
    ) -> Result<Self> {
        let mut states = BTreeMap::new();
        let entries = matrices.iter().map(|name| {
            source
                .entry(name)
                .with_context(|| format!("tensor `{name}` is missing"))
        });
        let entries = entries.collect::<Result<Vec<_>>>()?;
        let bytes = entries.iter().map(|entry| entry.bytes).sum();
        let mut meter = Meter::start(events, "scales", bytes);
        for entry in entries {
            events.check()?;
            let offset = match format {
                FourBitFormat::Nf4 => 0.0,
                FourBitFormat::Nf4Double => {
                    let scales = quantise(source, entry, &mut |_| Ok(()))?;
                    NestedScales::new(&scales.absmax).offset
                }
            };
            states.insert(entry.name.clone(), format.state_json(entry, offset)?);
            meter.add(entry.bytes);
        }
        meter.finish();
        Ok(Self {
            source,
            format,
            states,
        })
    }

    /// The layout of the output: the tensors of the source in their order, each matrix as its parts.
    ///
    /// # Errors
    /// Fails as [`Layout::new`], so where the source has a tensor with the name of such a part.
    pub fn layout(&self) -> Result<Layout> {
        let mut planned = Vec::new();
        for entry in self.source.tensors() {
            match self.states.get(&entry.name) {
                Some(state) => {
                    let parts = self
                        .format
                        .tensors(&entry.name, entry.elements(), state.len());
                    planned.extend(parts);
                }
                None => planned.push(PlannedTensor {
                    name: entry.name.clone(),
                    dtype: entry.dtype,
                    shape: entry.shape.clone(),
                }),
            }
        }
        Layout::new(planned, SHARD_BYTES)
    }

    /// Writes every tensor.
    ///
    /// # Errors
    /// Fails where a file cannot be read or written, for weights that are not finite, and for a matrix that changed since the pass was
    /// settled.
    pub fn run(&self, writer: &MergedWriter, events: &dyn Events) -> Result<QuantizedTotals> {
        let mut totals = QuantizedTotals::default();
        let mut meter = Meter::start(events, "quantise", self.source.total_bytes().0);
        for entry in self.source.tensors() {
            events.check()?;
            match self.states.get(&entry.name) {
                Some(state) => {
                    let scales = self.write_matrix(writer, entry, state)?;
                    totals.matrices += 1;
                    totals.weights += entry.elements() as u64;
                    totals.zeros_before += scales.zeros_before;
                    totals.zeros_after += scales.zeros_after;
                }
                None => copy(self.source, writer, entry)?,
            }
            meter.add(entry.bytes);
        }
        meter.finish();
        Ok(totals)
    }

    fn write_matrix(
        &self,
        writer: &MergedWriter,
        entry: &TensorEntry,
        state: &str,
    ) -> Result<Scales> {
        let put = |end: &str, bytes: &[u8]| {
            let mut stream = writer.begin(&format!("{}{end}", entry.name))?;
            stream.write(bytes)?;
            stream.finish()
        };
        let bytes = |values: &[f32]| -> Vec<u8> {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        let mut codes = writer.begin(&entry.name)?;
        let scales = quantise(self.source, entry, &mut |packed| codes.write(packed))?;
        codes.finish()?;
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
}

/// Quantises a matrix piece by piece and hands the codes over.
fn quantise(
    source: &Checkpoint,
    entry: &TensorEntry,
    put: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<Scales> {
    let dtype = match entry.dtype {
        safetensors::Dtype::F32 => StoredDtype::F32,
        safetensors::Dtype::F16 => StoredDtype::F16,
        safetensors::Dtype::BF16 => StoredDtype::Bf16,
        other => anyhow::bail!("tensor `{}` is stored as {other}", entry.name),
    };
    let weights = entry.elements();
    let mut scales = Scales {
        absmax: vec![0.0; nf4::blocks(weights)],
        zeros_before: 0,
        zeros_after: 0,
    };
    let (mut stored, mut wide, mut packed) = (Vec::new(), Vec::new(), Vec::new());
    for start in (0..weights).step_by(PIECE) {
        let count = PIECE.min(weights - start);
        stored.resize(count * dtype.bytes(), 0);
        wide.resize(count, 0.0);
        packed.resize(nf4::packed_bytes(count), 0);
        source.read(entry, (start * dtype.bytes()) as u64, &mut stored)?;
        widen(dtype, &stored, &mut wide);
        if let Some(at) = first_not_finite(&wide) {
            return Err(
                Failure::new(format!("tensor `{}` cannot be quantised", entry.name))
                    .detail(format!(
                        "element {} is {}; it is in `{}`",
                        start + at,
                        wide[at],
                        source.file_of(entry)
                    ))
                    .hint("download the checkpoint again, or take an earlier state of its training")
                    .into(),
            );
        }
        let first = start / BLOCK;
        let absmax = &mut scales.absmax[first..first + nf4::blocks(count)];
        nf4::quantise(&wide, &mut packed, absmax);
        scales.zeros_before += wide.iter().filter(|&&weight| weight == 0.0).count() as u64;
        let codes = packed
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 15])
            .take(count);
        scales.zeros_after += codes.filter(|&code| code == ZERO_CODE).count() as u64;
        put(&packed)?;
    }
    Ok(scales)
}

/// Copies a tensor as it is.
fn copy(source: &Checkpoint, writer: &MergedWriter, entry: &TensorEntry) -> Result<()> {
    let mut stream = writer.begin(&entry.name)?;
    let mut buffer = Vec::new();
    let mut start = 0;
    while start < entry.bytes {
        buffer.resize((entry.bytes - start).min(COPY_BYTES) as usize, 0);
        source.read(entry, start, &mut buffer)?;
        stream.write(&buffer)?;
        start += buffer.len() as u64;
    }
    stream.finish()
}
