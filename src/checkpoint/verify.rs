//! Reading the written files back, before they get their names: one pass over the bytes for every check.
//!
//! This file holds what is expected, what is reported, and the walk over files and tensors; `verify_tensor` looks at one
//! tensor's bytes.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::header::TensorEntry;
use super::meter::Meter;
use super::source::{Checkpoint, WeightSource};
use super::verify_tensor::{Look, Looked, check_tensor};
use crate::bytes::hex;
use crate::disk::positioned::read_exact_at;
use crate::failure::Failure;
use crate::run::Events;

/// How much is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerifyLevel {
    /// Headers, hashes, zeros and groups.
    #[default]
    Quick,
    /// Also: every element of a rewritten tensor is the source's, bit for bit, or +0. Only for methods that remove weights
    /// without changing the others; reads those tensors of the source once more.
    Full,
}

/// What a pruned matrix must look like on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedMatrix {
    /// The tensor's name ("model.layers.0.self_attn.q_proj.weight").
    pub name: String,
    /// How many of its elements are zero, exactly; `None` counts without judging.
    pub zeros: Option<u64>,
    /// `(n, m)`: at least `n` zeros in each aligned group of `m` elements along the last dimension.
    pub group: Option<(usize, usize)>,
}

/// One finished file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedFile {
    /// Its name in the output folder.
    pub file: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// SHA-256 of the whole file, in hex.
    pub sha256: String,
}

/// The zeros counted in one matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatrixZeros {
    /// The tensor's name.
    pub name: String,
    /// Elements equal to 0.
    pub zeros: u64,
    /// All its elements.
    pub elements: u64,
}

/// What was checked, for the manifest. It exists only where every check passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// How much was checked.
    pub level: VerifyLevel,
    /// The weight files, in the order of the source's.
    pub files: Vec<VerifiedFile>,
    /// Tensors whose hash was compared: all of them.
    pub tensors_checked: usize,
    /// Tensors handed to the writer.
    pub tensors_rewritten: usize,
    /// Tensors copied from the source.
    pub tensors_copied: usize,
    /// One row per expected matrix, in that order.
    pub zeros: Vec<MatrixZeros>,
    /// N:M groups looked at, over all matrices.
    pub groups_checked: u64,
}

/// One partial file and what it should hold.
pub(super) struct WrittenShard<'a> {
    pub(super) file_name: &'a str,
    pub(super) path: &'a Path,
    pub(super) file: &'a File,
    /// Length, JSON and padding.
    pub(super) header: &'a [u8],
    pub(super) file_bytes: u64,
    /// By offset; together they fill the file after the header.
    pub(super) tensors: Vec<WrittenTensor<'a>>,
}

/// One tensor of a partial file.
pub(super) struct WrittenTensor<'a> {
    /// The source's tensor.
    pub(super) entry: &'a TensorEntry,
    /// Where its data begins in the partial file, in bytes.
    pub(super) offset: u64,
    /// SHA-256 taken while it was written.
    pub(super) digest: [u8; 32],
    /// False where it was copied from the source.
    pub(super) rewritten: bool,
}

/// Checks every file; stops at the first thing that is wrong.
pub(super) fn verify_shards(
    source: &Checkpoint,
    shards: &[WrittenShard<'_>],
    expected: &[ExpectedMatrix],
    level: VerifyLevel,
    events: &dyn Events,
) -> anyhow::Result<Verification> {
    let by_name: HashMap<&str, &ExpectedMatrix> = expected
        .iter()
        .map(|matrix| (matrix.name.as_str(), matrix))
        .collect();
    for matrix in expected {
        check_expectation(matrix, source)?;
    }
    let total = shards.iter().map(|shard| shard.file_bytes).sum();
    let mut meter = Meter::start(events, "verify", total);
    let mut files = Vec::with_capacity(shards.len());
    let mut counts: HashMap<&str, Looked> = HashMap::new();
    for shard in shards {
        let mut file_hash = Sha256::new();
        check_header(shard, &mut file_hash)?;
        meter.add(shard.header.len() as u64);
        for tensor in &shard.tensors {
            events.check()?;
            let matrix = by_name.get(tensor.entry.name.as_str()).copied();
            let look = Look {
                matrix,
                source: (level == VerifyLevel::Full && tensor.rewritten).then_some(source),
                shard,
                tensor,
            };
            let looked = check_tensor(&look, &mut file_hash, &mut meter)?;
            if let Some(matrix) = matrix {
                counts.insert(&matrix.name, looked);
            }
        }
        check_length(shard)?;
        files.push(VerifiedFile {
            file: shard.file_name.to_owned(),
            bytes: shard.file_bytes,
            sha256: hex(&file_hash.finalize()),
        });
    }
    meter.finish();

    let all = || shards.iter().flat_map(|shard| &shard.tensors);
    let tensors_rewritten = all().filter(|tensor| tensor.rewritten).count();
    let rows = expected.iter().map(|matrix| {
        let looked = counts
            .get(matrix.name.as_str())
            .copied()
            .unwrap_or_default();
        MatrixZeros {
            name: matrix.name.clone(),
            zeros: looked.zeros,
            elements: looked.elements,
        }
    });
    Ok(Verification {
        level,
        files,
        tensors_checked: all().count(),
        tensors_rewritten,
        tensors_copied: all().count() - tensors_rewritten,
        zeros: rows.collect(),
        groups_checked: counts.values().map(|looked| looked.groups).sum(),
    })
}

/// The failure of a check; it names the partial file, which still has its content for a look.
pub(super) fn wrong(shard: &WrittenShard<'_>, why: String) -> Failure {
    Failure::new(format!(
        "verification failed in `{}`: {why}",
        shard.path.display()
    ))
}

/// Bytes that differ from what was handed to the disk point below this program.
pub(super) fn wrong_bytes(shard: &WrittenShard<'_>, why: String) -> Failure {
    wrong(shard, why).hint("check the disk and memory, then run again")
}

fn check_expectation(matrix: &ExpectedMatrix, source: &Checkpoint) -> anyhow::Result<()> {
    let Some(entry) = source.entry(&matrix.name) else {
        anyhow::bail!(
            "cannot verify tensor `{}`: the checkpoint does not have it",
            matrix.name
        );
    };
    if !matches!(entry.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        anyhow::bail!(
            "cannot count the zeros of tensor `{}` of dtype {}",
            matrix.name,
            entry.dtype
        );
    }
    if let Some((n, m)) = matrix.group {
        let last = entry.shape.last().copied().unwrap_or(0);
        if m == 0 || n > m || last % m != 0 {
            return Err(
                Failure::new(format!("tensor `{}` has no {n}:{m} groups", matrix.name))
                    .detail(format!(
                        "its last dimension is {last}, not a multiple of {m}"
                    ))
                    .into(),
            );
        }
    }
    Ok(())
}

fn check_header(shard: &WrittenShard<'_>, file_hash: &mut Sha256) -> anyhow::Result<()> {
    let mut found = vec![0; shard.header.len()];
    read_exact_at(shard.file, &mut found, 0)
        .map_err(|error| wrong_bytes(shard, error.to_string()))?;
    if let Some(at) = found
        .iter()
        .zip(shard.header)
        .position(|(found, written)| found != written)
    {
        return Err(wrong_bytes(shard, format!("its header differs at file offset {at}")).into());
    }
    file_hash.update(&found);
    Ok(())
}

fn check_length(shard: &WrittenShard<'_>) -> anyhow::Result<()> {
    let found = shard
        .file
        .metadata()
        .map_err(|error| wrong_bytes(shard, error.to_string()))?
        .len();
    if found != shard.file_bytes {
        let why = format!(
            "it is {found} bytes long, {} were written",
            shard.file_bytes
        );
        return Err(wrong_bytes(shard, why).into());
    }
    Ok(())
}
