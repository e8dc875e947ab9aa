//! Verification of a written tensor, chunk by chunk.
//!
//! Each chunk has three tasks: the file's SHA-256, the tensor's SHA-256, and the check of the elements (zeros, N:M groups, comparison with
//! the source). They run at once, or one after another where the other threads compute.

use std::fs::File;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::elements::{count_zeros, element_bytes, is_changed, row_and_column};
use super::header::TensorEntry;
use super::names::CHUNK_BYTES;
use super::source::Checkpoint;
use super::weight_source::WeightSource;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::Meter;

/// The expected zeros of a pruned matrix on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedMatrix {
    /// The tensor's name ("model.layers.0.self_attn.q_proj.weight").
    pub name: String,
    /// The exact number of zero elements; `None` accepts any number.
    pub zeros: Option<u64>,
    /// `(n, m)`: at least `n` zeros in each aligned group of `m` elements along the last dimension.
    pub group: Option<(usize, usize)>,
}

/// A partial file and its expected contents.
pub(super) struct WrittenShard<'a> {
    pub(super) file_name: &'a str,
    pub(super) path: &'a Path,
    pub(super) file: &'a File,
    /// Length, JSON and padding.
    pub(super) header: &'a [u8],
    pub(super) file_bytes: u64,
    /// Tensors by offset; together they fill the file after the header.
    pub(super) tensors: Vec<WrittenTensor<'a>>,
}

pub(super) struct WrittenTensor<'a> {
    /// Its position in the partial file.
    pub(super) entry: &'a TensorEntry,
    /// SHA-256 taken while it was written.
    pub(super) digest: [u8; 32],
    /// False for a tensor copied from the source.
    pub(super) rewritten: bool,
}

/// The checks of a tensor.
pub(super) struct Look<'a> {
    pub(super) matrix: Option<&'a ExpectedMatrix>,
    /// The source and its tensor to compare with in a full check.
    pub(super) source: Option<(&'a Checkpoint, &'a TensorEntry)>,
    pub(super) shard: &'a WrittenShard<'a>,
    pub(super) tensor: &'a WrittenTensor<'a>,
}

/// Counts from a tensor.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Looked {
    pub(super) zeros: u64,
    pub(super) elements: u64,
    pub(super) groups: u64,
}

/// The speed of a check.
pub(super) enum CheckPace<'m, 'e> {
    /// Large chunks, on all threads, with a meter.
    Fast(&'m mut Meter<'e>),
    /// Chunks of about so many bytes on this thread, while other threads compute.
    Beside(usize),
}

/// Reads a tensor back, feeds the hash of its file, and fails at the first error.
pub(super) fn check_tensor(
    look: &Look<'_>,
    file_hash: &mut Sha256,
    mut pace: CheckPace<'_, '_>,
) -> anyhow::Result<Looked> {
    let WrittenTensor { entry, digest, .. } = look.tensor;
    let offset = entry.offset;
    let most = match pace {
        CheckPace::Fast(_) => CHUNK_BYTES,
        CheckPace::Beside(bytes) => bytes,
    };
    let chunk_bytes = chunk_bytes(entry, look.matrix, most);
    let mut tensor_hash = Sha256::new();
    let mut looked = Looked::default();
    let mut first_wrong = None;
    let (mut chunk, mut original) = (Vec::new(), Vec::new());
    let mut start = 0;
    while start < entry.bytes {
        let length = (entry.bytes - start).min(chunk_bytes);
        chunk.resize(length as usize, 0);
        read_exact_at(look.shard.file, &mut chunk, offset + start).map_err(|error| {
            wrong_bytes(
                look.shard,
                format!("tensor `{}` at file offset {}: {error}", entry.name, offset + start),
            )
        })?;
        let mut of_file = || file_hash.update(&chunk);
        let mut of_tensor = || tensor_hash.update(&chunk);
        let mut of_elements = || look_at_chunk(look, start, &chunk, &mut original);
        let seen = match &mut pace {
            CheckPace::Fast(meter) => {
                let ((), ((), seen)) = rayon::join(of_file, || rayon::join(of_tensor, of_elements));
                meter.add(length);
                seen
            }
            CheckPace::Beside(_) => {
                of_file();
                of_tensor();
                of_elements()
            }
        };
        match seen {
            Ok(seen) => {
                looked.zeros += seen.zeros;
                looked.elements += seen.elements;
                looked.groups += seen.groups;
            }
            // Reported below, unless the hash shows damage on the disk.
            Err(error) => first_wrong = first_wrong.or(Some(error)),
        }
        start += length;
    }
    if tensor_hash.finalize().as_slice() != digest {
        let end = offset + entry.bytes;
        let why = format!("tensor `{}` is not what was written", entry.name);
        return Err(wrong_bytes(look.shard, why)
            .detail(format!("its SHA-256 differs, somewhere in file offsets {offset} to {end}"))
            .into());
    }
    if let Some(error) = first_wrong {
        return Err(error);
    }
    if let Some(zeros) = look.matrix.and_then(|matrix| matrix.zeros)
        && zeros != looked.zeros
    {
        return Err(wrong(
            look.shard,
            format!("tensor `{}` has {} zeros", entry.name, looked.zeros),
        )
        .detail(format!(
            "expected {zeros} of {} elements; its data is at file offset {offset}",
            looked.elements
        ))
        .into());
    }
    Ok(looked)
}

/// The failure of a check. It names the partial file, which stays for inspection.
pub(super) fn wrong(shard: &WrittenShard<'_>, why: String) -> Failure {
    Failure::new(format!("verification failed in `{}`: {why}", shard.path.display()))
}

/// The failure for bytes that differ from what was written: the cause is outside this program.
pub(super) fn wrong_bytes(shard: &WrittenShard<'_>, why: String) -> Failure {
    wrong(shard, why).hint("check the disk and memory, then run again")
}

/// The bytes of a chunk: whole groups (or elements), so that no group is cut. Rows are whole numbers of groups, so flat groups are
/// the groups along the last dimension.
fn chunk_bytes(entry: &TensorEntry, matrix: Option<&ExpectedMatrix>, most: usize) -> u64 {
    let group = matrix.and_then(|matrix| matrix.group).map_or(1, |(_, m)| m as u64);
    let unit = group * element_bytes(entry.dtype) as u64;
    (most as u64 / unit * unit).max(unit)
}

/// Counts zeros, checks groups and compares with the source; `chunk` begins at byte `start` of the tensor.
fn look_at_chunk(
    look: &Look<'_>,
    start: u64,
    chunk: &[u8],
    original: &mut Vec<u8>,
) -> anyhow::Result<Looked> {
    let entry = look.tensor.entry;
    let each = element_bytes(entry.dtype);
    if let Some((source, stored)) = look.source {
        original.resize(chunk.len(), 0);
        source.read(stored, start, original)?;
        let changed = chunk
            .chunks_exact(each)
            .zip(original.chunks_exact(each))
            .position(|(now, before)| is_changed(now, before));
        if let Some(at) = changed {
            let (row, column) = place_in(entry, start, at);
            let offset = entry.offset + start + (at * each) as u64;
            return Err(wrong(look.shard, format!("tensor `{}` has a changed weight", entry.name))
                .detail(format!("row {row}, column {column} (file offset {offset}) is neither +0 nor the source's bits"))
                .into());
        }
    }
    let Some(matrix) = look.matrix else {
        return Ok(Looked::default());
    };
    let mut looked = Looked { elements: (chunk.len() / each) as u64, ..Looked::default() };
    let Some((n, m)) = matrix.group else {
        looked.zeros = count_zeros(entry.dtype, chunk);
        return Ok(looked);
    };
    for (index, group) in chunk.chunks_exact(m * each).enumerate() {
        let zeros = count_zeros(entry.dtype, group);
        if zeros < n as u64 {
            let (row, column) = place_in(entry, start, index * m);
            let offset = entry.offset + start + (index * m * each) as u64;
            return Err(wrong(look.shard, format!("tensor `{}` is not {n}:{m} sparse", entry.name))
                .detail(format!(
                    "row {row}, columns {column} to {} (file offset {offset}) hold {zeros} zeros, {n} needed",
                    column + m - 1
                ))
                .into());
        }
        looked.zeros += zeros;
        looked.groups += 1;
    }
    Ok(looked)
}

/// The row and column of element `at` of the chunk that begins at byte `start`.
fn place_in(entry: &TensorEntry, start: u64, at: usize) -> (usize, usize) {
    row_and_column(entry, start as usize / element_bytes(entry.dtype) + at)
}
