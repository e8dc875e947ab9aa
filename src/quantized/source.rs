//! [`QuantizedSource`]: an NF4 checkpoint, read as if its matrices were dense.
//!
//! A matrix `P.weight` has the dtype and shape of its `quant_state`; a read restores the weights of its range and rounds them to that
//! dtype, as bitsandbytes does before a product. So the layers take the memory of dense layers, and the results equal the results of
//! the dequantised model. All further tensors are read from the checkpoint unchanged.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Result;
use safetensors::Dtype;

use super::stored::{
    ABSMAX, LONGEST_STATE, NESTED_ABSMAX, NESTED_QUANT_MAP, QUANT_MAP, QuantState, STATE, broken,
    maps,
};
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, TensorEntry, WeightSource};
use crate::linalg::StoredDtype;
use crate::linalg::convert::narrow;
use crate::linalg::nf4::{self, BLOCK, NESTED_BLOCK};

/// Weights that a read holds in f32 at a time: 1 MiB. A multiple of [`BLOCK`].
const PIECE: usize = 1 << 18;

/// An NF4 checkpoint; see the module's first lines.
#[derive(Debug)]
pub struct QuantizedSource {
    base: Arc<Checkpoint>,
    /// Tensors as they are presented, in the order of the files.
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
    matrices: HashMap<String, CodedMatrix>,
}

/// The parts of a matrix.
#[derive(Debug)]
struct CodedMatrix {
    packed: TensorEntry,
    absmax: TensorEntry,
    dtype: StoredDtype,
    /// With double quantisation: the scales of the scales, and the offset.
    nested: Option<(Vec<f32>, f32)>,
}

impl QuantizedSource {
    /// Opens the matrices of a checkpoint in the layout of bitsandbytes. Reads their small parts.
    ///
    /// # Errors
    /// Fails for a part that is missing or does not have the form that its `quant_state` states, for formats and codebooks that are not
    /// read here, and where a file cannot be read.
    pub fn open(base: Arc<Checkpoint>) -> Result<Self> {
        let mut matrices = HashMap::new();
        let mut presented = HashMap::new();
        for state in base.tensors() {
            let Some(name) = state.name.strip_suffix(STATE) else {
                continue;
            };
            let (entry, matrix) = CodedMatrix::open(&base, name, state)?;
            presented.insert(name.to_string(), entry);
            matrices.insert(name.to_string(), matrix);
        }
        let is_part = |entry: &TensorEntry| {
            [STATE, ABSMAX, QUANT_MAP, NESTED_ABSMAX, NESTED_QUANT_MAP]
                .iter()
                .filter_map(|end| entry.name.strip_suffix(end))
                .any(|name| matrices.contains_key(name))
        };
        let entries: Vec<TensorEntry> = base
            .tensors()
            .filter(|entry| !is_part(entry))
            .map(|entry| presented.remove(&entry.name).unwrap_or_else(|| entry.clone()))
            .collect();
        let names = entries.iter().map(|entry| entry.name.clone());
        Ok(Self { by_name: names.zip(0..).collect(), entries, matrices, base })
    }

    /// Every tensor as it is presented.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorEntry> {
        self.entries.iter()
    }

    /// The number of quantised matrices.
    pub fn matrices(&self) -> usize {
        self.matrices.len()
    }

    /// The bytes of all tensors as they are presented.
    pub fn dense_bytes(&self) -> ByteSize {
        self.entries.iter().map(|entry| ByteSize(entry.bytes)).sum()
    }
}

impl CodedMatrix {
    /// Checks the parts of the matrix `name`; returns them with the entry of the dense matrix.
    fn open(base: &Checkpoint, name: &str, state: &TensorEntry) -> Result<(TensorEntry, Self)> {
        if state.bytes > LONGEST_STATE {
            let why = format!(
                "its quant_state has {} bytes, at most {LONGEST_STATE} are read",
                state.bytes
            );
            return Err(broken(name, why).into());
        }
        let parsed = QuantState::parse(name, &read_all(base, state)?)?;
        let dense = parsed.dtype(name)?;
        let dtype = StoredDtype::of_file(dense).unwrap_or(StoredDtype::F32);
        let weights = parsed.shape.iter().try_fold(1usize, |all, &one| all.checked_mul(one));
        let bytes = weights.and_then(|weights| weights.checked_mul(dtype.bytes()));
        let Some((weights, bytes)) = weights.zip(bytes) else {
            return Err(broken(name, format!("its shape is {:?}", parsed.shape)).into());
        };
        let blocks = nf4::blocks(weights);
        let is_nested = parsed.nested_offset.is_some();
        let packed = part(base, name, "", Dtype::U8, nf4::packed_bytes(weights))?;
        let scales = if is_nested { Dtype::U8 } else { Dtype::F32 };
        let absmax = part(base, name, ABSMAX, scales, blocks)?;
        let [codebook, nested_map] = maps();
        check_map(base, name, QUANT_MAP, &codebook)?;
        let nested = match parsed.nested_offset {
            None => None,
            Some(offset) => {
                check_map(base, name, NESTED_QUANT_MAP, &nested_map)?;
                let count = blocks.div_ceil(NESTED_BLOCK);
                let tops = part(base, name, NESTED_ABSMAX, Dtype::F32, count)?;
                Some((floats(&read_all(base, &tops)?), offset as f32))
            }
        };
        let entry = TensorEntry {
            name: name.to_string(),
            dtype: dense,
            shape: parsed.shape,
            shard: packed.shard,
            offset: packed.offset,
            bytes: bytes as u64,
        };
        let matrix = Self { packed, absmax, dtype, nested };
        Ok((entry, matrix))
    }

    /// The scales of some blocks.
    fn scales(&self, base: &Checkpoint, blocks: std::ops::Range<usize>) -> Result<Vec<f32>> {
        match &self.nested {
            None => {
                let mut bytes = vec![0; 4 * blocks.len()];
                base.read(&self.absmax, 4 * blocks.start as u64, &mut bytes)?;
                Ok(floats(&bytes))
            }
            Some((tops, offset)) => {
                let mut codes = vec![0; blocks.len()];
                base.read(&self.absmax, blocks.start as u64, &mut codes)?;
                let scale = |(block, code): (usize, u8)| {
                    nf4::nested_scale(code, tops[block / NESTED_BLOCK], *offset)
                };
                Ok(blocks.zip(codes).map(scale).collect())
            }
        }
    }
}

/// The part `name + end`, which must have this dtype and number of elements.
fn part(
    base: &Checkpoint,
    name: &str,
    end: &str,
    dtype: Dtype,
    elements: usize,
) -> Result<TensorEntry> {
    let part = format!("{name}{end}");
    match base.entry(&part) {
        Some(entry) if entry.dtype == dtype && entry.elements() == elements => Ok(entry.clone()),
        Some(entry) => Err(broken(
            name,
            format!(
                "`{part}` is {} {:?}, {dtype} with {elements} elements expected",
                entry.dtype, entry.shape
            ),
        )
        .into()),
        None => Err(broken(name, format!("`{part}` is missing in `{}`", base.place())).into()),
    }
}

fn check_map(base: &Checkpoint, name: &str, end: &str, expected: &[u8]) -> Result<()> {
    let map = part(base, name, end, Dtype::F32, expected.len() / 4)?;
    if read_all(base, &map)? != expected {
        return Err(broken(name, format!("`{}` is not the map of the format", map.name)).into());
    }
    Ok(())
}

fn read_all(base: &Checkpoint, entry: &TensorEntry) -> Result<Vec<u8>> {
    let mut bytes = vec![0; entry.bytes as usize];
    base.read(entry, 0, &mut bytes)?;
    Ok(bytes)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|&word| f32::from_le_bytes(word)).collect()
}

impl WeightSource for QuantizedSource {
    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).and_then(|&at| self.entries.get(at))
    }

    fn read(&self, entry: &TensorEntry, start: u64, buffer: &mut [u8]) -> Result<()> {
        let Some(matrix) = self.matrices.get(&entry.name) else {
            return self.base.read(entry, start, buffer);
        };
        let end = entry.end_of(start, buffer.len())?;
        if buffer.is_empty() {
            return Ok(());
        }
        let each = matrix.dtype.bytes();
        let first = start as usize / each;
        let last = (end as usize).div_ceil(each);
        let (mut packed, mut wide, mut stored) = (Vec::new(), Vec::new(), Vec::new());
        // Pieces begin at blocks, so that a code and its scale are read once.
        for from in (first - first % BLOCK..last).step_by(PIECE) {
            let range = from.max(first)..last.min(from + PIECE);
            packed.resize(nf4::packed_bytes(range.end) - range.start / 2, 0);
            self.base.read(&matrix.packed, (range.start / 2) as u64, &mut packed)?;
            let blocks = range.start / BLOCK..nf4::blocks(range.end);
            let scales = matrix.scales(&self.base, blocks)?;
            wide.resize(range.len(), 0.0);
            nf4::dequantise(range.clone(), &packed, &scales, &mut wide);
            narrow(matrix.dtype, &wide, &mut stored);
            // The bytes that the piece and the request share.
            let piece_start = range.start * each;
            let shared_start = piece_start.max(start as usize);
            let shared_end = (range.end * each).min(end as usize);
            buffer[shared_start - start as usize..shared_end - start as usize]
                .copy_from_slice(&stored[shared_start - piece_start..shared_end - piece_start]);
        }
        Ok(())
    }

    fn place(&self) -> String {
        self.base.place()
    }

    fn file_of(&self, entry: &TensorEntry) -> String {
        self.base.file_of(entry)
    }
}
